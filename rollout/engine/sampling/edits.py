"""Edits of logits before filtering (logit_bias, banned tokens, constraints, penalties), and sets of drawable tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory.buffers import upload, upload_together
from rollout.engine.sampling.constraints import Allowed
from rollout.engine.sampling.sampling_table import SamplingRows

Sets = tuple[Tensor, Tensor] | tuple[None, None]
"""The kept tokens of R rows (the tokens that could be drawn), as (ids, counts). The ids [K] int32 of all rows are
concatenated, and ascending within a row. The counts [R] int64 are 0 for rows that do not return their kept tokens."""
History = tuple[NDArray[np.integer], NDArray[np.integer]]
"""The token ids of one row: (prompt, completion)."""


def edited(
    raw: Tensor,
    rows: SamplingRows,
    histories: Sequence[History] | None,
    banned: Sequence[tuple[int, Sequence[int]]],
    masked: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Apply biases, banned tokens, constraints and penalties. Return a changed copy, or `raw` itself if there are none.

    Args:
        raw: [R, V] float32, the logits.
        rows: the sampling parameters of the R rows.
        histories: the token ids of every row; None if no row has a penalty.
        banned: pairs of a row and the token ids that must not be drawn in the row.
        masked: the result of `removed`: the indices [K] of constrained rows, and the tokens that their constraints exclude,
            [K, V] bool; None if no row is constrained.
    """
    if not (rows.any_bias or rows.any_penalty or banned or masked):
        return raw
    scores = rows.scratch.take("edited", raw).copy_(raw)
    if rows.any_bias:
        row, token, bias = rows.bias
        flat, index = scores.view(-1), upload(row * scores.shape[1] + token, scores.device)
        flat[index] = flat[index] + upload(bias, scores.device)
    if banned:
        _, index = _places([row for row, _ in banned], [np.asarray(ids, np.int64) for _, ids in banned], scores)
        scores.view(-1).index_fill_(0, index, -torch.inf)
    if masked:
        index, mask = masked
        scores.index_copy_(0, index, scores[index].masked_fill_(mask, -torch.inf))
    if rows.any_penalty:
        assert histories is not None
        _penalize(scores, rows, histories)
    return scores


def removed(allowed: Allowed, start: int, end: int, scores: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the constrained rows in [start, end) and the tokens that their constraints exclude; None without such rows.

    The rows are int64 [K], counted from `start`; the excluded tokens are bool [K, V].
    """
    places = [place for place, row in enumerate(allowed.rows) if start <= row < end]
    if not places:
        return None
    rows = upload(np.array([allowed.rows[place] - start for place in places], np.int64), scores.device)
    packed = upload(allowed.bits[places], scores.device)
    # Create the tensor on the device: copying a list to the device would make the host wait for the forward pass.
    bits = torch.arange(8, dtype=torch.uint8, device=scores.device)
    return rows, packed[:, :, None].bitwise_right_shift(bits).bitwise_and(1).eq(0).flatten(1)[:, : scores.shape[1]]


def _penalize(scores: Tensor, rows: SamplingRows, histories: Sequence[History]) -> None:
    # A token that occurs repeatedly needs no special case: its score is written several times with the same value.
    flat, penalized = scores.view(-1), rows.penalized.tolist()
    if rows.any_repetition:
        row, index = _places(penalized, [np.concatenate(histories[row]) for row in penalized], scores)
        score, penalty = flat[index], rows.value["repetition_penalty"][row]
        flat[index] = torch.where(score < 0, score * penalty, score / penalty)
    if rows.any_occurrence:
        row, index = _places(penalized, [histories[row][1] for row in penalized], scores)
        counts = rows.scratch.take("counts", scores).zero_().view(-1)
        counts.index_add_(0, index, torch.ones_like(index, dtype=counts.dtype))
        flat[index] = flat[index] - (
            counts[index] * rows.value["frequency_penalty"][row] + rows.value["presence_penalty"][row]
        )


def _places(rows: Sequence[int], tokens: Sequence[NDArray[np.integer]], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return two int64 tensors [N] on the device: the row of each token, and the token's index in the flattened scores."""
    vocabulary = scores.shape[1]
    counts, token = np.array([len(ids) for ids in tokens]), np.concatenate(tokens)
    inside = (token >= 0) & (token < vocabulary)
    if not inside.all():
        counts = np.bincount(np.repeat(np.arange(len(rows)), counts)[inside], minlength=len(rows))
        token = token[inside]
    # Transfer int32 instead of int64 to halve the transfer: histories are copied to the device in every step.
    first, count, token = (np.asarray(each, np.int32) for each in (rows, counts, token))
    row, times, column = upload_together((first, count, token), scores.device)
    row = row.long().repeat_interleave(times.long(), output_size=len(token))
    return row, row * vocabulary + column


def drawable(kept: Tensor, relative: Tensor, rows: SamplingRows, least: float) -> Sets:
    """Return the tokens that can be drawn, for rows that return them. (On a CPU, the C++ kernel does this, see `CpuDraw`.)

    Tokens of weight 0 cannot be drawn and are left out. The sets therefore stay small if the distribution is sharp.

    Args:
        kept: [R, V] bool, the tokens that pass the filters.
        relative: [R, V], the probabilities relative to the most likely token.
        rows: the sampling parameters of the R rows.
        least: the smallest relative probability whose weight is not 0.
    """
    everywhere = len(rows.keeping) == len(rows)
    mask, source = (kept, relative) if everywhere else (kept[rows.keeping], relative[rows.keeping])
    counts = rows.key.new_zeros(len(rows))
    places = mask.nonzero()
    places = places[source[places[:, 0], places[:, 1]] >= least]
    counts[rows.keeping] = torch.bincount(places[:, 0], minlength=len(mask))
    return places[:, 1].to(torch.int32), counts


def no_sets(rows: SamplingRows, wanted: bool) -> Sets:
    """Return the `Sets` of rows that do not return their kept tokens: no ids, and counts of 0.

    Args:
        rows: the sampling parameters of the rows.
        wanted: whether other rows of the step return their sets. If not, the result is (None, None).
    """
    if not wanted:
        return None, None
    device = rows.key.device
    return torch.zeros(0, dtype=torch.int32, device=device), torch.zeros(len(rows), dtype=torch.int64, device=device)
