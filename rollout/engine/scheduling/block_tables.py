"""Block tables: the blocks of each sequence, and which of them are shared.

This module connects the allocator with the sequence table, in which each active sequence owns a *row*. Blocks are reserved
before they are written. A shared block is copied before it is written. A complete block is registered for sharing only if a
new request would now compute equal KV.

In a model with recurrent states, a row also holds a state slot, and a cached prefix can be continued only from a snapshot of
the state. A snapshot is kept at the last block boundary inside a prompt, and at the last boundary that a completion passed.
"""

from __future__ import annotations

import numpy as np

from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.blocks.index import NO_BLOCK
from rollout.engine.blocks.states import NO_SLOT
from rollout.engine.scheduling.sequences import IntArray, Sequence, SequenceTable
from rollout.requests.block_hash import chain_block_hashes, chain_root


class BlockTables:
    """Reserves, shares, registers and releases the blocks of the active sequences."""

    def __init__(self, allocator: BlockAllocator, table: SequenceTable) -> None:
        self.allocator = allocator
        self.table = table
        self.pages = allocator.pages
        self.states = allocator.states
        self._leading: IntArray = np.arange(table.block_size, dtype=np.int32)

    # --- room to write ------------------------------------------------------------------------------------------

    def need_block(self, rows: IntArray) -> IntArray:
        """Return the rows among `rows` whose next position needs a new block, or a private copy of a shared block."""
        table = self.table
        index = table.computed[rows] // table.block_size
        missing = index >= table.num_blocks[rows]
        shared = ~missing
        shared[shared] = ~self.allocator.writable(table.blocks[rows[shared], index[shared]])
        return rows[missing | shared]

    def reserve(self, row: int, count: int) -> bool:
        """Reserve blocks for a row's next `count` positions. If the first of these blocks is shared, replace it by a copy.

        Return False and reserve nothing if too few blocks are free or evictable.
        """
        table = self.table
        start = int(table.computed[row])
        have = int(table.num_blocks[row])
        fresh = max(0, -(-(start + count) // table.block_size) - have)
        index = start // table.block_size
        copy = index < have and not self.allocator.writable(table.blocks[row, index : index + 1])[0]
        if not self.allocator.can_allocate(fresh + copy):
            return False
        blocks = self.allocator.allocate(fresh + copy)
        if copy:
            source, target = int(table.blocks[row, index]), blocks.pop()
            self.allocator.copies.append((self.pages.page_of.item(source), self.pages.page_of.item(target)))
            table.blocks[row, index] = target
            self.allocator.release(np.asarray([source], np.int32))
        table.blocks[row, have : have + fresh] = blocks
        table.num_blocks[row] = have + fresh
        return True

    def release_reserved(self, rows: IntArray) -> None:
        """Release the reserved blocks of each row that lie beyond the block containing the row's next position."""
        table = self.table
        needed = table.computed[rows] // table.block_size + 1
        for at in np.flatnonzero(table.num_blocks[rows] > needed).tolist():
            row, first = rows.item(at), needed.item(at)
            unused = table.blocks[row, first : table.num_blocks.item(row)].copy()
            self.allocator.release(unused)
            table.num_blocks[row] = first

    def release(self, row: int) -> None:
        """Release all blocks of a row, and its slot for recurrent states."""
        table = self.table
        self.states.release(table.state.item(row))
        table.state[row] = NO_SLOT
        self.allocator.release(table.held(row))
        table.num_blocks[row] = 0

    def share(self, source: Sequence, target: Sequence) -> None:
        """Let `target` share all KV that `source` has computed, and give it a copy of `source`'s recurrent state."""
        self.allocator.acquire(self.table.held(source.row))
        self.table.fork(source, target)
        self.table.state[target.row] = self.states.allocate(self.table.state.item(source.row))

    def memory(self, row: int) -> IntArray:
        """Return the ids of the pages that hold a row's blocks."""
        return self.pages.of_blocks(self.table.held(row))

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the page copies to make before the next forward pass (`BlockAllocator.copies`), and clear the list."""
        copies = tuple(self.allocator.copies)
        self.allocator.copies.clear()
        return copies

    # --- cached prefixes ----------------------------------------------------------------------------------------

    def attach_prefix(self, sequence: Sequence, hashes: list[int], budget: int, headroom: int) -> bool:
        """Attach a prompt's longest cached prefix to the sequence's empty row, and reserve blocks for its first chunk.

        In a model with recurrent states, the prefix stops at a snapshot of the state, and the row's state slot starts as a
        copy of this snapshot. Return False and change nothing if there is too little room.

        Args:
            sequence: the owner of the row.
            hashes: hashes of the prompt blocks that may be looked up.
            budget: maximum number of positions in the first chunk.
            headroom: number of blocks that must stay free or evictable after the reservation.
        """
        table, allocator, row, size = self.table, self.allocator, sequence.row, self.table.block_size
        found: list[int] = []
        if hashes and allocator.enable_prefix_caching:
            found = allocator.index.find(hashes, sequence.tokens[: len(hashes) * size].reshape(-1, size))
            allocator.acquire(np.asarray(found, np.int32))
        if not self._load(sequence, hashes, found, budget, headroom):
            allocator.release(np.asarray(found, np.int32))
            table.num_blocks[row] = 0
            return False
        count = self.states.deepest(found, (len(sequence.tokens) - 1) // size)
        allocator.release(np.asarray(found[count:], np.int32))
        found = found[:count]
        table.blocks[row, :count] = found
        table.num_blocks[row] = table.chained[row] = count
        table.chain[row] = hashes[count - 1] if count else chain_root(sequence.request.sampling_params.prefix_share)
        # Compute at least the last token, even if it is cached: its logits are needed.
        start = table.computed[row] = min(count * size, len(sequence.tokens) - 1)
        count = sequence.images.fitting(start, min(budget, len(sequence.tokens) - start))
        need = -(-(start + count) // size) - len(found)
        if count and allocator.can_allocate(need + headroom) and self.reserve(row, count):
            allocator.index.count_refused(hashes[len(found) :])
            table.state[row] = self.states.allocate_at(found)
            return True
        allocator.release(np.asarray(found, np.int32))
        table.num_blocks[row] = 0
        return False

    def _load(self, sequence: Sequence, hashes: list[int], found: list[int], budget: int, headroom: int) -> bool:
        """Load the prompt's blocks that follow the cached blocks `found` from host memory, and append them to `found`.

        Each loaded block has one reference. Return False and load nothing if there is too little room.
        """
        host, index, size = self.allocator.host, self.allocator.index, self.table.block_size
        if not host.num_slots or not self.allocator.enable_prefix_caching:
            return True
        blocks = host.find(index, found, hashes, sequence.tokens[: len(hashes) * size].reshape(-1, size))
        if not blocks:
            return True
        start = min((len(found) + len(blocks)) * size, len(sequence.tokens) - 1)
        count = sequence.images.fitting(start, min(budget, len(sequence.tokens) - start))
        need = -(-(start + count) // size) - len(found)
        if not self.allocator.can_allocate(need + headroom):
            return False
        found += self.allocator.load(blocks, found[-1] if found else NO_BLOCK)
        return True

    def unregistered(self, sequence: Sequence) -> list[int]:
        """Return the hashes of an active sequence's prompt blocks that will enter the prefix cache once computed."""
        row = sequence.row
        if not self.allocator.enable_prefix_caching or not self.table.current[row]:
            return []
        return sequence.hashes[int(self.table.chained[row]) :]

    def next_block(self, sequence: Sequence) -> int | None:
        """Return the hash of the first prompt block that a waiting sequence would have to compute itself.

        Return None if all blocks are cached, or if the sequence must not wait for blocks that other sequences compute.
        """
        if sequence.wants_prompt_logprobs or self.states.num_slots:
            return None
        return next((each for each in sequence.hashes if not self.allocator.findable(each)), None)

    def register_prompt(self, sequence: Sequence) -> None:
        """Register the prompt blocks of a sequence whose KV is complete, so that new requests can share them."""
        table, row, size = self.table, sequence.row, self.table.block_size
        if not table.current[row]:
            return
        for index in range(int(table.chained[row]), min(int(table.computed[row]) // size, len(sequence.hashes))):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            if not self._register(row, index, sequence.hashes[index], tokens):
                return
        if table.computed[row] == self._boundary(sequence):
            self._keep_state(row)

    def register_decoded(self, rows: IntArray) -> None:
        """Register the blocks that a decode step has filled, at most one in each of `rows`."""
        table, size = self.table, self.table.block_size
        computed = table.computed[rows]
        index = computed // size - 1
        ready = (computed % size == 0) & (table.chained[rows] == index) & table.current[rows]
        if not ready.any() or not self.allocator.enable_prefix_caching:
            return
        rows, index = rows[ready], index[ready]
        tokens = table.tokens[rows[:, None], index[:, None] * size + self._leading]
        hashes = chain_block_hashes(table.chain[rows], tokens.astype(np.int64))
        for at, row in enumerate(rows.tolist()):
            if self._register(row, index.item(at), hashes.item(at), tokens[at]) and self.states.num_slots:
                # Drop the completion's previous snapshot: a completion keeps only its latest one.
                self.states.forget(table.trail.item(row))
                table.trail[row] = self._keep_state(row)

    # --- snapshots of recurrent states --------------------------------------------------------------------------

    def cut(self, sequence: Sequence, count: int) -> int:
        """Return the length of a sequence's next prompt chunk.

        It is `count`, or less if the chunk must stop at a block boundary so that the recurrent state there can be saved.
        """
        start, boundary = self.table.computed.item(sequence.row), self._boundary(sequence)
        pauses = sequence.pauses_for_snapshot and start < boundary < start + count
        return boundary - start if pauses else count

    def _boundary(self, sequence: Sequence) -> int:
        """Return the position of the last block boundary before a prompt's last token; 0 if no snapshots are kept."""
        # Exclude the last token, because every later request recomputes at least the last token of its prompt.
        if not self.states.num_slots or not self.allocator.enable_prefix_caching:
            return 0
        return (len(sequence.tokens) - 1) // self.table.block_size * self.table.block_size

    def _keep_state(self, row: int) -> int:
        """Keep a snapshot of a row's recurrent state at the end of its last registered block, if there is room.

        Return this block, or `NO_BLOCK` if the model has no recurrent states or the row is not at that position.
        """
        table = self.table
        count = table.chained.item(row)
        if not self.states.num_slots or not count or count * table.block_size != table.computed[row]:
            return NO_BLOCK
        block = table.blocks.item(row, count - 1)
        self.states.keep(block, table.state.item(row))
        return block

    def _register(self, row: int, index: int, block_hash: int, tokens: IntArray) -> bool:
        table = self.table
        block = int(table.blocks[row, index])
        parent = int(table.blocks[row, index - 1]) if index else NO_BLOCK
        if index and not self.allocator.index.registered[parent]:
            return False
        kept = self.allocator.register(block, block_hash, parent, tokens)
        if not self.allocator.index.registered[kept]:
            return False
        table.blocks[row, index] = kept
        table.chain[row] = block_hash
        table.chained[row] = index + 1
        return True
