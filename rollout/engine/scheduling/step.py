"""The scheduler's output and the model runner's output for one step. No tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout.engine.scheduling.sequences import IntArray
from rollout.engine.scheduling.sequences import Sequence as Sample


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """The work of one forward pass: E entries, from which K tokens are sampled.

    Entry e computes `counts[e]` positions of table row `rows[e]`, starting at position `starts[e]`. The first `num_decodes`
    entries compute one position each, and a token is sampled from each; the other entries are prefill chunks.
    """

    rows: IntArray
    """[E] int32, the table row of each entry."""
    starts: IntArray
    """[E] int32, the first position that each entry computes."""
    counts: IntArray
    """[E] int32, the number of positions that each entry computes."""
    num_decodes: int
    prefills: tuple[Sample, ...]
    """The sequences of the prefill entries, which follow the first `num_decodes` entries."""
    copies: tuple[tuple[int, int], ...]
    """(source, destination) pages to copy before the forward pass, in this order; `~s` means slot s in host memory."""
    sampled_entries: IntArray
    """[K] int32, the entry whose last position each token is sampled from; all samples of a group use the same entry."""
    sampled_rows: IntArray
    """[K] int32, the table row that receives each token."""
    ahead: int = 0
    """The maximum number of decode steps that these rows make in one call; their blocks are reserved. 0: one step."""

    state_moves: tuple[tuple[int, int], ...] = ()
    """(source, destination) state slots to copy before the forward pass, all read before any is written. A negative source
    means zeros."""

    @property
    def num_tokens(self) -> int:
        """The number of positions that the step computes."""
        return int(self.counts.sum())

    def distinct_entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `sampled_entries` without duplicates, and for each of the K tokens the index of its entry in the result."""
        if not self.prefills:
            entries = self.sampled_entries.astype(np.int64)
            return entries, entries
        entries, repeats = np.unique(self.sampled_entries, return_inverse=True)
        return entries.astype(np.int64), repeats


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The K sampled tokens of a step, aligned with `ScheduledStep.sampled_rows`.

    A run of several decode steps has K = rows * `steps` tokens: all tokens of the first row, then all of the second, etc.
    """

    token_ids: NDArray[np.int64]
    """[K], the sampled token ids."""
    logprobs: NDArray[np.float32]
    """[K], the log-probs of the sampled tokens; NaN if the logits had no finite value."""
    top: list[list[tuple[int, float]]] | None = None
    """[K], the most likely tokens as (token, log-prob), most likely first; None if no request needs them."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """The reasons why samples have no valid token, if known, by index into the K tokens."""
    complete: Sequence[int] = ()
    """The indices, into the K tokens, of samples whose structured text is complete: they may stop before `min_tokens`."""
    kept: list[bytes] | None = None
    """[K], the token sets from which the tokens were drawn, each packed by `pack_kept`; None if no request returns them."""
    values: NDArray[np.float32] | None = None
    """[K, k], the k numbers per token that the user's value function computed; None: there is no function."""
    steps: int = 1
    """The number of decode steps made."""
