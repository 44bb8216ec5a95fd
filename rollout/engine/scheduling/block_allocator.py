"""KV block allocator: reference counts, prefix index, LRU eviction.

Always true here (`check()` proves it):
- a block is exactly one of *free*, *held* (reference count above 0) or *cached* (unreferenced but still indexed);
- a holder of a registered block holds its parent too, so the least recently released cached block is a leaf;
- a lookup returns only blocks registered since the last weight update and under the current variant (adapters and forward
  settings) whose tokens and parents compare equal: a hash match alone is not trusted.

Handles block ids and token ids, no tensors and no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.state import PrefixCachingEvictionPolicy

NO_BLOCK = -1

IntArray = NDArray[np.int32]


class CacheChanges:
    """Prefix hashes added to and removed from the current index since the last `take`.

    Always true: the index at the last `take` (empty, if `flushed`), less `removed`, plus `added`, is the index now. A prefix
    that was added and removed in between is in neither set.
    """

    __slots__ = ("added", "flushed", "removed")

    def __init__(self) -> None:
        self.added: set[int] = set()
        self.removed: set[int] = set()
        self.flushed = False

    def add(self, block_hash: int) -> None:
        """Record that a prefix is now found by lookups."""
        if block_hash in self.removed:
            self.removed.remove(block_hash)
        else:
            self.added.add(block_hash)

    def remove(self, block_hash: int) -> None:
        """Record that a prefix is no longer found."""
        if block_hash in self.added:
            self.added.remove(block_hash)
        else:
            self.removed.add(block_hash)

    def flush(self) -> None:
        """Record that the index is now empty."""
        self.added.clear()
        self.removed.clear()
        self.flushed = True

    def take(self) -> CacheChanges:
        """Return the changes since the last call and reset them."""
        taken = CacheChanges()
        taken.added, taken.removed, taken.flushed = self.added, self.removed, self.flushed
        self.added, self.removed, self.flushed = set(), set(), False
        return taken


class BlockAllocator:
    """Reference counts, prefix cache and eviction over `num_blocks` blocks of `block_size` token slots."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        eviction_policy: PrefixCachingEvictionPolicy = PrefixCachingEvictionPolicy.LRU,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.eviction_policy = eviction_policy
        self.variant: Hashable = ()
        self.refused_for_version = 0
        self.evictions = 0
        self.changes: CacheChanges | None = None
        """Set to a `CacheChanges` to record changes of the index; None: not recorded."""
        self._last_index_id = 0
        self._reset(num_blocks)

    def _reset(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count: IntArray = np.zeros(num_blocks, np.int32)
        self.registered: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._hash: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._parent: IntArray = np.full(num_blocks, NO_BLOCK, np.int32)
        self._tokens: IntArray = np.zeros((num_blocks, self.block_size), np.int32)
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._index_id: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._clear_indexes()
        self._outdated: dict[int, int] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._lru_outdated: OrderedDict[int, None] = OrderedDict()

    def _clear_indexes(self) -> None:
        """Start with empty indexes, one (hash → block) per variant used since the last weight update."""
        self._indexes: dict[int, dict[int, int]] = {}
        self._index_ids: dict[Hashable, int] = {}
        self._open_index()

    def _open_index(self) -> None:
        """Make `_current` the index of the current variant. Index ids are not reused, since outdated blocks keep theirs."""
        if self.variant not in self._index_ids:
            for variant in [each for each, number in self._index_ids.items() if not self._indexes[number]]:
                del self._indexes[self._index_ids.pop(variant)]
            self._index_ids[self.variant] = self._last_index_id = self._last_index_id + 1
            self._indexes[self._last_index_id] = {}
        self._current = self._indexes[self._index_ids[self.variant]]

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Number of blocks without cached content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of unreferenced blocks with registered content, including content of older weights."""
        return len(self._lru) + len(self._lru_outdated)

    @property
    def num_used(self) -> int:
        """Number of blocks with at least one holder."""
        return self.num_blocks - self.num_free - self.num_cached

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= self.num_free + self.num_cached

    def writable(self, blocks: IntArray) -> NDArray[np.bool_]:
        """[n] bool: the block has one holder and is not registered."""
        writable: NDArray[np.bool_] = (self.ref_count[blocks] == 1) & ~self.registered[blocks]
        return writable

    def findable(self, block_hash: int) -> bool:
        """Whether a block is registered under this hash in the current index (its tokens may differ)."""
        return block_hash in self._current

    def findable_hashes(self) -> list[int]:
        """Hashes of all blocks in the current index."""
        return list(self._current)

    def match(self, hashes: Sequence[int], tokens: IntArray) -> list[int]:
        """The longest cached prefix of a chain of complete blocks, *pinned*: each block gains a reference.

        Args:
            hashes: the chain's block hashes, one per complete block.
            tokens: [len(hashes), block_size] int32, the tokens they stand for.

        Returns:
            Block ids, from the first block on; empty when nothing matches.
        """
        found: list[int] = []
        parent = NO_BLOCK
        for index, block_hash in enumerate(hashes):
            block = self._current.get(block_hash)
            if block is None or self._parent[block] != parent:
                break
            if not np.array_equal(self._tokens[block], tokens[index]):
                break
            found.append(block)
            parent = block
        self.acquire(np.asarray(found, np.int32))
        return found

    def count_refused(self, hashes: Sequence[int]) -> None:
        """Count the leading blocks of a chain that are cached, but were computed by older weights."""
        for block_hash in hashes:
            if block_hash not in self._outdated:
                return
            self.refused_for_version += 1

    def counts(self) -> dict[str, int]:
        """Block counts of the whole pool, keyed as in the GENERATED_TOKEN event."""
        held = self.ref_count > 0
        return {
            "blocks_total": self.num_blocks,
            "blocks_hashed_total": int(self.registered.sum()),
            "blocks_hashed_active": int((self.registered & held).sum()),
            "blocks_ref_count": int(self.ref_count.sum()),
        }

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
        while len(self._free) < count:
            self._evict_one()
        blocks = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        blocks.reverse()
        self.ref_count[blocks] = 1
        return blocks

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
        seen: set[int] = set()
        for block in reversed(blocks[counts == 0].tolist()):
            if block not in seen:
                seen.add(block)
                self._park(block)

    def _park(self, block: int) -> None:
        if not self.registered[block]:
            self._free.append(block)
        elif self.eviction_policy is PrefixCachingEvictionPolicy.REF_ZERO:
            self._free_cached(block)
        elif self._index_id.item(block) in self._indexes:
            self._lru[block] = None
        else:
            self._lru_outdated[block] = None

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
        if self.registered[block]:
            if self._hash.item(block) != block_hash:
                raise RuntimeError(
                    f"register(block {block}, hash {block_hash}): it is registered under {self._hash.item(block)}; "
                    "unregister() it first"
                )
            return block
        known = self._current.get(block_hash)
        if known is not None:
            if self._parent[known] != parent or not np.array_equal(self._tokens[known], tokens):
                return block
            self.acquire(np.asarray([known], np.int32))
            self.release(np.asarray([block], np.int32))
            return known
        self.registered[block] = True
        self._hash[block] = block_hash
        self._parent[block] = parent
        self._tokens[block] = tokens
        self._index_id[block] = self._index_ids[self.variant]
        self._current[block_hash] = block
        if self.changes is not None:
            self.changes.add(block_hash)
        return block

    def outdate(self) -> None:
        """Invalidate the index after a weight update. Held blocks stay with their holders."""
        for index in self._indexes.values():
            self._outdated.update(index)
        self._clear_indexes()
        if self.changes is not None:
            self.changes.flush()
        self._lru_outdated.update(self._lru)
        self._lru.clear()

    def switch(self, variant: Hashable) -> None:
        """Switch lookups to the index of `variant`."""
        self.variant = variant
        self._open_index()
        if self.changes is not None:
            self.changes.flush()
            for block_hash in self._current:
                self.changes.add(block_hash)

    def unregister(self, blocks: IntArray) -> None:
        """Remove held `blocks` from the index: their content must not be shared (it may hold NaN)."""
        for block in blocks[self.registered[blocks]].tolist():
            self._unregister(block)

    def drop_cached(self) -> int:
        """Free every cached block; returns the number freed."""
        count = self.num_cached
        for block in [*self._lru_outdated, *self._lru]:
            self._free_cached(block)
        if self.changes is not None and not self._current:
            self.changes.flush()
        return count

    def start_over(self) -> None:
        """Free every block, whatever its reference count."""
        self._reset(self.num_blocks)
        if self.changes is not None:
            self.changes.flush()

    def _evict_one(self) -> None:
        queue = self._lru_outdated or self._lru
        self._free_cached(next(iter(queue)))
        self.evictions += 1

    def _free_cached(self, block: int) -> None:
        self._lru.pop(block, None)
        self._lru_outdated.pop(block, None)
        self._unregister(block)
        self._free.append(block)

    def _unregister(self, block: int) -> None:
        block_hash = int(self._hash[block])
        index = self._indexes.get(self._index_id.item(block), {})
        if index.get(block_hash) == block:
            del index[block_hash]
            if self.changes is not None and index is self._current:
                self.changes.remove(block_hash)
        if self._outdated.get(block_hash) == block:
            del self._outdated[block_hash]
        self.registered[block] = False

    # --- suspend and resume -------------------------------------------------------------------------------------

    def live_blocks(self) -> IntArray:
        """Ids of all held and cached blocks, ascending: those that a suspend has to keep."""
        return np.flatnonzero((self.ref_count > 0) | self.registered).astype(np.int32)

    def resize(self, num_blocks: int) -> IntArray | None:
        """Change the pool's size, moving live blocks to the lowest ids when the old ids no longer all exist.

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
        names = ("ref_count", "registered", "_hash", "_index_id", "_tokens")
        kept_rows = {name: getattr(self, name)[live] for name in names}
        parents = self._parent[live]
        indexes, numbers, outdated = self._indexes, self._index_ids, self._outdated
        queues = (self._lru, self._lru_outdated)
        self._reset(num_blocks)
        kept = len(live)
        for name, rows in kept_rows.items():
            getattr(self, name)[:kept] = rows
        self._parent[:kept] = np.where(parents == NO_BLOCK, NO_BLOCK, mapping[parents])
        self._free = list(range(num_blocks - 1, kept - 1, -1))
        self._outdated = {key: int(mapping[block]) for key, block in outdated.items()}
        self._indexes = {
            number: {key: int(mapping[block]) for key, block in index.items()} for number, index in indexes.items()
        }
        self._index_ids = numbers
        self._current = self._indexes[numbers[self.variant]]
        self._lru, self._lru_outdated = (OrderedDict((int(mapping[block]), None) for block in q) for q in queues)
        return mapping

    # --- invariants ---------------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Check the invariants against the block tables of all holders.

        Raises:
            AssertionError: names the blocks that disagree.
        """
        expected = np.zeros(self.num_blocks, np.int32)
        for table in holders:
            np.add.at(expected, np.asarray(table, np.int32), 1)
            for child, parent in zip(table[1:], table, strict=False):
                if self.registered[child]:
                    assert self._parent[child] == parent, f"block {child} is held without its parent"
        wrong = np.flatnonzero(expected != self.ref_count)
        assert not len(wrong), f"blocks {wrong.tolist()}: reference counts {self.ref_count[wrong]} != {expected[wrong]}"
        cached = [*self._lru, *self._lru_outdated]
        states = np.zeros(self.num_blocks, np.int32)
        np.add.at(states, np.asarray(self._free, np.int32), 1)
        np.add.at(states, np.asarray(cached, np.int32), 1)
        states += self.ref_count > 0
        assert (states == 1).all(), (
            f"blocks {np.flatnonzero(states != 1).tolist()} are not exactly one of free/held/cached"
        )
        assert not self.registered[self._free].any(), "a free block is registered"
        assert self.registered[cached].all(), "a cached block is not registered"
        assert self._current is self._indexes[self._index_ids[self.variant]], "lookups use the index of another variant"
        for number, index in self._indexes.items():
            for block_hash, block in index.items():
                assert self.registered[block], f"the cache names block {block}, which is not registered"
                assert self._index_id[block] == number, f"block {block} is findable under another variant"
                assert self._hash[block] == block_hash, f"block {block} is found under a foreign hash"
