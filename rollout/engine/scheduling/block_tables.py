"""Block tables: which sequence holds which blocks, and which of them are shared.

Joins the sequence table (rows, block tables) with the allocator (reference counts, prefix cache): blocks are reserved before
they are written, a shared block is copied before it is written, and complete blocks are registered only when all KV
before them is what a new request would compute now. Scheduling decisions are made elsewhere.

Of a model with recurrent states a row also holds a state slot, and a cached prefix can be taken up only where a snapshot of
the state was kept: at the last block boundary inside a prompt, and at the last one that a completion has passed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np

from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.blocks.host_loading import load
from rollout.engine.blocks.index import NO_BLOCK
from rollout.engine.blocks.states import NO_SLOT
from rollout.engine.scheduling.sequences import IntArray, Sequence, SequenceTable
from rollout.requests.block_hash import chain_block_hashes, chain_root


class BlockTables:
    """Blocks of the active sequences.

    Attributes:
        states: slots of the recurrent states; None: the model has none.
        poisoned: free blocks, or pages, that may hold NaN, to be zeroed before the next forward.
        window: positions, its own included, that a query sees in any layer; None: all.
        pages: memory of the blocks, of a model that has layers with a window beside others; None: it has not.
    """

    def __init__(self, allocator: BlockAllocator, table: SequenceTable) -> None:
        self.window: int | None = None
        self.allocator = allocator
        self.table = table
        self.pages = allocator.pages
        self.poisoned: list[int] = [] if self.pages is None else self.pages.unverified
        self.states = allocator.states
        self._leading: IntArray = np.arange(table.block_size, dtype=np.int32)

    # --- room to write ------------------------------------------------------------------------------------------

    def need_block(self, rows: IntArray) -> IntArray:
        """Those of `rows` that need a new or unshared block for their next position."""
        table = self.table
        index = table.computed[rows] // table.block_size
        missing = index >= table.num_blocks[rows]
        shared = ~missing
        shared[shared] = ~self.allocator.writable(table.blocks[rows[shared], index[shared]])
        return rows[missing | shared]

    def reserve(self, row: int, count: int) -> bool:
        """Reserve blocks for the next `count` positions, copying a shared first block; False if too few are free."""
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
            self.allocator.copies += [(source, target)] if self.pages is None else self.pages.pairs(source, target)
            table.blocks[row, index] = target
            # Or it would be zeroed before it is copied.
            self.allocator.unview(np.asarray([source], np.int32), verified=True)
            self.allocator.release(np.asarray([source], np.int32))
        table.blocks[row, have : have + fresh] = blocks
        table.num_blocks[row] = have + fresh
        return True

    def release_reserved(self, rows: IntArray) -> None:
        """Release the blocks of these rows behind the one that their next position goes to."""
        table = self.table
        needed = table.computed[rows] // table.block_size + 1
        for at in np.flatnonzero(table.num_blocks[rows] > needed).tolist():
            row, first = rows.item(at), needed.item(at)
            unused = table.blocks[row, first : table.num_blocks.item(row)].copy()
            self.allocator.unview(unused, verified=False)
            self.allocator.release(unused)
            table.num_blocks[row] = first

    def release(self, row: int) -> None:
        """Release all blocks of a row, and its state."""
        if self.states is not None and self.table.state[row] != NO_SLOT:
            self.states.release(self.table.state.item(row))
            self.table.state[row] = NO_SLOT
        table = self.table
        self.allocator.unview(table.seen(row), verified=bool(table.computed[row] >= table.prompt_length[row]))
        self.allocator.release(table.held(row))
        table.num_blocks[row] = table.released[row] = table.seen_from[row] = 0

    def release_unseen(self, decoding: IntArray, prefilling: IntArray) -> int:
        """Release what no later query of these rows sees; returns of how many blocks.

        Where every layer has a window, these are the leading blocks, and of decoding rows only: their KV has made finite
        logits, so that what is given back holds no NaN. Where some have, it is the KV of those layers.
        """
        if self.pages is None:
            return self._release_leading(decoding)
        return self._unview_leading(decoding, verified=True) + self._unview_leading(prefilling, verified=False)

    def _unview_leading(self, rows: IntArray, *, verified: bool) -> int:
        table, pages = self.table, self.pages
        if pages is None or not len(rows):
            return 0
        first, before = pages.shape.first_seen(table.computed[rows], table.block_size), table.seen_from[rows]
        behind = np.flatnonzero(first > before)
        for at in behind.tolist():
            row, begin, end = rows.item(at), before.item(at), first.item(at)
            self.allocator.unview(table.blocks[row, begin:end].copy(), verified=verified)
            table.seen_from[row] = end
        return int((first - before)[behind].sum())

    def _release_leading(self, rows: IntArray) -> int:
        table, size = self.table, self.table.block_size
        if self.window is None or not len(rows):
            return 0
        computed = table.computed[rows]
        # Two whole blocks stay: the newest may have to be registered, and names its parent.
        unseen = np.minimum((computed - self.window + 1) // size, computed // size - 2)
        behind = unseen > table.released[rows]
        before = int(table.released[rows[behind]].sum())
        for row, count in zip(rows[behind].tolist(), unseen[behind].tolist(), strict=True):
            self.allocator.release(table.give_back(row, count))
        return int(unseen[behind].sum()) - before

    def share(self, source: Sequence, target: Sequence) -> None:
        """Start `target` with all KV, and a copy of the state, that `source` has computed."""
        self.allocator.acquire(self.table.held(source.row))
        if self.pages is not None:
            self.pages.view(self.table.seen(source.row))
        self.table.fork(source, target)
        if self.states is not None:
            self.table.state[target.row] = self.states.allocate(self.table.state.item(source.row))

    def memory(self, row: int) -> IntArray:
        """Ids of the blocks that a row holds, or of their pages."""
        held = self.table.held(row).copy()
        return held if self.pages is None else self.pages.of_blocks(held)

    def poison(self, memory: IntArray) -> None:
        """Mark the free ones of these blocks, or pages, as possibly holding NaN."""
        if self.pages is not None:
            self.poisoned += memory[self.pages.free(memory)].tolist()
            return
        self.poisoned += memory[
            (self.allocator.ref_count[memory] == 0) & ~self.allocator.index.registered[memory]
        ].tolist()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies that precede the next forward (`BlockAllocator.copies`); they are forgotten here."""
        copies = tuple(self.allocator.copies)
        self.allocator.copies.clear()
        if copies and self.poisoned:
            # What is copied is sound, and what takes its place in this step has not been written yet.
            sources = {source for source, _ in copies}
            self.poisoned[:] = [each for each in self.poisoned if each not in sources]
        return copies

    def remap(self, rows: Iterable[int], mapping: IntArray) -> None:
        """Rewrite the block tables for new block ids."""
        for row in rows:
            held = self.table.held(row)
            held[:] = mapping[held]
            released = self.table.released.item(row)
            self.table.blocks[row, :released] = self.table.blocks[row, released]
            if self.table.trail[row] != NO_BLOCK:
                self.table.trail[row] = mapping[self.table.trail[row]]

    # --- cached prefixes ----------------------------------------------------------------------------------------

    @property
    def has_tails(self) -> bool:
        """Whether a lookup may find a partly filled block."""
        host = self.allocator.host
        return self.allocator.index.has_tails or (host is not None and host.has_tails)

    def attach_prefix(
        self,
        sequence: Sequence,
        hashes: list[int],
        budget: int,
        headroom: int,
        *,
        tails: bool = False,
        host: bool = True,
    ) -> bool:
        """Attach the longest cached prefix to an empty row and reserve its first chunk; False, changing nothing, if no room.

        With recurrent states the prefix ends at a snapshot of the state, of which the row gets a copy.

        Args:
            hashes: of the prompt's blocks that may be looked up.
            budget: most positions of the first chunk.
            headroom: blocks that must stay free or evictable.
            tails: whether a copy of an ended sequence's partly filled last block may be the end of the prefix, which takes a
                block more while it is copied.
            host: whether what the host has of the prefix is loaded.
        """
        table, row, size = self.table, sequence.row, self.table.block_size
        found: list[int] = []
        if hashes and self.allocator.enable_prefix_caching:
            found = self.allocator.match(hashes, sequence.tokens[: len(hashes) * size].reshape(-1, size))
        if host and not self._load(sequence, hashes, found, budget, headroom, tails=tails):
            self.allocator.release(np.asarray(found, np.int32))
            table.num_blocks[row] = 0
            return False
        tail, common = self._match_tail(sequence, hashes, found) if tails else (NO_BLOCK, 0)
        if not common:
            count = self._usable(found, len(sequence.tokens))
            self.allocator.release(np.asarray(found[count:], np.int32))
            found = found[:count]
        attached = [*found, tail] if common else found
        table.blocks[row, : len(attached)] = attached
        table.num_blocks[row], table.chained[row] = len(attached), len(found)
        table.chain[row] = self._behind(sequence, hashes, len(found))[0]
        # The last token is always computed: its logits are needed.
        table.computed[row] = min(len(found) * size + common, len(sequence.tokens) - 1)
        start = int(table.computed[row])
        if self.pages is not None:
            table.seen_from[row] = self.pages.shape.first_seen(table.computed[row], size)
            self.pages.view(table.seen(row))
        count = sequence.fitting(start, min(budget, len(sequence.tokens) - start))
        need = -(-(start + count) // size) - len(found)
        if count and self.allocator.can_allocate(need + headroom) and self.reserve(row, count):
            self.allocator.count_refused(hashes[len(found) :])
            if self.states is not None:
                table.state[row] = self.states.allocate_at(attached[-1]) if attached else self.states.allocate()
            if common:
                # It has been copied. Branches come at about the same time; later ones are rare.
                self.allocator.evict_next(tail)
            return True
        self.allocator.unview(table.seen(row), verified=True)
        self.allocator.release(np.asarray(attached, np.int32))
        table.num_blocks[row] = table.seen_from[row] = 0
        return False

    def _load(
        self, sequence: Sequence, hashes: list[int], found: list[int], budget: int, headroom: int, *, tails: bool
    ) -> bool:
        """Load what the host has behind the cached blocks `found` of a prompt; False, loading nothing, if no room.

        The complete blocks are pinned and added to `found`; a tail is cached after it.
        """
        host, index, size = self.allocator.host, self.allocator.index, self.table.block_size
        if host is None or not self.allocator.enable_prefix_caching:
            return True
        blocks = host.find(index, found, hashes, sequence.tokens[: len(hashes) * size].reshape(-1, size))
        whole, tail, common = len(found) + len(blocks), None, 0
        if tails and host.has_tails:
            before = blocks[-1].digest() if blocks else index.digest(found[-1]) if found else b""
            chain, tokens, entire = self._behind(sequence, hashes, whole)
            tail, common = host.find_tail(index.variant, chain, before, tokens, whole=entire)
            parent = found[-1] if found else NO_BLOCK
            if not blocks and common <= index.find_tail(chain, parent, tokens, whole=entire)[1]:
                tail, common = None, 0
        if not blocks and tail is None:
            return True
        start = min(whole * size + common, len(sequence.tokens) - 1)
        count = sequence.fitting(start, min(budget, len(sequence.tokens) - start))
        need = -(-(start + count) // size) - len(found) + (tail is not None)
        with self._in_view(found, start):
            if not self.allocator.can_allocate(need + headroom):
                return False
            loaded = load(self.allocator, blocks if tail is None else [*blocks, tail], found[-1] if found else NO_BLOCK)
        found += loaded[: len(blocks)]
        self.allocator.release(np.asarray(loaded[len(blocks) :], np.int32))
        return True

    @contextmanager
    def _in_view(self, found: list[int], position: int) -> Iterator[None]:
        """Keep what a query at `position` sees of the pinned blocks `found` in layers with a window."""
        if self.pages is None:
            yield
            return
        first = int(self.pages.shape.first_seen(np.asarray(position, np.int32), self.table.block_size))
        blocks = np.asarray(found[first:], np.int32)
        blocks = blocks[self.pages.complete(blocks)]
        self.pages.view(blocks)
        try:
            yield
        finally:
            self.allocator.unview(blocks, verified=True)

    def _behind(self, sequence: Sequence, hashes: list[int], count: int) -> tuple[int, IntArray, bool]:
        """For a tail behind the first `count` blocks of a prompt: their hash, tokens it may have, and if only as a whole."""
        start, size = count * self.table.block_size, self.table.block_size
        chain = hashes[count - 1] if count else chain_root(sequence.request.sampling_params.prefix_share)
        tokens = sequence.tokens[start : min(start + size, len(sequence.tokens) - 1, max(start, sequence.reusable))]
        # A state is that after all tokens, and a prefill begins at no image's middle.
        return chain, tokens, self.states is not None or sequence.images is not None

    def _usable(self, found: list[int], length: int) -> int:
        """How many of the leading blocks of a cached chain a prompt of `length` tokens can go on from."""
        size, count = self.table.block_size, len(found)
        while count:
            if self.states is not None:
                count = self.states.deepest(found[:count], (length - 1) // size)
            if self.pages is None or not count:
                break
            first = int(self.pages.shape.first_seen(np.minimum(count * size, length - 1), size))
            missing = np.flatnonzero(~self.pages.complete(np.asarray(found[first:count], np.int32)))
            if not len(missing):
                break
            # The chain may go on from before the last block that a window has passed and the pool has taken back.
            count = first + int(missing[-1])
        return count

    def _match_tail(self, sequence: Sequence, hashes: list[int], found: list[int]) -> tuple[int, int]:
        """The tail that a prompt continues behind its cached complete blocks, pinned, and how many of its tokens."""
        chain, tokens, whole = self._behind(sequence, hashes, len(found))
        parent, start = found[-1] if found else NO_BLOCK, len(found) * self.table.block_size
        tail, common = self.allocator.match_tail(chain, parent, tokens, whole=whole)
        if common and not self._tail_usable(found, tail, start + common):
            self.allocator.release(np.asarray([tail], np.int32))
            return NO_BLOCK, 0
        return tail, common

    def _tail_usable(self, found: list[int], tail: int, position: int) -> bool:
        """Whether all that a query at `position` needs is there: the state, and the KV that it sees."""
        if self.states is not None and not self.states.has(tail):
            return False
        if self.pages is None:
            return True
        first = int(self.pages.shape.first_seen(np.asarray(position, np.int32), self.table.block_size))
        return bool(self.pages.complete(np.asarray([*found, tail][first:], np.int32)).all())

    def register_tail(self, row: int) -> None:
        """Register the partly filled last block of a row that ends, all of whose KV has made finite logits."""
        table, size = self.table, self.table.block_size
        index, filled = divmod(table.computed.item(row), size)
        # Without a token of its own its logits were never looked at.
        if not filled or not table.current[row] or table.chained[row] != index:
            return
        if table.length[row] <= table.prompt_length[row]:
            return
        parent = table.blocks.item(row, index - 1) if index else NO_BLOCK
        if index and not self.allocator.index.registered[parent]:
            return
        block, chain = table.blocks.item(row, index), table.chain.item(row)
        tokens = table.tokens[row, index * size : index * size + filled]
        if not self.allocator.register_tail(block, chain, parent, tokens):
            return
        if self.states is not None:
            self.states.forget(table.trail.item(row))
            self.states.keep(block, table.state.item(row))

    def unregistered(self, sequence: Sequence) -> list[int]:
        """Hashes of the prompt blocks that an active sequence will register."""
        row = sequence.row
        if not self.allocator.enable_prefix_caching or not self.table.current[row]:
            return []
        return sequence.hashes[int(self.table.chained[row]) :]

    def next_block(self, sequence: Sequence) -> int | None:
        """Hash of the first prompt block that a waiting sequence would have to compute itself; None: it waits for none."""
        if sequence.wants_prompt_logprobs or self.states is not None:
            return None
        return next((each for each in sequence.hashes if not self.allocator.findable(each)), None)

    def register_prompt(self, sequence: Sequence) -> None:
        """Register the prompt blocks computed so far."""
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
        """Register the blocks that a decode step has completed."""
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
            if self._register(row, index.item(at), hashes.item(at), tokens[at]) and self.states is not None:
                # One snapshot per completion moves along with it.
                self.states.forget(table.trail.item(row))
                table.trail[row] = self._keep_state(row)

    # --- snapshots of recurrent states --------------------------------------------------------------------------

    def cut(self, sequence: Sequence, count: int) -> int:
        """Positions of a prompt chunk of at most `count`: it ends where a snapshot of the state is to be kept."""
        start, boundary = self.table.computed.item(sequence.row), self._boundary(sequence)
        pauses = sequence.pauses_for_snapshot and start < boundary < start + count
        return boundary - start if pauses else count

    def _boundary(self, sequence: Sequence) -> int:
        """The last block boundary before the last token of a prompt: a later request computes that token again."""
        if self.states is None or not self.allocator.enable_prefix_caching:
            return 0
        return (len(sequence.tokens) - 1) // self.table.block_size * self.table.block_size

    def _keep_state(self, row: int) -> int:
        """Keep the state at a block boundary that a row has just reached; returns the block, or `NO_BLOCK`."""
        table = self.table
        count = table.chained.item(row)
        if self.states is None or not count or count * table.block_size != table.computed[row]:
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
