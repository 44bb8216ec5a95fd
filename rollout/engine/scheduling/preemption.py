"""Preemption: active sequences release their row and KV and return to the queue, to be computed again.

The tokens generated so far become part of the prompt of a new segment of the record.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np

from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import NO_ROW, Sequence
from rollout.engine.scheduling.step import ScheduledStep
from rollout.requests.record import route_rows
from rollout.state import Status


class Preemption:
    """Takes KV from the sequences of one scheduler."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def evict(self, sequence: Sequence) -> None:
        """Requeue an active sequence whose blocks or place others need."""
        counters = self._queues.counters
        counters["preemptions"] += 1
        counters["preemption_tokens_recomputed"] += self._checkpoint(sequence)

    def give_up_kv(self, group: list[Sequence]) -> None:
        """Take row and blocks from a leader and its siblings and prepare them for the queue."""
        queues = self._queues
        queues.table.write_back(group[0])
        for each in group:
            queues.deactivate(each)
            self._restart(each)

    def mark_evicted(self, sequences: Iterable[Sequence]) -> None:
        """Add an eviction event to each sequence."""
        now = self._queues.clock()
        for each in sequences:
            each.request.add_event_evict(timestamp=now)

    def checkpoint_all(self, why: BaseException | None = None) -> int:
        """Requeue every active sequence, dropping its KV; returns the number of KV positions lost.

        Args:
            why: the error that caused it; None: requested.
        """
        return sum(self._checkpoint(sequence, why) for sequence in reversed(self._queues.active()))

    def checkpoint_until_fits(self, num_pages: int) -> int:
        """Requeue the youngest active sequences until at most this many pages are live; returns the KV positions lost."""
        allocator, lost = self._queues.allocator, 0
        if len(allocator.pages.live()) > num_pages:
            allocator.drop_cached()
        while len(allocator.pages.live()) > num_pages:
            lost += self._checkpoint(self._queues.active()[-1])
            allocator.drop_cached()
        return lost

    def requeue_step(self, step: ScheduledStep, why: BaseException) -> None:
        """Requeue the sequences of an interrupted step: their KV may be partly written, so it is recomputed."""
        decodes = [self._queues.by_row[row] for row in step.rows[: step.num_decodes].tolist()]
        for sequence in (*decodes, *step.prefills):
            if sequence.active:
                self._checkpoint(sequence, why)
        self._queues.allocator.forget_copies()

    def start_over(self, sequences: Iterable[Sequence], *, half_taken: bool) -> list[Sequence]:
        """Reset all rows and blocks after an exception inside a scheduler call.

        Args:
            sequences: every sequence that was added and has not finished.
            half_taken: the exception was raised by `update`: tokens of that step are discarded.

        Returns:
            Sequences that are now in no queue, with complete records: they were active, or being admitted or removed.
        """
        queues, table = self._queues, self._queues.table
        waiting: set[int] = set()
        for queue in (queues.waiting, queues.parked):
            for leader in list(queue):
                group = [leader, *leader.siblings]
                if any(each.active for each in group):
                    queue.remove(leader)
                else:
                    waiting.update(map(id, group))
        lost = [each for each in sequences if id(each) not in waiting]
        if half_taken:
            np.minimum(table.length, np.maximum(table.computed, table.prompt_length), out=table.length)
        for each in lost:
            if each.active:
                self._save(each)
            each.row, each.siblings = NO_ROW, []
        queues.reset_active()
        # The content of these blocks was never checked for NaN.
        queues.allocator.pages.poisoned += queues.allocator.held_memory().tolist()
        queues.allocator.start_over()
        table.start_over()
        return lost

    def _save(self, sequence: Sequence) -> None:
        """Update the record from an interrupted row, with every column cut to the shortest."""
        request = sequence.request
        with suppress(Exception):
            self._queues.table.write_back(sequence)
        columns: list[list[Any]] = [request.generated_tokens, request.generated_log_probs]
        if sequence.params.logprobs:
            columns.append(request.generated_top_n_logprobs)
        made = min(map(len, columns))
        if sequence.params.return_kept_tokens:
            kept = request.generated_kept_tokens
            made = min(made, len(kept or ()))
            request.generated_kept_tokens = None if kept is None else kept[:made]
        if request.generated_values is not None:
            request.generated_values = request.generated_values[:made]
        for column in columns:
            del column[made:]
        del request.tpot[max(0, made - 1) :]
        # If reading routes has failed, rows are missing; they are read again from the recomputed KV.
        rows, routes = request.total_length - 1 - route_rows(sequence.record.segments[:-1]), request.routing_indices
        request.routing_indices = None if routes is None or len(routes) < rows else routes[: max(0, rows)]
        request.policy_spans.truncate(request.total_length)
        request.kv_spans.truncate(request.total_length)

    def _checkpoint(self, sequence: Sequence, why: BaseException | None = None) -> int:
        """Drop a sequence's KV and requeue it; returns the number of KV positions lost."""
        queues, group = self._queues, [sequence, *sequence.siblings]
        lost = queues.table.computed.item(sequence.row)
        if why is not None:
            now = queues.clock()
            for each in group:
                each.request.add_event_error_transient(why, timestamp=now)
        self.mark_evicted(group)
        self.give_up_kv(group)
        queues.put_back(group)
        return lost

    def _restart(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.generated_tokens:
            request = sequence.record.checkpoint()
            sequence.set_prompt(request.prompt_tokens, self._queues.table.block_size)
        else:
            request.kv_spans.clear()
            request.finished_chunk_token_count = 0
            request.routing_indices = None
            if not request.rng_offset:
                request.policy_spans.clear()
        sequence.pauses_for_snapshot = False
        sequence.top_logprobs, sequence.kept = [], []
        sequence.prompt_logprobs, sequence.prompt_top = [], []
        request.status = Status.WAITING_IN_QUEUE
