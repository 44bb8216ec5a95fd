"""The rows of a step as attention kernels read them: positions, slot mapping, block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class PagedRows:
    """The P positions of R sequences, packed one sequence after the other; the positions of a sequence are consecutive."""

    offsets: NDArray[np.int64]
    """The index of each sequence's first packed position, and P as the last entry, [R + 1]."""
    positions: NDArray[np.int64]
    """The index of each packed position within its sequence, [P]. A position attends to all positions up to its own."""
    tables: NDArray[np.int64]
    """The block tables, [R, width], contiguous in memory; entries beyond a sequence's last position are never read."""
    block_size: int
    seen: NDArray[np.int64] | None = None
    """The last position that each position attends to, [P], for steps with images that attend in both directions. If None,
    each position attends to all positions up to its own."""

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of positions of each sequence, [R]."""
        return np.diff(self.offsets)

    @property
    def ends(self) -> NDArray[np.int64]:
        """The position after the last position of each sequence, [R]."""
        return self.positions[self.offsets[1:] - 1] + 1

    def select(self, entries: NDArray[np.int64]) -> tuple[PagedRows, NDArray[np.int64]]:
        """Return the packed rows of some sequences, and the index of each of their positions in the original packing.

        Args:
            entries: indices of the sequences, ascending.
        """
        counts = self.counts[entries]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        chosen = np.repeat(self.offsets[entries] - offsets[:-1], counts) + np.arange(offsets[-1])
        seen = None if self.seen is None else self.seen[chosen]
        return PagedRows(offsets, self.positions[chosen], self.tables[entries], self.block_size, seen), chosen

    @property
    def slots(self) -> NDArray[np.int64]:
        """The token slot of each position, block * block_size + offset, [P]."""
        rows = np.repeat(np.arange(len(self)), self.counts)
        return self.tables[rows, self.positions // self.block_size] * self.block_size + self.positions % self.block_size
