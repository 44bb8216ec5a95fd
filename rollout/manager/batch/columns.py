"""Columns of a batch, a value or a set per token: log-probs and entropies, the sets tokens were drawn from, expert routes.

Beside logits, only their gradient is ever held whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout.algorithms.replay import replay_logprobs
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import PENALTIES

CHUNK_ELEMENTS = {"cpu": 1 << 21}
"""Logits that are widened to float32 at a time, by device: on a CPU what stays in its cache."""
OTHER_CHUNK_ELEMENTS = 1 << 26


def selected_logprobs(logits: Tensor, positions: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """[M]: log softmax(logits / temperature) of `tokens` at `positions`, in float32 (float64 of float64); differentiable.

    Args:
        logits: [K, V].
        positions: int64 [M], rows of `logits`; a row may be asked for several tokens.
        tokens: int64 [M].
        temperature: above 0.
    """
    selected: Tensor = _Selected.apply(logits, positions, tokens, 1.0 / temperature)  # type: ignore[no-untyped-call]
    return selected


def token_entropies(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """[K]: entropy in nats of softmax(logits / temperature), in float32 (float64 of float64); differentiable.

    Args:
        logits: [K, V]; -inf has no probability.
        temperature: above 0.
    """
    entropies: Tensor = _Entropies.apply(logits, 1.0 / temperature)  # type: ignore[no-untyped-call]
    return entropies


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _chunks(logits: Tensor) -> Iterator[slice]:
    size = max(1, CHUNK_ELEMENTS.get(logits.device.type, OTHER_CHUNK_ELEMENTS) // max(1, logits.shape[1]))
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _log_sums(logits: Tensor, scale: float) -> Tensor:
    sums = logits.new_empty(len(logits), dtype=_wide(logits))
    for rows in _chunks(logits):
        sums[rows] = (logits[rows].to(sums.dtype) * scale).logsumexp(-1)
    return sums


class _Selected(torch.autograd.Function):
    """Saves the logits and a log-sum-exp per row; the backward computes the softmax again, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, positions: Tensor, tokens: Tensor, scale: float) -> Tensor:
        sums = _log_sums(logits, scale)
        ctx.save_for_backward(logits, positions, tokens, sums)
        ctx.scale = scale
        return logits[positions, tokens].to(sums.dtype) * scale - sums[positions]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, positions, tokens, sums = ctx.saved_tensors
        scaled = gradient.to(sums.dtype) * ctx.scale
        of_row = torch.zeros_like(sums).index_add_(0, positions, scaled)
        out = torch.empty_like(logits)
        for rows in _chunks(logits):
            part = (logits[rows].to(sums.dtype) * ctx.scale).sub_(sums[rows, None]).exp_().mul_(-of_row[rows, None])
            inside = (positions >= rows.start) & (positions < rows.stop)
            part.index_put_((positions[inside] - rows.start, tokens[inside]), scaled[inside], accumulate=True)
            out[rows] = part.to(out.dtype)
        return out, None, None, None


class _Entropies(torch.autograd.Function):
    """H = -sum p log p, whose gradient by a scaled logit is -p (log p + H)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scale: float) -> Tensor:
        sums = _log_sums(logits, scale)
        out = torch.empty_like(sums)
        for rows in _chunks(logits):
            logprobs = (logits[rows].to(sums.dtype) * scale).sub_(sums[rows, None])
            out[rows] = -(logprobs.exp() * logprobs.nan_to_num_(neginf=0.0)).sum(-1)
        ctx.save_for_backward(logits, sums, out)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, sums, entropies = ctx.saved_tensors
        out = torch.empty_like(logits)
        for rows in _chunks(logits):
            logprobs = (logits[rows].to(sums.dtype) * ctx.scale).sub_(sums[rows, None])
            part = logprobs.exp().mul_(logprobs.nan_to_num_(neginf=0.0).add_(entropies[rows, None]))
            out[rows] = part.mul_(-ctx.scale * gradient[rows, None]).to(out.dtype)
        return out, None


class KeptSets(NamedTuple):
    """The sets that tokens were drawn from; the `kept` of `rollout.algorithms.replay_logprobs`."""

    ids: Tensor
    """int32 [S]: token ids, row after row and token after token, ascending in each."""

    counts: Tensor
    """int32 [N, T]: how many are of each token; 0 where it has no set. [L] of packed rollouts."""

    def to(self, device: torch.device | str) -> KeptSets:
        """The same on `device`."""
        return KeptSets(self.ids.to(device), self.counts.to(device))

    def of_rows(self, rows: Tensor | slice, columns: int | None = None) -> KeptSets:
        """Those of some rows, in that order, cut after `columns`."""
        chosen = torch.arange(len(self.counts), device=self.counts.device)[rows]
        sizes = self.counts.sum(1, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        counts = self.counts[chosen, :columns]
        lengths = counts.sum(1, dtype=torch.int64)
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if len(chosen) else 0
        shift = (starts[chosen] - (ends - lengths)).repeat_interleave(lengths, output_size=total)
        return KeptSets(self.ids[torch.arange(total, device=shift.device) + shift], counts)

    def of_tokens(self, rows: Tensor, columns: Tensor) -> KeptSets:
        """Those of single tokens [K], in that order; counts [K]."""
        sizes = self.counts.flatten().long()
        at = rows * self.counts.shape[1] + columns
        ends, lengths = sizes.cumsum(0)[at], sizes[at]
        shift = (ends - lengths.cumsum(0)).repeat_interleave(lengths)
        return KeptSets(self.ids[torch.arange(len(shift), device=shift.device) + shift], self.counts.flatten()[at])


def kept_sets(rows: Sequence[DynamicInferenceRequest], columns: int) -> KeptSets | None:
    """The sets of merged requests, padded to `columns`; None if none has any.

    Raises:
        ValueError: the sets of a request are not those of its tokens.
    """
    if all(row.generated_kept_tokens is None for row in rows):
        return None
    counts, ids = np.zeros((len(rows), columns), np.int32), []
    for index, row in enumerate(rows):
        sets = row.generated_kept_tokens
        if sets is None:
            continue
        if wrong := sets.wrong_for(row.generated_tokens):
            raise ValueError(f"request {row.request_id} sample {row.sample_index}: generated_kept_tokens: {wrong}")
        start = len(row.prompt_tokens)
        counts[index, start : start + len(sets)] = sets.counts
        ids.append(sets.ids)
    return KeptSets(torch.from_numpy(np.concatenate(ids)), torch.from_numpy(counts))


def no_sets(like: Tensor) -> KeptSets:
    """Kept tokens for [N, T] tokens drawn from the whole vocabulary."""
    return KeptSets(like.new_zeros(0, dtype=torch.int32), torch.zeros_like(like, dtype=torch.int32))


def logprobs_of_rows(
    rows: Sequence[DynamicInferenceRequest],
    logits: Tensor,
    kept: KeptSets,
    input_ids: Tensor,
    mask: Tensor,
    predictors: Tensor | None = None,
) -> Tensor:
    """`replay_logprobs` with the sampling parameters of the requests of the rows."""
    params = [row.sampling_params for row in rows]

    def each(name: str, neutral: float) -> float | Tensor:
        values = [float(getattr(one, name) or neutral) for one in params]
        first = values[0] if values else neutral
        return first if values.count(first) == len(values) else torch.tensor(values, device=logits.device)

    return replay_logprobs(
        logits,
        kept,
        input_ids,
        mask,
        temperature=each("temperature", 1.0),
        logit_bias=[one.logit_bias for one in params] if any(one.logit_bias for one in params) else None,
        prompt_lengths=torch.tensor([len(row.prompt_tokens) for row in rows], device=input_ids.device),
        predictors=predictors,
        **{name: each(name, off) for name, off in PENALTIES.items()},
    )


def padded_values(
    rows: Sequence[DynamicInferenceRequest], width: int, device: torch.device | str | None
) -> Tensor | None:
    """float32 [N, width, k] values of the completions, 0 elsewhere, NaN in a row without any; None: no row has any."""
    wide = next((row.generated_values.shape[1] for row in rows if row.generated_values is not None), 0)
    if not wide:
        return None
    padded = np.zeros((len(rows), width, wide), np.float32)
    for out, row in zip(padded, rows, strict=True):
        start, values = len(row.prompt_tokens), row.generated_values
        out[start : row.total_length] = np.nan if values is None else values
    return torch.from_numpy(padded).to(device)


def padded_routes(
    rows: Sequence[DynamicInferenceRequest], width: int, device: torch.device | str | None
) -> Tensor | None:
    """int16 [N, width, layers, k] of the requests that recorded routes, -1 elsewhere; None: no request did.

    Raises:
        ValueError: they are of different shapes, or of more positions than a request has.
    """
    shapes = {r.routing_indices.shape[1:] for r in rows if r.routing_indices is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"requests with routing_indices of different [layers, k]: {sorted(shapes)}; batch them apart")
    routes = np.full((len(rows), width, *shapes.pop()), -1, np.int16)
    for row, request in zip(routes, rows, strict=True):
        if request.routing_indices is not None:
            count = len(request.routing_indices)
            if count > max(0, request.total_length - 1):
                raise ValueError(
                    f"request {request.request_id} sample {request.sample_index} has routing_indices of {count} positions "
                    f"and {request.total_length} tokens, the last of which has none: its record was built wrongly"
                )
            row[:count] = request.routing_indices
    return torch.from_numpy(routes).to(device)
