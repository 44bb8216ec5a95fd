"""Block tables: which sequence holds which blocks, and which of them are shared.

Joins the sequence table (rows, block tables) with the allocator (reference counts, prefix cache): blocks are reserved before
they are written, a shared block is copied before it is written, and complete blocks are registered only when all KV
before them is what a new request would compute now. Scheduling decisions are made elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rollout.engine.scheduling.block_allocator import NO_BLOCK, BlockAllocator
from rollout.engine.scheduling.sequences import IntArray, Sequence, SequenceTable
from rollout.requests.block_hash import chain_block_hashes


class BlockTables:
    """Blocks of the active sequences.

    Attributes:
        copies: slot → (source, destination) blocks to copy before the next forward, in this order.
        poisoned: free blocks that may hold NaN, to be zeroed before the next forward.
    """

    def __init__(self, allocator: BlockAllocator, table: SequenceTable) -> None:
        self.allocator = allocator
        self.table = table
        self.copies: dict[int, tuple[int, int]] = {}
        self.poisoned: list[int] = []
        self._leading: IntArray = np.arange(table.block_size, dtype=np.int32)

    # --- room to write ------------------------------------------------------------------------------------------

    def need_block(self, slots: IntArray) -> IntArray:
        """Those of `slots` that need a new or unshared block for their next position."""
        table = self.table
        index = table.computed[slots] // table.block_size
        missing = index >= table.num_blocks[slots]
        shared = ~missing
        shared[shared] = ~self.allocator.writable(table.blocks[slots[shared], index[shared]])
        return slots[missing | shared]

    def reserve(self, slot: int, count: int) -> bool:
        """Reserve blocks for the next `count` positions, copying a shared first block; False if too few are free."""
        table = self.table
        start = int(table.computed[slot])
        have = int(table.num_blocks[slot])
        fresh = max(0, -(-(start + count) // table.block_size) - have)
        index = start // table.block_size
        copy = index < have and not self.allocator.writable(table.blocks[slot, index : index + 1])[0]
        if not self.allocator.can_allocate(fresh + copy):
            return False
        blocks = self.allocator.allocate(fresh + copy)
        if copy:
            source, target = int(table.blocks[slot, index]), blocks.pop()
            self.copies[slot] = (source, target)
            table.blocks[slot, index] = target
            self.allocator.release(np.asarray([source], np.int32))
        table.blocks[slot, have : have + fresh] = blocks
        table.num_blocks[slot] = have + fresh
        return True

    def release(self, slot: int) -> None:
        """Release all blocks of a row."""
        self.copies.pop(slot, None)
        self.allocator.release(self.table.held(slot))
        self.table.num_blocks[slot] = 0

    def share(self, source: Sequence, target: Sequence) -> None:
        """Start `target` with all KV that `source` has computed."""
        self.allocator.acquire(self.table.held(source.slot))
        self.table.fork(source, target)

    def poison(self, blocks: IntArray) -> None:
        """Mark the free ones of these blocks as possibly holding NaN."""
        self.poisoned += blocks[(self.allocator.ref_count[blocks] == 0) & ~self.allocator.registered[blocks]].tolist()

    def remap(self, slots: Iterable[int], mapping: IntArray) -> None:
        """Rewrite the block tables for new block ids."""
        for slot in slots:
            held = self.table.held(slot)
            held[:] = mapping[held]

    # --- cached prefixes ----------------------------------------------------------------------------------------

    def attach_prefix(self, sequence: Sequence, hashes: list[int], budget: int, headroom: int) -> bool:
        """Attach the longest cached prefix to an empty row and reserve its first chunk; False, changing nothing, if no room.

        Args:
            hashes: of the prompt's blocks that may be looked up.
            budget: most positions of the first chunk.
            headroom: blocks that must stay free or evictable.
        """
        table, slot, size = self.table, sequence.slot, self.table.block_size
        found: list[int] = []
        if hashes and self.allocator.enable_prefix_caching:
            found = self.allocator.match(hashes, sequence.tokens[: len(hashes) * size].reshape(-1, size))
        table.blocks[slot, : len(found)] = found
        table.num_blocks[slot] = table.chained[slot] = len(found)
        table.chain[slot] = hashes[len(found) - 1] if found else 0
        # The last token is always computed: its logits are needed.
        table.computed[slot] = min(len(found) * size, len(sequence.tokens) - 1)
        count = min(budget, len(sequence.tokens) - int(table.computed[slot]))
        spare = self.allocator.num_free + self.allocator.num_cached
        need = -(-(int(table.computed[slot]) + count) // size) - len(found)
        if spare >= need + headroom and self.reserve(slot, count):
            self.allocator.count_refused(hashes[len(found) :])
            return True
        self.allocator.release(np.asarray(found, np.int32))
        table.num_blocks[slot] = 0
        return False

    def unregistered(self, sequence: Sequence) -> list[int]:
        """Hashes of the prompt blocks that an active sequence will register."""
        slot = sequence.slot
        if not self.allocator.enable_prefix_caching or not self.table.current[slot]:
            return []
        return sequence.hashes[int(self.table.chained[slot]) :]

    def next_block(self, sequence: Sequence) -> int | None:
        """Hash of the first prompt block that a waiting sequence would have to compute itself."""
        if sequence.wants_prompt_logprobs:
            return None
        return next((each for each in sequence.hashes if not self.allocator.findable(each)), None)

    def register_prompt(self, sequence: Sequence) -> None:
        """Register the prompt blocks computed so far."""
        table, slot, size = self.table, sequence.slot, self.table.block_size
        if not table.current[slot]:
            return
        for index in range(int(table.chained[slot]), min(int(table.computed[slot]) // size, len(sequence.hashes))):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            if not self._register(slot, index, sequence.hashes[index], tokens):
                return

    def register_decoded(self, slots: IntArray) -> None:
        """Register the blocks that a decode step has completed."""
        table, size = self.table, self.table.block_size
        computed = table.computed[slots]
        index = computed // size - 1
        ready = (computed % size == 0) & (table.chained[slots] == index) & table.current[slots]
        if not ready.any() or not self.allocator.enable_prefix_caching:
            return
        slots, index = slots[ready], index[ready]
        tokens = table.tokens[slots[:, None], index[:, None] * size + self._leading]
        hashes = chain_block_hashes(table.chain[slots], tokens.astype(np.int64))
        for row in range(len(slots)):
            self._register(int(slots[row]), int(index[row]), int(hashes[row]), tokens[row])

    def _register(self, slot: int, index: int, block_hash: int, tokens: IntArray) -> bool:
        table = self.table
        block = int(table.blocks[slot, index])
        parent = int(table.blocks[slot, index - 1]) if index else NO_BLOCK
        kept = self.allocator.register(block, block_hash, parent, tokens)
        if not self.allocator.registered[kept]:
            return False
        table.blocks[slot, index] = kept
        table.chain[slot] = block_hash
        table.chained[slot] = index + 1
        return True
