"""The host-memory part of the prefix cache: maps evicted KV blocks of the current weights to slots in host memory.

A block that is evicted from the device is copied to a free host slot. If no slot is free, it replaces the least recently
offloaded block. If a request's prefix continues in host memory, the blocks found there are loaded into new device blocks.
Their slots are then freed.

Always true: a slot is either free or belongs to one block. A lookup finds a block only if its tokens and all tokens before
it are equal.

This module handles ids, no tensors. Copies are recorded as pairs in `BlockAllocator.copies`, where `~s` means slot s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.engine.blocks.index import IntArray, PrefixIndex, chain_digest


@dataclass(eq=False, slots=True)
class HostBlock:
    """A copy of one KV block in host memory."""

    block_hash: int
    """The hash of this block and all blocks before it in its prefix."""
    digest: bytes
    """The `chain_digest` of this block and all blocks before it in its prefix."""
    tokens: IntArray
    """[block_size] int32, the token ids of the block."""
    slot: int
    """The slot of host memory that holds the copy."""


class HostCache:
    """The evicted blocks in host memory, which has `num_slots` slots of `slot_bytes` bytes. Without slots, it stays empty.

    Attributes:
        blocks: the blocks by hash, least recently offloaded first.
        offloaded, loaded, evicted: the numbers of blocks copied to the host, loaded back, and replaced by other blocks.
        hit_tokens: the number of positions whose KV was loaded.
        unsettled: whether copies are planned for a step that has not completed, so that they may not have been made yet.
    """

    def __init__(self, num_slots: int, slot_bytes: int = 0) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        self.offloaded = self.loaded = self.evicted = self.hit_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Drop every block on the host."""
        self.unsettled = False
        self._free: list[int] = list(range(self.num_slots - 1, -1, -1))
        self.blocks: OrderedDict[int, HostBlock] = OrderedDict()

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """The number of blocks in host memory."""
        return len(self.blocks)

    @property
    def num_bytes(self) -> int:
        """The size of the slots in use, in bytes."""
        return (self.num_slots - len(self._free)) * self._slot_bytes

    def find(
        self, index: PrefixIndex, found: Sequence[int], hashes: Sequence[int], tokens: IntArray
    ) -> list[HostBlock]:
        """Return the blocks that continue the cached prefix `found` of a chain, up to the first missing one.

        Args:
            found: the leading blocks of the chain that are on the device.
            index: the prefix index of the blocks on the device.
            hashes: the block hashes of the whole chain.
            tokens: [len(hashes), block_size] int32, the token ids of the whole chain.
        """
        blocks: list[HostBlock] = []
        start = len(found)
        if start == len(hashes) or hashes[start] not in self.blocks:
            return blocks
        digest = index.digest(found[-1]) if found else b""
        for block_hash, wanted in zip(hashes[start:], tokens[start:], strict=True):
            block, digest = self.blocks.get(block_hash), chain_digest(digest, block_hash, wanted)
            # Stop at a hash that is already registered on the device, because a hash cannot be registered twice. The
            # lookup on the device may have missed that block because its parent is missing.
            if block is None or block.digest != digest or block_hash in index.current:
                break
            blocks.append(block)
        return blocks

    # --- adding and removing blocks -----------------------------------------------------------------------------

    def offload(self, index: PrefixIndex, block: int) -> int | None:
        """Reserve a slot for a registered block that the device evicts. If none is free, drop the oldest offloaded block.

        Returns:
            The slot to copy the block to. None if a block with the same hash is already on the host, or if all slots are
            being loaded to the device.
        """
        block_hash, tokens = index.described(block)
        digest, known = index.digest(block), self.blocks.get(block_hash)
        if known is not None:
            if known.digest == digest:
                self.blocks.move_to_end(block_hash)
            return None
        if not self._free:
            if not self.blocks:
                return None
            self.evicted += 1
            self._free.append(self.blocks.popitem(last=False)[1].slot)
        slot = self._free.pop()
        self.blocks[block_hash] = HostBlock(block_hash, digest, tokens.copy(), slot)
        self.offloaded += 1
        self.unsettled = True
        return slot

    def take(self, blocks: Sequence[HostBlock]) -> None:
        """Remove blocks from the cache, so that lookups no longer find them. Their slots stay in use until `release`."""
        for block in blocks:
            del self.blocks[block.block_hash]

    def release(self, block: HostBlock) -> None:
        """Free the slot of a block that `take` removed. Call this once the slot's copy to the device has been planned."""
        self._free.append(block.slot)
        self.loaded += 1
        self.hit_tokens += len(block.tokens)
        self.unsettled = True
