"""Applies the tokens of a step to its sequences: appends tokens, forks groups, finishes sequences, registers blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.engine.scheduling.queues import Queues
from rollout.engine.scheduling.sequences import IntArray, Sequence, discard
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.requests.token_columns import NO_SET
from rollout.state import FinishReason, Status


class StepResults:
    """Applies the sampled tokens of each step to the sequences and blocks of one scheduler.

    Args:
        track_events: whether to record an event with the pool's block counts for every token.
    """

    def __init__(self, queues: Queues, *, track_events: bool) -> None:
        self._queues = queues
        self._track_events = track_events
        self._pool_counts: dict[str, int] = {}

    def apply(self, step: ScheduledStep, sampled: StepTokens, since: float) -> list[Sequence]:
        """Apply a step's sampled tokens. Return the sequences that finished in it, each with a complete `record`.

        The tokens of several decode steps get evenly spaced times, from `since` (when the first step was planned) to now.
        """
        queues = self._queues
        queues.allocator.host.unsettled = False
        queues.counters["kv_blocks_copied"] += sum(source >= 0 and target >= 0 for source, target in step.copies)
        ended = self._apply_run(step, sampled, since) if sampled.steps > 1 else self._apply_step(step, sampled)
        if step.ahead > sampled.steps:
            queues.blocks.release_reserved(step.rows)
        return ended

    def _apply_step(self, step: ScheduledStep, sampled: StepTokens) -> list[Sequence]:
        queues, table = self._queues, self._queues.table
        table.computed[step.rows] += step.counts
        queues.counters["prefill_tokens_computed"] += int(step.counts[step.num_decodes :].sum())
        queues.blocks.register_decoded(step.rows[: step.num_decodes])
        for sequence in step.prefills:
            queues.blocks.register_prompt(sequence)
        ended: list[Sequence] = []
        for sequence in step.prefills:
            if table.computed[sequence.row] == table.length[sequence.row]:
                self._end_prompt(sequence, ended)
        self._append(step.sampled_rows, sampled, np.arange(len(step.sampled_rows)), queues.clock(), ended)
        return ended

    def _apply_run(self, step: ScheduledStep, sampled: StepTokens, since: float) -> list[Sequence]:
        """Append the tokens of a run of decode steps, except tokens that a row got after it had finished.

        The time of each token is computed as if the run had started at `since` and all its steps took equally long.
        """
        table, rows, steps, ended = self._queues.table, step.rows, sampled.steps, list[Sequence]()
        times = np.linspace(since, self._queues.clock(), steps + 1)[1:]
        needs_each = self._track_events or not table.plain[rows].all()
        together, done = 0 if needs_each else self._steps_without_end(rows, sampled), 0
        while done < together:
            left_in_block = table.block_size - table.computed[rows] % table.block_size
            count = min(together - done, int(left_in_block.min()))
            self._append_span(rows, sampled, slice(done, done + count), times)
            done += count
        indices = np.arange(done, len(rows) * steps, steps)
        for now in times[done:].tolist():
            table.computed[rows] += 1
            self._queues.blocks.register_decoded(rows)
            alive = self._append(rows, sampled, indices, now, ended)
            rows, indices = rows[alive], indices[alive] + 1
            if not len(rows):
                break
        return ended

    def _steps_without_end(self, rows: IntArray, sampled: StepTokens) -> int:
        """Return the number of steps at the start of a run in which none of `rows` finishes.

        The last step is never counted, because rows may reach their maximum length in it.
        """
        tokens, logprobs = (each.reshape(len(rows), -1) for each in (sampled.token_ids, sampled.logprobs))
        ends = np.isnan(logprobs)
        for stop_ids in self._queues.table.stop_ids[rows].T:
            ends |= tokens == stop_ids[:, None]
        if not ends[:, :-1].any():
            return sampled.steps - 1
        return int(ends.any(axis=0).argmax())

    def _append_span(self, rows: IntArray, sampled: StepTokens, span: slice, times: NDArray[np.float64]) -> None:
        """Append a run's tokens of steps `span` to `rows`. In these steps, no row may finish or cross a block boundary."""
        queues, table = self._queues, self._queues.table
        count = span.stop - span.start
        at = rows[:, None], table.length[rows, None] + np.arange(count)
        table.tokens[at] = sampled.token_ids.reshape(len(rows), -1)[:, span]
        table.logprobs[at] = sampled.logprobs.reshape(len(rows), -1)[:, span]
        if sampled.values is not None:
            table.values[at] = sampled.values.reshape(len(rows), -1, sampled.values.shape[1])[:, span]
        table.times[at] = times[span]
        table.length[rows] += count
        table.computed[rows] += count
        queues.counters["generated_tokens"] += len(rows) * count
        queues.blocks.register_decoded(rows)

    def _append(
        self, rows: IntArray, sampled: StepTokens, indices: NDArray[np.int64], now: float, ended: list[Sequence]
    ) -> NDArray[np.bool_]:
        """Append to each of `rows` the sampled token at the corresponding index in `indices`, with `now` as its time.

        Sequences that finish with this token are added to `ended`.

        Returns:
            [len(rows)] bool, whether each row is still unfinished.
        """
        queues, table = self._queues, self._queues.table
        queues.counters["generated_tokens"] += len(rows)
        tokens, logprobs = sampled.token_ids[indices], sampled.logprobs[indices]
        at = table.length[rows]
        table.tokens[rows, at] = tokens
        table.logprobs[rows, at] = logprobs
        if sampled.values is not None:
            table.values[rows, at] = sampled.values[indices]
        table.times[rows, at] = now
        length = at + 1
        table.length[rows] = length
        may_stop = length > table.min_length[rows]
        if sampled.complete:
            may_stop |= np.isin(indices, list(sampled.complete))
        stopped = (table.stop_ids[rows] == tokens[:, None]).any(axis=1) & may_stop
        over = stopped | (length >= table.max_length[rows]) | np.isnan(logprobs)
        if self._track_events:
            self._pool_counts = queues.allocator.counts()
        if sampled.kept is not None:
            self._keep(rows, sampled.kept, indices, logprobs)
        touched = over | ~table.plain[rows] | self._track_events
        alive = np.ones(len(rows), np.bool_)
        for place in np.flatnonzero(touched).tolist():
            sequence = queues.by_row[rows.item(place)]
            reason = self._take_token(sequence, int(indices[place]), sampled, now)
            if reason is None and over[place]:
                reason = FinishReason.STOP if stopped[place] else FinishReason.LENGTH
                sequence.request.stop_reason = int(tokens[place]) if stopped[place] else None
            if reason is not None:
                alive[place] = False
                self.leave(sequence, reason)
                ended.append(sequence)
        return alive

    def _keep(
        self, rows: IntArray, kept: list[bytes], indices: NDArray[np.int64], logprobs: NDArray[np.float32]
    ) -> None:
        """Store the set of token ids that each token at `indices` was drawn from. Skip tokens whose log-prob is NaN."""
        by_row, total = self._queues.by_row, 0
        for row, index, good in zip(rows.tolist(), indices.tolist(), (logprobs == logprobs).tolist(), strict=True):
            packed = kept[index]
            if good and packed != NO_SET:
                by_row[row].kept.append(packed)
                total += len(packed)
        self._queues.counters["kept_tokens_bytes"] += total

    def leave(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Finish a sequence that is active or in no queue: complete its record, and release its blocks and row."""
        queues, request = self._queues, sequence.request
        if sequence.active:
            queues.table.write_back(sequence)
            held, memory = queues.table.held(sequence.row).copy(), queues.blocks.memory(sequence.row)
            if reason is FinishReason.ERROR:
                queues.allocator.unregister(held)
            queues.deactivate(sequence)
            if reason is FinishReason.ERROR:
                queues.allocator.pages.poison(memory)
        failed = reason in (FinishReason.ERROR, FinishReason.ABORT)
        request.error = error or request.error
        request.status = Status.FAILED if failed else Status.COMPLETED
        now = queues.clock()
        if failed:
            request.add_event_fail(timestamp=now)
        else:
            request.add_event_finish(timestamp=now)
        # Set finish_reason last: it marks the sequence as finished.
        request.finish_reason = reason

    def _take_token(self, sequence: Sequence, index: int, sampled: StepTokens, now: float) -> FinishReason | None:
        token = int(sampled.token_ids[index])
        if np.isnan(sampled.logprobs[index]):
            # Remove the drawn token, which is meaningless and must not reach the record.
            self._queues.table.length[sequence.row] -= 1
            why = "its logits have no finite value; look for NaN or inf in the weights, and for extreme sampling parameters"
            # Report an invalid request if a reason is known: a constraint that no token satisfies is the caller's error.
            kind = "InvalidRequestError" if index in sampled.failed else "RequestFailedError"
            sequence.request.error = (
                f"{kind}: request {sequence.record.request_id} sample {sequence.record.sample_index}: "
                + sampled.failed.get(index, why)
            )
            return FinishReason.ERROR
        if sampled.top is not None and sequence.params.logprobs:
            sequence.top_logprobs.append(sampled.top[index][: sequence.params.logprobs])
        if self._track_events:
            sequence.request.add_event_generated_token(token, timestamp=now, **self._pool_counts)
        if sequence.text is not None:
            may_stop = bool(self._queues.table.length[sequence.row] > self._queues.table.min_length[sequence.row])
            try:
                sequence.stop_string = sequence.text.push(token, may_stop=may_stop)
            except Exception as exc:  # noqa: BLE001 - if the tokenizer fails, only this request fails
                sequence.request.add_event_error_nontransient(exc, timestamp=now)
                sequence.request.error = f"{type(exc).__name__}: {exc}"
                return FinishReason.ERROR
            if sequence.stop_string is not None:
                sequence.request.stop_reason = sequence.stop_string
                return FinishReason.STOP
        return None

    def _end_prompt(self, leader: Sequence, ended: list[Sequence]) -> None:
        """Share the computed prompt with the group's other samples and start decoding. Add finished samples to `ended`."""
        queues, table = self._queues, self._queues.table
        group = [leader, *leader.siblings]
        discard(queues.prefilling, leader)
        for sibling in leader.siblings:
            queues.blocks.share(leader, sibling)
            sibling.request.policy_version = leader.request.policy_version
            sibling.request.policy_spans = leader.request.policy_spans.copy()
            sibling.request.kv_spans = leader.request.kv_spans.copy()
        queues.counters["prefill_tokens_saved"] += len(leader.siblings) * len(leader.tokens)
        leader.siblings = []
        for each in group:
            each.request.finished_chunk_token_count = len(each.tokens)
            if each.wants_prompt_logprobs:
                each.wants_prompt_logprobs = False
                each.request.prompt_log_probs = list(leader.prompt_logprobs)
                each.request.prompt_top_n_logprobs = list(leader.prompt_top)
            if table.length[each.row] < table.max_length[each.row]:
                queues.start_decode(each)
            else:
                self.leave(each, FinishReason.LENGTH)
                ended.append(each)
