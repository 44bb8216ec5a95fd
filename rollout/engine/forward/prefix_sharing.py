"""Decides per captured step whether prefixes that its rows share are read once for all of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.engine.forward.model_support import ModelLayout
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.triton_attention import PrefixGroups, shared_prefixes

WORTHWHILE = 2**23
"""Bytes of a layer's K and V that have to be saved: what a GPU reads in the two microseconds that one more kernel takes."""


class PrefixSharing:
    """Groups of rows with a common prefix, looked for when rows or their first blocks change.

    Args:
        token_bytes: of K and V of one token in a layer whose queries see all positions; 0: there is no such layer.
    """

    def __init__(self, token_bytes: int) -> None:
        self._token_bytes = token_bytes
        self._groups: PrefixGroups | None = None
        self._lines: NDArray[np.int64] | None = None
        self._positions: NDArray[np.int64] | None = None
        """Of the rows last seen: a line that is no further has another sequence now."""
        self._blocks: NDArray[np.int64] | None = None

    def of(self, rows: PagedRows) -> PrefixGroups | None:
        """Groups of rows of one position each; None: reading their prefixes once saves too little."""
        if not self._token_bytes or len(rows) < 2:
            return None
        if not self._hold(rows):
            found = shared_prefixes(rows, len(rows))
            # As far as the search looked, also where it found nothing.
            width = int(np.minimum(rows.positions[:-1], rows.positions[1:]).max()) // rows.block_size
            self._lines, self._blocks, self._groups = rows.lines, rows.tables[:, :width].copy(), found
        self._positions, groups = rows.positions, self._groups
        assert groups is not None
        first = groups.members[groups.begins[:-1]] if len(groups.members) else groups.members
        saved = int(groups.lengths.sum() - groups.lengths[first].sum()) * self._token_bytes
        return groups if saved and saved >= WORTHWHILE else None

    def _hold(self, rows: PagedRows) -> bool:
        """Whether the groups found last are groups of these rows."""
        if self._positions is None or self._blocks is None or self._lines is None or rows.lines is None:
            return False
        return (
            np.array_equal(rows.lines, self._lines)
            and bool((rows.positions > self._positions).all())
            and np.array_equal(rows.tables[:, : self._blocks.shape[1]], self._blocks)
        )


def token_bytes(layout: ModelLayout) -> int:
    """Bytes of K and V of a token in the largest layer whose queries see all positions; 0: there is none."""
    sizes = [
        shape.num_kv_heads * (shape.head_dim + shape.value_dim) * layout.kv_dtype.itemsize
        for shape, call in zip(layout.layers, layout.calls, strict=True)
        if call.reach is None
    ]
    return max(sizes, default=0)
