"""Chooses the work of a step: decodes, then prefill chunks, then admissions, within the token budget and free blocks."""

from __future__ import annotations

import numpy as np

from rollout.config import InferenceConfig
from rollout.engine.scheduling.preemption import Preemption
from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import Sequence, insert, rank
from rollout.engine.scheduling.step import ScheduledStep
from rollout.state import Status

Chunk = tuple[Sequence, int]
"""A group's leader (see `Queues`), and the number of prompt positions to compute for it in this step."""


def blocks_for(prompt: int, length: int, block_size: int) -> int:
    """Return the number of blocks that hold the KV of a sequence of `length` tokens, including `prompt` prompt tokens.

    The last token of a completion needs no room, because the sequence finishes before its KV would be computed.
    """
    return -(-max(prompt, length - 1) // block_size)


class StepPlanner:
    """Plans the steps of one scheduler: which sequences decode, prefill or are admitted.

    Attributes:
        admitting: the leader of the group that `plan` is admitting, or None. It stays set if this raises an exception.
        deferred: leaders of groups that the last `plan` skipped, because another sequence is computing a block they need.
    """

    def __init__(self, config: InferenceConfig, queues: Queues, preemption: Preemption) -> None:
        self._config = config
        self._queues = queues
        self._preemption = preemption
        self.admitting: Sequence | None = None
        self.deferred: list[Sequence] = []

    def plan(self, version: int) -> ScheduledStep | None:
        """Choose the work of the next step, and reserve its blocks. Return None if nothing can run.

        Args:
            version: current policy version, to record for newly admitted sequences.
        """
        queues = self._queues
        queues.allocator.forget_copies()
        self.admitting, self.deferred = None, []
        for row in queues.blocks.need_block(queues.decode_rows()).tolist():
            if (decoding := queues.by_row.get(row)) is not None:
                self._reserve(decoding, 1)
        budget = self._config.step_tokens - len(queues.decoding)
        chunks: list[Chunk] = []
        for sequence in list(queues.prefilling):
            if budget <= 0:
                break
            if not sequence.active:
                continue
            start = int(queues.table.computed[sequence.row])
            count = sequence.images.fitting(start, min(budget, int(queues.table.length[sequence.row]) - start))
            count = queues.blocks.cut(sequence, count)
            if not count or not self._reserve(sequence, count):
                break
            chunks.append((sequence, count))
            budget -= count
        else:
            self._admit(budget, chunks, version)
        self.admitting = None
        return self._step(chunks)

    def _step(self, chunks: list[Chunk]) -> ScheduledStep | None:
        queues, table, decodes = self._queues, self._queues.table, self._queues.decode_rows()
        if not len(decodes) and not chunks:
            return None
        rows = np.concatenate([decodes, np.fromiter((s.row for s, _ in chunks), np.int32, len(chunks))])
        starts = table.computed[rows]
        counts = np.ones(len(rows), np.int32)
        counts[len(decodes) :] = [count for _, count in chunks]
        entries, targets = np.arange(len(decodes), dtype=np.int32), decodes
        ready: list[tuple[int, int]] = []
        for entry, (sequence, count) in enumerate(chunks, len(decodes)):
            if starts[entry] + count == table.length[sequence.row] < table.max_length[sequence.row]:
                ready += [(entry, each.row) for each in (sequence, *sequence.siblings)]
        if ready:
            more = np.array(ready, np.int32)
            entries, targets = np.concatenate([entries, more[:, 0]]), np.concatenate([targets, more[:, 1]])
        return ScheduledStep(
            rows=rows,
            starts=starts,
            counts=counts,
            num_decodes=len(decodes),
            prefills=tuple(sequence for sequence, _ in chunks),
            copies=queues.blocks.take_copies(),
            sampled_entries=entries,
            sampled_rows=targets,
            state_moves=queues.allocator.states.take_moves(),
        )

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Reserve blocks for a sequence's next `count` positions, evicting younger sequences if needed.

        Return False if there are still too few blocks. In that case, a decoding sequence is itself evicted.
        """
        queues = self._queues
        while not queues.blocks.reserve(sequence.row, count):
            victim = max(queues.decoding[-1:] + queues.prefilling[-1:], key=rank)
            if victim is sequence and victim in queues.prefilling[-1:]:
                return False
            self._preemption.evict(victim)
            if victim is sequence:
                return False
        return True

    # --- admission ----------------------------------------------------------------------------------------------

    def _admit(self, budget: int, chunks: list[Chunk], version: int) -> None:
        queues, blocks = self._queues, self._queues.blocks
        if budget <= 0 or not queues.waiting:
            return
        coming = {each for sequence in queues.prefilling for each in blocks.unregistered(sequence)}
        try:
            while budget > 0 and (leader := self._next()) is not None:
                self.admitting = leader
                if blocks.next_block(leader) in coming:
                    self.deferred.append(leader)
                    continue
                count = self._activate(leader, budget)
                if not count:
                    insert(queues.waiting, leader)
                    return
                queues.start_prefill(leader)
                self._mark_admitted([leader, *leader.siblings], version)
                chunks.append((leader, count))
                budget -= count
                coming.update(blocks.unregistered(leader))
        finally:
            for leader in self.deferred:
                insert(queues.waiting, leader)

    def _next(self) -> Sequence | None:
        """Dequeue the next group and return its leader; None if no group waits or too few rows are free for it."""
        queues = self._queues
        free = queues.num_free_places - sum(1 + len(each.siblings) for each in self.deferred)
        fits = queues.waiting and 1 + len(queues.waiting[0].siblings) <= free
        return queues.waiting.pop(0) if fits else None

    def _activate(self, sequence: Sequence, budget: int) -> int:
        """Assign a row, the cached prefix and blocks to a waiting sequence.

        Return the number of positions in the sequence's first prefill chunk, or 0 if there is no room.
        """
        queues, table = self._queues, self._queues.table
        hashes = [] if sequence.wants_prompt_logprobs else sequence.hashes
        table.add(sequence)
        headroom = queues.num_active + len(sequence.siblings) if queues.num_active else 0
        # Leave enough blocks for the deferred leaders, which this leader overtakes.
        headroom += sum(
            blocks_for(len(each.tokens), 0, table.block_size) + len(each.siblings) for each in self.deferred
        )
        # If a fully cached prompt does not fit, try again without its last cached block. Sharing that block costs an
        # additional block, because recomputing the last token writes to a copy of it.
        whole = len(hashes) * table.block_size == len(sequence.tokens)
        for usable in (hashes, *[hashes[:-1]] * whole):
            if queues.blocks.attach_prefix(sequence, usable, budget, headroom):
                cached = table.computed.item(sequence.row)
                sequence.request.num_cached_tokens = cached
                queues.counters["prefill_tokens_saved"] += cached
                count = sequence.images.fitting(cached, min(budget, len(sequence.tokens) - cached))
                return queues.blocks.cut(sequence, count)
        table.remove(sequence)
        return 0

    def _mark_admitted(self, group: list[Sequence], version: int) -> None:
        now = self._queues.clock()
        for each in group:
            request = each.request
            request.status = Status.ACTIVE_AND_GENERATING_TOKENS
            request.policy_version = version
            request.policy_spans.extend_to(len(each.tokens), version)
            request.add_event_add_context(timestamp=now)
