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

    Entry e computes `counts[e]` positions of the sequence in row `rows[e]` of the `SequenceTable`, from `starts[e]` on.
    The first `num_decodes` entries compute one position and sample one token each. The other entries are prefill chunks.
    """

    rows: IntArray
    """[E] int32, the `SequenceTable` row of each entry."""
    starts: IntArray
    """[E] int32, the first position that each entry computes."""
    counts: IntArray
    """[E] int32, the number of positions that each entry computes."""
    num_decodes: int
    prefills: tuple[Sample, ...]
    """The sequences of the prefill entries, which follow the first `num_decodes` entries."""
    copies: tuple[tuple[int, int], ...]
    """The page copies to make before the forward pass, in order: (source, destination), where `~s` is slot s on the host."""
    sampled_entries: IntArray
    """[K] int32, the entry whose last position each token is sampled from. Samples that share a prefill share its entry."""
    sampled_rows: IntArray
    """[K] int32, the `SequenceTable` row that receives each token."""
    ahead: int = 0
    """The maximum number of decode steps to run in one call, for which blocks are already reserved; 0 for a single step."""

    state_moves: tuple[tuple[int, int], ...] = ()
    """The (source, destination) pairs of state slots to copy before the forward pass. All sources are read before any
    destination is written. A negative source fills the destination with zeros."""

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

    A run of several decode steps has K = rows * `steps` tokens, ordered by row and then by step.
    """

    token_ids: NDArray[np.int64]
    """[K], the sampled token ids."""
    logprobs: NDArray[np.float32]
    """[K], the log-probs of the sampled tokens; NaN if the logits had no finite value."""
    top: list[list[tuple[int, float]]] | None = None
    """[K], the most likely tokens as (token, log-prob), most likely first; None if no request needs them."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """The known reasons why sampled tokens are invalid, by the token's index into the K tokens."""
    complete: Sequence[int] = ()
    """The indices (into the K tokens) of samples that may stop before `min_tokens`: their structured output is complete."""
    kept: list[bytes] | None = None
    """[K], the sets of token ids that the tokens were drawn from (see `pack_kept`); None if no request returns them."""
    values: NDArray[np.float32] | None = None
    """[K, k], the k numbers per token that the user's value function computed; None if there is no such function."""
    steps: int = 1
    """The number of decode steps that were run."""
