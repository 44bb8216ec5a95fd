"""Lists of the parts of keys in a decode step, computed on the device from positions, once for all layers.

The keys of a row are cut into parts of `SPLIT` tokens whatever the batch, so the bits of a row do not depend on its
neighbours. A launch has enough programs to keep the device busy. They divide the existing parts among themselves, instead of
one program per possible part. Shapes are fixed and the host never waits for the device, so the lists can be captured in a
CUDA graph and follow positions that the device advances.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

SPLIT = 512
"""Keys per part: eight iterations of a tile's loop keep its pipeline full, and 64 sequences of 1k tokens still fill a GPU.
Writing and merging a part (one row of V per query head, in float32) costs a few percent of reading it."""


class PartList(NamedTuple):
    """Item i is part i - begins[owners[i]] of row owners[i]. There are begins[-1] items, and room for more."""

    begins: Tensor
    """[B + 1] int32, index of each row's first item."""
    owners: Tensor
    """[capacity] int32, row of each item; undefined after the last item."""


class DecodeParts:
    """Parts of the keys of B rows with one query each. A list is made on first use.

    Args:
        positions: [B] int32 or int64, last position that a row attends to; negative: none.
        capacity: room of every list, at least the number of parts (`num_parts`).
    """

    def __init__(self, positions: Tensor, capacity: int) -> None:
        self.positions = positions.reshape(-1).to(torch.int32)
        self.capacity = capacity
        self._lists: dict[int, PartList] = {}

    def of(self, *, window: int | None = None) -> PartList:
        """Return the parts of the keys that the rows attend to; parts before the window are left out."""
        key = window or 0
        if key not in self._lists:
            seen = self.positions + 1
            visible = torch.zeros_like(seen)
            if window:
                visible = torch.maximum(seen - window, visible)
            counts = (seen + SPLIT - 1) // SPLIT - visible // SPLIT
            begins = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
            items = torch.arange(self.capacity, dtype=torch.int32, device=begins.device)
            owners = torch.searchsorted(begins[1:], items, right=True, out_int32=True)
            self._lists[key] = PartList(begins, owners)
        return self._lists[key]


def num_splits(tokens: int) -> int:
    """Return the number of parts of `tokens` keys: [0, SPLIT), [SPLIT, 2 * SPLIT), ..., independent of the batch."""
    return -(-tokens // SPLIT)
