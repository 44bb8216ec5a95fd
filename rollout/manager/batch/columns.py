"""Batch columns with more than one number per token: the sets that tokens were drawn from, token values, expert routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout.requests.request import DynamicInferenceRequest


class KeptSets(NamedTuple):
    """The set of token ids that each token of N rows was drawn from: the ids left by top-p and the like."""

    ids: Tensor
    """int32 [S]: the S token ids of all sets, row after row and token after token, ascending in each set."""

    counts: Tensor
    """int32 [N, T]: number of ids in each token's set; 0 if the token has no set. The shape is [L] in packed rollouts."""

    def to(self, device: torch.device | str) -> KeptSets:
        """Return the same sets on `device`."""
        return KeptSets(self.ids.to(device), self.counts.to(device))

    def of_rows(self, rows: Tensor | slice, columns: int | None = None) -> KeptSets:
        """Return the sets of `rows`, in this order. If `columns` is given, keep only the first `columns` columns."""
        chosen = torch.arange(len(self.counts), device=self.counts.device)[rows]
        sizes = self.counts.sum(1, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        counts = self.counts[chosen, :columns]
        lengths = counts.sum(1, dtype=torch.int64)
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if len(chosen) else 0
        shift = (starts[chosen] - (ends - lengths)).repeat_interleave(lengths, output_size=total)
        return KeptSets(self.ids[torch.arange(total, device=shift.device) + shift], counts)

    def without(self, rows: Tensor) -> KeptSets:
        """Return a copy without the sets of the rows for which `rows`, bool [N], is True."""
        kept = ~rows.repeat_interleave(self.counts.sum(1, dtype=torch.int64))
        return KeptSets(self.ids[kept], self.counts.masked_fill(rows[:, None], 0))

    def of_tokens(self, rows: Tensor, columns: Tensor) -> KeptSets:
        """Return the sets of the K tokens at (`rows`, `columns`), each [K], in this order, with counts [K]."""
        sizes = self.counts.flatten().long()
        at = rows * self.counts.shape[1] + columns
        ends, lengths = sizes.cumsum(0)[at], sizes[at]
        shift = (ends - lengths.cumsum(0)).repeat_interleave(lengths)
        return KeptSets(self.ids[torch.arange(len(shift), device=shift.device) + shift], self.counts.flatten()[at])


def kept_sets(rows: Sequence[DynamicInferenceRequest], columns: int) -> KeptSets | None:
    """Return the sets from which N requests' tokens were drawn, with counts [N, `columns`]; None if no request has sets.

    Raises:
        ValueError: the sets of a request do not match its tokens.
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
    """Return `KeptSets` for tokens `like` [N, T] drawn from the whole vocabulary: every token's set is empty."""
    return KeptSets(like.new_zeros(0, dtype=torch.int32), torch.zeros_like(like, dtype=torch.int32))


def padded_values(
    rows: Sequence[DynamicInferenceRequest], width: int, device: torch.device | str | None
) -> Tensor | None:
    """Return the token values of completions, float32 [N, width, k]; None if no row has values.

    The values are 0 outside of completions, and NaN in the completions of rows without values.
    """
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
    """Return recorded expert routes, int16 [N, width, layers, k], with -1 elsewhere; None if no request has routes.

    Raises:
        ValueError: the requests' numbers of layers or experts differ, or a request has too many routes for its tokens.
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
