"""Records engine counters, results and memory moves under the names of `METRICS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rollout.manager.recorder import MetricsRecorder
from rollout.metrics import ENGINE_STATS, Kind
from rollout.observe.recorder import active
from rollout.requests.events import DynamicInferenceEventType
from rollout.requests.request import DynamicInferenceRequest
from rollout.state import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.engine.engine import DynamicInferenceEngine
    from rollout.engine.parts.context import MemoryMove
    from rollout.manager.batch import RolloutBatch

_COUNTERS = [name for name, metric in ENGINE_STATS.items() if metric.kind is Kind.COUNTER]
_GAUGES = [name for name, metric in ENGINE_STATS.items() if metric.kind is Kind.GAUGE and metric.logged]


class RolloutMetrics(MetricsRecorder):
    """The recorder of one `RolloutManager`.

    Args:
        engine: whose counters are read, from their present values on.
        clock: seconds that never run backwards.
    """

    def __init__(self, engine: DynamicInferenceEngine, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._engine = engine
        stats = engine.stats()
        self._counted = {name: stats[name] for name in _COUNTERS}

    def enter_phase(self, phase: str | None) -> None:
        """Attribute wall time from now on to `phase`; a trace shows it."""
        before = self.present_phase
        super().enter_phase(phase)
        if (recorder := active()) is not None:
            recorder.phase(self, phase, before)

    def step(self, samples_missing: int) -> None:
        """Record the gauges with a peak, and the size of each step made, after every call of the engine; about 15 µs.

        Args:
            samples_missing: samples that are still to come; those not running wait.
        """
        self._set(self._load(samples_missing) | {"kv_blocks_used": self._engine.context.allocator.num_used})
        if (step := self._engine.parts.stepper.last) is not None:
            for _ in range(self._engine.parts.stepper.made):
                self.observe("rollout/step_requests", len(step.rows))
                self.observe("rollout/step_tokens", step.num_tokens)

    def sync(self, samples_missing: int, groups_in_flight: int) -> None:
        """Bring counters and gauges up to date with the engine's."""
        before, stats = self._counted, self._engine.stats()
        self._counted = {name: stats[name] for name in _COUNTERS}
        for name, value in self._counted.items():
            # A rebuilt engine counts from 0.
            self.add(f"rollout/{name}", value - before[name] if value >= before[name] else value)
        # Samples that have not reached this engine wait too.
        self._set({name: stats[name] for name in _GAUGES} | self._load(samples_missing))
        self.set("rollout/groups_in_flight", groups_in_flight)

    def _load(self, samples_missing: int) -> dict[str, float]:
        running = self._engine.load[0]
        return {"requests_running": running, "requests_waiting": max(0, samples_missing - running)}

    def _set(self, gauges: Mapping[str, float]) -> None:
        for name, value in gauges.items():
            self.set(f"rollout/{name}", value)

    def result(self, result: DynamicInferenceRequest) -> None:
        """Record a sample that has ended; a failed one is only counted, by the engine."""
        if result.error is not None:
            return
        self.add("rollout/requests_finished")
        self.add("rollout/requests_truncated", result.finish_reason is FinishReason.LENGTH)
        self.observe("rollout/prompt_length", len(result.prompt_tokens))
        self.observe("rollout/completion_length", len(result.generated_tokens))
        self.observe("rollout/tpot_s", result.tpot)
        if result.ttft is not None:
            self.observe("rollout/ttft_s", result.ttft)
        if result.latency is not None:
            self.observe("rollout/request_s", result.latency)
        for event in result.events:
            if event.type is DynamicInferenceEventType.ADD_CONTEXT:
                # The event is by the clock of the rank that computed it.
                self.observe("rollout/queue_s", max(0.0, event.timestamp - result.arrival_time))
                return

    def batch(self, batch: RolloutBatch) -> None:
        """Record the staleness of a batch that is handed out."""
        real = batch.attention_mask.bool()
        sampled = real & (batch.position_ids >= batch.prompt_lengths[:, None])
        self.observe("rollout/policy_staleness", batch.policy_staleness[sampled])
        self.observe("rollout/kv_staleness", batch.kv_staleness[real])

    def logprob_diff(self, batch: RolloutBatch, logprobs: Tensor) -> None:
        """Record the distance to the trainer's log-probs of a batch, [N, T] aligned like its own.

        Raises:
            ValueError: another shape.
        """
        if logprobs.shape != batch.logprobs.shape:
            raise ValueError(
                f"logprobs of shape {tuple(logprobs.shape)}: the batch's are {tuple(batch.logprobs.shape)}"
            )
        mask = batch.response_mask
        ours = batch.logprobs[mask]
        self.observe("rollout/logprob_diff", (logprobs.detach().to(ours)[mask] - ours).abs())

    def suspended(self, move: MemoryMove) -> None:
        """Record a suspend of the KV cache."""
        self.add("rollout/suspends")
        self.add("rollout/suspend_bytes", move.bytes_copied)
        self.add("rollout/suspend_fallbacks", move.offload_failed)
        self.add("rollout/tokens_recomputed", move.tokens_given_up)

    def resumed(self, move: MemoryMove) -> None:
        """Record a resume of the KV cache."""
        self.add("rollout/resumes")
        self.add("rollout/resume_bytes", move.bytes_copied)
        self.add("rollout/resume_tokens_restored", move.blocks_restored * self._engine.config.block_size_tokens)
        self.add("rollout/resume_fallbacks", move.requests_given_up)
        self.add("rollout/tokens_recomputed", move.tokens_given_up)
        self.add("rollout/kv_blocks_lost", move.shrunk_by_blocks)
