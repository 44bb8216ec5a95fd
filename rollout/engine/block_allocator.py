"""Block ids of the KV pool: who holds them, which of them are a reusable prefix, which go first when room is needed.

Always true here (`check()` proves it):
- a block is exactly one of *free*, *held* (reference count above 0) or *cached* (unreferenced, its content findable);
- whoever holds a registered block holds its parent too, so the least recently released cached block is a leaf;
- a lookup returns only blocks registered under the present policy version and the present variant of the model (which
  adapters act) whose tokens and parents compare equal: a hash alone is never believed.

Knows block ids and token ids, no tensors and no requests.
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
    """Which prefixes have become findable under the present version and variant, and which can no longer be found.

    Always true: what could be found at the last `take` (nothing, if `flushed`), less `removed`, plus `added`, is what can
    be found now. A prefix that came and went in between is in neither.
    """

    __slots__ = ("added", "flushed", "removed")

    def __init__(self) -> None:
        self.added: set[int] = set()
        self.removed: set[int] = set()
        self.flushed = False

    def add(self, block_hash: int) -> None:
        """A prefix that could not be found can be."""
        if block_hash in self.removed:
            self.removed.remove(block_hash)
        else:
            self.added.add(block_hash)

    def remove(self, block_hash: int) -> None:
        """A prefix that could be found cannot any more."""
        if block_hash in self.added:
            self.added.remove(block_hash)
        else:
            self.removed.add(block_hash)

    def flush(self) -> None:
        """Nothing can be found any more."""
        self.added.clear()
        self.removed.clear()
        self.flushed = True

    def take(self) -> CacheChanges:
        """What has changed since the last call."""
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
        version: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.eviction_policy = eviction_policy
        self.version = version
        self.variant: Hashable = ()
        self.refused_for_version = 0
        self.evictions = 0
        self.changes: CacheChanges | None = None
        """Keeps account of what can be found, for whoever sets it."""
        self._reset(num_blocks)

    def _reset(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count: IntArray = np.zeros(num_blocks, np.int32)
        self.registered: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._hash: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._block_version: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._parent: IntArray = np.full(num_blocks, NO_BLOCK, np.int32)
        self._tokens: IntArray = np.zeros((num_blocks, self.block_size), np.int32)
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._on_shelf: IntArray = np.zeros(num_blocks, np.int32)
        self._clear_shelves()
        self._outdated: dict[int, int] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._lru_outdated: OrderedDict[int, None] = OrderedDict()

    def _clear_shelves(self) -> None:
        """One shelf (hash → block) per variant seen under the present version; `_current` is the present variant's."""
        self._current: dict[int, int] = {}
        self._shelves = [self._current]
        self._shelf_of: dict[Hashable, int] = {self.variant: 0}

    # --- asking -------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks with no content worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can still be found, or could until the version moved."""
        return len(self._lru) + len(self._lru_outdated)

    @property
    def num_used(self) -> int:
        """Blocks somebody holds."""
        return self.num_blocks - self.num_free - self.num_cached

    def can_allocate(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed."""
        return count <= self.num_free + self.num_cached

    def writable(self, blocks: IntArray) -> NDArray[np.bool_]:
        """Per block: only its holder reads it, and no lookup can find it."""
        writable: NDArray[np.bool_] = (self.ref_count[blocks] == 1) & ~self.registered[blocks]
        return writable

    def findable(self, block_hash: int) -> bool:
        """Whether a block is registered under this hash and the present version (its tokens may differ)."""
        return block_hash in self._current

    def findable_hashes(self) -> list[int]:
        """Hashes of all blocks registered under the present version."""
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
        """Count the leading blocks of a chain that are here, but under an older policy version."""
        for block_hash in hashes:
            if block_hash not in self._outdated:
                return
            self.refused_for_version += 1

    # --- holding ------------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """`count` blocks nobody else holds, evicting cached ones where needed. Ask `can_allocate` first.

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
        """One more reference to each of `blocks` (held or cached); a block may appear several times."""
        for block in blocks[self.ref_count[blocks] == 0].tolist():
            self._lru.pop(block, None)
            self._lru_outdated.pop(block, None)
        np.add.at(self.ref_count, blocks, 1)

    def release(self, blocks: IntArray) -> None:
        """Give back one reference to each of `blocks`, listed in chain order."""
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
            self._forget(block)
        elif self._block_version[block] == self.version:
            self._lru[block] = None
        else:
            self._lru_outdated[block] = None

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def register(self, block: int, block_hash: int, parent: int, tokens: IntArray) -> int:
        """Make a held, complete block findable under the present version.

        Args:
            block: the block, held by the caller.
            block_hash: hash of the chain up to and including this block.
            parent: the registered block before it, or `NO_BLOCK`.
            tokens: [block_size] int32.

        Returns:
            The block to use from now on. It differs from `block` when an equal block is registered already: then the
            caller's reference has moved there and `block` is released.
        """
        if not self.enable_prefix_caching or self.registered[block]:
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
        self._block_version[block] = self.version
        self._parent[block] = parent
        self._tokens[block] = tokens
        self._on_shelf[block] = self._shelf_of[self.variant]
        self._current[block_hash] = block
        if self.changes is not None:
            self.changes.add(block_hash)
        return block

    def advance_version(self, version: int) -> None:
        """The weights moved: nothing registered so far is found any more. Held blocks stay with their holders."""
        if version == self.version:
            return
        self.version = version
        for shelf in self._shelves:
            self._outdated.update(shelf)
        self._clear_shelves()
        if self.changes is not None:
            self.changes.flush()
        self._lru_outdated.update(self._lru)
        self._lru.clear()

    def switch(self, variant: Hashable) -> None:
        """Other adapters act: what was registered under these is found, and nothing else, until they change again."""
        self.variant = variant
        number = self._shelf_of.setdefault(variant, len(self._shelves))
        if number == len(self._shelves):
            self._shelves.append({})
        self._current = self._shelves[number]
        if self.changes is not None:
            self.changes.flush()
            for block_hash in self._current:
                self.changes.add(block_hash)

    def unregister(self, blocks: IntArray) -> None:
        """Make held `blocks` unfindable: their content must not be shared (it holds NaN, say)."""
        for block in blocks[self.registered[blocks]].tolist():
            self._unlist(block)

    def drop_cached(self) -> int:
        """Free every cached block; returns how many."""
        count = self.num_cached
        for block in [*self._lru_outdated, *self._lru]:
            self._forget(block)
        if self.changes is not None and not self._current:
            self.changes.flush()
        return count

    def _evict_one(self) -> None:
        queue = self._lru_outdated or self._lru
        self._forget(next(iter(queue)))
        self.evictions += 1

    def _forget(self, block: int) -> None:
        self._lru.pop(block, None)
        self._lru_outdated.pop(block, None)
        self._unlist(block)
        self._free.append(block)

    def _unlist(self, block: int) -> None:
        block_hash = int(self._hash[block])
        shelf = self._shelves[self._on_shelf[block]] if self._block_version[block] == self.version else {}
        if shelf.get(block_hash) == block:
            del shelf[block_hash]
            if self.changes is not None and shelf is self._current:
                self.changes.remove(block_hash)
        if self._outdated.get(block_hash) == block:
            del self._outdated[block_hash]
        self.registered[block] = False

    # --- suspend and resume -------------------------------------------------------------------------------------

    def live_blocks(self) -> IntArray:
        """Ids of all held and cached blocks, ascending: what a suspend has to keep."""
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
        names = ("ref_count", "registered", "_hash", "_block_version", "_on_shelf", "_tokens")
        kept_rows = {name: getattr(self, name)[live] for name in names}
        parents = self._parent[live]
        shelves, numbers, outdated = self._shelves, self._shelf_of, self._outdated
        queues = (self._lru, self._lru_outdated)
        self._reset(num_blocks)
        kept = len(live)
        for name, rows in kept_rows.items():
            getattr(self, name)[:kept] = rows
        self._parent[:kept] = np.where(parents == NO_BLOCK, NO_BLOCK, mapping[parents])
        self._free = list(range(num_blocks - 1, kept - 1, -1))
        self._outdated, *self._shelves = (
            {key: int(mapping[block]) for key, block in table.items()} for table in (outdated, *shelves)
        )
        self._shelf_of = numbers
        self._current = self._shelves[numbers[self.variant]]
        self._lru, self._lru_outdated = (OrderedDict((int(mapping[block]), None) for block in q) for q in queues)
        return mapping

    # --- proof --------------------------------------------------------------------------------------------------

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Prove the invariants against the block tables of all holders.

        Raises:
            AssertionError: naming the blocks that disagree.
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
        assert self._current is self._shelves[self._shelf_of[self.variant]], (
            "lookups go to the shelf of another variant"
        )
        for number, shelf in enumerate(self._shelves):
            for block_hash, block in shelf.items():
                assert self.registered[block], f"the cache names block {block}, which is not registered"
                assert self._block_version[block] == self.version, f"block {block} is findable under another version"
                assert self._on_shelf[block] == number, f"block {block} is findable under another variant"
                assert self._hash[block] == block_hash, f"block {block} is found under a foreign hash"
