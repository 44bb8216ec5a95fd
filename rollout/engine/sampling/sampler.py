"""The sampler, which turns logits and sampling parameters into tokens and log-probs.

Always true:
- A row's token and log-probs depend only on the row's logits, parameters, key and position, bit for bit. Probabilities are
  summed as integer weights (the most likely token has weight 2^42), so the order of a sum does not matter.
- A token of weight 0 cannot be drawn. Filtered tokens have weight 0, and so do tokens less than 2^-42 as likely as the most
  likely token.
- The given logits are not changed. Nothing synchronises with the device, except for rows that return their kept tokens.
- A row without a finite largest logit (all -inf, or a NaN) gets log-prob NaN and some token id. The caller checks for NaN
  when it reads the log-probs, because raising an exception in the sampler would require a synchronisation.

Parameters apply in this order: logit_bias, banned tokens, constraints, repetition, presence and frequency penalties,
temperature, top_k, top_p, min_p. Among equal logits the filters keep the lower ids. A greedy row takes the largest logit
(the lowest id on ties), with temperature 1 and its filters off.

A draw is an inverse-CDF search in two levels. The first level finds the block of `BLOCK` tokens from the running sum over
blocks. The second level finds the token from the running sum inside the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout.engine.kernels import cpu_draw
from rollout.engine.kernels.cpu_draw import CpuDraw
from rollout.engine.memory.buffers import BLOCK, Scratch
from rollout.engine.sampling.constraints import Allowed
from rollout.engine.sampling.edits import History, Sets, drawable, edited, no_sets, removed
from rollout.engine.sampling.numerics import over_temperature, softmax_logprobs, uniforms
from rollout.engine.sampling.sampling_table import SamplingRows

UNIT = 2.0**42
"""The weight of the most likely token. A sum over fewer than 2^21 tokens fits in 63 bits; rounding to integers changes a
log-prob by at most 2^-42 per token of the vocabulary."""

LOWEST = -50.0
"""The lower bound on the difference between a logit and the row's largest logit. At this bound a weight is
exp(-50) * 2^42 < 1e-9, which rounds to 0."""

CPU_ELEMENTS = 2**19
"""The number of logits per operation and CPU thread: few enough to fit in the cache, but enough to amortise a call."""

DEVICE_ELEMENTS = 2**27
"""The number of logits per operation on other devices, which limits temporary tensors (about 20 bytes per logit)."""


# --- sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sampled:
    """The results of R rows, one token each. A NaN in `logprobs` means that the row had no finite largest logit."""

    token_ids: Tensor
    """[R] int64, the ids of the drawn tokens."""
    logprobs: Tensor
    """[R] float32, the log-probs of the drawn tokens, under the distribution that `logprobs_mode` selects."""
    top_ids: Tensor | None
    """[R, k] int64, the most likely tokens, most likely first, lower id first on ties. k is the largest number of top
    log-probs that a row returns; None if no row returns any."""
    top_logprobs: Tensor | None
    """[R, k] float32, the log-probs of `top_ids` in the distribution of `logprobs`; -inf if a filter removed it."""
    kept_ids: Tensor | None = None
    """[K] int32, the token ids that could be drawn, joined for all rows that request them; None if no row requests them."""
    kept_counts: Tensor | None = None
    """[R] int64, the number of `kept_ids` of each row; None without `kept_ids`."""


@torch.no_grad()
def sample(
    logits: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    *,
    histories: Sequence[History] | None = None,
    banned: Sequence[tuple[int, Sequence[int]]] = (),
    exact: bool = False,
    allowed: Allowed | None = None,
) -> Sampled:
    """Draw one token per row.

    Args:
        logits: [R, V], any float dtype; V below 2^21. The arithmetic is float32.
        rows: the parameters of the R rows. Every token in a logit_bias must be in the vocabulary.
        positions: [R] int64, the number of completion tokens that each row already has: the counter of its random stream.
        histories: the token ids of every row, read only for rows with a penalty; None if no row has a penalty.
        banned: pairs of a row and the token ids that must not be drawn in the row; ids outside the vocabulary are ignored.
        exact: whether to compute log-probs with torch's `log_softmax`, as a trainer does. This does not affect the tokens.
        allowed: the tokens that constrained rows may draw; None if no row is constrained.
    """
    kernel = cpu_draw.load() if cpu_draw.serves(logits) else None
    if kernel is not None and rows.plain and not (banned or allowed):
        token_ids, peak, log_sum, score, *_ = kernel(logits, rows.temperature, rows.greedy, rows.key, positions)
        if exact:
            return Sampled(token_ids, softmax_logprobs(logits, token_ids[:, None], rows.temperature)[:, 0], None, None)
        return Sampled(token_ids, _log_probs(score, _Total(peak, log_sum)), None, None)
    parts, start, done = rows.parts(_rows_at_once(logits)), 0, []
    for part in parts:
        cut = slice(start, start + len(part))
        own = [(row - start, ids) for row, ids in banned if start <= row < cut.stop]
        raw = _single(logits[cut], part.scratch)
        masked = None if allowed is None else removed(allowed, start, cut.stop, raw)
        scores = edited(raw, part, None if histories is None else histories[cut], own, masked)
        wanted = _Wanted(rows.top_n, rows.any_keeping, exact)
        done.append(_sample(scores, raw, part, positions[cut], wanted, kernel))
        start = cut.stop
    return Sampled(*_joined(done))


@torch.no_grad()
def token_logprobs(
    logits: Tensor, targets: Tensor, k: int, *, exact: bool = False, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the log-probs of T target tokens, and of the k most likely tokens in each row.

    Args:
        logits: [T, V], any float dtype.
        targets: [T] int64, the target token of each row.
        k: number of most likely tokens per row; if it exceeds V, V tokens are returned.
        exact: whether to compute the log-probs with torch's own `log_softmax`.
        temperature: [T] float32, the divisors of the logits, above 0; None means 1.

    Returns:
        (log-probs of the targets, ids of the most likely tokens, their log-probs). The shapes are [T] float32, [T, k] int64
        and [T, k] float32, most likely first. The last two are None if k is 0. A target's log-prob is bit-identical to the
        log-prob that `sample` returns for the token.
    """
    kernel = cpu_draw.load() if not (k or exact) and cpu_draw.serves(logits) else None
    if kernel is not None:
        divisor = torch.ones(len(logits), device="cpu") if temperature is None else temperature
        # Mark all rows as greedy, so that the kernel draws nothing: only its sums are needed.
        greedy, unused = torch.ones_like(divisor, dtype=torch.bool), torch.zeros_like(targets)
        _, peak, log_sum, *_ = kernel(logits, divisor, greedy, unused, unused)
        chosen = logits.gather(1, targets[:, None])[:, 0].float() / divisor
        return _log_probs(chosen, _Total(peak, log_sum)), None, None
    done, scratch, size = [], Scratch(), _rows_at_once(logits)
    divisors: Iterable[Tensor | None] = repeat(None) if temperature is None else torch.split(temperature, size)
    for part, target, warmth in zip(torch.split(logits, size), torch.split(targets, size), divisors, strict=False):
        scores = _single(part, scratch)
        if warmth is not None:
            scores = over_temperature(scores, warmth, out=scratch.take("tempered", scores))
        total = _raw_total(scores, scratch)
        top = _top(scores, total, k, scratch)
        found = _log_probs(scores.gather(1, target[:, None]), total)[:, 0], *top
        done.append(_by_softmax(scores, target[:, None], top[0]) if exact else found)
    log_probs, top_ids, top_log_probs = _joined(done)
    return log_probs, top_ids, top_log_probs


def _rows_at_once(logits: Tensor) -> int:
    """Return the number of rows per operation, chosen to fit the CPU cache or, on other devices, to limit temporaries."""
    elements = CPU_ELEMENTS * torch.get_num_threads() if logits.device.type == "cpu" else DEVICE_ELEMENTS
    return max(1, elements // logits.shape[1])


def _single(logits: Tensor, scratch: Scratch) -> Tensor:
    return logits if logits.dtype == torch.float32 else scratch.take("raw", logits).copy_(logits)


def _joined(parts: Sequence[tuple[Tensor | None, ...]]) -> tuple[Any, ...]:
    if len(parts) == 1:
        return parts[0]
    return tuple(None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True))


class _Wanted(NamedTuple):
    """The results that `sample` must compute in addition to tokens and log-probs."""

    top_n: int
    """The number of top log-probs per row."""
    kept: bool
    """Whether some row returns its kept tokens (the tokens that could be drawn)."""
    exact: bool
    """Whether log-probs are computed with torch's `log_softmax`."""

    @property
    def scores(self) -> bool:
        """Whether the scores of the final distribution (after temperature and filters) are needed."""
        return self.exact or self.top_n > 0


def _sample(
    scores: Tensor,
    raw: Tensor,
    rows: SamplingRows,
    positions: Tensor,
    wanted: _Wanted,
    kernel: CpuDraw | None,
) -> tuple[Tensor | None, ...]:
    """Compute the fields of `Sampled` from edited float32 scores [R, V] and the unedited logits `raw`."""
    scratch = rows.scratch
    if kernel is None:
        token_ids, total, score, listed, kept = _drawn(scores, rows, positions, wanted)
    else:
        scores, listed = _filtered(scores, rows, wanted)
        keeping = (rows.keeps, rows.scratch.take("kept_ids", scores, torch.int32)) if wanted.kept else ()
        *drawn, ids, counts = kernel(scores, rows.temperature, rows.greedy, rows.key, positions, *keeping)
        token_ids, peak, log_sum, score = (column[:, None] for column in drawn)
        total, kept = _Total(peak, log_sum), (None, None) if ids is None or counts is None else (ids, counts)
    if rows.any_raw:
        if rows.any_raw_temperature:
            raw = over_temperature(raw, rows.raw_temperature, out=scratch.take("raw_tempered", raw))
        mine, own = rows.raw[:, None], _raw_total(raw, scratch)
        score = torch.where(mine, raw.gather(1, token_ids), score)
        total = _Total(torch.where(mine, own.peak, total.peak), torch.where(mine, own.log_sum, total.log_sum))
        if listed is not None:
            listed = raw if rows.all_raw else torch.where(mine, raw, listed)
    top = _top(listed, total, wanted.top_n, scratch)
    if wanted.exact and listed is not None:
        return token_ids[:, 0], *_by_softmax(listed, token_ids, top[0]), *kept
    return token_ids[:, 0], _log_probs(score, total)[:, 0], *top, *kept


def _filtered(scores: Tensor, rows: SamplingRows, wanted: _Wanted) -> tuple[Tensor, Tensor | None]:
    """Return scores [R, V] with -inf for filtered tokens. Also return them divided by temperature (None if unwanted)."""
    if not (rows.filters or wanted.scores):
        return scores, None
    scratch, tempered = rows.scratch, scores
    if rows.any_temperature:
        tempered = over_temperature(scores, rows.temperature, out=scratch.take("tempered", scores))
    if not rows.filters:
        return scores, tempered
    peak = tempered.amax(-1, keepdim=True)
    relative = _exponentials(torch.sub(tempered, peak, out=scratch.take("relative", scores)))
    kept = _kept(tempered, peak, relative, rows)
    assert kept is not None
    # Filter only rows with a finite peak, so that a NaN is not replaced by -inf and the caller can detect it.
    removed = kept.logical_not_().logical_and_(peak.isfinite())
    if wanted.scores:
        tempered = scratch.take("listed", scores).copy_(tempered).masked_fill_(removed, -torch.inf)
    return scratch.take("masked", scores).copy_(scores).masked_fill_(removed, -torch.inf), tempered


def _drawn(
    scores: Tensor, rows: SamplingRows, positions: Tensor, wanted: _Wanted
) -> tuple[Tensor, _Total, Tensor, Tensor | None, Sets]:
    """Draw one token per row from float32 scores [R, V], the edited logits.

    Returns:
        (token ids [R, 1], log-sum-exp of the scores, score of each token, scores of the final distribution, `Sets`).
        The last two are None unless `wanted` requires them.
    """
    relative, peak, greedy_ids, listed, kept = _relative(scores, rows, wanted)
    weights = rows.scratch.blocks("weights", scores, 0, torch.int64).copy_(relative.mul_(UNIT))
    ends = weights.sum(-1).cumsum(-1)
    token_ids = _chosen(weights, ends, greedy_ids, rows, positions)[:, None].clamp_(0, scores.shape[1] - 1)
    score = over_temperature(scores.gather(1, token_ids), rows.temperature)
    return token_ids, _total(peak, ends[:, -1:]), score, listed, kept


def _relative(
    scores: Tensor, rows: SamplingRows, wanted: _Wanted
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Sets]:
    """Compute each token's probability relative to the most likely token of its row.

    Returns:
        (relative probabilities, largest score, most likely tokens, scores of the final distribution, `Sets`). The
        relative probabilities are 0 for filtered tokens, and in C blocks per row [R, C, BLOCK]. The largest score is [R, 1],
        the most likely tokens are ids [R] (None if no row is greedy). The last two are None unless `wanted` requires them.
    """
    scratch = rows.scratch
    tempered = scores
    if rows.any_temperature:
        tempered = over_temperature(scores, rows.temperature, out=scratch.take("tempered", scores))
    peak = tempered.amax(-1, keepdim=True)
    blocks = scratch.blocks("relative", scores, -torch.inf)
    flat = blocks.flatten(1)[:, : scores.shape[1]]
    torch.sub(tempered, peak, out=flat)
    greedy_ids = _first_best(blocks) if rows.any_greedy else None
    _exponentials(blocks)
    kept, sets = _kept(tempered, peak, flat, rows), no_sets(rows, wanted.kept)
    if kept is not None:
        if rows.any_keeping:
            sets = drawable(kept, flat, rows, 1 / UNIT)
        flat.mul_(kept)
        if wanted.scores:
            tempered = scratch.take("listed", scores).copy_(tempered).masked_fill_(kept.logical_not_(), -torch.inf)
    return blocks, peak, greedy_ids, tempered if wanted.scores else None, sets


def _chosen(weights: Tensor, ends: Tensor, greedy_ids: Tensor | None, rows: SamplingRows, positions: Tensor) -> Tensor:
    if greedy_ids is not None and rows.all_greedy:
        return greedy_ids
    total = ends[:, -1]
    # Limit the draw to total - 1: if a uniform number is close to 1, the product may round up to the total.
    draw = torch.minimum((uniforms(rows.key, positions) * total).to(torch.int64), total - 1)
    drawn = _first_above(weights, ends, draw)
    return drawn if greedy_ids is None else torch.where(rows.greedy, greedy_ids, drawn)


def _kept(scores: Tensor, peak: Tensor, relative: Tensor, rows: SamplingRows) -> Tensor | None:
    """Return a mask of the tokens that pass the filters, bool [R, V]; None if there are no filters."""
    kept = None
    if rows.filters & {"top_k", "top_p"}:
        kept = _likeliest(scores, peak, rows)
    if "min_p" in rows.filters:
        likely = torch.ge(relative, rows.value["min_p"][:, None], out=rows.scratch.take("likely", scores, torch.bool))
        kept = likely if kept is None else kept.logical_and_(likely)
    return kept


def _likeliest(scores: Tensor, peak: Tensor, rows: SamplingRows) -> Tensor:
    """Return a mask of the tokens that pass top_k and top_p, bool [R, V]."""
    limited, width = rows.limited, min(rows.limited_width or scores.shape[1], scores.shape[1])
    if len(limited) == len(scores):
        return _leading(scores, peak, rows.top_k, rows.top_p, width, rows.scratch)
    kept = _leading(scores[limited], peak[limited], rows.top_k[limited], rows.top_p[limited], width, rows.scratch)
    return rows.scratch.take("all_kept", scores, torch.bool).fill_(True).index_copy_(0, limited, kept)


def _leading(scores: Tensor, peak: Tensor, top_k: Tensor, top_p: Tensor, width: int, scratch: Scratch) -> Tensor:
    """Return a mask of the tokens that pass top_k and top_p in the L limited rows, bool [L, V].

    Each row keeps the smallest set of most likely tokens that has a share of at least top_p in the weight of its top_k
    tokens. Among equal scores, the lower ids are kept.

    Args:
        width: upper bound on the number of tokens that a row keeps.
    """
    negated = _smallest(torch.neg(scores, out=scratch.take("negated", scores)), width)
    count = _leading_count(negated, peak, top_k[:, None], top_p[:, None], scratch)
    edge = negated.gather(1, count - 1)
    room = count - torch.searchsorted(negated, edge)
    at_edge = torch.eq(scores, -edge, out=scratch.take("at_edge", scores, torch.bool))
    ties = scratch.blocks("weights", scores, 0, torch.int64)
    ties.flatten(1)[:, : scores.shape[1]] = at_edge
    last = _first_above(ties, ties.sum(-1).cumsum(-1), room[:, 0] - 1)
    ids = torch.arange(scores.shape[1], device=scores.device)
    among_first = torch.le(ids, last[:, None], out=scratch.take("among_first", scores, torch.bool))
    kept = torch.gt(scores, -edge, out=scratch.take("kept", scores, torch.bool))
    return kept.logical_or_(at_edge.logical_and_(among_first))


def _leading_count(negated: Tensor, peak: Tensor, top_k: Tensor, top_p: Tensor, scratch: Scratch) -> Tensor:
    """Return the number of tokens that top_k and top_p keep in each row, int64 [L, 1].

    Args:
        negated: [L, width], the largest scores of each row, negated, in ascending order.
    """
    count = top_k.clamp(max=negated.shape[1])
    weights = _exponentials(torch.add(negated, peak, out=scratch.take("sorted", negated)).neg_()).mul_(UNIT)
    ends = scratch.take("weights", negated, torch.int64).copy_(weights).cumsum_(-1)
    wanted = (ends.gather(1, count - 1) * top_p).ceil_().to(torch.int64)
    return torch.where(top_p < 1, torch.minimum(count, torch.searchsorted(ends, wanted) + 1), count)


def _smallest(values: Tensor, width: int) -> Tensor:
    """Return the smallest values [L, width] of each row [L, V], ascending. May reorder `values`."""
    if values.device.type == "cpu":
        # Sort with numpy, which takes a thirtieth of torch's time on a CPU.
        array = values.numpy()
        if width == array.shape[1]:
            array.sort(axis=-1)
            return values
        array.partition(width - 1, axis=-1)
        return torch.from_numpy(np.sort(array[:, :width], axis=-1))
    if width < values.shape[1]:
        return values.topk(width, largest=False).values
    return values.sort(-1).values


# --- sums and searches ------------------------------------------------------------------------------------------------


def _first_best(blocks: Tensor) -> Tensor:
    """Return the first maximum's index in each row of `blocks`, int64 [R]. One `argmax` takes ten times as long."""
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    return block[:, 0] * BLOCK + _inside(blocks, block).argmax(-1)


def _first_above(weights: Tensor, ends: Tensor, level: Tensor) -> Tensor:
    """Return the index of each row's first element whose running sum exceeds `level` [R], int64 [R] (inverse-CDF sampling).

    Args:
        weights: [R, C, BLOCK], the elements in C blocks per row.
        ends: [R, C], the running sum at the end of each block.
        level: [R], the level of each row.
    """
    level = level[:, None]
    block = torch.searchsorted(ends, level, right=True).clamp_(max=ends.shape[1] - 1)
    inside = _inside(weights, block)
    rest = level - ends.gather(1, block) + inside.sum(-1, keepdim=True)
    return (block * BLOCK + torch.searchsorted(inside.cumsum(-1), rest, right=True))[:, 0]


def _inside(blocks: Tensor, block: Tensor) -> Tensor:
    return blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]


def _exponentials(shifted: Tensor) -> Tensor:
    """Exponentiate in place, after a clamp at `LOWEST`, because a CPU takes 40 times as long if results are below 1e-38."""
    return shifted.clamp_(min=LOWEST).exp_()


class _Total(NamedTuple):
    """The log-sum-exp of each row's scores, as `peak` + `log_sum`. In one float32, a large peak would hide `log_sum`."""

    peak: Tensor
    """[R, 1] float32, the largest score."""
    log_sum: Tensor
    """[R, 1] float64, the logarithm of the sum of exp(score - peak); NaN if the peak is not finite."""


def _raw_total(scores: Tensor, scratch: Scratch) -> _Total:
    peak = scores.amax(-1, keepdim=True)
    relative = _exponentials(torch.sub(scores, peak, out=scratch.take("relative", scores))).mul_(UNIT)
    return _total(peak, scratch.take("weights", scores, torch.int64).copy_(relative).sum(-1, keepdim=True))


def _total(peak: Tensor, weight: Tensor) -> _Total:
    """Return the log-sum-exp, given the total integer weight [R, 1] of each row, in which the peak has weight `UNIT`."""
    log_sum = (weight.to(torch.float64) / UNIT).log_()
    return _Total(peak, torch.where(peak.isfinite(), log_sum, torch.nan))


def _log_probs(scores: Tensor, total: _Total) -> Tensor:
    return ((scores.to(torch.float64) - total.peak) - total.log_sum).to(torch.float32)


def _by_softmax(
    scores: Tensor, token_ids: Tensor, top_ids: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return log-probs [R] of `token_ids` [R, 1], `top_ids` [R, k] and their log-probs [R, k], by torch's `log_softmax`."""
    if top_ids is None:
        return softmax_logprobs(scores, token_ids)[:, 0], None, None
    found = softmax_logprobs(scores, torch.cat([token_ids, top_ids], 1))
    return found[:, 0], top_ids, found[:, 1:]


def _top(scores: Tensor | None, total: _Total, k: int, scratch: Scratch) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return ids and log-probs of the k largest scores. Score and id are sorted as one integer, so ties are sorted by id."""
    if scores is None or k == 0:
        return None, None
    bits, order = scores.contiguous().view(torch.int32), scratch.take("order", scores, torch.int32)
    # Map floats to integers that sort in reverse: flip all bits but the sign of negative numbers, then invert all bits.
    torch.bitwise_right_shift(bits, 31, out=order).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).bitwise_not_()
    keys = scratch.take("weights", scores, torch.int64).copy_(order).bitwise_left_shift_(32)
    keys.bitwise_or_(torch.arange(scores.shape[1], device=scores.device))
    ids = _smallest(keys, min(k, scores.shape[1])).bitwise_and(0xFFFFFFFF)
    return ids, _log_probs(scores.gather(1, ids), total)
