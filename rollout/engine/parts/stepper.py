"""One engine step: read the model's adapters and forward settings, schedule, execute, update.

An exception fails the requests of the step. After `MAX_FAILED_STEPS` failed steps in a row, or if a rank that computes
together with this one is lost, the engine is dead and every unfinished request fails.
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
    """The loop body of one engine; the caller of `step` holds the engine's lock.

    Attributes:
        last: the most recently scheduled step; None: nothing could run.
        made: the number of decode steps that the last call of `step` made; 1 if the step had prefill chunks, 0 if nothing
            ran or the step failed.
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
        """Schedule, execute and update. Add finished records to the ledger.

        Args:
            ahead: whether to make several decode steps in one call if no Python code must run in between.
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
        """Read the active adapters and forward settings, and return the adapters.

        If they have changed, clear the caches, because KV computed under other settings must not be shared.
        """
        scheduler, installation = self._scheduler, self._controller.runner.installation
        variant = self._watch.variant()
        if variant != scheduler.variant:
            # Invalidate the bound forward pass, which may still use the previous adapters.
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
        """Handle a forward pass that raised.

        If device memory ran out, shrink the KV pool. Otherwise fail every request of the step.
        """
        if lacks_device_memory(exc):
            # Clear the exception's frames, which keep the failed forward pass's tensors alive.
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
        """Free device memory by shrinking the KV pool, which loses all KV. Return whether the pool could shrink."""
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
        """Fail the request whose image made the vision tower raise; the other requests of the step continue."""
        cause = exc.__cause__
        assert isinstance(cause, Exception)
        self._scheduler.preemption.requeue_step(step, exc)
        self._ledger.fail(self._scheduler.remove(lambda key: key[0] == exc.request_id), cause)

    def _start_over(self, exc: Exception) -> None:
        """Free all rows and blocks, because an exception in `schedule` or `update` has left them inconsistent.

        Every request with a row fails, and so does the request that was being admitted. Waiting requests are not affected.
        """
        scheduler = self._scheduler
        for sample in scheduler.preemption.start_over(self._ledger.unfinished()):
            if sample.request.finish_reason is not None:
                self._ledger.collect(sample)
            else:
                self._ledger.fail([sample], exc)
        # Count the failure only if no request was being admitted. Otherwise that request has been removed, so retries
        # end by themselves.
        if scheduler.planner.admitting is None:
            self._count_failed_step(exc)

    def _count_failed_step(self, exc: Exception) -> None:
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._die(exc)

    def _die(self, exc: Exception) -> None:
        """Stop the engine for good: fail every unfinished request and free the KV cache."""
        self._lifecycle.die(exc)
        self._ledger.fail(self._scheduler.remove(lambda key: True), exc)
        self._context.drop()

    # --- steps of a tensor-parallel group -----------------------------------------------------------------------

    def follow(self) -> Any:
        """Compute the work that the first rank of the tensor-parallel group sends, until that rank's call returns.

        Returns:
            The outcome that the first rank sends at the end of its call (see `Leader.leading`).

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
    """Return the numbers of a step for its `StepRow`. `made`: the number of decode steps made in the call."""
    allocator, counters = scheduler.allocator, scheduler.counters
    host = allocator.host
    decodes, entries = step.num_decodes, len(step.rows)
    return (
        decodes, entries - decodes, int(step.counts[decodes:].sum()) if entries > decodes else 0,
        made * len(step.sampled_rows), scheduler.num_active, scheduler.num_waiting, allocator.num_used,
        allocator.num_cached, allocator.num_free, host.num_blocks, host.offloaded, host.loaded,
        counters["prefill_tokens_saved"], counters["preemptions"], scheduler.version,
    )  # fmt: skip
