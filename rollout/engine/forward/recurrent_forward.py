"""The split of a step into batches, for models with recurrent states.

Recurrent layers need one row per sequence, so the packed positions of a step are split into batches [B, L]. All decoding
sequences form one batch, and so do all prefill chunks of equal length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.engine.kernels.rows import PagedRows

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LengthGroup:
    """The batch of one forward pass: B sequences with L positions each, K of which are *kept* (their logits are needed)."""

    members: IntArray
    """[B], the index of each sequence in the step."""
    positions: IntArray
    """[B, L], the indices of the batch's positions among the packed positions of the step."""
    rows: PagedRows
    """The sequences of this batch, with their positions and block tables."""
    columns: IntArray
    """[C], at least one: the columns of the batch whose logits are computed."""
    places: IntArray
    """[K], the indices in the step's list of kept positions (whose logits are needed) of those in this batch."""
    row: IntArray
    """[K], the row in the batch of each kept position (a position whose logits are needed)."""
    column: IntArray
    """[K], the index in `columns` of the column of each kept position (a position whose logits are needed)."""


def length_groups(rows: PagedRows, keep: IntArray) -> Iterator[LengthGroup]:
    """Group the sequences of a step by their number of positions, and yield the groups.

    Args:
        rows: the packed rows of the step.
        keep: the packed positions whose logits are needed.
    """
    begin, length = rows.offsets[:-1], rows.counts
    member_of = np.searchsorted(begin, keep, side="right") - 1
    for size in np.unique(length).tolist():
        members = np.flatnonzero(length == size)
        places = np.flatnonzero(length[member_of] == size)
        positions = begin[members, None] + np.arange(size)
        columns, column = np.unique(keep[places] - begin[member_of[places]], return_inverse=True)
        yield LengthGroup(
            members=members,
            positions=positions,
            rows=PagedRows(
                np.arange(len(members) + 1) * size,
                rows.positions[positions.ravel()],
                rows.tables[members],
                rows.block_size,
            ),
            columns=columns if len(columns) else np.array([size - 1]),
            places=places,
            row=np.searchsorted(members, member_of[places]),
            column=column,
        )
