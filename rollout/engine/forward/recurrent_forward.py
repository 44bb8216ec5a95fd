"""Batches of one step of a model with recurrent states.

Its layers tell sequences apart by rows only, so the packed positions of a step are split into batches [B, L]: all decodes
run together, and prefill chunks of equal length together.
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
    """One forward: pieces of B sequences, with L positions each."""

    members: IntArray
    """[B] index of each sequence in the step."""
    positions: IntArray
    """[B, L] packed positions."""
    rows: PagedRows
    """Rows of these positions."""
    columns: IntArray
    """[C], at least one: columns whose logits are computed."""
    places: IntArray
    """[K] indices of the step's kept positions that are computed here."""
    row: IntArray
    """[K] their rows."""
    column: IntArray
    """[K] their indices in `columns`."""
    begins: bool
    """Whether each piece is the first of its sequence and longer than one token."""


def length_groups(rows: PagedRows, keep: IntArray, *, continues: bool) -> Iterator[LengthGroup]:
    """Groups of pieces of equal length; every piece comes after the earlier pieces of its sequence.

    First pieces have groups of their own. Some layers compute a prompt's beginning by another function than the rest, and
    the choice must not depend on a sequence's neighbours.

    Args:
        keep: [K] packed positions whose logits are wanted.
        continues: whether a chunk of several tokens continues from the state before it; if not, later chunks of a sequence
            are computed token by token.
    """
    member, begin, length, turn = _pieces(rows, continues)
    piece_of = np.searchsorted(begin, keep, side="right") - 1
    begins = (rows.positions[begin] == 0) & (length > 1)
    for now, size, first in sorted(set(zip(turn.tolist(), length.tolist(), begins.tolist(), strict=True))):
        chosen = np.flatnonzero((turn == now) & (length == size) & (begins == first))
        places = np.flatnonzero(np.isin(piece_of, chosen))
        positions = begin[chosen, None] + np.arange(size)
        columns, column = np.unique(keep[places] - begin[piece_of[places]], return_inverse=True)
        yield LengthGroup(
            members=member[chosen],
            positions=positions,
            rows=PagedRows(
                np.arange(len(chosen) + 1) * size,
                rows.positions[positions.ravel()],
                rows.tables[member[chosen]],
                rows.block_size,
                others=tuple(tables[member[chosen]] for tables in rows.others),
            ),
            columns=columns if len(columns) else np.array([size - 1]),
            places=places,
            row=np.searchsorted(chosen, piece_of[places]),
            column=column,
            begins=first,
        )


def _pieces(rows: PagedRows, continues: bool) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Sequence, first packed position, length and order of each piece, in packed order."""
    counts, starts = rows.counts, rows.positions[rows.offsets[:-1]]
    single = (starts > 0) & (counts > 1) & (not continues)
    pieces = np.where(single, counts, 1)
    member = np.repeat(np.arange(len(rows)), pieces)
    first = np.cumsum(pieces) - pieces
    turn = np.arange(len(member)) - first[member]
    return member, rows.offsets[member] + turn, np.where(single, 1, counts)[member], turn
