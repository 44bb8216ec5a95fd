"""The table of metrics: name, kind, unit, meaning, and where an engine's counters and gauges are read.

`METRICS` defines every metric; `LOGGED` lists the flat names that a snapshot can contain, and `ENGINE_STATS` the plain names
in `engine.stats()`. To add a counter or gauge of the engine, add one row with `read`. The manager's metrics, the server's
`/metrics` and the reference page are generated from the table.

In this table a "request" is one sample: a prompt with n=8 is eight requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Literal

from rollout.errors import did_you_mean


class Kind(StrEnum):
    """The way a metric is recorded and reported in a snapshot."""

    COUNTER = "counter"
    """The sum of the values passed to `add` during the interval; with `Metric.total`, also the sum since construction."""

    TIMER = "timer"
    """The seconds of the interval spent in the metric's phase, which `phase` or `enter_phase` has set."""

    GAUGE = "gauge"
    """The last value passed to `set`, absent before the first call; with `Metric.peak`, also the interval's maximum."""

    SUMMARY = "summary"
    """The statistics of the values passed to `observe` during the interval; absent without values."""

    RATIO = "ratio"
    """The ratio of a logged value to a sum of logged values; absent if any of these values is absent or the sum is 0."""


Statistic = Literal["mean", "p50", "p99", "max", "nonzero_share"]


@dataclass(frozen=True)
class Metric:
    """The definition of one metric.

    Attributes:
        kind: the way the metric is recorded.
        unit: unit of the value. A summary's statistics have the same unit, except `nonzero_share`, which is in [0, 1].
        help: the meaning, in one line.
        read: for an engine's counters and gauges, the attribute path that `engine.stats()` reads, such as
            `scheduler.num_active`; "" if the value does not come from the engine.
        stats: for summaries, the statistics that are logged, as `<name>_<statistic>`.
        total: for counters, whether `<name>_total` is logged too.
        peak: for gauges, whether `<name>_peak` is logged too.
        numerator, denominator: for ratios, the logged name to divide, and the logged names whose sum is the divisor.
        logged: whether the metric is recorded and part of snapshots; otherwise it is only in `engine.stats()`.
    """

    kind: Kind
    unit: str
    help: str
    read: str = ""
    stats: tuple[Statistic, ...] = ()
    total: bool = False
    peak: bool = False
    numerator: str = ""
    denominator: tuple[str, ...] = ()
    logged: bool = True

    def logged_as(self, name: str) -> tuple[str, ...]:
        """Return the flat names under which a snapshot reports the metric `name`."""
        if not self.logged:
            return ()
        if self.kind is Kind.SUMMARY:
            return tuple(f"{name}_{stat}" for stat in self.stats)
        return (name, *[f"{name}_total"] * self.total, *[f"{name}_peak"] * self.peak)


_counter = partial(Metric, Kind.COUNTER)
_gauge = partial(Metric, Kind.GAUGE)
_timer = partial(Metric, Kind.TIMER, "s")


def _summary(unit: str, text: str, *stats: Statistic) -> Metric:
    return Metric(Kind.SUMMARY, unit, text, stats=stats)


def _ratio(unit: str, text: str, above: str, *below: str) -> Metric:
    return Metric(
        Kind.RATIO, unit, text, numerator=f"rollout/{above}", denominator=tuple(f"rollout/{name}" for name in below)
    )


PHASES = ("generate", "suspend", "train", "resume")

_TABLE: dict[str, Metric] = {
    "requests_running": _gauge("requests", "requests that advance in every step", "scheduler.num_active", peak=True),
    "requests_waiting": _gauge("requests", "requests waiting for a slot or blocks", "scheduler.num_waiting", peak=True),
    "groups_in_flight": _gauge("groups", "unfinished groups, continued by the next generate"),
    "groups_discarded": _counter("groups", "finished groups that `keep` rejected", total=True),
    "requests_finished": _counter("requests", "requests that ended with a result", total=True),
    "requests_truncated": _counter("requests", "finished requests that were cut off by their token budget"),
    "requests_failed": _counter("requests", "requests that ended with an error", "ledger.requests_failed"),
    "requests_aborted": _counter("requests", "requests that were aborted", "ledger.requests_aborted"),
    "requests_stale": _counter("requests", "requests finished early by max_staleness", "ledger.requests_stale"),
    "requests_requeued": _counter("requests", "requests restarted by max_staleness", "ledger.requests_requeued"),
    "truncated_share": _ratio(
        "share", "share of the finished requests that were truncated", "requests_truncated", "requests_finished"
    ),
    "preemptions": _counter("requests", "requests preempted because KV blocks ran out", "queues.preemptions"),
    "kv_pool_shrinks": _counter("shrinks", "steps repeated in a smaller KV pool", "ledger.kv_pool_shrinks"),
    "steps": _counter("steps", "forwards of the engine", "ledger.steps"),
    "step_requests": _summary("requests", "requests advanced by one forward", "mean", "max"),
    "step_tokens": _summary("tokens", "tokens computed by one forward", "mean", "max"),
    "prompt_tokens": _counter("tokens", "prompt tokens of admitted samples", "ledger.prompt_tokens"),
    "images_encoded": _counter("images", "images or tiles encoded by the vision tower", "images.encoded"),
    "images_reused": _counter("images", "images whose embeddings were cached", "images.reused"),
    "image_cache_bytes": _gauge("bytes", "size of the cached embeddings of images", "images.bytes", logged=False),
    "generated_tokens": _counter("tokens", "sampled tokens", "queues.generated_tokens", total=True),
    "kept_tokens_bytes": _counter("bytes", "size of the returned kept tokens", "queues.kept_tokens_bytes", total=True),
    "tokens_per_second": _ratio(
        "tokens/s", "sampled tokens per second of generating", "generated_tokens", "generate_s"
    ),
    "prefill_tokens_computed": _counter(
        "tokens", "prompt positions computed by a forward", "queues.prefill_tokens_computed"
    ),
    "prefill_tokens_saved": _counter(
        "tokens", "prompt positions found in the cache or forked", "queues.prefill_tokens_saved"
    ),
    "prefix_hit_rate": _ratio(
        "share",
        "share of the prompt positions that needed no forward",
        "prefill_tokens_saved",
        "prefill_tokens_saved",
        "prefill_tokens_computed",
    ),
    "prefix_hits_refused_version": _counter(
        "blocks",
        "blocks that were cached before the last weight update or change of adapters, and are computed again",
        "allocator.index.refused",
    ),
    "kv_blocks_used": _gauge("blocks", "KV blocks referenced by a request", "allocator.num_used", peak=True),
    "kv_blocks_cached": _gauge("blocks", "unreferenced KV blocks kept for prefix hits", "allocator.num_cached"),
    "kv_blocks_free": _gauge("blocks", "KV blocks without content", "allocator.num_free"),
    "kv_blocks_total": _gauge("blocks", "most blocks that the KV pool can hold", "allocator.num_blocks", logged=False),
    "oldest_request_timestamp_s": _gauge(
        "s",
        "arrival of the oldest open request since the epoch, or 0",
        "engine.oldest_request_timestamp_s",
        logged=False,
    ),
    "hold_level": _gauge(
        "level", "0: the engine runs, 1: it is paused, 2: its KV cache is suspended", "engine.hold_level", logged=False
    ),
    "kv_device_bytes": _gauge("bytes", "memory of the KV cache on the device", "cache.device_bytes", logged=False),
    "kv_route_bytes": _gauge(
        "bytes", "part of `kv_device_bytes` for expert routes", "cache.route_device_bytes", logged=False
    ),
    "graph_bytes": _gauge("bytes", "device memory of CUDA graphs", "runner.graph_bytes", logged=False),
    "state_slots": _gauge("slots", "recurrent states that can be kept", "states.num_slots", logged=False),
    "state_slots_used": _gauge("slots", "recurrent states of running requests", "states.num_held", logged=False),
    "state_snapshots": _gauge("slots", "recurrent states kept for prefix hits", "states.num_snapshots", logged=False),
    "state_hits": _counter("requests", "requests that continued from a kept recurrent state", "states.hits"),
    "state_snapshots_evicted": _counter("slots", "kept recurrent states evicted to make room", "states.evictions"),
    "state_device_bytes": _gauge("bytes", "device memory of recurrent states", "state_pool.device_bytes", logged=False),
    "kv_host_bytes": _gauge("bytes", "memory of the KV cache on the host", "cache.host_bytes", logged=False),
    "kv_blocks_copied": _counter(
        "blocks", "KV blocks copied by the first write after a fork", "queues.kv_blocks_copied"
    ),
    "kv_blocks_evicted": _counter("blocks", "cached KV blocks evicted to make room", "allocator.evictions"),
    "kv_blocks_offloaded": _counter("blocks", "evicted KV blocks that went to the host tier", "host.offloaded"),
    "kv_blocks_loaded": _counter("blocks", "KV blocks that came back from the host tier", "host.loaded"),
    "kv_blocks_evicted_from_host": _counter("blocks", "KV blocks evicted from the host tier", "host.evicted"),
    "prefix_host_tokens": _counter("tokens", "positions whose KV came back from the host tier", "host.hit_tokens"),
    "kv_host_cache_bytes": _gauge("bytes", "size of the KV blocks that the host tier holds", "host.num_bytes"),
    "kv_blocks_lost": _counter("blocks", "KV blocks the pool lost because a resume found too little memory"),
    "queue_s": _summary("s", "time from arrival to the request's first forward", "mean", "max"),
    "ttft_s": _summary("s", "time from arrival to the first token", "mean", "p50", "p99", "max"),
    "tpot_s": _summary("s", "time between two tokens of a request", "mean", "p50", "p99"),
    "request_s": _summary("s", "time from arrival to the last token", "mean", "p50", "p99", "max"),
    "tail_factor": _ratio("ratio", "longest over mean duration of a request", "request_s_max", "request_s_mean"),
    "prompt_length": _summary("tokens", "prompt length of finished requests", "mean", "max"),
    "completion_length": _summary("tokens", "completion length of finished requests", "mean", "p50", "p99", "max"),
    "policy_version": _gauge("updates", "weight updates since the engine was constructed", "scheduler.version"),
    "policy_staleness": _summary(
        "updates", "weight updates since a returned token was sampled", "mean", "max", "nonzero_share"
    ),
    "kv_staleness": _summary("updates", "weight updates since returned KV was computed", "mean", "max"),
    "logprob_diff": _summary("nats", "difference of rollout and trainer log-prob", "mean", "p99", "max"),
    "generate_s": _timer("time spent generating"),
    "suspend_s": _timer("time spent releasing the KV cache's device memory"),
    "train_s": _timer("time spent outside the engine: rewards, backward, optimizer"),
    "resume_s": _timer("time spent restoring the KV cache, its copies included"),
    **{
        f"time_share_{phase}": _ratio(
            "share",
            f"share of the time of all phases spent in {phase}",
            f"{phase}_s",
            *(f"{each}_s" for each in PHASES),
        )
        for phase in PHASES
    },
    "suspends": _counter("calls", "suspends that released the KV cache's device memory"),
    "suspend_bytes": _counter("bytes", "KV copied to host memory"),
    "suspend_fallbacks": _counter("calls", "suspends without memory to offload to, which dropped the KV"),
    "resumes": _counter("calls", "resumes that restored the KV cache"),
    "resume_bytes": _counter("bytes", "KV copied back to the device"),
    "resume_fallbacks": _counter("requests", "requests recomputed at a resume because their KV no longer fits"),
    "resume_tokens_restored": _counter("tokens", "positions whose KV was restored without a forward"),
    "tokens_recomputed": _counter("tokens", "positions to prefill again after a resume"),
    "preemption_tokens_recomputed": _counter(
        "tokens", "positions to compute again after a preemption", "queues.preemption_tokens_recomputed"
    ),
}

METRICS = {f"rollout/{name}": metric for name, metric in _TABLE.items()}

LOGGED: dict[str, Metric] = {flat: metric for name, metric in METRICS.items() for flat in metric.logged_as(name)}
"""Flat name → metric. The names are all keys that a snapshot can contain."""

ENGINE_STATS: dict[str, Metric] = {name: metric for name, metric in _TABLE.items() if metric.read}
"""Plain name → metric. The names are the keys that `engine.stats()` returns."""


def describe() -> str:
    """Return the table as Markdown, one row per logged name."""
    rows = [f"| `{name}` | {metric.kind.value} | {metric.unit} | {metric.help} |" for name, metric in LOGGED.items()]
    return "\n".join(["| name | kind | unit | meaning |", "|---|---|---|---|", *rows])


def unknown_name(name: str, known: Mapping[str, Metric]) -> KeyError:
    """Return the `KeyError` for a name that is not in the table, with the closest known names."""
    cure = did_you_mean(name, known, "print(rollout.observe.metric_table.describe()) lists them", most=3, cutoff=0.5)
    return KeyError(f"{name!r} is not a metric of this package; {cure}")


def short_count(number: float) -> str:
    """Format a number with three digits and a decimal unit: `596 M`, `1.5 G`, `12 k`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def binary_bytes(number: float) -> str:
    """Format a number of bytes: `1.1 GiB`, `12.0 MiB`, `3 KiB`, `96 B`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 2**10:.0f} KiB" if number >= 2**10 else f"{number:.0f} B"
