"""Memory of KV blocks: one *page* per group of layers, freed early if a group attends only to a window.

A *block* is `block_size` positions of a sequence in all layers; tables, reference counts and the prefix index use its id.
Groups have the same number of layers (the last of each kind may have fewer), so any page serves any group (as in vLLM's
hybrid KV cache manager). Ordinary models have one group: one page per block.

Always true:
- a page is free, or belongs to one block;
- a block in use has a page in each group without a window, and in all or none of the groups with one;
- a block that a sequence can still attend to has all its pages; other blocks with all pages are in `unseen`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollout.engine.blocks.index import IntArray

NO_PAGE = -1
PER_GROUP = 0.02
"""Cost of one more group, as a share of the pool: every step makes a block table for each."""
_EVERYTHING = 2**30
"""Reach of a query without a window; positions are int32."""


@dataclass(frozen=True)
class LayerGroups:
    """Groups of attention layers that share one pool of equal pages."""

    group_of: tuple[int, ...]
    """Group of each layer; groups without a window come first."""
    place_of: tuple[int, ...]
    """Place of each layer in the pages of its group."""
    places: int
    """Number of layers in a group."""
    whole: int = 1
    """Number of groups whose pages are kept as long as the sequence."""
    limited: int = 0
    """Number of groups whose pages are freed once they are outside the window of every query."""
    reach: int = _EVERYTHING
    """Positions, including its own, that a query attends to in any layer of the limited groups."""

    @property
    def count(self) -> int:
        """Number of groups, which is the number of pages of a block with memory in every layer."""
        return self.whole + self.limited

    def first_seen(self, position: IntArray, block_size: int) -> IntArray:
        """Index of the first block that a query at `position` attends to in the layers with a window."""
        return np.maximum(position - self.reach + 1, 0) // block_size

    def most_seen(self, step: int, block_size: int) -> int:
        """Maximum number of blocks that queries at `step` successive positions attend to in the layers with a window."""
        return -(-(self.reach - 1 + step) // block_size) + 1

    def needed(self, blocks: int, step: int, block_size: int) -> int:
        """Maximum number of pages that a sequence of this many blocks needs at once, if a step computes `step` of its
        positions."""
        return self.whole * blocks + self.limited * min(blocks, self.most_seen(step, block_size))

    def most_blocks(self, pages: int, step: int, block_size: int) -> int:
        """Maximum number of blocks of a sequence that fits into `pages` pages."""
        seen = self.most_seen(step, block_size)
        return max((pages - self.limited * seen) // self.whole, min(seen, pages // self.count))


def one_group(layers: int = 1) -> LayerGroups:
    """All layers of a model together."""
    return LayerGroups((0,) * layers, tuple(range(layers)), layers)


ONE_GROUP = one_group()


def layer_groups(widths: Sequence[tuple[int, int]], reaches: Sequence[int | None], length: int) -> LayerGroups:
    """Split a model's layers; one group if all see whole sequences, none does, or their KV differs in size.

    Args:
        widths: elements of K and of V per token of each layer.
        reaches: positions, including its own, that a query attends to in each layer; None: all.
        length: tokens of the longest sequence.
    """
    if len(set(widths)) != 1:
        return one_group(len(widths))
    limited = {index: reach for index, reach in enumerate(reaches) if reach is not None and reach < length}
    whole = [index for index in range(len(widths)) if index not in limited]
    if not limited or not whole:
        return one_group(len(widths))

    def cost(places: int) -> float:
        kept, passing = -(-len(whole) // places), -(-len(limited) // places)
        memory = (kept + passing) * places / len(widths) + kept * places / len(whole)
        return memory + PER_GROUP * (kept + passing)

    places = min(range(1, max(len(whole), len(limited)) + 1), key=cost)
    group_of, place_of = [0] * len(widths), [0] * len(widths)
    kept = -(-len(whole) // places)
    for first, layers in ((0, whole), (kept, [*limited])):
        for order, layer in enumerate(layers):
            group_of[layer], place_of[layer] = first + order // places, order % places
    return LayerGroups(
        tuple(group_of), tuple(place_of), places, kept, -(-len(limited) // places), max(limited.values())
    )


class BlockPages:
    """Pages of the blocks of one allocator.

    Attributes:
        num_pages: size of the pool.
        num_ids: most blocks that can be in use, in the pool as configured.
        page_of: [num_ids + 1, groups] int32, groups without a window first; the last row belongs to `NO_BLOCK`.
        viewers: [num_ids] int32, sequences whose next query may see the block in the layers with a window.
        verified: [num_ids] bool, finite logits were computed from its content.
        unseen: blocks without viewers that still have all pages → time when they lost the last viewer, oldest first.
        poisoned: free pages that may hold NaN, to be zeroed before the next forward.
    """

    def __init__(self, num_pages: int, groups: LayerGroups = ONE_GROUP) -> None:
        self.shape = groups
        self.whole, self.limited, self.groups = groups.whole, groups.limited, groups.count
        self.num_pages = num_pages
        self.num_ids = num_pages // groups.whole
        self.poisoned: list[int] = []
        self.start_over()

    def start_over(self) -> None:
        """Free every page."""
        self.page_of: IntArray = np.full((self.num_ids + 1, self.groups), NO_PAGE, np.int32)
        self.viewers: IntArray = np.zeros(self.num_ids, np.int32)
        self.verified: NDArray[np.bool_] = np.zeros(self.num_ids, np.bool_)
        self.unseen: OrderedDict[int, int] = OrderedDict()
        self._free: list[int] = list(range(self.num_pages - 1, -1, -1))
        self._used: NDArray[np.bool_] = np.zeros(self.num_pages, np.bool_)

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def unit(self) -> str:
        """Unit of the pool's size, for messages."""
        return "pages" if self.limited else "blocks"

    def complete(self, blocks: IntArray) -> NDArray[np.bool_]:
        """[n] bool: the block has its pages in every layer."""
        found: NDArray[np.bool_] = self.page_of[blocks, -1] != NO_PAGE
        return found

    def of_blocks(self, blocks: IntArray) -> IntArray:
        """Ids of the pages of some blocks."""
        pages: IntArray = self.page_of[blocks].ravel()
        return pages[pages != NO_PAGE] if self.limited else pages

    def pairs(self, source: int, target: int) -> list[tuple[int, int]]:
        """(page of `source`, page of `target`) for each group."""
        return list(zip(self.page_of[source].tolist(), self.page_of[target].tolist(), strict=True))

    def live(self) -> IntArray:
        """Ids of the pages in use, ascending."""
        return np.flatnonzero(self._used).astype(np.int32)

    def tables(self, blocks: IntArray, seen_from: IntArray) -> list[NDArray[np.int64]]:
        """[R, width] page table for each group, from the block tables [R, width] of R rows.

        In layers with a window, the places of freed pages hold the first page that remains.

        Args:
            seen_from: [R], leading blocks of each row whose pages in those layers were freed.
        """
        found = [self.page_of[:, group][blocks].astype(np.int64) for group in range(self.whole)]
        if self.limited:
            width = np.arange(blocks.shape[1])
            seen = np.take_along_axis(blocks, np.maximum(width, seen_from[:, None]), 1)
            found += [self.page_of[:, group][seen].astype(np.int64) for group in range(self.whole, self.groups)]
        return found

    # --- pages of blocks ----------------------------------------------------------------------------------------

    def give(self, blocks: list[int]) -> None:
        """Give each of these blocks all its pages and one viewer."""
        # A step takes one block per row at a time; for so few, numpy's indexing by lists is ten times slower than this loop.
        for block in blocks:
            for group in range(self.groups):
                page = self.page_of[block, group] = self._free.pop()
                self._used[page] = True
        if self.limited:
            self.viewers[blocks] = 1
            self.verified[blocks] = False

    def take(self, block: int) -> None:
        """Take all its pages from a block that is no longer in use."""
        self.unseen.pop(block, None)
        for group, page in enumerate(self.page_of[block].tolist()):
            if page != NO_PAGE:
                self._free.append(page)
                self._used[page] = False
                self.page_of[block, group] = NO_PAGE

    def strip(self, block: int) -> None:
        """Take the pages of the layers with a window from a block without viewers."""
        self.unseen.pop(block, None)
        pages: list[int] = self.page_of[block, self.whole :].tolist()
        if not pages or pages[0] == NO_PAGE:
            return
        if not self.verified[block]:
            self.poisoned += pages
        self._free += pages
        self._used[pages] = False
        self.page_of[block, self.whole :] = NO_PAGE

    def strip_unseen(self) -> None:
        """Take the pages of the layers with a window from every block without viewers."""
        for block in list(self.unseen):
            self.strip(block)

    def poison(self, pages: IntArray) -> None:
        """Mark free pages among these as possibly holding NaN."""
        self.poisoned += pages[~self._used[pages]].tolist()

    def move(self, source: int, target: int) -> None:
        """If `target` has no pages for the window, give it the window pages of `source`, an equal block that it replaces."""
        if self.page_of[target, -1] == NO_PAGE:
            self.page_of[target, self.whole :] = self.page_of[source, self.whole :]
            self.page_of[source, self.whole :] = NO_PAGE
            self.verified[target] = False

    # --- viewers ------------------------------------------------------------------------------------------------

    def view(self, blocks: IntArray) -> None:
        """Add a viewer to each of these blocks, which are `complete`."""
        if not self.limited:
            return
        for block in blocks[self.viewers[blocks] == 0].tolist():
            self.unseen.pop(block, None)
        np.add.at(self.viewers, blocks, 1)

    def unview(self, blocks: IntArray) -> list[int]:
        """Remove a viewer from each of these blocks; returns blocks without viewers, the last one first."""
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
            raise RuntimeError(f"resize({num_pages}): {len(live)} KV {self.unit} are in use; release some first")
        mapping = np.full(self.num_pages + 1, NO_PAGE, np.int32)
        mapping[live] = np.arange(len(live), dtype=np.int32)
        # The last entry is that of NO_PAGE.
        self.page_of = mapping[self.page_of]
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, len(live) - 1, -1))
        self._used = np.arange(num_pages) < len(live)
        return mapping[:-1]
