"""Metrics in Prometheus' text format. Every server has its own registry, so its metrics cannot collide with a trainer's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.errors import RolloutError
from rollout.observe.metric_table import ENGINE_STATS, Kind
from rollout.requests.request import DynamicInferenceRequest

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = tuple(2**power for power in range(18))


class EngineNumbers(Collector):
    """A collector that reads `llm.stats()` at each Prometheus scrape. A dead engine reports only `rollout_engine_up 0`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def describe(self) -> Iterable[Metric]:
        return ()  # Without this method, a registry with `auto_describe` would call `collect`, which queries the engine.

    def collect(self) -> Iterator[Metric]:
        try:
            stats = self._llm.stats()
        except RolloutError:
            stats = None
        yield _gauge("engine_up", "whether the engine answers", stats is not None)
        if stats is None:
            return
        yield _gauge("open_groups", "prompts accepted and not ended, over HTTP or not", self._llm.num_open)
        for name, value in stats.items():
            metric = ENGINE_STATS[name]
            text = f"{metric.unit}: {metric.help}"
            if metric.kind is Kind.COUNTER:
                yield CounterMetricFamily(f"rollout_{name}", text, value=value)
            else:
                yield _gauge(name, text, value)


class RequestMetrics:
    """The metrics of one HTTP server: request counters, latency histograms and the engine's statistics."""

    def __init__(self, llm: Any) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_http_requests",
            "replies by path and status; 499: the client disconnected before",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self._duration = self._histogram("http_request_seconds", "from a request's head to its reply's last byte", True)
        self._ttft = self._histogram("request_ttft_seconds", "from arrival at the engine to a sample's first token")
        self._latency = self._histogram("request_latency_seconds", "from arrival at the engine to a sample's end")
        self._prompt = self._histogram("request_prompt_tokens", "tokens of a sample's prompt", buckets=_TOKENS)
        self._generated = self._histogram("request_generated_tokens", "tokens of a sample", buckets=_TOKENS)
        self._registry.register(EngineNumbers(llm))

    def _histogram(
        self, name: str, text: str, by_endpoint: bool = False, buckets: tuple[float, ...] = _SECONDS
    ) -> Histogram:
        labels = ("endpoint",) if by_endpoint else ()
        return Histogram(f"rollout_{name}", text, labels, registry=self._registry, buckets=buckets)

    def replied(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a reply, and record its duration. A reply counts even if its client disconnected.

        Args:
            endpoint: path of the route. The request's own path would make the number of label values unbounded.
            status: HTTP status of the reply; 499 if the client disconnected.
            seconds: seconds since the request's headers were complete.
        """
        self._requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(seconds)

    def finished(self, results: Iterable[DynamicInferenceRequest]) -> None:
        """Record finished samples. Failed samples are counted only in the engine's statistics."""
        for result in results:
            if result.error is not None:
                continue
            self._prompt.observe(len(result.prompt_tokens))
            self._generated.observe(len(result.generated_tokens))
            if result.ttft is not None:
                self._ttft.observe(result.ttft)
            if result.latency is not None:
                self._latency.observe(result.latency)

    def text(self) -> bytes:
        """Return all metrics as text of the type `CONTENT_TYPE`."""
        return generate_latest(self._registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rollout_{name}", text, value=float(value))
