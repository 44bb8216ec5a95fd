"""Metric names with kind, unit and meaning, and the recorder that fills them in.

`METRICS` is the one table: what is recorded, of which kind, in which unit, and one line of help. `LOGGED` lists the
flat names a snapshot may hold; nothing else ever comes out of a recorder. Counters, timers and summaries cover the
interval since the last snapshot; gauges are what was last set.

A recorder knows no engine and no logger: whoever records brings the numbers, and time is read from the clock given.
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
    """How a metric is recorded, and what a snapshot makes of it."""

    COUNTER = "counter"
    """`add`: the sum over the interval; 0 when nothing was added. With `total`, also the sum since the beginning."""

    TIMER = "timer"
    """`phase` / `enter_phase`: seconds of the interval spent in that phase."""

    GAUGE = "gauge"
    """`set`: the last value, absent until set. With `peak`, also the highest value held during the interval."""

    SUMMARY = "summary"
    """`observe`: statistics of the values of the interval, absent when there was none."""

    RATIO = "ratio"
    """Derived: one sum of logged values over another, absent when a part is absent or the denominator is 0."""


Statistic = Literal["mean", "p50", "p99", "max", "nonzero_share"]


@dataclass(frozen=True)
class Metric:
    """One line of the table.

    Attributes:
        kind: how it is recorded.
        unit: of the value (statistics of a summary have the same unit, but for `nonzero_share`, a share of 1).
        help: one line.
        stats: of a summary, what is logged, as `<name>_<statistic>`.
        total: of a counter, log `<name>_total` too.
        peak: of a gauge, log `<name>_peak` too.
        numerator, denominator: of a ratio, the logged names that are summed.
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
        """The flat names a snapshot uses for the metric called `name`."""
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

# One request here is one sample: a prompt asked for n times is n requests.
METRICS: dict[str, Metric] = {
    "rollout/requests_running": _gauge("requests", "hold KV and advance with every step", peak=True),
    "rollout/requests_waiting": _gauge("requests", "wait for a place or for blocks", peak=True),
    "rollout/groups_in_flight": _gauge("groups", "unfinished, continued by the next generate"),
    "rollout/requests_finished": _counter("requests", "ended with a result", total=True),
    "rollout/requests_truncated": _counter("requests", "of the finished, those cut off by their token budget"),
    "rollout/requests_failed": _counter("requests", "ended by an error"),
    "rollout/requests_aborted": _counter("requests", "ended by an abort"),
    "rollout/requests_stale": _counter("requests", "ended early because they would have exceeded max_staleness"),
    "rollout/requests_requeued": _counter("requests", "started again from the prompt because of max_staleness"),
    "rollout/truncated_share": _ratio(
        "share",
        "of the finished requests, the part cut off by the token budget",
        ("rollout/requests_truncated",),
        ("rollout/requests_finished",),
    ),
    "rollout/preemptions": _counter("requests", "evicted because KV blocks ran out"),
    "rollout/steps": _counter("steps", "forwards of the engine"),
    "rollout/step_requests": _summary("requests", "that one forward advanced", "mean", "max"),
    "rollout/step_tokens": _summary("tokens", "that one forward computed", "mean", "max"),
    "rollout/prompt_tokens": _counter("tokens", "prompt tokens of admitted requests, each sample of a group counted"),
    "rollout/generated_tokens": _counter("tokens", "sampled", total=True),
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
        "of the prompt positions needed, the part that was not computed",
        ("rollout/prefill_tokens_saved",),
        ("rollout/prefill_tokens_saved", "rollout/prefill_tokens_computed"),
    ),
    "rollout/prefix_hits_refused_version": _counter("blocks", "equal tokens, but KV of another policy version"),
    "rollout/kv_blocks_used": _gauge("blocks", "referenced by a request", peak=True),
    "rollout/kv_blocks_cached": _gauge("blocks", "unreferenced, kept for a prefix hit"),
    "rollout/kv_blocks_free": _gauge("blocks", "without content"),
    "rollout/kv_blocks_copied": _counter("blocks", "copied at the first write after a fork"),
    "rollout/kv_blocks_evicted": _counter("blocks", "cached content dropped to make room"),
    "rollout/kv_blocks_lost": _counter("blocks", "by which the pool shrank because a resume found too little memory"),
    "rollout/queue_s": _summary("s", "from arrival to the first time in a forward", "mean", "max"),
    "rollout/ttft_s": _summary("s", "from arrival to the first token", "mean", "p50", "p99", "max"),
    "rollout/tpot_s": _summary("s", "between two tokens of a request", "mean", "p50", "p99"),
    "rollout/request_s": _summary("s", "from arrival to the last token", "mean", "p50", "p99", "max"),
    "rollout/tail_factor": _ratio(
        "ratio",
        "slowest request over mean request: what waiting for the last one costs",
        ("rollout/request_s_max",),
        ("rollout/request_s_mean",),
    ),
    "rollout/prompt_length": _summary("tokens", "of finished requests", "mean", "max"),
    "rollout/completion_length": _summary("tokens", "of finished requests", "mean", "p50", "p99", "max"),
    "rollout/policy_version": _gauge("updates", "weight updates since the engine was built"),
    "rollout/policy_staleness": _summary(
        "updates", "since a returned completion token was sampled", "mean", "max", "nonzero_share"
    ),
    "rollout/kv_staleness": _summary("updates", "since the KV of a returned position was computed", "mean", "max"),
    "rollout/logprob_diff": _summary(
        "nats", "absolute difference between rollout and trainer log-prob of a token", "mean", "p99", "max"
    ),
    "rollout/generate_s": _timer("spent generating"),
    "rollout/suspend_s": _timer("spent taking the KV cache off the device"),
    "rollout/train_s": _timer("spent outside the engine: rewards, backward, optimizer"),
    "rollout/resume_s": _timer("spent bringing the KV cache back"),
    **{
        f"rollout/time_share_{phase}": _ratio(
            "share", f"of the time in any phase, the part spent in {phase}", (f"rollout/{phase}_s",), _PHASE_SECONDS
        )
        for phase in PHASES
    },
    "rollout/suspends": _counter("calls", "times the KV cache was taken off the device"),
    "rollout/suspend_bytes": _counter("bytes", "of KV copied to the host"),
    "rollout/resumes": _counter("calls", "times the KV cache was brought back"),
    "rollout/resume_bytes": _counter("bytes", "of KV copied back to the device"),
    "rollout/resume_fallbacks": _counter("requests", "recomputed at a resume because their KV did not fit any more"),
    "rollout/resume_tokens_restored": _counter("tokens", "positions whose KV came back without a forward"),
    "rollout/tokens_recomputed": _counter("tokens", "positions to prefill again after a resume"),
    "rollout/preemption_tokens_recomputed": _counter("tokens", "positions to prefill again after a preemption"),
}

LOGGED: dict[str, Metric] = {flat: metric for name, metric in METRICS.items() for flat in metric.logged_as(name)}
"""Flat name → its metric: every key a snapshot may hold."""


def describe() -> str:
    """The table as Markdown, one row per logged name."""
    rows = [f"| `{name}` | {metric.kind.value} | {metric.unit} | {metric.help} |" for name, metric in LOGGED.items()]
    return "\n".join(["| name | kind | unit | meaning |", "|---|---|---|---|", *rows])


def unknown_name(name: str, known: Mapping[str, Metric]) -> KeyError:
    """The error for a name that is not in the table, with the nearest ones that are."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    cure = f"did you mean {' or '.join(close)}?" if close else "see rollout.metrics.describe()"
    return KeyError(f"{name!r} is not a metric of this package: names are those of rollout.metrics; {cure}")


RESERVOIR_SIZE = 8192


class _Summary:
    """Statistics of a stream of numbers in bounded memory.

    Mean, maximum and share of non-zeros are exact (float64). Percentiles are exact up to `RESERVOIR_SIZE` values;
    beyond, they are those of a uniform sample of that size (Vitter's algorithm R, a batch of values at a time). A NaN
    makes mean and maximum NaN, and the percentiles while it is in the sample.
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
        """Take in values, float64 [n] with n ≥ 1."""
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
    """Takes numbers in by the names of `METRICS`, gives them out as one flat dict. Safe to use from several threads.

    A name that is not in the table is a `KeyError` with the nearest names; the wrong verb for a metric is a `TypeError`
    with the right one. Memory is bounded whatever is recorded, and however long nobody takes a snapshot.

    Args:
        clock: seconds that never run backwards.
        seed: of the reservoirs that percentiles of very many values come from.
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
        """Count `value` ≥ 0 more.

        Raises:
            KeyError: no such metric. TypeError: it is not a counter. ValueError: `value` is negative or NaN.
        """
        metric = self._metric(name, Kind.COUNTER)
        if not value >= 0:
            raise ValueError(f"{name}: cannot add {value!r}: a counter only rises; a value that also falls is a gauge")
        with self._lock:
            self._counters[name] += value
            if metric.total:
                self._totals[name] += value

    def set(self, name: str, value: float) -> None:
        """The gauge is now `value`.

        Raises:
            KeyError: no such metric. TypeError: it is not a gauge.
        """
        metric = self._metric(name, Kind.GAUGE)
        with self._lock:
            self._gauges[name] = float(value)
            if metric.peak:
                self._peaks[name] = max(self._gauges[name], self._peaks.get(name, -math.inf))

    def observe(self, name: str, values: Any) -> None:
        """Take in one number or an array of them, of any shape (a torch tensor on any device too); none is fine.

        Raises:
            KeyError: no such metric. TypeError: it is not a summary.
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
        """From now on, wall time belongs to `phase` (one of `PHASES`; None: to nobody). Exactly one phase is current.

        Raises:
            KeyError: no such phase.
        """
        if phase is not None and phase not in PHASES:
            raise KeyError(f"phase {phase!r}: must be one of {', '.join(PHASES)}, or None")
        with self._lock:
            self._account()
            self._phase = phase

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Wall time of the body belongs to `phase`; afterwards, an exception too, to the phase current before."""
        before = self._phase
        self.enter_phase(phase)
        try:
            yield
        finally:
            self.enter_phase(before)

    def snapshot(self, reset: bool = True) -> dict[str, float]:
        """What happened since the last snapshot, by flat name (see `Kind` for what is present when).

        Args:
            reset: begin a new interval. False: only look.
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
    # A tensor on a device, in bfloat16 or with a gradient is no numpy array yet. Duck-typed: torch stays out of here.
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    return np.asarray(values, dtype=np.float64).reshape(-1)
