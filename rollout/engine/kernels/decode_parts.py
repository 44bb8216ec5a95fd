"""Lists of the parts of keys that a decode step computes, made on the device from positions, for all layers at once.

The keys of a row are cut into parts of `SPLIT` tokens whatever the batch, so the bits of a row that shares no prefix do not
depend on its neighbours. A launch has as many programs as keep the device busy, and they share out the parts that there are,
rather than one program for every part there could be. Shapes are fixed and nothing waits for the device: it can be captured,
and a step whose positions were advanced on the device finds its new parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

SPLIT = 256
"""Keys per part. Small enough to fill a GPU at 64 sequences of 1k tokens, large enough that writing and merging a part (one
row of V per query head, in float32) costs a few percent of reading it."""


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Rows of a decode batch that start with the same blocks. Read by kernels only, no host code: update it in place."""

    members: Tensor
    """[M] int32: rows of the batch, those of a group together; the blocks are read from the table of its first one."""
    begins: Tensor
    """[N + 1] int32: offset of each group in `members`; empty groups are padding."""
    lengths: Tensor
    """[B] int32: length of the prefix that the group reads for the row, equal within a group; 0 without a group."""


class PartList(NamedTuple):
    """Item i is part i - begins[owners[i]] of owner owners[i]; there are begins[-1] of them, and room for more."""

    begins: Tensor
    """[owners + 1] int32."""
    owners: Tensor
    """[capacity] int32, not defined behind the last item."""


class RowParts(NamedTuple):
    """The parts that are a row's own, and where the results of all of its parts lie."""

    own: PartList
    """Behind its prefix, if that is shared; without those before its window or chunk, if it is not."""
    slots: Tensor
    """[B + 1] int32: places in the workspace of the results of a row, those of its prefix first."""


class DecodeParts:
    """Parts of the keys of B rows with one query each. A list is made when it is first asked for.

    Args:
        positions: [B] int32 or int64, last position that a row sees; negative: none.
        capacity: room of every list, at least the parts that there are (`num_parts`).
        shared: prefixes that are read once.
        spread: one program for every part there could be, as many as there is room for; otherwise a few for each processor.
    """

    def __init__(
        self, positions: Tensor, capacity: int, shared: SharedPrefixes | None = None, *, spread: bool = False
    ) -> None:
        self.positions = positions.reshape(-1).to(torch.int32)
        self.capacity = capacity
        self.shared = shared
        self.spread = spread
        self._rows: dict[tuple[bool, int, int], RowParts] = {}
        self._tiles: dict[int, PartList] = {}

    def rows(self, *, shares: bool, window: int | None = None, chunk: int | None = None) -> RowParts:
        """Parts of every row.

        Args:
            shares: whether the prefixes of `shared` are read once.
        """
        key = shares, window or 0, chunk or 0
        if key not in self._rows:
            seen = self.positions + 1
            if shares:
                assert self.shared is not None
                prefix = torch.minimum(self.shared.lengths, seen)
                counts, before = _num_splits(seen - prefix), _num_splits(prefix)
                self._rows[key] = RowParts(self._list(counts), _begins(counts + before))
            else:
                visible = torch.zeros_like(seen)
                if window:
                    visible = torch.maximum(seen - window, visible)
                if chunk:
                    visible = torch.maximum(self.positions // chunk * chunk, visible)
                own = self._list(_num_splits(seen) - visible // SPLIT)
                self._rows[key] = RowParts(own, own.begins)
        return self._rows[key]

    def tiles(self, tokens: int) -> PartList:
        """Parts of the prefix of every group, each for up to `tokens` of its rows: all parts for the first of them, then for
        others."""
        if tokens not in self._tiles:
            assert self.shared is not None
            members, begins, lengths = self.shared.members, self.shared.begins, self.shared.lengths
            # Empty groups may begin behind the last member.
            first = members[begins[:-1].clamp(max=len(members) - 1)]
            sizes = begins.diff()
            self._tiles[tokens] = self._list((sizes + tokens - 1) // tokens * _num_splits(lengths[first]))
        return self._tiles[tokens]

    def _list(self, counts: Tensor) -> PartList:
        begins = _begins(counts)
        items = torch.arange(self.capacity, dtype=torch.int32, device=counts.device)
        return PartList(begins, torch.searchsorted(begins[1:], items, right=True, out_int32=True))


def num_splits(tokens: int) -> int:
    """Number of parts of `tokens` keys: [0, SPLIT), [SPLIT, 2 * SPLIT) and so on, independent of the batch."""
    return -(-tokens // SPLIT)


def _num_splits(tokens: Tensor) -> Tensor:
    return (tokens + SPLIT - 1) // SPLIT


def _begins(counts: Tensor) -> Tensor:
    return pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
