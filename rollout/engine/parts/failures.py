"""Failure containment: maps an exception inside a step to the requests it belongs to; the others are computed again.

After `MAX_FAILED_STEPS` failed steps in a row, or when a member of its tensor-parallel group is lost, the engine is dead,
and every unfinished request ends with an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from rollout.engine.multimodal.vision import EncodingError
from rollout.engine.parts.admission import Admission
from rollout.engine.parts.context import DynamicInferenceContext
from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.parts.ledger import Ledger
from rollout.engine.parts.lifecycle import Lifecycle
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.engine.scheduling.step import ScheduledStep
from rollout.state import FinishReason

MAX_FAILED_STEPS = 3
_log = logging.getLogger(__name__)


class FailureContainment:
    """Decides which requests of one engine fail with an exception, and which are queued again."""

    def __init__(
        self,
        context: DynamicInferenceContext,
        controller: TextGenerationController,
        ledger: Ledger,
        admission: Admission,
        lifecycle: Lifecycle,
        clock: Callable[[], float],
    ) -> None:
        self._context = context
        self._controller = controller
        self._scheduler = context.scheduler
        self._ledger = ledger
        self._admission = admission
        self._lifecycle = lifecycle
        self._clock = clock
        self._failed_steps = 0

    def step_succeeded(self) -> None:
        """Count failed steps from 0 again."""
        self._failed_steps = 0

    def fail_step(self, step: ScheduledStep, exc: Exception) -> None:
        """The forward has raised: every request of the step fails."""
        keys = {sample.key for sample in self._scheduler.sequences_of(step)}
        self._ledger.fail(self._scheduler.remove(lambda key: key in keys), exc)
        self._count_failed_step(exc)

    def fail_image(self, step: ScheduledStep, exc: EncodingError) -> None:
        """The vision tower has raised: the request whose image it was fails, and the others of the step go on."""
        cause = exc.__cause__
        assert isinstance(cause, Exception)
        self._scheduler.preemption.requeue_step(step, exc)
        self._ledger.fail(self._scheduler.remove(lambda key: key[0] == exc.request_id), cause)

    def make_room(self, exc: BaseException) -> bool:
        """Free device memory for a step that ran out of it, at the cost of all KV.

        Returns:
            False: nothing is left to free.
        """
        self._controller.runner.release_workspace(graphs=True)
        before = self._context.cache.num_blocks
        if not self._context.shrink(exc):
            return False
        self._ledger.counters["kv_pool_shrinks"] += 1
        _log.warning(
            "a step ran out of device memory: the KV pool shrinks from %d to %d %s, and its requests are computed "
            "again; a smaller kv_cache_memory_fraction or max_tokens_per_step leaves more to the forward (%s)",
            before, self._context.cache.num_blocks, self._context.allocator.pages.unit, str(exc).partition("\n")[0],
        )  # fmt: skip
        return True

    def die(self, exc: Exception) -> None:
        """No step can be made any more: every unfinished request fails, and the KV cache is freed."""
        self._lifecycle.die(exc)
        self._ledger.fail(self._scheduler.remove(lambda key: True), exc)
        self._context.drop()

    def start_over(self, exc: BaseException, *, half_taken: bool) -> None:
        """Rebuild queues, rows and blocks, which an exception in `schedule` or `update` has left in disagreement.

        The request that was being admitted fails alone, and the others compute their KV again; without one, all that
        held a row fail. Where it was no error (Ctrl-C), none fails.
        """
        scheduler = self._scheduler
        admitting = scheduler.planner.admitting
        group = [] if admitting is None else [admitting, *admitting.siblings]
        guilty = 0
        for sample in scheduler.preemption.start_over(self._ledger.unfinished(), half_taken=half_taken):
            if sample.request.finish_reason is not None:
                self._ledger.collect(sample)
            elif isinstance(exc, Exception) and (not group or sample in group):
                self._ledger.fail([sample], exc)
                guilty += 1
            else:
                self._compute_again(sample, exc)
        # Where one request is to blame, the next step has one less, and so there is an end of it.
        if isinstance(exc, Exception) and not (group and guilty):
            self._count_failed_step(exc)

    def replace(self, sample: Sample, what: str, build: Callable[[], Sample]) -> bool:
        """Queue the sample that `build` makes in place of one that is in no queue; where that raises, this one fails.

        Returns:
            Whether the other one was queued.
        """
        try:
            fresh = build()
            fresh.client = sample.client
            self._scheduler.add(fresh, sample.variant)
        except Exception as exc:  # noqa: BLE001 - whatever it raises harms this request alone
            number, index = sample.key
            error = f"RequestFailedError: request {number} sample {index} {what}: {type(exc).__name__}: {exc}"
            self._ledger.end(sample, FinishReason.ERROR, error)
            return False
        self._ledger.accept(fresh)
        return True

    def _compute_again(self, sample: Sample, why: BaseException) -> None:
        now = self._clock()
        sample.request.add_event_error_transient(why, timestamp=now)
        sample.request.add_event_evict(timestamp=now)
        continued = partial(self._admission.continued, sample.record, sample.order, self._scheduler.version)
        self.replace(sample, "cannot go on", continued)

    def _count_failed_step(self, exc: Exception) -> None:
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            self.die(exc)
