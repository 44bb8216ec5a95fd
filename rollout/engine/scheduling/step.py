"""Scheduler output and model-runner output of one step. No tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollout.engine.scheduling.sequences import IntArray
from rollout.engine.scheduling.sequences import Sequence as Sample


@dataclass(frozen=True, eq=False)
class ScheduledStep:
    """Work of one forward pass. Entry e computes `counts[e]` positions of table row `rows[e]`, from `starts[e]` on.

    The first `num_decodes` entries compute one position each, and are all sampled; the others are prefill chunks.
    """

    rows: IntArray
    """[E] int32, table row of each entry."""
    starts: IntArray
    """[E] int32, first position that each entry computes."""
    counts: IntArray
    """[E] int32, number of positions that each entry computes."""
    num_decodes: int
    prefills: tuple[Sample, ...]
    """Sequences of the entries from `num_decodes` on."""
    copies: tuple[tuple[int, int], ...]
    """(source, destination) pages to copy before the forward, in this order; `~s`: slot s of the host."""
    sampled_entries: IntArray
    """[K] int32, the entry whose last position is sampled; the samples of one group share one."""
    sampled_rows: IntArray
    """[K] int32, the table row that receives the token."""
    ahead: int = 0
    """The maximum number of decode steps that these rows make in one call; their blocks are reserved. 0: one step."""

    state_moves: tuple[tuple[int, int], ...] = ()
    """(source, destination) state slots to copy before the forward; all are read before any is written. Negative source:
    zeros."""

    @property
    def num_tokens(self) -> int:
        """The number of positions computed."""
        return int(self.counts.sum())

    def distinct_entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return `sampled_entries` without duplicates, and for each of the K entries its index in them."""
        if not self.prefills:
            entries = self.sampled_entries.astype(np.int64)
            return entries, entries
        entries, repeats = np.unique(self.sampled_entries, return_inverse=True)
        return entries.astype(np.int64), repeats


@dataclass(frozen=True, eq=False)
class StepTokens:
    """Sampled tokens of a step, aligned with `ScheduledStep.sampled_rows`.

    A run of decode steps has `steps` tokens of each row, one after the other.
    """

    token_ids: NDArray[np.int64]
    """[K] sampled token ids."""
    logprobs: NDArray[np.float32]
    """[K] log-probs of the sampled tokens; NaN where the logits had no finite value."""
    top: list[list[tuple[int, float]]] | None = None
    """[K] of (token, log-prob), best first; None if no request needs them."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Index in K → why the sample has no token, if known."""
    complete: Sequence[int] = ()
    """Indices in K of samples whose text was complete, so that they stop before `min_tokens`."""
    kept: list[bytes] | None = None
    """[K] sets from which the tokens were drawn, each packed by `pack_kept`; None if no request returns them."""
    values: NDArray[np.float32] | None = None
    """[K, k] numbers of the user's function of the hidden states; None: there is no function."""
    steps: int = 1
    """The number of decode steps made."""
