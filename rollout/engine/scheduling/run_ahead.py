"""How long a step takes, and how many decode steps may be made in one call. No tensors, no clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import IntArray
from rollout.engine.scheduling.step import ScheduledStep

LONGEST_S = 0.03
"""Seconds that a run of steps may take: aborts, new requests and the next tokens of streams wait for its end."""
MOST = 64
"""Most steps of a run, however short a step is measured."""
MOST_WITH_TEXT = 8
"""Most steps of a run with rows that their text may end: tokens behind the end are computed for nothing."""

_KEPT_OF_COSTS = 0.97
_PRIOR_POSITIONS = 16.0
"""Without measurements a position beyond those of the rows costs the time of a step / (rows + 16)."""
_PRIOR_WEIGHT = 4.0
_OUTLIER = 3.0


class StepCost:
    """Seconds of a step as a + b·positions: least squares over recent steps, forgetting, with a prior for b."""

    def __init__(self) -> None:
        self._weight = self._positions = self._seconds = 0.0
        self._variance = self._covariance = 0.0

    @property
    def known(self) -> bool:
        """Whether a step was observed."""
        return self._weight > 0

    def observe(self, positions: int, seconds: float) -> None:
        """Take in one step. A step much longer than expected counts in part: others may have used the machine."""
        if _OUTLIER * seconds < self.step(positions):
            # The times known so far are of slower steps: the first ones may compile kernels and capture graphs.
            self._weight = self._positions = self._seconds = 0.0
        elif self._weight > 1:
            seconds = min(seconds, _OUTLIER * self.step(positions))
        self._weight = _KEPT_OF_COSTS * self._weight + 1
        # The gain of the first step is 1.
        x, y, gain = positions - self._positions, seconds - self._seconds, 1 / self._weight
        self._positions += gain * x
        self._seconds += gain * y
        self._variance = (1 - gain) * (self._variance + gain * x * x)
        self._covariance = (1 - gain) * (self._covariance + gain * x * y)

    @property
    def position(self) -> float:
        """Seconds of one more position."""
        prior = self._seconds / (self._positions + _PRIOR_POSITIONS)
        slope = (self._covariance + _PRIOR_WEIGHT * prior) / (self._variance + _PRIOR_WEIGHT)
        return min(self._seconds / max(1.0, self._positions), max(0.002 * self._seconds, slope))

    def step(self, positions: int) -> float:
        """Seconds of a step of so many positions; 0 before the first observation."""
        return max(0.0, self._seconds + self.position * (positions - self._positions))


def run_ahead(queues: Queues, step: ScheduledStep, cost: StepCost) -> ScheduledStep:
    """The decodes of a step with up to `MOST` - 1 further ones that may follow in the same call, their blocks reserved.

    No row becomes longer than it may, no sequence is preempted for it, and a block is left to each sequence. With recurrent
    states the run ends at the first block boundary, where a snapshot of the state may be kept.
    """
    table, rows = queues.table, step.rows
    seconds = cost.step(len(rows))
    most = MOST if seconds <= 0 else min(MOST, int(LONGEST_S / seconds))
    most = min(most, int((table.max_length[rows] - table.length[rows]).min()))
    if not table.plain[rows].all():
        most = min(most, MOST_WITH_TEXT)
    if queues.allocator.states.num_slots:
        most = min(most, int((table.block_size - table.computed[rows] % table.block_size).min()))
    if not cost.known:
        most = 1
    while most > 1 and not _reserve(queues, rows, most):
        most //= 2
    # What is evicted for it may be kept on the host.
    return replace(step, ahead=max(1, most), copies=(*step.copies, *queues.blocks.take_copies()))


def _reserve(queues: Queues, rows: IntArray, count: int) -> bool:
    """Reserve blocks for the next `count` positions of every row; False, reserving none, if too few are free."""
    table = queues.table
    fresh = -(-(table.computed[rows] + count) // table.block_size) - table.num_blocks[rows]
    if not (fresh > 0).any():
        return True
    if not queues.allocator.can_allocate(int(np.maximum(fresh, 0).sum()) + queues.num_active):
        return False
    return all(queues.blocks.reserve(row, count) for row in rows[fresh > 0].tolist())
