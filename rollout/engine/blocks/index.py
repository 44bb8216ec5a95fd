"""Prefix index: finds the KV blocks of a token prefix by their hashes.

Always true: a lookup returns only blocks that were registered under the current weights, adapters and forward settings, and
whose tokens and parents are equal. A hash match alone is not trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

NO_BLOCK = -1

IntArray = NDArray[np.int32]


def chain_digest(before: bytes, block_hash: int, tokens: IntArray) -> bytes:
    """Return the digest of a prefix's blocks, given the last block and `before`, the digest of the blocks before it."""
    return blake2b(before + block_hash.to_bytes(8, "little") + tokens.tobytes(), digest_size=32).digest()


@dataclass(eq=False, slots=True)
class CacheChanges:
    """The prefix hashes that were added to and removed from the index since the last `take`.

    Always true: the hashes at the last `take` (none if `flushed`), minus `removed`, plus `added`, are the current hashes. A
    hash that was both added and removed since the last `take` is in neither set.
    """

    added: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    flushed: bool = False

    def add(self, block_hash: int) -> None:
        """Record that lookups now find the prefix with this hash."""
        if block_hash in self.removed:
            self.removed.remove(block_hash)
        else:
            self.added.add(block_hash)

    def remove(self, block_hash: int) -> None:
        """Record that lookups no longer find the prefix with this hash."""
        if block_hash in self.added:
            self.added.remove(block_hash)
        else:
            self.removed.add(block_hash)

    def flush(self) -> None:
        """Record that the index is now empty."""
        self.added, self.removed, self.flushed = set(), set(), True

    def take(self) -> CacheChanges:
        """Return the changes since the last `take`, and start to record new ones."""
        taken = CacheChanges(self.added, self.removed, self.flushed)
        self.added, self.removed, self.flushed = set(), set(), False
        return taken


class PrefixIndex:
    """The registered blocks, by hash.

    Attributes:
        registered: [num_blocks] bool, whether each block is registered.
        current: the id of each registered block, by the block's hash.
        outdated: the hashes that the last `clear` of a non-empty index removed.
        refused: the number of blocks that lookups missed because they were computed before the last `clear`.
        changes: the changes to `current` that have not been taken yet.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.refused = 0
        self.changes = CacheChanges()
        self.registered: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.current: dict[int, int] = {}
        self.outdated: frozenset[int] = frozenset()
        self._digests: dict[int, bytes] = {}
        self._hash: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._parent: IntArray = np.full(num_blocks, NO_BLOCK, np.int32)
        self._tokens: IntArray = np.zeros((num_blocks, block_size), np.int32)

    def clear(self) -> None:
        """Remove every block from the index."""
        if self.current:
            self.outdated = frozenset(self.current)
        self.registered[:] = False
        self._digests.clear()
        self.current.clear()
        self.changes.flush()

    def described(self, block: int) -> tuple[int, IntArray]:
        """Return the hash and the tokens of a registered block."""
        return self._hash.item(block), self._tokens[block]

    def digest(self, block: int) -> bytes:
        """Return the `chain_digest` of a registered block and all blocks before it in its chain."""
        chain: list[int] = []
        while block != NO_BLOCK and block not in self._digests:
            chain.append(block)
            block = self._parent.item(block)
        found = b"" if block == NO_BLOCK else self._digests[block]
        for each in reversed(chain):
            found = self._digests[each] = chain_digest(found, self._hash.item(each), self._tokens[each])
        return found

    def find(self, hashes: Sequence[int], tokens: IntArray) -> list[int]:
        """Return the ids of the blocks that form the longest cached prefix of a chain of complete blocks.

        Args:
            hashes: the block hashes of the chain.
            tokens: [len(hashes), block_size] int32, the token ids of the chain.
        """
        found: list[int] = []
        parent = NO_BLOCK
        for index, block_hash in enumerate(hashes):
            block = self.current.get(block_hash)
            if block is None or self._parent[block] != parent:
                break
            if not np.array_equal(self._tokens[block], tokens[index]):
                break
            found.append(block)
            parent = block
        return found

    def count_refused(self, hashes: Sequence[int]) -> None:
        """Increase `refused` by the number of leading `hashes` whose blocks were cached until the last `clear`."""
        self.refused += sum(1 for _ in takewhile(self.outdated.__contains__, hashes))

    def add(self, block: int, block_hash: int, parent: int, tokens: IntArray) -> int:
        """Register a complete block, unless another block with the same hash is registered.

        Return that other block if it has the same parent and tokens, otherwise `block`.

        Raises:
            RuntimeError: the block is already registered under another hash.
        """
        if self.registered[block]:
            if self._hash.item(block) != block_hash:
                raise RuntimeError(
                    f"register(block {block}, hash {block_hash}): it is registered under {self._hash.item(block)}; "
                    "unregister() it first"
                )
            return block
        known = self.current.get(block_hash)
        if known is not None:
            return known if self._parent[known] == parent and np.array_equal(self._tokens[known], tokens) else block
        self.registered[block] = True
        self._hash[block], self._parent[block], self._tokens[block] = block_hash, parent, tokens
        self.current[block_hash] = block
        self.changes.add(block_hash)
        return block

    def remove(self, block: int) -> None:
        """Unregister a block. Do nothing if it is not registered."""
        if not self.registered[block]:
            return
        block_hash = self._hash.item(block)
        self.registered[block] = False
        self._digests.pop(block, None)
        del self.current[block_hash]
        self.changes.remove(block_hash)

    def behind(self, block: int) -> list[int]:
        """Return the registered blocks that follow `block` in any cached prefix. Parents precede their children."""
        found = [block]
        for each in found:
            found += np.flatnonzero(self.registered & (self._parent == each)).tolist()
        return found[1:]
