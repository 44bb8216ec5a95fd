"""Log-probs under the sampling distribution: softmax over the tokens that top_k, top_p and min_p kept.

Truncated sampling renormalises over sets of tokens that the trainer does not have. Without these sets, the ratio of trainer
to sampler probability is the total probability of the kept tokens, and its product over a completion shrinks with the
length. DeepSeek-AI 2025, DeepSeek-V3.2, arXiv:2512.02556, section 3.1 ("Keep Sampling Mask").

Always true: for a token with a set, only the logits of the set are read, and a few numbers per id in it are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rollout.algorithms.importance import check_floating, check_integer, check_mask, wide

PerRow = float | Tensor
"""One value for all rows, or one per row, floating [N]."""
Biases = Mapping[int, float] | Sequence[Mapping[int, float] | None] | None
"""Token id → value that is added to the token's logit: one mapping for all rows, or one per row. None means no bias."""


class LogitReader(Protocol):
    """A reader of logits [K, V], which need not be in memory; `rollout.engine.training.head` has a reader that runs a model.

    K is the number of rows of logits, V the size of the vocabulary.
    """

    def read(
        self, rows: Tensor, temperature: PerRow, tokens: Tensor, ids: Tensor, whole: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the requested logits, and the log-normalisers (logsumexp of the divided logits) of whole rows.

        Args:
            rows: the row of logits of each of M sampled tokens.
            temperature: divisor of the logits in the log-normalisers, one for all or one per sampled token.
            tokens: for each requested logit, which of the M sampled tokens it belongs to.
            ids: the vocabulary id of each requested logit.
            whole: which of the M sampled tokens need the log-normaliser of their whole row.
        """


class _Held:
    """A `LogitReader` for logits that are in memory."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def read(
        self, rows: Tensor, temperature: PerRow, tokens: Tensor, ids: Tensor, whole: Tensor
    ) -> tuple[Tensor, Tensor]:
        flat = self._logits
        single = wide(flat.reshape(-1)[rows[tokens] * flat.shape[1] + ids])
        warm = temperature[whole, None] if isinstance(temperature, Tensor) else temperature
        sums = (wide(flat[rows[whole]]) / warm).logsumexp(1) if len(whole) else single.new_zeros(0)
        return single, sums


def replay_logprobs(
    logits: Tensor | LogitReader,
    kept: tuple[Tensor, Tensor],
    input_ids: Tensor,
    mask: Tensor,
    *,
    temperature: PerRow = 1.0,
    logit_bias: Biases = None,
    repetition_penalty: PerRow = 1.0,
    presence_penalty: PerRow = 0.0,
    frequency_penalty: PerRow = 0.0,
    prompt_lengths: Tensor | None = None,
    predictors: Tensor | None = None,
) -> Tensor:
    """Compute each token's log-prob under the trainer's logits, renormalised over the set that the token was drawn from.

    The result is differentiable. Logits are shaped as in the sampler: bias, repetition, presence and frequency penalty,
    temperature, then the set. Under the weights that sampled the tokens, the result equals `RolloutBatch.logprobs`.

    Args:
        logits: floating [N, T, V] from a forward pass over `input_ids` (N rows of T tokens, V logits for each): column t
            predicts token t + 1. With `predictors`, [K, V] or a `LogitReader`.
        kept: `RolloutBatch.kept_tokens`: (ids, counts). ids, integer [S], are the ids of all sets, row after row and
            ascending in each set. counts, integer [N, T], are the set sizes; 0 for a token without a set, which was drawn
            from all tokens.
        input_ids: int64 [N, T]; an id outside of the vocabulary is padding, which does not count for penalties.
        mask: bool [N, T], the tokens whose log-probs are computed, usually `RolloutBatch.response_mask`.
        temperature: divisor of the logits, above 0.
        logit_bias, repetition_penalty, presence_penalty, frequency_penalty: as in `SamplingParams`.
        prompt_lengths: int64 [N], the number of prompt tokens in each row; required for penalties.
        predictors: int64 [N, T], the row of `logits` that predicts each token. None if `logits` are [N, T, V].

    Returns:
        float32 [N, T] (float64 for float64 logits), with 0 outside of `mask` and -inf for a token that is not in its set.

    Raises:
        ValueError: shapes or dtypes do not match; a penalty is set without `prompt_lengths`; or a token without a set has a
            penalty or bias.
    """
    ids, counts = kept
    _check(logits, ids, counts, input_ids, mask, predictors)
    if predictors is None:
        predictors = torch.arange(input_ids.numel(), device=input_ids.device).view(input_ids.shape) - 1
    reader: LogitReader = _Held(logits.reshape(-1, logits.shape[-1])) if isinstance(logits, Tensor) else logits
    drawn, columns = _Drawn.of(mask, counts), input_ids.shape[1]
    rows, targets = drawn.places // columns, input_ids.flatten()[drawn.places]
    warmth, members, free = _per_row(temperature, rows), ids[drawn.entries].long(), drawn.unrestricted
    biases = _of_each_row(logit_bias, len(input_ids))
    penalties = {
        "repetition": (repetition_penalty, 1.0),
        "presence": (presence_penalty, 0.0),
        "frequency": (frequency_penalty, 0.0),
    }
    penalised = any(not _neutral(value, off) for value, off in penalties.values())
    unknown = [
        row
        for row in sorted(set(rows[free].tolist()))
        if biases[row] or any(_per_row(value, rows.new_tensor(row)) != off for value, off in penalties.values())
    ]
    if unknown:
        raise ValueError(
            f"rows {unknown} have tokens without a set (count 0), and a logit_bias or penalty: their log-probs need every "
            "logit shaped; sample with return_kept_tokens, or leave them out of the mask"
        )
    single, sums = reader.read(
        predictors.flatten()[drawn.places], warmth, torch.cat([drawn.token, free]), torch.cat([members, targets[free]]), free
    )  # fmt: skip
    scores, chosen = single[: len(members)], single[len(members) :]
    entry_rows = rows[drawn.token]
    if any(biases):
        scores = scores + _biases(biases, entry_rows, members, scores)
    if penalised:
        if prompt_lengths is None:
            raise ValueError(
                "prompt_lengths=None: must be int64 [N] with a penalty, which counts the tokens before each"
            )
        said, listed = _occurrences(input_ids, prompt_lengths, entry_rows, drawn.places[drawn.token] % columns, members)
        penalty = _per_row(repetition_penalty, entry_rows)
        scores = torch.where(listed, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        scores = scores - said * _per_row(frequency_penalty, entry_rows)
        scores = scores - (said > 0) * _per_row(presence_penalty, entry_rows)
    found = _normalised(
        scores / _per_row(temperature, entry_rows), drawn.token, members == targets[drawn.token], len(rows)
    )
    of_whole = chosen / (warmth[free] if isinstance(warmth, Tensor) else warmth) - sums
    found = found.index_copy(0, free, of_whole.to(found))
    return found.new_zeros(mask.numel()).index_copy(0, drawn.places, found).view(mask.shape)


class _Drawn(NamedTuple):
    """The M tokens in the mask, and the S' ids (entries) in the sets that these tokens were drawn from."""

    places: Tensor
    """[M]: for each of the M tokens, its flat index in the [N, T] batch."""
    entries: Tensor
    """[S']: the index of each entry in the ids of `kept`."""
    token: Tensor
    """[S']: for each entry, the index (0 to M - 1) of the token that was drawn from the entry's set."""
    unrestricted: Tensor
    """[U]: which of the M tokens have no set."""

    @classmethod
    def of(cls, mask: Tensor, counts: Tensor) -> _Drawn:
        sizes, wanted = counts.flatten().long(), mask.flatten()
        entries = wanted.repeat_interleave(sizes).nonzero()[:, 0]
        places = wanted.nonzero()[:, 0]
        token = torch.arange(len(places), device=mask.device).repeat_interleave(sizes[places])
        return cls(places, entries, token, (sizes[places] == 0).nonzero()[:, 0])


def _normalised(scores: Tensor, token: Tensor, chosen: Tensor, count: int) -> Tensor:
    """Return the log-softmax of the entry that `chosen` marks in each of `count` sets, or -inf if it marks none."""
    peak = scores.new_full((count,), -torch.inf).scatter_reduce(0, token, scores.detach(), "amax")
    total = scores.new_zeros(count).index_add(0, token, (scores - peak[token]).exp())
    score = scores.new_zeros(count).index_add(0, token, torch.where(chosen, scores, 0))
    known = scores.new_zeros(count).index_add(0, token, chosen.to(scores.dtype)) > 0
    # Use neutral values for tokens without a chosen entry: a peak of -inf would make the gradient NaN.
    peak, total, score = (
        torch.where(known, value, other) for value, other in ((peak, 0.0), (total, 1.0), (score, -torch.inf))
    )
    return score - peak - total.log()


def _occurrences(
    input_ids: Tensor, prompt_lengths: Tensor, rows: Tensor, columns: Tensor, members: Tensor
) -> tuple[Tensor, Tensor]:
    """Return, for each entry (a row, a column and a token id in `members`), how often the id occurs in the completion before
    that column, and whether it occurs anywhere in the row before that column."""
    # Use the largest id + 2 as vocabulary size: with + 1, padding (id -1) would look like the previous row's largest id.
    width, vocabulary = input_ids.shape[1], max(int(each.max()) for each in (input_ids, members) if len(each)) + 2
    row = torch.arange(len(input_ids), device=input_ids.device)[:, None]
    every = (
        ((row * vocabulary + input_ids) * width + torch.arange(width, device=input_ids.device)).flatten().sort().values
    )
    first = (rows * vocabulary + members) * width
    before = torch.searchsorted(every, first + columns)
    in_completion = before - torch.searchsorted(every, first + prompt_lengths[rows])
    return in_completion, before > torch.searchsorted(every, first)


def _of_each_row(biases: Biases, count: int) -> list[Mapping[int, float]]:
    each = [biases] * count if biases is None or isinstance(biases, Mapping) else list(biases)
    if len(each) != count:
        raise ValueError(f"logit_bias has {len(each)} entries: must be one for all rows, or one for each of {count}")
    return [own or {} for own in each]


def _biases(biases: Sequence[Mapping[int, float]], rows: Tensor, members: Tensor, like: Tensor) -> Tensor:
    """Return the bias [S'] that row `rows[i]` adds to the logit of token id `members[i]`; 0 without a bias."""
    pairs = sorted((row, token, value) for row, own in enumerate(biases) for token, value in own.items())
    # Use a span of 2**32, which is larger than every token id.
    span = 1 << 32
    keys = torch.tensor([row * span + token for row, token, _ in pairs], device=members.device)
    values = like.new_tensor([value for *_, value in pairs])
    wanted = rows * span + members
    at = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return torch.where(keys[at] == wanted, values[at], 0)


def _per_row(value: PerRow, rows: Tensor) -> PerRow:
    return value.to(rows.device)[rows] if isinstance(value, Tensor) else value


def _neutral(value: PerRow, neutral: float) -> bool:
    return bool((value == neutral).all()) if isinstance(value, Tensor) else value == neutral


def _check(
    logits: Tensor | LogitReader,
    ids: Tensor,
    counts: Tensor,
    input_ids: Tensor,
    mask: Tensor,
    predictors: Tensor | None,
) -> None:
    check_mask(mask, input_ids=input_ids, counts=counts)
    for name, values in (("kept ids", ids), ("kept counts", counts), ("input_ids", input_ids)):
        check_integer(name, values)
    if mask.ndim != 2:
        raise ValueError(f"mask has shape {list(mask.shape)}: must be [N, T]; give a single row as mask[None]")
    if int(counts.sum()) != len(ids):
        raise ValueError(f"kept has {len(ids)} ids and counts that sum to {int(counts.sum())}: must be equal")
    if not isinstance(logits, Tensor):
        return
    check_floating("logits", logits)
    if predictors is not None:
        if logits.ndim != 2 or predictors.shape != mask.shape:
            raise ValueError(
                f"logits {list(logits.shape)} and predictors {list(predictors.shape)}: must be [K, V] and {list(mask.shape)}"
            )
    elif logits.shape[:-1] != mask.shape:
        raise ValueError(
            f"logits have shape {list(logits.shape)}: must be {[*mask.shape, 'V']}, all columns of a forward of input_ids"
        )
    elif mask[:, :1].any():
        raise ValueError("mask holds a token at column 0, which no logits predict")
