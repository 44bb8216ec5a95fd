"""The memory of KV blocks: which *page* of the pool holds each block. Pages let blocks keep their ids when the pool shrinks.

A *block* is `block_size` positions of a sequence in all layers. Block tables, reference counts and the prefix index use
block ids.

Always true: a page is either free, or belongs to exactly one block in use.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.engine.blocks.index import IntArray

NO_PAGE = -1


class BlockPages:
    """The assignment of pages to one allocator's blocks.

    Attributes:
        num_pages: the current size of the pool, in pages.
        num_ids: the number of block ids, which is the configured (largest) size of the pool.
        page_of: [num_ids + 1] int32, the page of each block, or `NO_PAGE`; the last entry belongs to `NO_BLOCK`.
        poisoned: the ids of free pages that may contain NaN and must be zeroed before the next forward pass.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = self.num_ids = num_pages
        self.poisoned: list[int] = []
        self.start_over()

    def start_over(self) -> None:
        """Free every page."""
        self.page_of: IntArray = np.full(self.num_ids + 1, NO_PAGE, np.int32)
        self._free: list[int] = list(range(self.num_pages - 1, -1, -1))
        self._used: NDArray[np.bool_] = np.zeros(self.num_pages, np.bool_)

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def of_blocks(self, blocks: IntArray) -> IntArray:
        """Return the page id of each of `blocks`, or `NO_PAGE` for a block that is not in use."""
        pages: IntArray = self.page_of[blocks]
        return pages

    def live(self) -> IntArray:
        """Return the ids of the pages in use, ascending."""
        return np.flatnonzero(self._used).astype(np.int32)

    def give(self, blocks: list[int]) -> None:
        """Assign a free page to each of `blocks`."""
        # Loop in Python, because numpy's list indexing takes ten times as long for the few blocks that one row needs.
        for block in blocks:
            page = self.page_of[block] = self._free.pop()
            self._used[page] = True

    def take(self, block: int) -> None:
        """Free the page of a block that is no longer in use."""
        page = self.page_of.item(block)
        self._free.append(page)
        self._used[page] = False
        self.page_of[block] = NO_PAGE

    def poison(self, pages: IntArray) -> None:
        """Record that the free pages among `pages` may hold NaN and must be zeroed (see `poisoned`)."""
        self.poisoned += pages[~self._used[pages]].tolist()

    def resize(self, num_pages: int) -> IntArray | None:
        """Change the number of pages and move the pages in use to the lowest page ids. Blocks keep their ids.

        Returns:
            [old num_pages] int32, the new id of each old page (`NO_PAGE` for free pages); None if the size is the same.

        Raises:
            RuntimeError: more pages are in use than `num_pages`.
        """
        if num_pages == self.num_pages:
            return None
        live = self.live()
        if len(live) > num_pages:
            raise RuntimeError(f"resize({num_pages}): {len(live)} KV blocks are in use; release some first")
        mapping = np.full(self.num_pages + 1, NO_PAGE, np.int32)
        mapping[live] = np.arange(len(live), dtype=np.int32)
        # Look up all ids at once. NO_PAGE is -1, so it selects the last entry, which is NO_PAGE itself.
        self.page_of = mapping[self.page_of]
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, len(live) - 1, -1))
        self._used = np.arange(num_pages) < len(live)
        return mapping[:-1]
