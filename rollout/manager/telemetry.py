"""A thread-safe recorder of the metrics in `METRICS`, and the recorder of one manager.

Counters, timers and summaries cover the interval since the last snapshot that reset them. A gauge is the last value set.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollout.observe.metric_table import ENGINE_STATS, LOGGED, METRICS, PHASES, Kind, Statistic
from rollout.observe.recorder import active
from rollout.observe.run_log import flat_array
from rollout.requests.events import DynamicInferenceEventType
from rollout.requests.request import DynamicInferenceRequest
from rollout.state import FinishReason

if TYPE_CHECKING:
    from torch import Tensor

    from rollout.engine.engine import DynamicInferenceEngine
    from rollout.engine.parts.context import MemoryMove
    from rollout.manager.batch.batch import RolloutBatch

NEWEST = 8192
"""The maximum number of values from which percentiles are computed: if there are more, only the newest are used."""


class _Summary:
    """The statistics of a stream of numbers in bounded memory.

    Mean, maximum and share of non-zeros cover all values (float64); percentiles cover the newest `NEWEST` values. A NaN
    value makes the mean and the maximum NaN, and also the percentiles while it is among the newest values.
    """

    def __init__(self, stats: tuple[Statistic, ...]) -> None:
        self._stats = stats
        self._keeps = NEWEST if {"p50", "p99"} & set(stats) else 0
        self.clear()

    def clear(self) -> None:
        self._count = 0
        self._nonzero = 0
        self._sum = 0.0
        self._max = -math.inf
        self._newest = np.empty(0)

    def extend(self, values: NDArray[np.float64]) -> None:
        """Add n ≥ 1 values, float64 [n], to the statistics."""
        if self._keeps:
            self._newest = np.concatenate([self._newest, values])[-self._keeps :]
        self._count += values.size
        self._nonzero += int(np.count_nonzero(values))
        self._sum += float(values.sum())
        self._max = float(np.maximum(self._max, values.max()))

    def statistics(self) -> Iterator[tuple[Statistic, float]]:
        if not self._count:
            return
        plain = {"mean": self._sum / self._count, "max": self._max, "nonzero_share": self._nonzero / self._count}
        for stat in self._stats:
            percentile = stat.removeprefix("p")
            yield stat, float(np.percentile(self._newest, int(percentile))) if percentile.isdigit() else plain[stat]


class MetricsRecorder:
    """A thread-safe recorder of the metrics in `METRICS`; `snapshot` returns them as one flat dict.

    A name that is not in the table raises `KeyError`. Memory use is bounded even if no snapshot is ever taken.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counters = {name: 0.0 for name, metric in METRICS.items() if metric.kind is Kind.COUNTER}
        self._totals = {name: 0.0 for name, metric in METRICS.items() if metric.total}
        self._gauges: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._summaries = {name: _Summary(metric.stats) for name, metric in METRICS.items() if metric.stats}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase: str | None = None
        self._phase_since = 0.0

    def add(self, name: str, value: float = 1) -> None:
        """Increase the counter `name` by `value` ≥ 0."""
        with self._lock:
            self._counters[name] += value
            if name in self._totals:
                self._totals[name] += value

    def set(self, name: str, value: float) -> None:
        """Set the gauge `name` to `value`."""
        with self._lock:
            self._gauges[name] = float(value)
            if METRICS[name].peak:
                self._peaks[name] = max(self._gauges[name], self._peaks.get(name, -math.inf))

    def observe(self, name: str, values: Any) -> None:
        """Add `values`, a number or a (possibly empty) array or tensor of any shape and device, to the summary `name`."""
        flat = flat_array(values)
        if not flat.size:
            return
        with self._lock:
            self._summaries[name].extend(flat)

    def enter_phase(self, phase: str | None) -> None:
        """Count wall time from now on towards `phase`, one of `PHASES`; with None, count it towards no phase."""
        with self._lock:
            self._account()
            self._phase = phase

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Count the body's wall time towards `phase`, then return to the previous phase, even after an exception."""
        before = self._phase
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(before)

    def snapshot(self, reset: bool = True) -> dict[str, float]:
        """Return a dict of metric name → value for the current interval; `Kind` documents which names are present.

        Args:
            reset: whether to start a new interval afterwards.
        """
        with self._lock:
            self._account()
            flat = {
                **self._counters,
                **{f"{name}_total": value for name, value in self._totals.items()},
                **{f"rollout/{phase}_s": seconds for phase, seconds in self._seconds.items()},
                **self._gauges,
                **{f"{name}_peak": value for name, value in self._peaks.items()},
                **{f"{name}_{s}": value for name, each in self._summaries.items() for s, value in each.statistics()},
            }
            if reset:
                self._counters = dict.fromkeys(self._counters, 0.0)
                self._seconds = dict.fromkeys(PHASES, 0.0)
                self._peaks = {name: self._gauges[name] for name in self._peaks}
                for summary in self._summaries.values():
                    summary.clear()
        for name, metric in METRICS.items():
            if metric.kind is Kind.RATIO and flat.keys() >= {metric.numerator, *metric.denominator}:
                below = sum(flat[part] for part in metric.denominator)
                if below:
                    flat[name] = flat[metric.numerator] / below
        return {name: flat[name] for name in LOGGED if name in flat}

    def _account(self) -> None:
        now = self._clock()
        if self._phase is not None:
            self._seconds[self._phase] += now - self._phase_since
        self._phase_since = now


_COUNTERS = [name for name, metric in ENGINE_STATS.items() if metric.kind is Kind.COUNTER]
_GAUGES = [name for name, metric in ENGINE_STATS.items() if metric.kind is Kind.GAUGE and metric.logged]


class RolloutMetrics(MetricsRecorder):
    """The recorder of one `RolloutManager`.

    Args:
        engine: the engine whose counters are recorded, starting from their current values.
        clock: monotonic clock, in seconds.
    """

    def __init__(self, engine: DynamicInferenceEngine, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._engine = engine
        stats = engine.stats()
        self._counted = {name: stats[name] for name in _COUNTERS}

    def enter_phase(self, phase: str | None) -> None:
        before = self._phase
        super().enter_phase(phase)
        if (recorder := active()) is not None:
            recorder.phase(self, phase, before)

    def step(self, samples_missing: int) -> None:
        """Record the last step's size and the gauges whose peak is logged. Called after every step; takes about 15 µs.

        Args:
            samples_missing: number of samples that have not finished; those that are not running count as waiting.
        """
        self._set(self._load(samples_missing) | {"kv_blocks_used": self._engine.context.allocator.num_used})
        stepper = self._engine.parts.stepper
        if (step := stepper.last) is not None:
            self.observe("rollout/step_requests", [len(step.rows)] * stepper.made)
            self.observe("rollout/step_tokens", [step.num_tokens] * stepper.made)

    def sync(self, samples_missing: int, groups_in_flight: int) -> None:
        """Update counters and gauges from the engine. `samples_missing` is as in `step`."""
        before, stats = self._counted, self._engine.stats()
        self._counted = {name: stats[name] for name in _COUNTERS}
        for name, value in self._counted.items():
            # Add the whole value if it is lower than before: a rebuilt engine counts from 0 again.
            self.add(f"rollout/{name}", value - before[name] if value >= before[name] else value)
        # Count samples as waiting even if they have not reached this engine.
        self._set({name: stats[name] for name in _GAUGES} | self._load(samples_missing))
        self.set("rollout/groups_in_flight", groups_in_flight)

    def _load(self, samples_missing: int) -> dict[str, float]:
        running = self._engine.load[0]
        return {"requests_running": running, "requests_waiting": max(0, samples_missing - running)}

    def _set(self, gauges: Mapping[str, float]) -> None:
        for name, value in gauges.items():
            self.set(f"rollout/{name}", value)

    def result(self, result: DynamicInferenceRequest) -> None:
        """Record a finished sample. A failed sample is ignored, because the engine already counts failures."""
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
                # Clamp at 0: the timestamp is from the rank that computed the sample, whose clock may be behind this rank's.
                self.observe("rollout/queue_s", max(0.0, event.timestamp - result.arrival_time))
                return

    def batch(self, batch: RolloutBatch) -> None:
        """Record the staleness of the tokens in a batch that is returned to the caller."""
        real = batch.attention_mask.bool()
        sampled = real & (batch.position_ids >= batch.prompt_lengths[:, None])
        self.observe("rollout/policy_staleness", batch.policy_staleness[sampled])
        self.observe("rollout/kv_staleness", batch.kv_staleness[real])

    def observe_logprobs(self, batch: RolloutBatch, logprobs: Tensor, rows: Tensor | slice = slice(None)) -> None:
        """Record how far the trainer's log-probs are from the rollout's (metric `rollout/logprob_diff`).

        Args:
            batch: a batch from `generate`.
            logprobs: the trainer's log-probs [N, T], aligned with `batch.logprobs[rows]`, on any device.
            rows: the batch rows that `logprobs` belong to, as int64 indices or a slice.

        Raises:
            ValueError: the shape of `logprobs` differs from that of `batch.logprobs[rows]`.
        """
        mask, known = batch.response_mask[rows], batch.logprobs[rows]
        if logprobs.shape != known.shape:
            raise ValueError(f"logprobs of shape {tuple(logprobs.shape)}: the batch's are {tuple(known.shape)}")
        ours = known[mask]
        self.observe("rollout/logprob_diff", (logprobs.detach().to(ours)[mask] - ours).abs())

    def suspended(self, move: MemoryMove) -> None:
        """Record that the KV cache was suspended; `move` says what was copied or dropped."""
        self.add("rollout/suspends")
        self.add("rollout/suspend_bytes", move.bytes_copied)
        self.add("rollout/suspend_fallbacks", move.offload_failed)
        self.add("rollout/tokens_recomputed", move.tokens_given_up)

    def resumed(self, move: MemoryMove) -> None:
        """Record that the KV cache was resumed; `move` says what was restored or dropped."""
        self.add("rollout/resumes")
        self.add("rollout/resume_bytes", move.bytes_copied)
        self.add(
            "rollout/resume_tokens_restored", move.blocks_restored * self._engine.config.advanced.block_size_tokens
        )
        self.add("rollout/resume_fallbacks", move.requests_given_up)
        self.add("rollout/tokens_recomputed", move.tokens_given_up)
        self.add("rollout/kv_blocks_lost", move.shrunk_by_blocks)
