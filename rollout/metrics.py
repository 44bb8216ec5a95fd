"""Table of metrics (name, kind, unit, meaning) and a thread-safe recorder of their values.

`METRICS` defines every metric; `LOGGED` lists the flat names that a snapshot can contain, and a snapshot contains no
others. Counters, timers and summaries cover the interval since the previous snapshot; a gauge is the last value set.

One "request" in this table is one sample: a prompt with n=8 is eight requests.
"""

from __future__ import annotations

import difflib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


class Kind(StrEnum):
    """How a metric is recorded, and how a snapshot reports it."""

    COUNTER = "counter"
    """`add`: sum over the interval, 0 if nothing was added. With `total`, also the sum since construction."""

    TIMER = "timer"
    """`phase` / `enter_phase`: seconds of the interval spent in the phase."""

    GAUGE = "gauge"
    """`set`: last value, absent until set. With `peak`, also the maximum during the interval."""

    SUMMARY = "summary"
    """`observe`: statistics of the interval's values, absent if there were none."""

    RATIO = "ratio"
    """Derived: ratio of two sums of logged values, absent if a part is absent or the denominator is 0."""


Statistic = Literal["mean", "p50", "p99", "max", "nonzero_share"]


@dataclass(frozen=True)
class Metric:
    """Definition of one metric.

    Attributes:
        kind: how it is recorded.
        unit: unit of the value; statistics of a summary have the same unit, except `nonzero_share`, in [0, 1].
        help: meaning, one line.
        stats: summaries: the statistics logged, as `<name>_<statistic>`.
        total: counters: also log `<name>_total`.
        peak: gauges: also log `<name>_peak`.
        numerator, denominator: ratios: the logged names that are summed.
    """

    kind: Kind
    unit: str
    help: str
    stats: tuple[Statistic, ...] = ()
    total: bool = False
    peak: bool = False
    numerator: tuple[str, ...] = ()
    denominator: tuple[str, ...] = ()

    def logged_as(self, name: str) -> tuple[str, ...]:
        """Flat names under which a snapshot reports the metric `name`."""
        if self.kind is Kind.SUMMARY:
            return tuple(f"{name}_{stat}" for stat in self.stats)
        return (name, *[f"{name}_total"] * self.total, *[f"{name}_peak"] * self.peak)


def _counter(unit: str, text: str, *, total: bool = False) -> Metric:
    return Metric(Kind.COUNTER, unit, text, total=total)


def _timer(text: str) -> Metric:
    return Metric(Kind.TIMER, "s", text)


def _gauge(unit: str, text: str, *, peak: bool = False) -> Metric:
    return Metric(Kind.GAUGE, unit, text, peak=peak)


def _summary(unit: str, text: str, *stats: Statistic) -> Metric:
    return Metric(Kind.SUMMARY, unit, text, stats=stats)


def _ratio(unit: str, text: str, numerator: tuple[str, ...], denominator: tuple[str, ...]) -> Metric:
    return Metric(Kind.RATIO, unit, text, numerator=numerator, denominator=denominator)


PHASES = ("generate", "suspend", "train", "resume")
_PHASE_SECONDS = tuple(f"rollout/{phase}_s" for phase in PHASES)

METRICS: dict[str, Metric] = {
    "rollout/requests_running": _gauge(
        "requests", "active requests: they hold KV and advance in every step", peak=True
    ),
    "rollout/requests_waiting": _gauge("requests", "requests waiting for a slot or for KV blocks", peak=True),
    "rollout/groups_in_flight": _gauge("groups", "unfinished groups, continued by the next generate"),
    "rollout/requests_finished": _counter("requests", "requests that ended with a result", total=True),
    "rollout/requests_truncated": _counter("requests", "finished requests that were cut off by their token budget"),
    "rollout/requests_failed": _counter("requests", "requests that ended with an error"),
    "rollout/requests_aborted": _counter("requests", "requests that were aborted"),
    "rollout/requests_stale": _counter("requests", "requests ended early because they would exceed max_staleness"),
    "rollout/requests_requeued": _counter("requests", "requests restarted from the prompt because of max_staleness"),
    "rollout/truncated_share": _ratio(
        "share",
        "share of the finished requests that were cut off by the token budget",
        ("rollout/requests_truncated",),
        ("rollout/requests_finished",),
    ),
    "rollout/preemptions": _counter("requests", "requests preempted because KV blocks ran out"),
    "rollout/steps": _counter("steps", "forwards of the engine"),
    "rollout/step_requests": _summary("requests", "requests advanced by one forward", "mean", "max"),
    "rollout/step_tokens": _summary("tokens", "tokens computed by one forward", "mean", "max"),
    "rollout/prompt_tokens": _counter(
        "tokens", "prompt tokens of admitted requests, counted once per sample of a group"
    ),
    "rollout/generated_tokens": _counter("tokens", "sampled tokens", total=True),
    "rollout/tokens_per_second": _ratio(
        "tokens/s",
        "sampled tokens per second of the generate phase",
        ("rollout/generated_tokens",),
        ("rollout/generate_s",),
    ),
    "rollout/prefill_tokens_computed": _counter("tokens", "prompt positions whose KV a forward computed"),
    "rollout/prefill_tokens_saved": _counter(
        "tokens", "prompt positions whose KV came from the prefix cache or a fork"
    ),
    "rollout/prefix_hit_rate": _ratio(
        "share",
        "share of the required prompt positions that needed no forward",
        ("rollout/prefill_tokens_saved",),
        ("rollout/prefill_tokens_saved", "rollout/prefill_tokens_computed"),
    ),
    "rollout/prefix_hits_refused_version": _counter(
        "blocks", "cached blocks with equal tokens, not reused because their KV is of another policy version"
    ),
    "rollout/kv_blocks_used": _gauge("blocks", "KV blocks referenced by a request", peak=True),
    "rollout/kv_blocks_cached": _gauge("blocks", "unreferenced KV blocks kept for prefix hits"),
    "rollout/kv_blocks_free": _gauge("blocks", "KV blocks without content"),
    "rollout/kv_blocks_copied": _counter("blocks", "KV blocks copied on the first write after a fork"),
    "rollout/kv_blocks_evicted": _counter("blocks", "cached KV blocks evicted to make room"),
    "rollout/kv_blocks_lost": _counter("blocks", "KV blocks the pool lost because a resume found too little memory"),
    "rollout/queue_s": _summary("s", "time from arrival to the request's first forward", "mean", "max"),
    "rollout/ttft_s": _summary("s", "time from arrival to the first token", "mean", "p50", "p99", "max"),
    "rollout/tpot_s": _summary("s", "time between two tokens of a request", "mean", "p50", "p99"),
    "rollout/request_s": _summary("s", "time from arrival to the last token", "mean", "p50", "p99", "max"),
    "rollout/tail_factor": _ratio(
        "ratio",
        "duration of the slowest request over the mean duration",
        ("rollout/request_s_max",),
        ("rollout/request_s_mean",),
    ),
    "rollout/prompt_length": _summary("tokens", "prompt length of finished requests", "mean", "max"),
    "rollout/completion_length": _summary(
        "tokens", "completion length of finished requests", "mean", "p50", "p99", "max"
    ),
    "rollout/policy_version": _gauge("updates", "weight updates since the engine was constructed"),
    "rollout/policy_staleness": _summary(
        "updates", "weight updates since a returned completion token was sampled", "mean", "max", "nonzero_share"
    ),
    "rollout/kv_staleness": _summary(
        "updates", "weight updates since the KV of a returned position was computed", "mean", "max"
    ),
    "rollout/logprob_diff": _summary(
        "nats", "absolute difference between rollout and trainer log-prob of a token", "mean", "p99", "max"
    ),
    "rollout/generate_s": _timer("time spent generating"),
    "rollout/suspend_s": _timer("time spent releasing the KV cache's device memory"),
    "rollout/train_s": _timer("time spent outside the engine: rewards, backward, optimizer"),
    "rollout/resume_s": _timer("time spent restoring the KV cache"),
    **{
        f"rollout/time_share_{phase}": _ratio(
            "share", f"share of the time of all phases spent in {phase}", (f"rollout/{phase}_s",), _PHASE_SECONDS
        )
        for phase in PHASES
    },
    "rollout/suspends": _counter("calls", "suspends that released the KV cache's device memory"),
    "rollout/suspend_bytes": _counter("bytes", "KV copied to host memory"),
    "rollout/resumes": _counter("calls", "resumes that restored the KV cache"),
    "rollout/resume_bytes": _counter("bytes", "KV copied back to the device"),
    "rollout/resume_fallbacks": _counter("requests", "requests recomputed at a resume because their KV no longer fits"),
    "rollout/resume_tokens_restored": _counter("tokens", "positions whose KV was restored without a forward"),
    "rollout/tokens_recomputed": _counter("tokens", "positions to prefill again after a resume"),
    "rollout/preemption_tokens_recomputed": _counter("tokens", "positions to prefill again after a preemption"),
}

LOGGED: dict[str, Metric] = {flat: metric for name, metric in METRICS.items() for flat in metric.logged_as(name)}
"""Flat name → its metric: every key that a snapshot can contain."""


def describe() -> str:
    """Return the table as Markdown, one row per logged name."""
    rows = [f"| `{name}` | {metric.kind.value} | {metric.unit} | {metric.help} |" for name, metric in LOGGED.items()]
    return "\n".join(["| name | kind | unit | meaning |", "|---|---|---|---|", *rows])


def unknown_name(name: str, known: Mapping[str, Metric]) -> KeyError:
    """Return the `KeyError` for a name that is not in the table, with the closest known names."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    cure = f"did you mean {' or '.join(close)}?" if close else "see rollout.metrics.describe()"
    return KeyError(f"{name!r} is not a metric of this package: names are those of rollout.metrics; {cure}")


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
        if metric is None:
            raise unknown_name(name, METRICS)
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
