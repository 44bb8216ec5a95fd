"""Host tier of the prefix cache: which evicted KV blocks of the present weights have a copy in host memory, and where.

A block that the device evicts goes to free slots of the host; the least recently offloaded one makes room. A prefix that
continues there is loaded into fresh blocks of the device, which frees its slots.

Always true: a slot is free, or belongs to one block. A block is found under the variant that computed
it, and only if its tokens and all tokens before it are equal.

Handles ids, no tensors. Copies are pairs in `BlockAllocator.copies`, where `~s` stands for slot s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from rollout.engine.blocks.index import IntArray, PrefixIndex, chain_digest

NOWHERE = -1


@dataclass(eq=False, slots=True)
class HostBlock:
    """Copy of one block."""

    variant: Hashable
    block_hash: int
    """Hash of the chain up to and including it; for a tail, of the chain before it."""
    before: bytes
    """Digest of the chain before it."""
    tokens: IntArray
    """[block_size] int32; fewer for a tail."""
    slots: tuple[int, ...]
    """One for each page of the block; `NOWHERE`: the device had given that page back."""

    def digest(self) -> bytes:
        """`chain_digest` of the chain up to a complete block."""
        return chain_digest(self.before, self.block_hash, self.tokens)


class HostCache:
    """Blocks in `num_slots` slots of host memory, `slot_bytes` each; without slots it holds nothing.

    Attributes:
        num_slots: number of slots, each for one page.
        offloaded, loaded, evicted: counters of blocks.
        hit_tokens: counter of the positions whose KV was loaded.
        unsettled: whether copies were planned for a step that has not ended well: they may not have been made.
    """

    def __init__(self, num_slots: int, block_size: int, slot_bytes: int = 0) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._block_size = block_size
        self.offloaded = self.loaded = self.evicted = self.hit_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forget every block."""
        self.unsettled = False
        self._free: list[int] = list(range(self.num_slots - 1, -1, -1))
        self._found: dict[tuple[Hashable, int, bool], list[HostBlock]] = {}
        self._lru: OrderedDict[HostBlock, None] = OrderedDict()

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Number of blocks held."""
        return len(self._lru)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots in use."""
        return (self.num_slots - len(self._free)) * self._slot_bytes

    def has(self, variant: Hashable, block_hash: int) -> bool:
        """Whether a complete block of this hash is held (its tokens may differ)."""
        return (variant, block_hash, True) in self._found

    def find(
        self, index: PrefixIndex, found: Sequence[int], hashes: Sequence[int], tokens: IntArray
    ) -> list[HostBlock]:
        """Complete blocks that continue the cached prefix `found` of a chain, up to the first that is not held.

        Args:
            found: blocks of the device, from the first of the chain on.
            hashes: of the whole chain.
            tokens: [len(hashes), block_size] int32.
        """
        blocks: list[HostBlock] = []
        start = len(found)
        if start == len(hashes) or not self.has(index.variant, hashes[start]):
            return blocks
        before = index.digest(found[-1]) if found else b""
        for block_hash, wanted in zip(hashes[start:], tokens[start:], strict=True):
            block = self._equal(index.variant, block_hash, before, wanted)
            # The device may have a block of these tokens whose parent it has lost.
            if block is None or block_hash in index.current:
                break
            blocks.append(block)
            before = block.digest()
        return blocks

    def find_tail(
        self, variant: Hashable, chain: int, before: bytes, tokens: IntArray, *, whole: bool
    ) -> tuple[HostBlock | None, int]:
        """Find a tail, like `PrefixIndex.find_tail`, among the tails here: (tail, leading tokens in common)."""
        best, most = None, 0
        for tail in self._found.get((variant, chain, False), ()):
            width = min(len(tail.tokens), len(tokens))
            common = int(np.logical_and.accumulate(tail.tokens[:width] == tokens[:width]).sum())
            if tail.before == before and common > most and (common == len(tail.tokens) or not whole):
                best, most = tail, common
        return best, most

    # --- blocks come and go -------------------------------------------------------------------------------------

    def offload(self, index: PrefixIndex, block: int, memory: Sequence[int]) -> list[tuple[int, int]]:
        """Keep a block of the present weights that the device evicts, in place of those offloaded longest ago.

        Args:
            memory: its pages; negative: the block has none there.

        Returns:
            The copies to make, (page, `~slot`); empty if an equal block is held, or it does not fit.
        """
        variant, block_hash, parent, tokens = index.described(block)
        before = b"" if parent < 0 else index.digest(parent)
        known = self._equal(variant, block_hash, before, tokens)
        if known is not None:
            self._lru.move_to_end(known)
            return []
        kept = [place for place in memory if place >= 0]
        if len(kept) > self.num_slots or (len(tokens) == self._block_size and self.has(variant, block_hash)):
            return []
        while len(self._free) < len(kept):
            if not self._lru:
                # The others are being loaded.
                return []
            self.evicted += 1
            oldest = next(iter(self._lru))
            self._remove(oldest)
            self._free += [slot for slot in oldest.slots if slot != NOWHERE]
        slots = tuple(self._free.pop() if place >= 0 else NOWHERE for place in memory)
        made = HostBlock(variant, block_hash, before, tokens.copy(), slots)
        self._found.setdefault(self._key(variant, block_hash, tokens), []).append(made)
        self._lru[made] = None
        self.offloaded += 1
        self.unsettled = True
        return [(place, ~slot) for place, slot in zip(memory, slots, strict=True) if place >= 0]

    def take(self, blocks: Sequence[HostBlock]) -> None:
        """Remove blocks from lookups; their slots stay in use until `release`."""
        for block in blocks:
            self._remove(block)

    def release(self, block: HostBlock) -> None:
        """Free the slots of a block that was taken and whose copy back precedes any to the same slots."""
        self._free += [slot for slot in block.slots if slot != NOWHERE]
        self.loaded += 1
        self.hit_tokens += len(block.tokens)
        self.unsettled = True

    def _key(self, variant: Hashable, block_hash: int, tokens: IntArray) -> tuple[Hashable, int, bool]:
        return variant, block_hash, len(tokens) == self._block_size

    def _equal(self, variant: Hashable, block_hash: int, before: bytes, tokens: IntArray) -> HostBlock | None:
        candidates = self._found.get(self._key(variant, block_hash, tokens), ())
        return next(
            (each for each in candidates if each.before == before and np.array_equal(each.tokens, tokens)), None
        )

    def _remove(self, block: HostBlock) -> None:
        key = self._key(block.variant, block.block_hash, block.tokens)
        del self._lru[block]
        self._found[key].remove(block)
        if not self._found[key]:
            del self._found[key]
