"""Batches of one step of a model with recurrent states.

Its layers separate sequences by rows only, so the packed positions of a step are split into batches [B, L]: all decodes form
a batch, and prefill chunks of equal length form another.
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
    """One forward: B sequences with L positions each."""

    members: IntArray
    """[B] index of each sequence in the step."""
    positions: IntArray
    """[B, L] packed positions that this forward computes."""
    rows: PagedRows
    """Rows of these positions."""
    columns: IntArray
    """[C], at least one: columns whose logits are computed."""
    places: IntArray
    """[K] indices of the step's kept positions that are computed here."""
    row: IntArray
    """[K] row of each of these positions."""
    column: IntArray
    """[K] index in `columns` of each of these positions."""


def length_groups(rows: PagedRows, keep: IntArray) -> Iterator[LengthGroup]:
    """Return groups of sequences with equally many positions in this step.

    Args:
        keep: [K] packed positions whose logits are needed.
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
