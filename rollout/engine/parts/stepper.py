"""One engine step: follow the model's adapters and forward, schedule, execute, update; failures are contained."""

from __future__ import annotations

from dataclasses import dataclass
from traceback import clear_frames

from rollout.engine.forward.model_watch import ModelWatch
from rollout.engine.memory.buffers import lacks_device_memory
from rollout.engine.multimodal.vision import EncodingError
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.failures import FailureContainment
from rollout.engine.parts.ledger import Ledger
from rollout.engine.scheduling.adapters import Variant
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.step import ScheduledStep
from rollout.errors import EngineDeadError, EngineStateError
from rollout.threads.fair_lock import FairLock
from rollout.tracing.recorder import EngineLog, EngineTap


@dataclass(eq=False)
class Stepper:
    """Makes the steps of one engine; the caller holds the engine's lock.

    Args:
        watch: compares what the model computes.
        tap: hears of every step while a trace is recorded.
        lock: the engine's.

    Attributes:
        last: the step that was scheduled last; None: there was nothing to run.
        made: how many decode steps the last call has made; 1 where it had prefill chunks, 0 where nothing ran or it failed.
    """

    _scheduler: Scheduler
    _controller: TextGenerationController
    _ledger: Ledger
    _failures: FailureContainment
    _watch: ModelWatch
    _tap: EngineTap
    _lock: FairLock
    last: ScheduledStep | None = None
    made: int = 0

    def step(self, *, ahead: bool = False) -> None:
        """Schedule, execute, update; records that end are in the ledger.

        Args:
            ahead: make several decode steps in one call where nothing needs Python in between.
        """
        log, self.made = self._tap.log, 0
        if log is not None:
            log.step_begins(self._scheduler.counters["prefill_tokens_saved"])
        try:
            variant = self.follow_forward()
            step = self._scheduler.schedule()
            runs = self._controller.runner.runs if ahead and not self._lock.wanted else None
            if step is not None and runs is not None and runs.serves(step, self._controller.constraints):
                step = self._scheduler.run_ahead(step)
            self.last = step
            if step is None and not self._ledger.ended and self._scheduler.has_work(variant):
                raise EngineStateError(
                    f"no request can run, which must not happen; please report: {self._scheduler.counters}"
                )
        except BaseException as exc:
            self._failures.start_over(exc, half_taken=False)
            if not isinstance(exc, Exception):
                raise
        else:
            if step is not None:
                self._run(step, log)

    def follow_forward(self) -> Variant:
        """Take note of the adapters and forward settings that act now; returns the variant. KV of others is not shared."""
        scheduler, installation = self._scheduler, self._controller.runner.installation
        variant = self._watch.variant()
        if variant != scheduler.variant:
            # What a forward has bound of the model may be of the other adapters.
            installation.module_epoch += 1
        forward = self._watch.forward_key()
        if (variant, forward) != (scheduler.variant, scheduler.forward):
            scheduler.switch(variant, forward)
            self._controller.runner.vision.features.clear()
        return variant

    def _run(self, step: ScheduledStep, log: EngineLog | None) -> None:
        if log is not None:
            log.step_reached()
        try:
            self._admit(step)
            sampled = self._controller.runner.execute(step)
            self._lock.heard()
        except EngineDeadError as exc:
            self._failures.die(exc)
            return
        except EncodingError as exc:
            self._failures.fail_image(step, exc)
            return
        except Exception as exc:  # noqa: BLE001 - whatever a model raises belongs to the requests of this step
            if log is not None:
                log.instant("step failed", error=f"{type(exc).__name__}: {exc}")
            self._contain(step, exc)
            return
        except BaseException as exc:
            self._scheduler.preemption.requeue_step(step, exc)
            raise
        if log is not None:
            log.step_reached()
        try:
            ended = self._scheduler.update(step, sampled)
            self._controller.runner.move_states(self._scheduler.allocator.states.take_moves())
        except BaseException as exc:
            self._failures.start_over(exc, half_taken=True)
            if not isinstance(exc, Exception):
                raise
            return
        self._failures.step_succeeded()
        self.made = sampled.steps
        self._ledger.counters["steps"] += sampled.steps
        for sample in ended:
            self._ledger.collect(sample)
        if log is not None:
            log.step_ends(traced_numbers(step, self._scheduler, sampled.steps))

    def _contain(self, step: ScheduledStep, exc: Exception) -> None:
        if lacks_device_memory(exc):
            # Frames of the failed forward hold its tensors.
            clear_frames(exc.__traceback__)
            try:
                if self._failures.make_room(exc):
                    return
            except EngineStateError as without_pool:
                self._failures.die(without_pool)
                return
        self._failures.fail_step(step, exc)

    def _admit(self, step: ScheduledStep) -> None:
        if poisoned := self._scheduler.allocator.pages.poisoned:
            self._controller.runner.zero_blocks(poisoned)
            poisoned.clear()
        for leader in step.prefills:
            for sample in (leader, *leader.siblings):
                self._controller.admit(sample)


def traced_numbers(step: ScheduledStep, scheduler: Scheduler, made: int = 1) -> tuple[int, ...]:
    """Numbers of a step for its `StepRow`; `made`: how many decode steps the call made."""
    allocator, counters = scheduler.allocator, scheduler.counters
    host = allocator.host
    decodes, entries = step.num_decodes, len(step.rows)
    return (
        decodes, entries - decodes, int(step.counts[decodes:].sum()) if entries > decodes else 0,
        made * len(step.sampled_rows), scheduler.num_active, scheduler.num_waiting, allocator.num_used,
        allocator.num_cached, allocator.num_free, host.num_blocks, host.offloaded, host.loaded,
        counters["prefill_tokens_saved"], counters["preemptions"], scheduler.version,
    )  # fmt: skip
