"""Rows of a step as attention kernels read them: positions, slot mapping, block tables."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class PagedRows:
    """P positions of R sequences, packed one sequence after the other; the positions of a sequence are consecutive."""

    offsets: NDArray[np.int64]
    """[R + 1], offset of each sequence's positions."""
    positions: NDArray[np.int64]
    """[P], place of each position in its sequence. It attends to positions up to its own, or up to `seen`."""
    tables: NDArray[np.int64]
    """[R, width] block ids, contiguous in memory; entries beyond a sequence's last position are never read."""
    block_size: int
    seen: NDArray[np.int64] | None = None
    """[P], last position that each attends to, if not its own: within an image that attends in both directions."""

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def counts(self) -> NDArray[np.int64]:
        """[R], the number of positions of each sequence."""
        return np.diff(self.offsets)

    @property
    def ends(self) -> NDArray[np.int64]:
        """[R], one past the last position of each sequence."""
        return self.positions[self.offsets[1:] - 1] + 1

    def select(self, entries: NDArray[np.int64]) -> tuple[PagedRows, NDArray[np.int64]]:
        """Return the rows of the sequences `entries`, which ascend, and the indices [P'] of their packed positions."""
        counts = self.counts[entries]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        chosen = np.repeat(self.offsets[entries] - offsets[:-1], counts) + np.arange(offsets[-1])
        seen = None if self.seen is None else self.seen[chosen]
        return PagedRows(offsets, self.positions[chosen], self.tables[entries], self.block_size, seen), chosen

    @property
    def slots(self) -> NDArray[np.int64]:
        """[P], token slot of each position: block * block_size + offset."""
        rows = np.repeat(np.arange(len(self)), self.counts)
        return self.tables[rows, self.positions // self.block_size] * self.block_size + self.positions % self.block_size
