"""Prefix index: finds the KV block of a token prefix by its hash, per policy version and variant.

Always true: a lookup returns only blocks registered since the last weight update and under the current variant (adapters and
forward settings) whose tokens and parents compare equal: a hash match alone is not trusted.

A *tail* is the partly filled last block of an ended sequence. It is found by the hash of the chain before it. Sequences that
continue it copy it, so its own slots are never written again.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

NO_BLOCK = -1

IntArray = NDArray[np.int32]


def chain_digest(before: bytes, block_hash: int, tokens: IntArray) -> bytes:
    """Digest of a chain of complete blocks, computed from the digest of the chain before the last block and that block."""
    return blake2b(before + block_hash.to_bytes(8, "little") + tokens.tobytes(), digest_size=32).digest()


@dataclass(eq=False, slots=True)
class CacheChanges:
    """Prefix hashes added to and removed from the current index since the last `take`.

    Always true: the index at the last `take` (empty if `flushed`), minus `removed`, plus `added`, is the current index. A
    prefix that was added and removed in between is in neither set.
    """

    added: set[int] = field(default_factory=set)
    removed: set[int] = field(default_factory=set)
    flushed: bool = False

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
        self.added, self.removed, self.flushed = set(), set(), True

    def take(self) -> CacheChanges:
        """Return the changes since the last call and reset them."""
        taken = CacheChanges(self.added, self.removed, self.flushed)
        self.added, self.removed, self.flushed = set(), set(), False
        return taken


class PrefixIndex:
    """Registered blocks by hash, one index per variant used since the last weight update.

    Attributes:
        registered: [num_blocks] bool.
        variant: the current one.
        current: hash → block of the current variant.
        outdated: hash → block of earlier weights.
        tails: (number of the index, hash of the chain before) → partly filled blocks.
        refused: counter of blocks that a lookup missed because older weights computed them.
        changes: a `CacheChanges` that records the changes of `current`; None: not recorded.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._last_number = 0
        self.variant: Hashable = ()
        self.refused = 0
        self.changes: CacheChanges | None = None
        self.registered: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._hash: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._number: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._parent: IntArray = np.full(num_blocks, NO_BLOCK, np.int32)
        self._tokens: IntArray = np.zeros((num_blocks, block_size), np.int32)
        self._filled: IntArray = np.zeros(num_blocks, np.int32)
        self.clear()

    def clear(self) -> None:
        """Forget every block."""
        self.registered[:] = False
        self._filled[:] = 0
        self._digests: dict[int, bytes] = {}
        self.outdated: dict[int, int] = {}
        self._clear_indexes()

    def _clear_indexes(self) -> None:
        self.tails: dict[tuple[int, int], list[int]] = {}
        self._indexes: dict[int, dict[int, int]] = {}
        self._number_of: dict[Hashable, int] = {}
        self._open()
        self.flushed()

    def _open(self) -> None:
        """Make `current` the index of the current variant. Numbers are not reused, since outdated blocks keep theirs."""
        if self.variant not in self._number_of:
            with_tails = {number for number, _ in self.tails}
            empty = {number for number, index in self._indexes.items() if not index} - with_tails
            for variant in [each for each, number in self._number_of.items() if number in empty]:
                del self._indexes[self._number_of.pop(variant)]
            self._number_of[self.variant] = self._last_number = self._last_number + 1
            self._indexes[self._last_number] = {}
        self.current = self._indexes[self._number_of[self.variant]]

    def findable(self, block: int) -> bool:
        """Whether a registered block is in an index of the current weights."""
        return self._number.item(block) in self._indexes

    def is_tail(self, block: int) -> bool:
        """Whether a registered block is partly filled."""
        return self._filled.item(block) > 0

    def described(self, block: int) -> tuple[Hashable, int, IntArray]:
        """Variant, hash and tokens of a complete findable block."""
        number = self._number.item(block)
        variant = next(each for each, known in self._number_of.items() if known == number)
        return variant, self._hash.item(block), self._tokens[block]

    def digest(self, block: int) -> bytes:
        """`chain_digest` of the chain up to a complete registered block."""
        chain: list[int] = []
        while block != NO_BLOCK and block not in self._digests:
            chain.append(block)
            block = self._parent.item(block)
        found = b"" if block == NO_BLOCK else self._digests[block]
        for each in reversed(chain):
            found = self._digests[each] = chain_digest(found, self._hash.item(each), self._tokens[each])
        return found

    def find(self, hashes: Sequence[int], tokens: IntArray) -> list[int]:
        """Blocks of the longest cached prefix of a chain of complete blocks, from the first block on.

        Args:
            hashes: the chain's block hashes.
            tokens: [len(hashes), block_size] int32.
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
        """Count the leading blocks of a chain that are cached but were computed by older weights."""
        self.refused += sum(1 for _ in takewhile(self.outdated.__contains__, hashes))

    def add(self, block: int, block_hash: int, parent: int, tokens: IntArray) -> int:
        """Register a block; returns the equal block that is registered already, or `block`, registered or not.

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
        self._describe(block, block_hash, parent, tokens)
        self.current[block_hash] = block
        if self.changes is not None:
            self.changes.add(block_hash)
        return block

    def find_tail(self, chain: int, parent: int, tokens: IntArray, *, whole: bool) -> tuple[int, int]:
        """Find the tail behind a chain of complete blocks that shares the most leading tokens with `tokens`.

        Args:
            chain: hash of the chain.
            parent: its last block, or `NO_BLOCK`.
            tokens: [n] int32, what follows the chain.
            whole: only a tail whose tokens are all among these.

        Returns:
            (block, leading tokens in common); (`NO_BLOCK`, 0) when nothing matches.
        """
        tails = np.asarray(self.tails.get((self._number_of[self.variant], chain), ()), np.int32)
        tails = tails[self._parent[tails] == parent]
        width = min(len(tokens), self._block_size)
        if not len(tails) or not width:
            return NO_BLOCK, 0
        equal = np.logical_and.accumulate(self._tokens[tails, :width] == tokens[:width], axis=1)
        common = np.minimum(equal.sum(axis=1), self._filled[tails])
        if whole:
            common[common < self._filled[tails]] = 0
        best = int(common.argmax())
        return (tails.item(best), common.item(best)) if common[best] else (NO_BLOCK, 0)

    def add_tail(self, block: int, chain: int, parent: int, tokens: IntArray) -> bool:
        """Register a partly filled block behind a chain. False if an equal block, or the block itself, is already
        registered."""
        if self.registered[block] or self.find_tail(chain, parent, tokens, whole=True)[1] == len(tokens):
            return False
        self._filled[block] = len(tokens)
        number = self._describe(block, chain, parent, tokens)
        self.tails.setdefault((number, chain), []).append(block)
        return True

    def _describe(self, block: int, block_hash: int, parent: int, tokens: IntArray) -> int:
        """Fill in the columns of a newly registered block; returns the number of the current index."""
        self.registered[block] = True
        self._digests.pop(block, None)
        self._hash[block], self._parent[block] = block_hash, parent
        self._tokens[block, : len(tokens)] = tokens
        number = self._number[block] = self._number_of[self.variant]
        return number

    def remove(self, block: int) -> None:
        """Unregister a block."""
        block_hash, number = self._hash.item(block), self._number.item(block)
        self._digests.pop(block, None)
        self.registered[block] = False
        if self._filled[block]:
            self._filled[block] = 0
            tails = self.tails.get((number, block_hash), [])
            if block in tails:
                tails.remove(block)
                if not tails:
                    del self.tails[number, block_hash]
            return
        index = self._indexes.get(number, {})
        if index.get(block_hash) == block:
            del index[block_hash]
            if self.changes is not None and index is self.current:
                self.changes.remove(block_hash)
        if self.outdated.get(block_hash) == block:
            del self.outdated[block_hash]

    def behind(self, block: int) -> list[int]:
        """Blocks registered behind `block`, each after its parent."""
        found = [block]
        for each in found:
            found += np.flatnonzero(self.registered & (self._parent == each)).tolist()
        return found[1:]

    def outdate(self) -> None:
        """Invalidate everything registered so far, after a weight update."""
        for index in self._indexes.values():
            self.outdated.update(index)
        self._clear_indexes()

    def switch(self, variant: Hashable) -> None:
        """Switch lookups to the index of `variant`."""
        self.variant = variant
        self._open()
        self.flushed()
        if self.changes is not None:
            for block_hash in self.current:
                self.changes.add(block_hash)

    def flushed(self) -> None:
        """Record that `current` was emptied or replaced."""
        if self.changes is not None:
            self.changes.flush()
