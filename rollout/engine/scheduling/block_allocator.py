"""KV block allocator: reference counts, prefix index, LRU eviction.

Always true here (`check()` proves it):
- a block is exactly one of *free*, *held* (reference count above 0) or *cached* (unreferenced, its content findable);
- whoever holds a registered block holds its parent too, so the least recently released cached block is a leaf;
- a lookup returns only blocks registered since the weights last moved and under the present variant (whatever else
  decides what a forward computes) whose tokens and parents compare equal: a hash alone is never believed.

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
    """Which prefixes have become findable with the present weights and variant, and which can no longer be found.

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
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.eviction_policy = eviction_policy
        self.variant: Hashable = ()
        self.refused_for_version = 0
        self.evictions = 0
        self.changes: CacheChanges | None = None
        """Keeps account of what can be found, for whoever sets it."""
        self._shelf_number = 0
        self._reset(num_blocks)

    def _reset(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_count: IntArray = np.zeros(num_blocks, np.int32)
        self.registered: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._hash: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._parent: IntArray = np.full(num_blocks, NO_BLOCK, np.int32)
        self._tokens: IntArray = np.zeros((num_blocks, self.block_size), np.int32)
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._on_shelf: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._clear_shelves()
        self._outdated: dict[int, int] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()
        self._lru_outdated: OrderedDict[int, None] = OrderedDict()

    def _clear_shelves(self) -> None:
        """One shelf (hash → block) per variant with a block since the weights moved; `_current` is the present one's."""
        self._shelves: dict[int, dict[int, int]] = {}
        self._shelf_of: dict[Hashable, int] = {}
        self._open_shelf()

    def _open_shelf(self) -> None:
        """Lookups go to the shelf of the present variant. Numbers are never used again: an outdated block keeps its."""
        if self.variant not in self._shelf_of:
            for variant in [each for each, number in self._shelf_of.items() if not self._shelves[number]]:
                del self._shelves[self._shelf_of.pop(variant)]
            self._shelf_of[self.variant] = self._shelf_number = self._shelf_number + 1
            self._shelves[self._shelf_number] = {}
        self._current = self._shelves[self._shelf_of[self.variant]]

    # --- asking -------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks with no content worth keeping."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content can still be found, or could until the weights moved."""
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
        """Whether a lookup finds a block registered under this hash (its tokens may differ)."""
        return block_hash in self._current

    def findable_hashes(self) -> list[int]:
        """Hashes of all blocks that a lookup finds."""
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
        """Count the leading blocks of a chain that are here, but computed by older weights."""
        for block_hash in hashes:
            if block_hash not in self._outdated:
                return
            self.refused_for_version += 1

    def counts(self) -> dict[str, int]:
        """Of the whole pool, by the names of the GENERATED_TOKEN event."""
        held = self.ref_count > 0
        return {
            "blocks_total": self.num_blocks,
            "blocks_hashed_total": int(self.registered.sum()),
            "blocks_hashed_active": int((self.registered & held).sum()),
            "blocks_ref_count": int(self.ref_count.sum()),
        }

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
        elif self._on_shelf.item(block) in self._shelves:
            self._lru[block] = None
        else:
            self._lru_outdated[block] = None

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def register(self, block: int, block_hash: int, parent: int, tokens: IntArray) -> int:
        """Make a held, complete block findable, as computed by the present weights and variant.

        Args:
            block: the block, held by the caller.
            block_hash: hash of the chain up to and including this block.
            parent: the registered block before it, or `NO_BLOCK`.
            tokens: [block_size] int32.

        Returns:
            The block to use from now on. It differs from `block` when an equal block is registered already: then the
            caller's reference has moved there and `block` is released.

        Raises:
            RuntimeError: it is registered already, under another hash.
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
        self._on_shelf[block] = self._shelf_of[self.variant]
        self._current[block_hash] = block
        if self.changes is not None:
            self.changes.add(block_hash)
        return block

    def outdate(self) -> None:
        """The weights moved: nothing registered so far is found any more. Held blocks stay with their holders."""
        for shelf in self._shelves.values():
            self._outdated.update(shelf)
        self._clear_shelves()
        if self.changes is not None:
            self.changes.flush()
        self._lru_outdated.update(self._lru)
        self._lru.clear()

    def switch(self, variant: Hashable) -> None:
        """A forward computes otherwise: what was registered so is found, and nothing else, until that changes again."""
        self.variant = variant
        self._open_shelf()
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

    def start_over(self) -> None:
        """Every block is free, whoever held it."""
        self._reset(self.num_blocks)
        if self.changes is not None:
            self.changes.flush()

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
        shelf = self._shelves.get(self._on_shelf.item(block), {})
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
        names = ("ref_count", "registered", "_hash", "_on_shelf", "_tokens")
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
        self._outdated = {key: int(mapping[block]) for key, block in outdated.items()}
        self._shelves = {
            number: {key: int(mapping[block]) for key, block in shelf.items()} for number, shelf in shelves.items()
        }
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
        for number, shelf in self._shelves.items():
            for block_hash, block in shelf.items():
                assert self.registered[block], f"the cache names block {block}, which is not registered"
                assert self._on_shelf[block] == number, f"block {block} is findable under another variant"
                assert self._hash[block] == block_hash, f"block {block} is found under a foreign hash"
