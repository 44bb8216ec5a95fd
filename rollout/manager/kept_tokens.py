"""Kept tokens of a batch as tensors, and the log-probs of the distributions they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout.algorithms.replay import replay_logprobs
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import PENALTIES


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
    """Of tokens [N, T] all of which could be any of the vocabulary."""
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
