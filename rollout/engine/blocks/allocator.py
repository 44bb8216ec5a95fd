"""KV block allocator: reference counts and LRU eviction over a prefix index.

Always true:
- a block is exactly one of *free*, *held* (reference count above 0) or *cached* (unreferenced but still indexed);
- a block keeps its id when its memory (`pages`) is moved, or freed and allocated again;
- a holder of a registered block also holds the block's parent (the block before it in its chain). Therefore no registered
  block continues the chain of the least recently released cached block, which is evicted first.

This module handles block ids and token ids, no tensors and no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.engine.blocks.host import HostBlock, HostCache
from rollout.engine.blocks.index import IntArray, PrefixIndex
from rollout.engine.blocks.pages import BlockPages
from rollout.engine.blocks.states import StateSlots
from rollout.state import PrefixCachingEvictionPolicy


class BlockAllocator:
    """Reference counts, prefix cache and eviction over blocks of `block_size` token slots.

    Args:
        pages: the memory pages that hold the blocks' KV, or the number of pages to create.

    Attributes:
        pages: the memory pages that hold the blocks' KV.
        index: the prefix index, which contains the registered blocks.
        ref_count: [number of block ids] int32, the number of references to each block.
        states: the slots for recurrent states, whose snapshots belong to registered blocks. It has no slots if the model has
            no recurrent layers.
        host: the host memory for evicted blocks. If it has no slots, evicted blocks are dropped.
        copies: (source, destination) pages to copy before the next forward pass, in this order; `~s` is slot s of `host`.
        keeps_released: whether a registered block stays cached after its last holder has released it.
        evictions: the number of cached blocks evicted so far.
    """

    def __init__(
        self,
        pages: BlockPages | int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU,
        states: StateSlots | None = None,
        host: HostCache | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.keeps_released = enable_prefix_caching and eviction_policy is not PrefixCachingEvictionPolicy.REF_ZERO
        self.evictions = 0
        self.pages = BlockPages(pages) if isinstance(pages, int) else pages
        self.states = states or StateSlots(0)
        self.host = host or HostCache(0)
        self.copies: list[tuple[int, int]] = []
        self.index = PrefixIndex(self.pages.num_ids, block_size)
        self._free_all()

    def _free_all(self) -> None:
        self.ref_count: IntArray = np.zeros(self.pages.num_ids, np.int32)
        self._free: list[int] = list(range(self.pages.num_ids - 1, -1, -1))
        self._lru: OrderedDict[int, None] = OrderedDict()

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the pool can hold."""
        return self.pages.num_pages

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated without evicting a cached block."""
        return self.pages.num_free

    @property
    def num_cached(self) -> int:
        """The number of blocks that have no holder but are still registered in the prefix index."""
        return len(self._lru)

    @property
    def num_used(self) -> int:
        """The number of blocks with at least one holder."""
        return len(self.ref_count) - len(self._free) - self.num_cached

    def held_memory(self) -> IntArray:
        """Return the ids of the memory pages of all blocks that have a holder, ascending."""
        return np.sort(self.pages.of_blocks(np.flatnonzero(self.ref_count > 0).astype(np.int32)))

    def can_allocate(self, count: int) -> bool:
        """Return whether `allocate(count)` would succeed."""
        return count <= self.pages.num_free + len(self._lru)

    def writable(self, blocks: IntArray) -> NDArray[np.bool_]:
        """Return bool [n], True for each of the n blocks that has a single holder and is not registered."""
        writable: NDArray[np.bool_] = (self.ref_count[blocks] == 1) & ~self.index.registered[blocks]
        return writable

    def findable(self, block_hash: int) -> bool:
        """Return whether a block with this hash is cached on the device or on the host, without comparing tokens."""
        return block_hash in self.index.current or block_hash in self.host.blocks

    def counts(self) -> dict[str, int]:
        """Return block counts of the whole pool, under the names that the GENERATED_TOKEN event uses."""
        registered = self.index.registered
        return {
            "blocks_total": self.num_blocks,
            "blocks_hashed_total": int(registered.sum()),
            "blocks_hashed_active": int((registered & (self.ref_count > 0)).sum()),
            "blocks_ref_count": int(self.ref_count.sum()),
        }

    # --- references ---------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each, evicting cached blocks if needed. Call `can_allocate` first.

        Raises:
            RuntimeError: fewer than `count` blocks are free or evictable.
        """
        if not count:
            return []
        while self.pages.num_free < count:
            self._evict()
        blocks = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        blocks.reverse()
        self.ref_count[blocks] = 1
        self.pages.give(blocks)
        return blocks

    def _evict(self) -> None:
        if not self._lru:
            raise RuntimeError("allocate(): too few blocks are free or evictable; ask can_allocate() first")
        oldest = next(iter(self._lru))
        if self.host.num_slots and (slot := self.host.offload(self.index, oldest)) is not None:
            self.copies.append((self.pages.page_of.item(oldest), ~slot))
        self._free_cached(oldest)
        self.evictions += 1

    def acquire(self, blocks: IntArray) -> None:
        """Add one reference to each of `blocks` (held or cached), or several to a block that appears several times."""
        for block in blocks[self.ref_count[blocks] == 0].tolist():
            self._lru.pop(block, None)
        np.add.at(self.ref_count, blocks, 1)

    def release(self, blocks: IntArray) -> None:
        """Drop one reference to each of `blocks`, given in chain order. Later blocks will be evicted before earlier ones."""
        np.subtract.at(self.ref_count, blocks, 1)
        counts = self.ref_count[blocks]
        if (counts < 0).any():
            raise RuntimeError(f"release({blocks[counts < 0].tolist()}): these blocks have no holder")
        for block in dict.fromkeys(reversed(blocks[counts == 0].tolist())):
            if not self.index.registered[block]:
                self._give_back(block)
            elif not self.keeps_released:
                self._free_cached(block)
            else:
                self._lru[block] = None

    def _give_back(self, block: int) -> None:
        self._lru.pop(block, None)
        self._free.append(block)
        self.pages.take(block)

    def _free_cached(self, block: int) -> None:
        self._unregister(block)
        self._give_back(block)

    def _unregister(self, block: int) -> None:
        self.index.remove(block)
        self.states.forget(block)

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def register(self, block: int, block_hash: int, parent: int, tokens: IntArray) -> int:
        """Add a held, complete block to the index. The current weights and adapters must have computed its KV.

        Args:
            block: the block, held by the caller.
            block_hash: hash of the chain up to and including this block.
            parent: the registered block before it in the chain, or `NO_BLOCK` if it is the chain's first.
            tokens: [block_size] int32, the token ids of the block.

        Returns:
            The block to use instead of `block`. If an equal block is already registered, this is the registered one: the
            caller's reference has moved to it, and `block` is released. Otherwise it is `block` itself.

        Raises:
            RuntimeError: the block is already registered under another hash.
        """
        if not self.enable_prefix_caching:
            return block
        kept = self.index.add(block, block_hash, parent, tokens)
        if kept != block:
            self.acquire(np.asarray([kept], np.int32))
            self.release(np.asarray([block], np.int32))
        return kept

    def load(self, blocks: Sequence[HostBlock], parent: int) -> list[int]:
        """Load a chain of blocks from host memory into new blocks. Call `can_allocate` first.

        Args:
            blocks: the blocks to load, in chain order.
            parent: the registered block before the first of `blocks`, or `NO_BLOCK` if the chain starts with `blocks`.

        Returns:
            The ids of the new blocks, which are registered and have one reference each.
        """
        # Take the blocks from the host cache first, so that device blocks evicted by `allocate` cannot replace them there.
        self.host.take(blocks)
        loaded = self.allocate(len(blocks))
        for block, copy in zip(loaded, blocks, strict=True):
            self.copies.append((~copy.slot, self.pages.page_of.item(block)))
            self.host.release(copy)
            self.index.add(block, copy.block_hash, parent, copy.tokens)
            parent = block
        return loaded

    def forget_copies(self) -> None:
        """Drop the pending copies of a step that did not run. Also drop cached blocks whose content may depend on them."""
        self.copies.clear()
        if self.host.unsettled:
            self.drop_cached()

    def outdate(self) -> None:
        """Empty the index and free every cached block after a change of the model. Held blocks stay allocated."""
        self.index.clear()
        self.host.clear()
        self.states.forget_all()
        for block in list(self._lru):
            self._give_back(block)

    def unregister(self, blocks: IntArray) -> None:
        """Remove held `blocks`, and all blocks that follow them in cached prefixes, from the index.

        Call this if the blocks must not be shared, for example because their KV may contain NaN.
        """
        for block in blocks[self.index.registered[blocks]].tolist():
            if self.index.registered[block]:
                behind = self.index.behind(block)
                for each in (block, *behind):
                    self._unregister(each)
                # Free the following blocks that no sequence references: lookups no longer find them. They left the
                # index because their entries contain their parent's id, which may be reused for other tokens.
                for each in behind:
                    if not self.ref_count[each]:
                        self._give_back(each)

    def drop_cached(self) -> int:
        """Free every cached block on the device and on the host. Return the number of blocks freed on the device."""
        count = self.num_cached
        for block in list(self._lru):
            self._free_cached(block)
        self.host.clear()
        if not self.index.current:
            self.index.changes.flush()
        return count

    def start_over(self) -> None:
        """Free every block, whatever its reference count."""
        self.index.clear()
        self._free_all()
        self.copies.clear()
        self.host.clear()
        self.pages.start_over()
        self.states.start_over()
