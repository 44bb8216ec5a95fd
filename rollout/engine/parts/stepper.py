"""One engine step: read the model's adapters and forward settings, schedule, execute, update.

An exception in a step fails the requests of that step. The engine stops for good, and every unfinished request fails, after
`MAX_FAILED_STEPS` failed steps in a row, or when contact with a rank that computes together with this one is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any

from rollout.engine.forward.model_watch import ModelWatch
from rollout.engine.memory.buffers import lacks_device_memory
from rollout.engine.multimodal.vision import EncodingError
from rollout.engine.parallel.leading import ForwardWork, follow
from rollout.engine.parts.context import DynamicInferenceContext
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.ledger import Ledger
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.parts.peers import Peers
from rollout.engine.scheduling.adapters import Variant
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.step import ScheduledStep
from rollout.errors import EngineDeadError, EngineStateError
from rollout.observe.recorder import EngineLog, EngineTap

MAX_FAILED_STEPS = 3
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Stepper:
    """The part that runs one engine's steps. The caller of `step` must hold the engine's lock.

    Attributes:
        last: the step that was scheduled last. None if no request could run.
        made: the number of decode steps run by the last call of `step`. It is 1 if that call computed prefill chunks, and 0
            if nothing ran or the step failed.
    """

    _context: DynamicInferenceContext
    _controller: TextGenerationController
    _ledger: Ledger
    _lifecycle: Lifecycle
    _peers: Peers
    _watch: ModelWatch
    _tap: EngineTap
    last: ScheduledStep | None = None
    made: int = 0
    _failed_steps: int = 0

    @property
    def _scheduler(self) -> Scheduler:
        return self._context.scheduler

    def step(self, *, ahead: bool = False) -> None:
        """Schedule and execute a step, update the scheduler, and add the finished records to the ledger.

        Args:
            ahead: whether to run several decode steps in one call, if the step's rows need no Python code in between.
        """
        log, self.made = self._tap.log, 0
        if log is not None:
            log.step_begins(self._scheduler.counters["prefill_tokens_saved"])
        try:
            variant = self.follow_forward()
            step = self._scheduler.schedule()
            runs = self._controller.runner.runs if ahead and not self._lifecycle.lock.wanted else None
            if step is not None and runs is not None and runs.serves(step):
                step = self._scheduler.run_ahead(step)
            self.last = step
            if step is None and not self._ledger.ended and self._scheduler.has_work(variant):
                raise EngineStateError(
                    f"no request can run, which must not happen; please report: {self._scheduler.counters}"
                )
        except Exception as exc:  # noqa: BLE001 - the requests fail, not the engine
            self._start_over(exc)
        else:
            if step is not None:
                self._run(step, log)

    def follow_forward(self) -> Variant:
        """Read the model's active adapters and forward settings, and return the active adapters.

        If any has changed, clear the prefix cache and the image cache, because their content depends on these settings.
        """
        scheduler, installation = self._scheduler, self._controller.runner.installation
        variant = self._watch.variant()
        if variant != scheduler.variant:
            # Invalidate the prepared fused forward pass, which may still use the previous adapters.
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
            self._lifecycle.lock.heard()
        except EngineDeadError as exc:
            self._die(exc)
            return
        except EncodingError as exc:
            self._fail_image(step, exc)
            return
        except Exception as exc:  # noqa: BLE001 - any error in the model fails only this step's requests
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
        except Exception as exc:  # noqa: BLE001 - the requests fail, not the engine
            self._start_over(exc)
            return
        self._failed_steps = 0
        self.made = sampled.steps
        self._ledger.counters["steps"] += sampled.steps
        for sample in ended:
            self._ledger.collect(sample)
        if log is not None:
            log.step_ends(_traced_numbers(step, self._scheduler, sampled.steps))

    def _admit(self, step: ScheduledStep) -> None:
        if poisoned := self._scheduler.allocator.pages.poisoned:
            self._controller.runner.zero_blocks(poisoned)
            poisoned.clear()
        for leader in step.prefills:
            for sample in (leader, *leader.siblings):
                self._controller.admit(sample)

    # --- failures -----------------------------------------------------------------------------------------------

    def _contain(self, step: ScheduledStep, exc: Exception) -> None:
        """Handle an exception that a forward pass raised.

        If device memory ran out, shrink the KV pool. If it cannot shrink, or for other errors, fail the step's requests.
        """
        if lacks_device_memory(exc):
            # Clear the frames of the traceback, whose local variables keep tensors of the failed forward pass alive.
            clear_frames(exc.__traceback__)
            try:
                if self._make_room(exc):
                    return
            except EngineStateError as without_pool:
                self._die(without_pool)
                return
        keys = {sample.key for sample in self._scheduler.sequences_of(step)}
        self._ledger.fail(self._scheduler.remove(keys.__contains__), exc)
        self._count_failed_step(exc)

    def _make_room(self, exc: Exception) -> bool:
        """Shrink the KV pool to free device memory; all KV is then recomputed. Return whether the pool could shrink."""
        self._controller.runner.release_workspace(graphs=True)
        before = self._context.cache.num_blocks
        if not self._context.shrink(exc):
            return False
        self._ledger.counters["kv_pool_shrinks"] += 1
        _log.warning(
            "a step ran out of device memory: the KV pool shrinks from %d to %d blocks, and its requests are computed "
            "again; a smaller kv_cache_memory_fraction or max_tokens_per_step leaves more to the forward (%s)",
            before, self._context.cache.num_blocks, str(exc).partition("\n")[0],
        )  # fmt: skip
        return True

    def _fail_image(self, step: ScheduledStep, exc: EncodingError) -> None:
        """Fail the request whose image made the vision tower raise, and queue the other requests of the step again."""
        cause = exc.__cause__
        assert isinstance(cause, Exception)
        self._scheduler.preemption.requeue_step(step, exc)
        self._ledger.fail(self._scheduler.remove(lambda key: key[0] == exc.request_id), cause)

    def _start_over(self, exc: Exception) -> None:
        """Free all rows and blocks, because an exception in `schedule` or `update` has left them inconsistent.

        Requests with a row in the sequence table fail, and so does the request that was being admitted. Waiting requests
        are not affected.
        """
        scheduler = self._scheduler
        for sample in scheduler.preemption.start_over(self._ledger.unfinished()):
            if sample.request.finish_reason is not None:
                self._ledger.collect(sample)
            else:
                self._ledger.fail([sample], exc)
        # Do not count the failure if a request was being admitted: that request is removed, so no step fails on it again.
        if scheduler.planner.admitting is None:
            self._count_failed_step(exc)

    def _count_failed_step(self, exc: Exception) -> None:
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._die(exc)

    def _die(self, exc: Exception) -> None:
        """Stop the engine for good, fail every unfinished request, and free the KV cache."""
        self._lifecycle.die(exc)
        self._ledger.fail(self._scheduler.remove(lambda key: True), exc)
        self._context.drop()

    # --- steps of a tensor-parallel group -----------------------------------------------------------------------

    def follow(self) -> Any:
        """Compute the forward passes that the first rank of the tensor-parallel group sends, until it sends an outcome.

        Returns:
            The outcome, which the first rank sends when it leaves `Leader.leading`.

        Raises:
            EngineDeadError: the group is lost, so it can compute no more steps.
        """
        assert self._peers.group is not None

        def compute(work: ForwardWork) -> None:
            with self._lifecycle.locked():
                self._lifecycle.refuse_unless_running()
                self._controller.runner.compute(work)

        with self._dead_without_the_others():
            return follow(self._peers.group, compute)

    def agree(self, state: int) -> int:
        """Return the smallest `state` among the expert-parallel ranks, all of which must call this (see `Lockstep`).

        Raises:
            EngineDeadError: the group is lost, so it can compute no more steps.
        """
        assert self._peers.lockstep is not None
        with self._dead_without_the_others():
            return self._peers.lockstep.agree(state)

    @contextmanager
    def _dead_without_the_others(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as exc:
            with self._lifecycle.locked():
                self._die(exc)
            self._lifecycle.moved()
            raise


def _traced_numbers(step: ScheduledStep, scheduler: Scheduler, made: int) -> tuple[int, ...]:
    """Return the numbers that a trace records for a step, in `StepRow` order. `made` is the number of decode steps run."""
    allocator, counters = scheduler.allocator, scheduler.counters
    host = allocator.host
    decodes, entries = step.num_decodes, len(step.rows)
    return (
        decodes, entries - decodes, int(step.counts[decodes:].sum()) if entries > decodes else 0,
        made * len(step.sampled_rows), scheduler.num_active, scheduler.num_waiting, allocator.num_used,
        allocator.num_cached, allocator.num_free, host.num_blocks, host.offloaded, host.loaded,
        counters["prefill_tokens_saved"], counters["preemptions"], scheduler.version,
    )  # fmt: skip
