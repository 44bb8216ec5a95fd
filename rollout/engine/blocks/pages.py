"""Pages of the blocks of a model that has layers with a window beside layers without.

A *block* is `block_size` positions of a sequence in all layers; its id is what tables, reference counts and the prefix index
know. Its memory is one *page* per group of layers (`memory.layer_groups`). Those of the groups with a window are given back
while the block is still held, once no query sees them: they stay as a cached tail, for a prefix that ends behind them, until
their memory is needed.

Always true here (`check()` proves it):
- a page is free, or belongs to one block;
- a block in use has a page in each group without a window, and in all groups or none of those with one;
- a block that some sequence still sees has all its pages; one that none does is in `unseen` if it has them.

Handles ids, no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.engine.blocks.index import IntArray

NO_PAGE = -1


@dataclass(frozen=True)
class PageShape:
    """How many pages a block has, and which of them a sequence keeps."""

    whole: int
    """Groups of layers that see everything."""
    limited: int
    """Groups of layers with a window."""
    reach: int
    """Positions, its own included, that a query sees in the latter."""

    @property
    def groups(self) -> int:
        """Pages of a block that is seen in every layer."""
        return self.whole + self.limited

    def first_seen(self, position: IntArray, block_size: int) -> IntArray:
        """Index of the first block that a query at `position` sees in the layers with a window."""
        return np.maximum(position - self.reach + 1, 0) // block_size

    def most_seen(self, step: int, block_size: int) -> int:
        """Most blocks that queries at `step` successive positions see in the layers with a window."""
        return -(-(self.reach - 1 + step) // block_size) + 1

    def needed(self, blocks: int, step: int, block_size: int) -> int:
        """Most pages that a sequence of so many blocks needs at once, if a step computes `step` of its positions."""
        return self.whole * blocks + self.limited * min(blocks, self.most_seen(step, block_size))

    def most_blocks(self, pages: int, step: int, block_size: int) -> int:
        """Blocks of the longest sequence that so many pages suffice for."""
        seen = self.most_seen(step, block_size)
        return max((pages - self.limited * seen) // self.whole, min(seen, pages // self.groups))


class LayerPages:
    """Pages of the blocks of one allocator.

    Attributes:
        num_pages: of the pool.
        num_blocks: most blocks that can be in use, in the pool as configured.
        page_of: [num_blocks, groups] int32, those without a window first.
        viewers: [num_blocks] int32, sequences whose next query may see the block in the layers with a window.
        verified: [num_blocks] bool, finite logits were made of its content.
        unseen: blocks without viewers that still have all pages, and when they lost the last viewer, oldest first.
        unverified: free pages whose content may be NaN, to be zeroed before the next forward.
    """

    def __init__(self, num_pages: int, shape: PageShape) -> None:
        self.shape = shape
        self.whole, self.limited, self.groups = shape.whole, shape.limited, shape.groups
        self.num_pages = num_pages
        # A block in use has at least the pages of its layers without a window.
        self.num_blocks = num_pages // shape.whole
        self.unverified: list[int] = []
        self.start_over()

    def start_over(self) -> None:
        """Free every page."""
        self.page_of: IntArray = np.full((self.num_blocks, self.groups), NO_PAGE, np.int32)
        self.viewers: IntArray = np.zeros(self.num_blocks, np.int32)
        self.verified: NDArray[np.bool_] = np.zeros(self.num_blocks, np.bool_)
        self.unseen: OrderedDict[int, int] = OrderedDict()
        self._free: list[int] = list(range(self.num_pages - 1, -1, -1))
        self._used: NDArray[np.bool_] = np.zeros(self.num_pages, np.bool_)

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    def complete(self, blocks: IntArray) -> NDArray[np.bool_]:
        """[n] bool: the block still has its pages of the layers with a window."""
        found: NDArray[np.bool_] = self.page_of[blocks, self.whole] != NO_PAGE
        return found

    def of_blocks(self, blocks: IntArray) -> IntArray:
        """Ids of the pages of some blocks."""
        pages: IntArray = self.page_of[blocks].ravel()
        found: IntArray = pages[pages != NO_PAGE]
        return found

    def pairs(self, source: int, target: int) -> list[tuple[int, int]]:
        """Pages of a block, and of the other that it is copied to."""
        return list(zip(self.page_of[source].tolist(), self.page_of[target].tolist(), strict=True))

    def free(self, pages: IntArray) -> NDArray[np.bool_]:
        """[n] bool: the page belongs to no block."""
        free: NDArray[np.bool_] = ~self._used[pages]
        return free

    def live(self) -> IntArray:
        """Ids of the pages in use, ascending."""
        return np.flatnonzero(self._used).astype(np.int32)

    # --- pages of blocks ----------------------------------------------------------------------------------------

    def give(self, blocks: list[int]) -> None:
        """Give each of these blocks all its pages and one viewer."""
        count = len(blocks) * self.groups
        pages = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        self._used[pages] = True
        self.page_of[blocks] = np.reshape(pages[::-1], (len(blocks), self.groups))
        self.viewers[blocks] = 1
        self.verified[blocks] = False

    def take(self, block: int) -> None:
        """Take all its pages from a block that is no longer in use."""
        self.unseen.pop(block, None)
        self._give_back(self.of_blocks(np.asarray([block], np.int32)).tolist())
        self.page_of[block] = NO_PAGE

    def strip(self, block: int) -> None:
        """Take from a block without viewers the pages of the layers with a window."""
        self.unseen.pop(block, None)
        pages: list[int] = self.page_of[block, self.whole :].tolist()
        if pages[0] == NO_PAGE:
            return
        if not self.verified[block]:
            self.unverified += pages
        self._give_back(pages)
        self.page_of[block, self.whole :] = NO_PAGE

    def strip_unseen(self) -> None:
        """Take from every block without viewers the pages of the layers with a window."""
        for block in list(self.unseen):
            self.strip(block)

    def _give_back(self, pages: list[int]) -> None:
        self._free += pages
        self._used[pages] = False

    def move(self, source: int, target: int) -> None:
        """Let `target` have the window's pages of `source`, an equal block that is given up for it, if it has none."""
        if self.page_of[target, self.whole] == NO_PAGE:
            self.page_of[target, self.whole :] = self.page_of[source, self.whole :]
            self.page_of[source, self.whole :] = NO_PAGE
            self.verified[target] = False

    # --- viewers ------------------------------------------------------------------------------------------------

    def view(self, blocks: IntArray) -> None:
        """Add a viewer to each of these blocks, which are `complete`."""
        for block in blocks[self.viewers[blocks] == 0].tolist():
            self.unseen.pop(block, None)
        np.add.at(self.viewers, blocks, 1)

    def unview(self, blocks: IntArray) -> list[int]:
        """Take a viewer from each of these blocks; returns those that have none left, the last one first."""
        np.subtract.at(self.viewers, blocks, 1)
        left: list[int] = blocks[self.viewers[blocks] == 0][::-1].tolist()
        return left

    # --- suspend and resume -------------------------------------------------------------------------------------

    def resize(self, num_pages: int) -> IntArray | None:
        """Change the number of pages, moving those in use to the lowest ids; blocks keep their ids.

        Returns:
            [old num_pages] int32, the new id of each old page (`NO_PAGE` for the free ones); None if nothing moved.

        Raises:
            RuntimeError: more pages are in use than `num_pages`.
        """
        if num_pages == self.num_pages:
            return None
        live = self.live()
        if len(live) > num_pages:
            raise RuntimeError(f"resize({num_pages}): {len(live)} KV pages are in use; release some first")
        mapping = np.full(self.num_pages + 1, NO_PAGE, np.int32)
        mapping[live] = np.arange(len(live), dtype=np.int32)
        # The last entry is that of NO_PAGE.
        self.page_of = mapping[self.page_of]
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, len(live) - 1, -1))
        self._used = np.arange(num_pages) < len(live)
        return mapping[:-1]

    # --- invariants ---------------------------------------------------------------------------------------------

    def check(self, used: NDArray[np.bool_], seen: Iterable[list[int]]) -> None:
        """Check the invariants against the blocks in use and those that each sequence sees.

        Raises:
            AssertionError: names the blocks that disagree.
        """
        pages = sorted([*self._free, *self.page_of[self.page_of != NO_PAGE].tolist()])
        assert pages == list(range(self.num_pages)), "a page is not exactly one of free and some block's"
        has = self.page_of != NO_PAGE
        wrong = np.flatnonzero((has[:, : self.whole] != used[:, None]).any(1))
        assert not len(wrong), f"blocks {wrong.tolist()} are in use and lack pages, or the other way about"
        window = has[:, self.whole :]
        assert (window.any(1) == window.all(1)).all(), "a block has some of its window's pages"
        expected = np.zeros(self.num_blocks, np.int32)
        for blocks in seen:
            np.add.at(expected, np.asarray(blocks, np.int32), 1)
        wrong = np.flatnonzero(expected != self.viewers)
        assert not len(wrong), f"blocks {wrong.tolist()}: {self.viewers[wrong]} viewers, not {expected[wrong]}"
        assert window.all(1)[expected > 0].all(), "a block that is still seen lacks pages"
        unseen = np.flatnonzero(window.all(1) & (expected == 0)).tolist()
        assert unseen == sorted(self.unseen), f"blocks {unseen} have no viewers, and {sorted(self.unseen)} are known"
