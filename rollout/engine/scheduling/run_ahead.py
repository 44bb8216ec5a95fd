"""How many decode steps may be made in one call, without a look at the queues in between. No tensors, no clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollout.engine.scheduling.draft_budget import StepCost
from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import IntArray
from rollout.engine.scheduling.step import ScheduledStep

LONGEST_S = 0.03
"""Seconds that a run of steps may take: as long is what waits for its end kept waiting, as a stream for its next tokens."""
MOST = 64
"""Steps of a run at most, however short a step is measured."""
MOST_WITH_TEXT = 8
"""Steps of a run with rows that their text may end: what lies behind the end is computed for nothing."""


def run_ahead(queues: Queues, step: ScheduledStep, cost: StepCost, most: int = MOST) -> ScheduledStep:
    """The decodes of a step with as many further ones as may follow in the same call, their blocks reserved.

    No row becomes longer than it may, no sequence is preempted for it, and a block is left to each sequence. With recurrent
    states the run ends at the first block boundary, where a snapshot of the state may be kept.

    Args:
        most: steps to make.
    """
    table, rows = queues.table, step.rows
    seconds = cost.step(len(rows))
    most = most if seconds <= 0 else min(most, int(LONGEST_S / seconds))
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
    """Reserve blocks for the next `count` positions of every row, whose present block is its own; False, reserving none, if
    too few are free."""
    table = queues.table
    fresh = -(-(table.computed[rows] + count) // table.block_size) - table.num_blocks[rows]
    if not (fresh > 0).any():
        return True
    if not queues.allocator.can_allocate(int(np.maximum(fresh, 0).sum()) + queues.num_active):
        return False
    return all(queues.blocks.reserve(row, count) for row in rows[fresh > 0].tolist())
