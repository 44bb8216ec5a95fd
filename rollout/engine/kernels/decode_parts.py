"""Splits the keys of a decode step into parts. The device lists the parts from the positions, once for all layers.

The keys of a row are split into parts of `SPLIT` tokens in every batch. The bits of a row's result therefore do not depend
on the other rows. A launch has a fixed number of programs, enough to keep the device busy. The programs divide the listed
parts among themselves. Shapes are fixed and the host never waits for the device, so the lists can be captured in a CUDA
graph. Each replay of the graph computes the lists from the current positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

SPLIT = 512
"""The number of keys per part.

A kernel's loop takes eight iterations per part, which keeps its pipeline full, and 64 sequences of 1k tokens still fill a
GPU. Writing and merging a part's result (one row of V per query head, in float32) costs a few percent of reading the part.
"""


class PartList(NamedTuple):
    """A list of the key parts of B rows: item i is part number i - begins[owners[i]] of row owners[i]."""

    begins: Tensor
    """The index of each row's first item, followed by the number of items, int32 [B + 1]."""
    owners: Tensor
    """The row of each item, int32 [capacity]; undefined after the last item."""


class DecodeParts:
    """The parts of the keys of B rows with one query each. Each list is computed on first use.

    Args:
        positions: last position that each row attends to, int32 or int64 [B]; negative if it attends to nothing.
        capacity: maximum length of every list, at least the number of parts (see `triton_attention.num_parts`).
    """

    def __init__(self, positions: Tensor, capacity: int) -> None:
        self.positions = positions.reshape(-1).to(torch.int32)
        self.capacity = capacity
        self._lists: dict[int, PartList] = {}

    def of(self, *, window: int | None = None) -> PartList:
        """Return the list of all parts or, with a `window`, of the parts that contain some of the last `window` keys."""
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
    """Return the number of parts into which `tokens` keys are split: [0, SPLIT), [SPLIT, 2 * SPLIT), and so on."""
    return -(-tokens // SPLIT)
