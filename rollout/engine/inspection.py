"""Read-only state of an engine: unfinished samples and their progress, counters and gauges, what blocks progress."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollout.engine.explain.explanation import Explanation, explain
from rollout.engine.parts import EngineParts
from rollout.engine.scheduling.adapters import described
from rollout.engine.scheduling.sequences import rank
from rollout.engine.scheduling.step import ScheduledStep
from rollout.errors import EngineStateError
from rollout.requests.delta import SampleDelta
from rollout.requests.growth import growth
from rollout.requests.record import DynamicInferenceRequestRecord

_SHOWN = 4
"""Oldest samples that a report of the state names."""


class EngineInspection(EngineParts):
    """What can be read of one engine."""

    @property
    def policy_version(self) -> int:
        """Weight updates so far."""
        return self.context.scheduler.version

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has something left to do or to hand out, with the adapters that act now."""
        return bool(self._ledger.ended or self.context.scheduler.has_work(self._watch.adapters.variant))

    @property
    def num_active(self) -> int:
        """Number of samples that own a table row."""
        return self.context.scheduler.num_active

    @property
    def num_waiting(self) -> int:
        """Number of unfinished samples without a table row."""
        return self.context.scheduler.num_waiting

    @property
    def next_request_id(self) -> int:
        """The id that the next request without one gets."""
        return self._next_request_id

    @property
    def last_step(self) -> ScheduledStep | None:
        """The step that was scheduled last; None: there was nothing to run."""
        return self._stepper.last

    @property
    def last_step_count(self) -> int:
        """How many decode steps the last call of `step` has made; 1 where it had prefill chunks, 0 where nothing ran."""
        return self._stepper.made

    def refuse_when_nothing_can_run(self) -> None:
        """Raises: EngineStateError: all that is unfinished waits for adapters that do not act now, or for nothing."""
        if not self._ledger.live or self.has_unfinished:
            return
        waiting = {sample.variant for sample in self.context.scheduler}
        if not waiting:
            raise EngineStateError(
                f"requests {sorted(self._ledger.live)[:4]} are unfinished and in no queue, which must not happen; please "
                "report"
            )
        raise EngineStateError(
            f"{self.num_waiting} samples in flight were accepted with other adapters (acting then: "
            f"{'; '.join(map(described, waiting))}) than act now ({described(self._watch.adapters.variant)}): leave the "
            "`with adapter(...)` block or switch back, and they go on; or abort them"
        )

    @property
    def acting_adapters(self) -> str:
        """The adapters of the model that act now, in words."""
        with self._lock:
            return described(self._watch.variant())

    def explain(self, *, measure: bool = True) -> Explanation:
        """What the engine does with this model on this machine, and why; `print` it.

        Waits for a step boundary. Adds no request and changes no random stream.

        Args:
            measure: measure memory bandwidth and matrix products, in half a second; False: no bounds of speed.
        """
        with self.locked():
            return explain(
                self.controller.runner, self.cache, self.context.scheduler, self.config, self.weights,
                self.max_sequence_length, measure=measure,
            )  # fmt: skip

    def _scheduler_lines(self) -> Iterator[str]:
        """Samples, blocks, last step and oldest samples, without a lock."""
        scheduler, allocator, step = self.context.scheduler, self.context.allocator, self.last_step
        unfinished = [sample for samples in list(self._ledger.live.values()) for sample in list(samples.values())]
        running = scheduler.num_active
        yield (
            f"  samples: {running} running, {len(unfinished) - running} waiting, {len(self._ledger.ended)} ended and not "
            f"handed out; {self._ledger.counters['steps']} steps; model {'whole' if self.weights.ready else 'sharded'}"
        )
        yield (
            f"  KV blocks: {allocator.num_used} used, {allocator.num_cached} cached, {allocator.num_free} free, of "
            f"{allocator.num_blocks}; {'on' if self.cache.on_device else 'not on'} the device"
        )
        if step is not None:
            yield f"  last step: {step.num_decodes} decodes, {len(step.prefills)} prefills, {step.num_tokens} tokens"
        for sample in sorted(unfinished, key=rank)[:_SHOWN]:
            request, number = sample.request, sample.key
            yield (
                f"  request {number[0]} sample {number[1]}: {request.status.name.lower()}, {len(sample.tokens)} of at most "
                f"{sample.max_length} tokens"
            )

    def snapshot(self) -> list[DynamicInferenceRequestRecord]:
        """Copies of the records of all unfinished samples, in scheduling order.

        Raises:
            EngineStateError: some wait for other adapters than are active, which no record can express.
        """
        with self._lock:
            scheduler, variant = self.context.scheduler, self._watch.variant()
            foreign = [sample for sample in scheduler if sample.variant != variant]
            if foreign:
                raise EngineStateError(
                    f"snapshot() with {len(foreign)} samples accepted with other adapters (acting then: "
                    f"{described(foreign[0].variant)}) than act now ({described(variant)}): save when all in flight are of "
                    "one, outside of `with adapter(...)`"
                )
            records = []
            for sample in scheduler:
                if sample.active:
                    scheduler.table.write_back(sample)
                records.append(DynamicInferenceRequestRecord.deserialize(sample.record.serialize()))
            return records

    def progress(self, known: Mapping[tuple[int, int], tuple[int, int, int]]) -> list[SampleDelta]:
        """Tokens that unfinished samples have gained. Costs a few microseconds per sample and copies only new tokens.

        Args:
            known: (request_id, sample_index) → (completion tokens known, the prompt's policy version they came with,
                events known).

        Returns:
            One row per sample of `known` that has more, or that was requeued (`StalenessPolicy.REQUEUE`): such a
            sample counts from 0 again, and may have no token yet.
        """
        with self._lock:
            table, live = self.context.scheduler.table, self._ledger.live
            grown = []
            for (number, index), have in known.items():
                sample = live.get(number, {}).get(index)
                if sample is None:
                    continue
                each = table.growth(sample, *have) if sample.active else growth(sample.record, *have)
                if each.token_ids or each.start < have[0]:
                    grown.append(each)
            return grown

    def staleness(self) -> dict[int, int]:
        """Per unfinished request id: updates since the oldest token of its unfinished samples (0: they have none)."""
        with self._lock:
            return self._staleness.by_request()

    @property
    def counters(self) -> dict[str, int]:
        """Of steps, prompt tokens and requests that failed, were aborted, too stale or queued again, by plain names."""
        return self._ledger.counters
