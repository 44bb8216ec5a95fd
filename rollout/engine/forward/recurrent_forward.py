"""Forwards of one step of a model with recurrent states.

Its layers tell sequences apart by rows only: all decodes run together, and prefill chunks of equal length together. Where
kernels of the model's own know the borders of packed sequences, all prompts that begin lie in one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import upload, upload_together
from rollout.engine.memory.state_pool import StatePool
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.recurrent_states import PackedStates, StateRows, States
from rollout.engine.multimodal.step_images import StepImages

IntArray = NDArray[np.int64]
Forward = Callable[[IntArray, PagedRows, IntArray, States, StepImages | None], Tensor]
"""Logits [B, C, V] of token ids [B, L], of their rows, at columns [C], with states and images."""


def forward_by_length(
    forward: Forward,
    layout: ModelLayout,
    pool: StatePool,
    ids: IntArray,
    rows: PagedRows,
    keep: IntArray,
    states: NDArray[np.int32],
    images: StepImages | None,
) -> Tensor:
    """Logits [len(keep), V] at packed positions `keep`; the states in `pool` go on.

    Args:
        forward: of the model.
        ids: [P] token ids.
        states: [R], slot of each sequence.
        images: of the step; None: it has none.
    """
    parts, places = [], []
    for group in length_groups(rows, keep, continues=layout.continues, packs=layout.packs and images is None):
        slots = states[group.members]
        cache: States = StateRows(pool, slots, begins=group.begins)
        if group.packed:
            cache = PackedStates(pool, slots, group.rows.offsets)
        pictured = None if images is None else images.part(group.positions.ravel())
        logits = forward(ids[group.positions], group.rows, group.columns, cache, pictured)
        cache.flush()
        row, column = upload_together((group.row, group.column), layout.device)
        parts.append(logits[row, column])
        places.append(group.places)
    order = np.argsort(np.concatenate(places), kind="stable")
    return torch.cat(parts).index_select(0, upload(order, layout.device))


@dataclass(frozen=True, eq=False)
class LengthGroup:
    """One forward: pieces of B sequences, of L positions each; or, `packed`, of any length, in one row of L in all."""

    members: IntArray
    """[B], index of each sequence in the step."""
    positions: IntArray
    """[B, L] packed positions; [1, L] if `packed`."""
    rows: PagedRows
    """Of these positions."""
    columns: IntArray
    """[C], at least one: columns whose logits are computed."""
    places: IntArray
    """[K], which of the step's kept positions are computed here."""
    row: IntArray
    """[K], their rows."""
    column: IntArray
    """[K], their indices in `columns`."""
    begins: bool
    """Whether each piece is the first of its sequence, and longer than a token."""
    packed: bool
    """Whether the pieces lie one after the other in one row."""


def length_groups(rows: PagedRows, keep: IntArray, *, continues: bool, packs: bool = False) -> Iterator[LengthGroup]:
    """Groups of pieces of equal length, in an order in which every piece follows those before it in its sequence.

    First pieces are apart from others, as some layers compute a prompt from its beginning by another function than what
    follows: which one must not depend on a sequence's neighbours.

    Args:
        keep: [K] packed positions whose logits are wanted.
        continues: whether a chunk of several tokens goes on from the state before it; if not, such chunks that are not
            the first of their sequence are computed token by token.
        packs: whether first pieces of different lengths can be computed in one row.
    """
    member, begin, length, turn = _pieces(rows, continues)
    piece_of = np.searchsorted(begin, keep, side="right") - 1
    begins = (rows.positions[begin] == 0) & (length > 1)
    # 0 stands for any length.
    sizes = np.where(begins & (packs and len(np.unique(length[begins])) > 1), 0, length)
    for now, size, first in sorted(set(zip(turn.tolist(), sizes.tolist(), begins.tolist(), strict=True))):
        chosen = np.flatnonzero((turn == now) & (sizes == size) & (begins == first))
        packed = not size
        places = np.flatnonzero(np.isin(piece_of, chosen))
        row = np.searchsorted(chosen, piece_of[places])
        offsets = np.concatenate([[0], np.cumsum(length[chosen])])
        positions = np.repeat(begin[chosen] - offsets[:-1], length[chosen]) + np.arange(offsets[-1])
        kept = keep[places] - begin[piece_of[places]] + (offsets[row] if packed else 0)
        columns, column = np.unique(kept, return_inverse=True)
        shaped = positions.reshape(1 if packed else len(chosen), -1)
        yield LengthGroup(
            members=member[chosen],
            positions=shaped,
            rows=PagedRows(
                offsets,
                rows.positions[positions],
                rows.tables[member[chosen]],
                rows.block_size,
                others=tuple(tables[member[chosen]] for tables in rows.others),
            ),
            columns=columns if len(columns) else np.array([shaped.shape[1] - 1]),
            places=places,
            row=row * 0 if packed else row,
            column=column,
            begins=first,
            packed=packed,
        )


def _pieces(rows: PagedRows, continues: bool) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Sequence, first packed position, length and turn of each piece, in packed order."""
    counts, starts = rows.counts, rows.positions[rows.offsets[:-1]]
    single = (starts > 0) & (counts > 1) & (not continues)
    pieces = np.where(single, counts, 1)
    member = np.repeat(np.arange(len(rows)), pieces)
    first = np.cumsum(pieces) - pieces
    turn = np.arange(len(member)) - first[member]
    return member, rows.offsets[member] + turn, np.where(single, 1, counts)[member], turn
