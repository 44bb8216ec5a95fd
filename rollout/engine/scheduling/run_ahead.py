"""The expected duration of a decode step, and the number of steps to run in one call. No tensors, no clock."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import IntArray
from rollout.engine.scheduling.step import ScheduledStep

LONGEST_S = 0.03
"""The maximum expected duration of a run (several steps in one call), in seconds. Aborts and new requests wait for it."""
MOST = 64
"""The maximum number of steps in a run, even if steps are very short."""
MOST_WITH_TEXT = 8
"""The maximum number of steps in a run if some rows have stop strings, because tokens after a stop string are discarded."""

_NEWEST = 0.2
"""The weight of the newest step in the running means of `StepCost`."""
_OUTLIER = 3.0
"""The ratio of a step's duration to the estimate (or of the estimate to the duration) that makes the step an outlier."""


class StepCost:
    """The cost of a decode step: running means of its duration in seconds and of its number of rows."""

    def __init__(self) -> None:
        self._rows = 1.0
        self._seconds = math.inf

    def observe(self, rows: int, seconds: float) -> None:
        """Add a step to the means. Cap the `seconds` of an outlier, because another process may have delayed that step."""
        if _OUTLIER * seconds < self.step(rows):
            # Restart the means: earlier steps were much slower, perhaps because they compiled kernels or captured graphs.
            self._rows, self._seconds = rows, seconds
        self._seconds += _NEWEST * (min(seconds, _OUTLIER * self.step(rows)) - self._seconds)
        self._rows += _NEWEST * (rows - self._rows)

    def step(self, rows: int) -> float:
        """Return an upper estimate of how long a step of `rows` rows takes, in seconds; infinite before the first step."""
        return self._seconds * max(1.0, rows / self._rows)


def run_ahead(queues: Queues, step: ScheduledStep, cost: StepCost) -> ScheduledStep:
    """Turn a decode step into a run of up to `MOST` decode steps in one call, and reserve the blocks of all these steps.

    No row exceeds its maximum length, no sequence is preempted for the run, and one free block is left per active sequence.
    In a model with recurrent states, the run stops at the first block boundary, where a snapshot of the state may be kept.
    """
    table, rows = queues.table, step.rows
    seconds = cost.step(len(rows))
    most = MOST if seconds <= 0 else min(MOST, int(LONGEST_S / seconds))
    most = min(most, int((table.max_length[rows] - table.length[rows]).min()))
    if not table.plain[rows].all():
        most = min(most, MOST_WITH_TEXT)
    if queues.allocator.states.num_slots:
        most = min(most, int((table.block_size - table.computed[rows] % table.block_size).min()))
    while most > 1 and not _reserve(queues, rows, most):
        most //= 2
    # The reservation may have evicted blocks to the host; they must be copied there before the step overwrites them.
    return replace(step, ahead=max(1, most), copies=(*step.copies, *queues.blocks.take_copies()))


def _reserve(queues: Queues, rows: IntArray, count: int) -> bool:
    """Reserve blocks for the next `count` positions of every row. Return False and reserve none if too few are free."""
    table = queues.table
    fresh = -(-(table.computed[rows] + count) // table.block_size) - table.num_blocks[rows]
    if not (fresh > 0).any():
        return True
    if not queues.allocator.can_allocate(int(np.maximum(fresh, 0).sum()) + queues.num_active):
        return False
    return all(queues.blocks.reserve(row, count) for row in rows[fresh > 0].tolist())
