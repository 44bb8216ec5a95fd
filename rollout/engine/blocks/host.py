"""Host tier of the prefix cache: maps evicted KV blocks of the current weights to their slots in host memory.

A block that the device evicts is copied to a free slot on the host. If no slot is free, it replaces the least recently
offloaded block. A prefix that continues on the host is loaded into new blocks of the device, which frees its slots.

Always true: a slot is free, or belongs to one block. A block is found only if its tokens and all tokens before it are equal.

Handles ids, no tensors. Copies are pairs in `BlockAllocator.copies`, where `~s` stands for slot s.
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
    """Hash of the chain up to and including this block."""
    digest: bytes
    """`chain_digest` of the same chain."""
    tokens: IntArray
    """[block_size] int32, the token ids of the block."""
    slot: int


class HostCache:
    """Blocks in `num_slots` slots of host memory, `slot_bytes` each; without slots it holds nothing.

    Attributes:
        blocks: hash → block, least recently offloaded first.
        offloaded, loaded, evicted: counters of blocks.
        hit_tokens: counter of the positions whose KV was loaded.
        unsettled: whether copies were planned for a step that has not completed: they may not have been made.
    """

    def __init__(self, num_slots: int, slot_bytes: int = 0) -> None:
        self.num_slots = num_slots
        self._slot_bytes = slot_bytes
        self.offloaded = self.loaded = self.evicted = self.hit_tokens = 0
        self.clear()

    def clear(self) -> None:
        """Forget every block on the host."""
        self.unsettled = False
        self._free: list[int] = list(range(self.num_slots - 1, -1, -1))
        self.blocks: OrderedDict[int, HostBlock] = OrderedDict()

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """The number of blocks held."""
        return len(self.blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots in use."""
        return (self.num_slots - len(self._free)) * self._slot_bytes

    def find(
        self, index: PrefixIndex, found: Sequence[int], hashes: Sequence[int], tokens: IntArray
    ) -> list[HostBlock]:
        """Return the blocks that continue the cached prefix `found` of a chain, up to the first missing one.

        Args:
            found: the leading blocks of the chain that are on the device.
            hashes: hashes of the whole chain.
            tokens: [len(hashes), block_size] int32.
        """
        blocks: list[HostBlock] = []
        start = len(found)
        if start == len(hashes) or hashes[start] not in self.blocks:
            return blocks
        digest = index.digest(found[-1]) if found else b""
        for block_hash, wanted in zip(hashes[start:], tokens[start:], strict=True):
            block, digest = self.blocks.get(block_hash), chain_digest(digest, block_hash, wanted)
            # Stop at a block whose hash the device already has: its parent there may be missing, so the device's own
            # lookup did not find it.
            if block is None or block.digest != digest or block_hash in index.current:
                break
            blocks.append(block)
        return blocks

    # --- adding and removing blocks -----------------------------------------------------------------------------

    def offload(self, index: PrefixIndex, block: int) -> int | None:
        """Keep a registered block that the device evicts, in place of the least recently offloaded one.

        Returns:
            The slot to copy it to; None: a block with its hash is already there, or all slots are being loaded.
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
        """Remove blocks from lookups; their slots stay in use until `release`."""
        for block in blocks:
            del self.blocks[block.block_hash]

    def release(self, block: HostBlock) -> None:
        """Free the slot of a removed block. Its copy to the device comes before any new copy to the same slot."""
        self._free.append(block.slot)
        self.loaded += 1
        self.hit_tokens += len(block.tokens)
        self.unsettled = True
