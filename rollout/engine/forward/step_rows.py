"""Arrays of a scheduled step: token ids, positions and block tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.scheduling.sequences import SequenceTable
from rollout.engine.scheduling.step import ScheduledStep


def pack(step: ScheduledStep, table: SequenceTable) -> tuple[NDArray[np.int64], PagedRows]:
    """Token ids [P] of a step's positions and their rows: positions, slot mapping, block tables, wide enough for the steps
    that may follow it."""
    offsets = np.zeros(len(step.rows) + 1, np.int64)
    np.cumsum(step.counts, out=offsets[1:])
    entries = np.repeat(np.arange(len(step.rows)), step.counts)
    positions = np.arange(offsets[-1]) - offsets[entries] + step.starts[entries]
    width = -(-(int((step.starts + step.counts).max()) + max(0, step.ahead - 1)) // table.block_size)
    tables, *others = table.block_tables(step.rows, width)
    ids = table.tokens[step.rows[entries], positions].astype(np.int64)
    return ids, PagedRows(offsets, positions, tables, table.block_size, others=tuple(others))
