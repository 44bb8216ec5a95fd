"""KV block allocator: reference counts and LRU eviction over a prefix index.

Always true here (`block_checks` proves it):
- a block is exactly one of *free*, *held* (reference count above 0) or *cached* (unreferenced but still indexed);
- of a model with layers that see only a window (`pages`), a block's memory there comes and goes while its id stays;
- a holder of a registered block holds its parent too, so the least recently released cached block is a leaf; with
  `parents_first` it may have released the parent already, and what is registered behind an evicted block is forgotten.

Handles block ids and token ids, no tensors and no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.engine.blocks.host import HostCache
from rollout.engine.blocks.index import NO_BLOCK, IntArray, PrefixIndex
from rollout.engine.blocks.pages import LayerPages
from rollout.engine.blocks.states import StateSlots
from rollout.state import PrefixCachingEvictionPolicy


class BlockAllocator:
    """Reference counts, prefix cache and eviction over `num_blocks` blocks of `block_size` token slots.

    Attributes:
        index: the registered blocks.
        ref_count: [num_blocks] int32.
        parents_first: holders may release leading blocks before the later ones.
        evictions, refused_for_version: counters.
        states: slots of a model with recurrent states, whose snapshots belong to registered blocks; None: it has none.
        pages: memory of the blocks, where some layers see a window and others everything, whose size is that of the pool;
            None: block ids stand for memory.
        host: where evicted blocks go; None: nowhere.
        copies: (source, destination) blocks or pages to copy before the next forward, in this order; `~s`: slot s of `host`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU,
        states: StateSlots | None = None,
        pages: LayerPages | None = None,
        host: HostCache | None = None,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.parents_first = False
        self.eviction_policy = eviction_policy
        self.refused_for_version = 0
        self.evictions = 0
        self.states = states
        self.pages = pages
        self.host = host
        self.copies: list[tuple[int, int]] = []
        self._clock = 0
        self.index = PrefixIndex(num_blocks, block_size)
        self._reset(num_blocks)

    def _reset(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count: IntArray = np.zeros(num_blocks, np.int32)
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._lru: OrderedDict[int, int] = OrderedDict()
        self._lru_outdated: OrderedDict[int, int] = OrderedDict()

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of blocks without cached content, for which there is memory in every layer."""
        return len(self._free) if self.pages is None else self.pages.num_free // self.pages.groups

    @property
    def num_cached(self) -> int:
        """Number of unreferenced blocks with registered content, including content of older weights."""
        return len(self._lru) + len(self._lru_outdated)

    @property
    def num_used(self) -> int:
        """Number of blocks with at least one holder."""
        return self.num_blocks - len(self._free) - self.num_cached

    @property
    def num_in_window(self) -> int:
        """Number of used or cached blocks whose KV is there in layers with a window too."""
        pages, count = self.pages, self.num_used + self.num_cached
        if pages is None:
            return count
        return (pages.num_pages - pages.num_free - pages.whole * count) // pages.limited

    @property
    def unit(self) -> str:
        """What the pool's size is counted in: `blocks` or `pages`."""
        return "blocks" if self.pages is None else "pages"

    @property
    def pages_per_block(self) -> int:
        """Of the pool's `unit`, how many make a block that is there in every layer."""
        return 1 if self.pages is None else self.pages.groups

    @property
    def pool_size(self) -> int:
        """Size of the pool, in the `unit` of its memory."""
        return self.num_blocks if self.pages is None else self.pages.num_pages

    def live_memory(self) -> IntArray:
        """Ids of the blocks, or pages, that a suspend has to keep, ascending."""
        return self.live_blocks() if self.pages is None else self.pages.live()

    def held_memory(self) -> IntArray:
        """Ids of the blocks, or pages, of held blocks, ascending."""
        held = np.flatnonzero(self.ref_count > 0).astype(np.int32)
        return held if self.pages is None else np.sort(self.pages.of_blocks(held))

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        pages = self.pages
        if pages is None:
            return count <= self.num_free + self.num_cached
        evictable = pages.whole * self.num_cached + pages.limited * len(pages.unseen)
        return count * pages.groups <= pages.num_free + evictable

    def writable(self, blocks: IntArray) -> NDArray[np.bool_]:
        """[n] bool: the block has one holder and is not registered."""
        writable: NDArray[np.bool_] = (self.ref_count[blocks] == 1) & ~self.index.registered[blocks]
        return writable

    def findable(self, block_hash: int) -> bool:
        """Whether a block of this hash is in the current index, or on the host (its tokens may differ)."""
        on_host = self.host is not None and self.host.has(self.index.variant, block_hash)
        return on_host or block_hash in self.index.current

    def findable_hashes(self) -> list[int]:
        """Hashes of all blocks in the current index."""
        return list(self.index.current)

    def match(self, hashes: Sequence[int], tokens: IntArray) -> list[int]:
        """The longest cached prefix of a chain of complete blocks, *pinned*: each block gains a reference.

        Args:
            hashes: the chain's block hashes, one per complete block.
            tokens: [len(hashes), block_size] int32, the tokens they stand for.

        Returns:
            Block ids, from the first block on; empty when nothing matches.
        """
        found = self.index.find(hashes, tokens)
        self.acquire(np.asarray(found, np.int32))
        return found

    def count_refused(self, hashes: Sequence[int]) -> None:
        """Count the leading blocks of a chain that are cached, but were computed by older weights."""
        for block_hash in hashes:
            if block_hash not in self.index.outdated:
                return
            self.refused_for_version += 1

    def counts(self) -> dict[str, int]:
        """Block counts of the whole pool, keyed as in the GENERATED_TOKEN event."""
        registered = self.index.registered
        return {
            "blocks_total": self.num_blocks,
            "blocks_hashed_total": int(registered.sum()),
            "blocks_hashed_active": int((registered & (self.ref_count > 0)).sum()),
            "blocks_ref_count": int(self.ref_count.sum()),
        }

    def free_and_cached(self) -> tuple[list[int], list[int]]:
        """Ids of the free and of the cached blocks."""
        return list(self._free), [*self._lru, *self._lru_outdated]

    # --- references ---------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each, evicting cached ones where needed. Ask `can_allocate` first.

        Raises:
            RuntimeError: fewer than `count` blocks are free or evictable.
        """
        if not self.can_allocate(count):
            raise RuntimeError(
                f"allocate({count}): only {self.num_free} free and {self.num_cached} cached blocks; ask can_allocate()"
            )
        while len(self._free) < count or (self.pages is not None and self.pages.num_free < count * self.pages.groups):
            self._evict()
        blocks = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        blocks.reverse()
        self.ref_count[blocks] = 1
        if self.pages is not None:
            self.pages.give(blocks)
        return blocks

    def _evict(self) -> None:
        """Free what was used least recently: a cached block, or (of a held one, with a host tier) what no window reaches."""
        cached = self._lru_outdated or self._lru
        oldest = next(iter(cached.items()), None)
        if self.pages is not None and not self._lru_outdated:
            unseen = next(iter(self.pages.unseen.items()), None)
            older = unseen is not None and (oldest is None or unseen[1] < oldest[1])
            if unseen is not None and older and (self.host is None or self.ref_count[unseen[0]]):
                self.pages.strip(unseen[0])
                return
        assert oldest is not None
        # A tail that was put in front has been continued; outdated blocks are of no use.
        if self.host is not None and not self._lru_outdated and oldest[1]:
            falling = [oldest[0], *(self.index.behind(oldest[0]) if self.parents_first else [])]
            for block in reversed(falling):
                self.copies += self.host.offload(self.index, block, self.memory_of(block))
        self._free_cached(oldest[0])
        self.evictions += 1

    def acquire(self, blocks: IntArray) -> None:
        """Add one reference to each of `blocks` (held or cached); a block may appear several times."""
        for block in blocks[self.ref_count[blocks] == 0].tolist():
            self._lru.pop(block, None)
            self._lru_outdated.pop(block, None)
        np.add.at(self.ref_count, blocks, 1)

    def release(self, blocks: IntArray) -> None:
        """Drop one reference to each of `blocks`, listed in chain order."""
        np.subtract.at(self.ref_count, blocks, 1)
        counts = self.ref_count[blocks]
        if (counts < 0).any():
            raise RuntimeError(f"release({blocks[counts < 0].tolist()}): these blocks have no holder")
        for block in dict.fromkeys(reversed(blocks[counts == 0].tolist())):
            self._clock += 1
            self._park(block)

    def _park(self, block: int) -> None:
        if not self.index.registered[block]:
            self._give_back(block)
        elif self.eviction_policy is PrefixCachingEvictionPolicy.REF_ZERO:
            self._free_cached(block)
        elif self.index.findable(block):
            self._lru[block] = self._clock
        else:
            self._lru_outdated[block] = self._clock

    def _give_back(self, block: int) -> None:
        self._free.append(block)
        if self.pages is not None:
            self.pages.take(block)

    def _free_cached(self, block: int) -> None:
        self._lru.pop(block, None)
        self._lru_outdated.pop(block, None)
        self._unregister(block)
        self._give_back(block)
        if self.parents_first:
            self._forget_behind(block)

    def _forget_behind(self, block: int, *, verified: bool = True) -> None:
        """Unregister what is registered behind a block that no longer is.

        No lookup reaches it any more, and the id of its parent may come to stand for other tokens.
        """
        for child in self.index.behind(block):
            self._unregister(child, verified=verified)
            if not self.ref_count[child]:
                self._lru.pop(child, None)
                self._lru_outdated.pop(child, None)
                self._give_back(child)

    def _unregister(self, block: int, *, verified: bool = True) -> None:
        self.index.remove(block)
        if self.states is not None:
            self.states.forget(block)
        if self.pages is not None:
            self.pages.verified[block] &= verified
            if block in self.pages.unseen:
                self.pages.strip(block)

    # --- what layers with a window see --------------------------------------------------------------------------

    def unview(self, blocks: IntArray, *, verified: bool) -> None:
        """Let a sequence see `blocks` no more in the layers with a window. What a lookup may find keeps its KV there.

        Args:
            verified: the sequence has made finite logits of them. What none has is not kept: it may be NaN.
        """
        pages = self.pages
        if pages is None:
            return
        self._clock += 1
        if verified:
            pages.verified[blocks] = True
        for block in pages.unview(blocks):
            if pages.verified[block] and self.index.registered[block] and self.index.findable(block):
                pages.unseen[block] = self._clock
            else:
                pages.strip(block)

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def register(self, block: int, block_hash: int, parent: int, tokens: IntArray) -> int:
        """Index a held, complete block, as computed by the current weights and variant.

        Args:
            block: the block, held by the caller.
            block_hash: hash of the chain up to and including this block.
            parent: the registered block before it, or `NO_BLOCK`.
            tokens: [block_size] int32.

        Returns:
            The block to use from now on. It differs from `block` when an equal block is already registered: then the
            caller's reference has moved there and `block` is released.

        Raises:
            RuntimeError: the block is already registered under another hash.
        """
        if not self.enable_prefix_caching:
            return block
        kept = self.index.add(block, block_hash, parent, tokens)
        if kept != block:
            self.acquire(np.asarray([kept], np.int32))
            if self.pages is not None and self.pages.viewers[block]:
                self.pages.move(block, kept)
                self.pages.view(np.asarray([kept], np.int32))
                self.unview(np.asarray([block], np.int32), verified=True)
            self.release(np.asarray([block], np.int32))
        return kept

    def match_tail(self, chain: int, parent: int, tokens: IntArray, *, whole: bool) -> tuple[int, int]:
        """As `PrefixIndex.find_tail`; a tail that is found is *pinned*: it gains a reference."""
        block, common = self.index.find_tail(chain, parent, tokens, whole=whole)
        if common:
            self.acquire(np.asarray([block], np.int32))
        return block, common

    def register_tail(self, block: int, chain: int, parent: int, tokens: IntArray) -> bool:
        """Index a held, partly filled block behind a chain of registered ones; False if an equal one is, or with `REF_ZERO`.

        Args:
            chain: hash of the chain.
            parent: its last block, or `NO_BLOCK`.
            tokens: [n] int32, those whose KV the block holds.
        """
        keeps = self.enable_prefix_caching and self.eviction_policy is PrefixCachingEvictionPolicy.LRU
        return keeps and self.index.add_tail(block, chain, parent, tokens)

    def memory_of(self, block: int) -> list[int]:
        """The block, or its pages; negative: it has none there."""
        return [block] if self.pages is None else [*self.pages.page_of[block].tolist()]

    def forget_copies(self) -> None:
        """Forget the copies of a step that was not made, and cached blocks whose content may depend on them."""
        self.copies.clear()
        if self.host is not None and self.host.unsettled:
            self.drop_cached()

    def evict_next(self, block: int) -> None:
        """Put a cached leaf in front of the others that wait for eviction; nothing to do for a block that is held."""
        if block in self._lru:
            self._lru[block] = 0
            self._lru.move_to_end(block, last=False)
            if self.states is not None:
                self.states.evict_next(block)

    def outdate(self) -> None:
        """Invalidate the index after a weight update. Held blocks stay with their holders."""
        self.index.outdate()
        if self.host is not None:
            self.host.clear()
        if self.states is not None:
            self.states.forget_all()
        if self.pages is not None:
            self.pages.strip_unseen()
        self._lru_outdated.update(self._lru)
        self._lru.clear()

    def switch(self, variant: Hashable) -> None:
        """Switch lookups to the index of `variant`."""
        self.index.switch(variant)

    def unregister(self, blocks: IntArray) -> None:
        """Remove held `blocks`, and all behind them, from the index: their content must not be shared (it may hold NaN)."""
        for block in blocks[self.index.registered[blocks]].tolist():
            if self.index.registered[block]:
                self._unregister(block, verified=False)
                self._forget_behind(block, verified=False)

    def drop_cached(self) -> int:
        """Free every cached block, also on the host, and what no window reaches; returns the number of blocks freed."""
        count = self.num_cached
        if self.pages is not None:
            self.pages.strip_unseen()
        while cached := self._lru_outdated or self._lru:
            self._free_cached(next(iter(cached)))
        if self.host is not None:
            self.host.clear()
        if not self.index.current:
            self.index.flushed()
        return count

    def start_over(self) -> None:
        """Free every block, whatever its reference count."""
        self.index.clear(self.num_blocks)
        self._reset(self.num_blocks)
        self.copies.clear()
        if self.host is not None:
            self.host.clear()
        for owner in (self.pages, self.states):
            if owner is not None:
                owner.start_over()

    # --- suspend and resume -------------------------------------------------------------------------------------

    def live_blocks(self) -> IntArray:
        """Ids of all held and cached blocks, ascending: those that a suspend has to keep."""
        return np.flatnonzero((self.ref_count > 0) | self.index.registered).astype(np.int32)

    def resize(self, num_blocks: int) -> IntArray | None:
        """Change the pool's size, moving live blocks to the lowest ids when the old ids no longer all exist.

        Not of an allocator with `pages`, which are resized themselves.

        Returns:
            [old num_blocks] int32, the new id of each old block (`NO_BLOCK` for the free ones); None if nothing moved.

        Raises:
            RuntimeError: more blocks are live than `num_blocks`.
        """
        live = self.live_blocks()
        if len(live) > num_blocks:
            raise RuntimeError(f"resize({num_blocks}): {len(live)} blocks are live; release some first")
        if num_blocks == self.num_blocks:
            return None
        mapping = np.full(self.num_blocks, NO_BLOCK, np.int32)
        mapping[live] = np.arange(len(live), dtype=np.int32)
        self.index.remap(live, mapping, num_blocks)
        if self.states is not None:
            self.states.remap_blocks(mapping)
        counts, queues = self.ref_count[live], (self._lru, self._lru_outdated)
        self._reset(num_blocks)
        self.ref_count[: len(live)] = counts
        self._free = list(range(num_blocks - 1, len(live) - 1, -1))
        self._lru, self._lru_outdated = (
            OrderedDict((int(mapping[block]), since) for block, since in queue.items()) for queue in queues
        )
        return mapping
