"""Duration of steps, and the number of decode steps that may be made in one call. No tensors, no clock."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import IntArray
from rollout.engine.scheduling.step import ScheduledStep

LONGEST_S = 0.03
"""Upper bound on one run of steps, in seconds. Aborts, new requests and stream updates wait for the run to finish."""
MOST = 64
"""The maximum number of steps of a run, even if steps are measured as very short."""
MOST_WITH_TEXT = 8
"""Maximum steps of a run with rows that their text may finish: tokens after the end are computed for nothing."""

_NEWEST = 0.2
"""The weight of the newest step in the mean."""
_OUTLIER = 3.0


class StepCost:
    """Seconds of a decode step: a mean that favours recent steps, and the number of rows it was measured with."""

    def __init__(self) -> None:
        self._rows = 1.0
        self._seconds = math.inf

    def observe(self, rows: int, seconds: float) -> None:
        """Add one step to the mean. A step much longer than expected counts less: others may have used the machine."""
        if _OUTLIER * seconds < self.step(rows):
            # Restart the mean: the earlier steps were much slower, perhaps because they compiled kernels and captured
            # graphs.
            self._rows, self._seconds = rows, seconds
        self._seconds += _NEWEST * (min(seconds, _OUTLIER * self.step(rows)) - self._seconds)
        self._rows += _NEWEST * (rows - self._rows)

    def step(self, rows: int) -> float:
        """Return the longest expected duration of a step of this many rows, in seconds; infinite before the first."""
        return self._seconds * max(1.0, rows / self._rows)


def run_ahead(queues: Queues, step: ScheduledStep, cost: StepCost) -> ScheduledStep:
    """Return the decodes of a step with up to `MOST` - 1 further steps in the same call, and reserve their blocks.

    No row exceeds its maximum length, no sequence is preempted for the run, and a block is left to each sequence. With
    recurrent states the run ends at the first block boundary, where a snapshot of the state may be kept.
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
    # Add the copies of blocks that the reservation evicted to the host: they must be copied before the step.
    return replace(step, ahead=max(1, most), copies=(*step.copies, *queues.blocks.take_copies()))


def _reserve(queues: Queues, rows: IntArray, count: int) -> bool:
    """Reserve blocks for the next `count` positions of every row. False: too few are free, and none was reserved."""
    table = queues.table
    fresh = -(-(table.computed[rows] + count) // table.block_size) - table.num_blocks[rows]
    if not (fresh > 0).any():
        return True
    if not queues.allocator.can_allocate(int(np.maximum(fresh, 0).sum()) + queues.num_active):
        return False
    return all(queues.blocks.reserve(row, count) for row in rows[fresh > 0].tolist())
