"""Preemption: active sequences release their row and KV, and return to the queue to be recomputed.

The tokens generated so far become part of the prompt in a new segment of the sequence's record.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import NO_ROW, Sequence
from rollout.engine.scheduling.step import ScheduledStep
from rollout.state import Status


class Preemption:
    """Takes the table row and the KV away from active sequences of one scheduler, and queues these sequences again."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def evict(self, sequence: Sequence) -> None:
        """Drop the KV of an active sequence, requeue it with its siblings, and count a preemption."""
        counters = self._queues.counters
        counters["preemptions"] += 1
        counters["preemption_tokens_recomputed"] += self._checkpoint(sequence)

    def give_up_kv(self, group: list[Sequence]) -> None:
        """Free the rows and blocks of a group, whose leader comes first, and prepare its sequences to be queued again."""
        queues = self._queues
        queues.table.write_back(group[0])
        for each in group:
            queues.deactivate(each)
            self._restart(each)

    def mark_evicted(self, sequences: Iterable[Sequence]) -> None:
        """Add an eviction event to the record of each sequence."""
        now = self._queues.clock()
        for each in sequences:
            each.request.add_event_evict(timestamp=now)

    def checkpoint_all(self, why: BaseException | None = None) -> int:
        """Requeue every active sequence, dropping its KV. Return the number of KV positions lost.

        Args:
            why: the error that caused the preemption, or None if a caller requested it.
        """
        return sum(self._checkpoint(sequence, why) for sequence in reversed(self._queues.active()))

    def checkpoint_until_fits(self, num_pages: int) -> int:
        """Requeue the youngest active sequences until at most `num_pages` pages are in use. Return the KV positions lost."""
        allocator, lost = self._queues.allocator, 0
        if len(allocator.pages.live()) > num_pages:
            allocator.drop_cached()
        while len(allocator.pages.live()) > num_pages:
            lost += self._checkpoint(self._queues.active()[-1])
            allocator.drop_cached()
        return lost

    def requeue_step(self, step: ScheduledStep, why: BaseException) -> None:
        """Requeue the sequences of an interrupted step, because their KV may be partly written and must be recomputed."""
        decodes = [self._queues.by_row[row] for row in step.rows[: step.num_decodes].tolist()]
        for sequence in (*decodes, *step.prefills):
            if sequence.active:
                self._checkpoint(sequence, why)
        self._queues.allocator.forget_copies()

    def start_over(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """Free all rows and blocks, which an exception inside a scheduler call may have left inconsistent.

        Args:
            sequences: all sequences that were added to the scheduler and have not finished.

        Returns:
            The sequences that are now in no queue, because they were active, or were being admitted or removed. Each
            sequence's `record` lacks the tokens sampled since `SequenceTable.write_back` last updated it.
        """
        queues = self._queues
        waiting: set[int] = set()
        for queue in (queues.waiting, queues.parked):
            for leader in list(queue):
                group = [leader, *leader.siblings]
                if any(each.active for each in group):
                    queue.remove(leader)
                else:
                    waiting.update(map(id, group))
        lost = [each for each in sequences if id(each) not in waiting]
        for each in lost:
            each.row, each.siblings = NO_ROW, []
        queues.reset_active()
        # Have these pages zeroed before reuse, because their content was never checked for NaN.
        queues.allocator.pages.poisoned += queues.allocator.held_memory().tolist()
        queues.allocator.start_over()
        queues.table.start_over()
        return lost

    def _checkpoint(self, sequence: Sequence, why: BaseException | None = None) -> int:
        """Drop a sequence's KV and requeue the sequence with its siblings. Return the number of KV positions lost."""
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
        """Make all tokens of a sequence its new prompt, because the KV of all of them must be recomputed."""
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
