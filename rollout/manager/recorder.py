"""Thread-safe recorder of the metrics in `METRICS`.

Counters, timers and summaries cover the interval since the previous snapshot; a gauge is the last value set.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.metric_table import LOGGED, METRICS, PHASES, Kind, Metric, Statistic, unknown_name

RESERVOIR_SIZE = 8192


class _Summary:
    """Statistics of a stream of numbers in bounded memory.

    Mean, maximum and share of non-zeros are exact (float64). Percentiles are exact up to `RESERVOIR_SIZE` values and
    estimated beyond, from a uniform sample of that size (Vitter's algorithm R, batched). A NaN value makes mean and
    maximum NaN, and the percentiles while it is in the sample.
    """

    def __init__(self, stats: tuple[Statistic, ...], rng: np.random.Generator) -> None:
        self._stats = stats
        self._rng = rng
        self._sample = np.empty(RESERVOIR_SIZE if {"p50", "p99"} & set(stats) else 0)
        self.clear()

    def clear(self) -> None:
        self._count = 0
        self._nonzero = 0
        self._sum = 0.0
        self._max = -math.inf

    def extend(self, values: NDArray[np.float64]) -> None:
        """Add values, float64 [n] with n ≥ 1."""
        if self._sample.size:
            self._keep(values)
        self._count += values.size
        self._nonzero += int(np.count_nonzero(values))
        self._sum += float(values.sum())
        self._max = float(np.maximum(self._max, values.max()))

    def _keep(self, values: NDArray[np.float64]) -> None:
        room = max(0, self._sample.size - self._count)
        self._sample[self._count : self._count + room][: values.size] = values[:room]
        late = values[room:]
        if late.size:
            seen = np.arange(self._count + room, self._count + values.size) + 1
            slots = (self._rng.random(late.size) * seen).astype(np.int64)
            kept = slots < self._sample.size
            self._sample[slots[kept]] = late[kept]

    def statistics(self) -> Iterator[tuple[Statistic, float]]:
        if not self._count:
            return
        sample = self._sample[: self._count]
        for stat in self._stats:
            match stat:
                case "mean":
                    yield stat, self._sum / self._count
                case "p50":
                    yield stat, float(np.percentile(sample, 50))
                case "p99":
                    yield stat, float(np.percentile(sample, 99))
                case "max":
                    yield stat, self._max
                case "nonzero_share":
                    yield stat, self._nonzero / self._count


class MetricsRecorder:
    """Thread-safe recorder of the metrics in `METRICS`; `snapshot` returns them as one flat dict.

    A name that is not in the table raises `KeyError` with the closest names; the wrong method for a metric's kind raises
    `TypeError` with the right one. Memory use is bounded, also when no snapshot is ever taken.

    Args:
        clock: monotonic clock, in seconds.
        seed: seed of the reservoir sampling used for percentiles.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, seed: int = 0) -> None:
        self._clock = clock
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self._counters = {name: 0.0 for name, metric in METRICS.items() if metric.kind is Kind.COUNTER}
        self._totals = {name: 0.0 for name, metric in METRICS.items() if metric.total}
        self._gauges: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._summaries: dict[str, _Summary] = {}
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._phase: str | None = None
        self._phase_since = 0.0

    def add(self, name: str, value: float = 1) -> None:
        """Increase a counter by `value` ≥ 0.

        Raises:
            KeyError: unknown metric. TypeError: not a counter. ValueError: `value` is negative or NaN.
        """
        metric = self._metric(name, Kind.COUNTER)
        if not value >= 0:
            raise ValueError(f"{name}: cannot add {value!r}: a counter only rises; a value that also falls is a gauge")
        with self._lock:
            self._counters[name] += value
            if metric.total:
                self._totals[name] += value

    def set(self, name: str, value: float) -> None:
        """Set a gauge to `value`.

        Raises:
            KeyError: unknown metric. TypeError: not a gauge.
        """
        metric = self._metric(name, Kind.GAUGE)
        with self._lock:
            self._gauges[name] = float(value)
            if metric.peak:
                self._peaks[name] = max(self._gauges[name], self._peaks.get(name, -math.inf))

    def observe(self, name: str, values: Any) -> None:
        """Add values to a summary: a number, or an array or torch tensor of any shape and device, possibly empty.

        Raises:
            KeyError: unknown metric. TypeError: not a summary.
        """
        metric = self._metric(name, Kind.SUMMARY)
        flat = _flat(values)
        if not flat.size:
            return
        with self._lock:
            if name not in self._summaries:
                self._summaries[name] = _Summary(metric.stats, self._rng)
            self._summaries[name].extend(flat)

    def enter_phase(self, phase: str | None) -> None:
        """Attribute wall time from now on to `phase`, one of `PHASES`; None: to no phase.

        Raises:
            KeyError: unknown phase.
        """
        if phase is not None and phase not in PHASES:
            raise KeyError(f"phase {phase!r}: must be one of {', '.join(PHASES)}, or None")
        with self._lock:
            self._account()
            self._phase = phase

    @property
    def present_phase(self) -> str | None:
        """The phase that wall time is attributed to."""
        return self._phase

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Attribute the wall time of the body to `phase`, then return to the previous phase, also on an exception."""
        before = self._phase
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(before)

    def snapshot(self, reset: bool = True) -> dict[str, float]:
        """Return the values since the previous snapshot, by flat name; see `Kind` for which names are present.

        Args:
            reset: start a new interval. False: leave the current one running.
        """
        with self._lock:
            self._account()
            flat = self._flat_values()
            if reset:
                self._begin_interval()
        for name, metric in METRICS.items():
            parts = (*metric.numerator, *metric.denominator)
            if metric.kind is Kind.RATIO and all(part in flat for part in parts):
                below = sum(flat[part] for part in metric.denominator)
                if below:
                    flat[name] = sum(flat[part] for part in metric.numerator) / below
        return {name: flat[name] for name in LOGGED if name in flat}

    def _flat_values(self) -> dict[str, float]:
        return {
            **self._counters,
            **{f"{name}_total": value for name, value in self._totals.items()},
            **{f"rollout/{phase}_s": seconds for phase, seconds in self._seconds.items()},
            **self._gauges,
            **{f"{name}_peak": value for name, value in self._peaks.items()},
            **{f"{name}_{s}": value for name, summary in self._summaries.items() for s, value in summary.statistics()},
        }

    def _begin_interval(self) -> None:
        self._counters = dict.fromkeys(self._counters, 0.0)
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._peaks = {name: self._gauges[name] for name in self._peaks}
        for summary in self._summaries.values():
            summary.clear()

    def _account(self) -> None:
        now = self._clock()
        if self._phase is not None:
            self._seconds[self._phase] += now - self._phase_since
        self._phase_since = now

    @staticmethod
    def _metric(name: str, kind: Kind) -> Metric:
        metric = METRICS.get(name)
        if metric is None or not metric.logged:
            raise unknown_name(name, {each: known for each, known in METRICS.items() if known.logged})
        if metric.kind is not kind:
            raise TypeError(f"{name} is a {metric.kind.value}, not a {kind.value}: {_VERBS[metric.kind]}")
        return metric


_VERBS = {
    Kind.COUNTER: "use add()",
    Kind.TIMER: "use phase() or enter_phase()",
    Kind.GAUGE: "use set()",
    Kind.SUMMARY: "use observe()",
    Kind.RATIO: "it is derived when a snapshot is taken, record its parts",
}


def _flat(values: Any) -> NDArray[np.float64]:
    # Tensors on a device, in bfloat16 or with a gradient cannot be read by numpy. Duck-typed: this module avoids torch.
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)
