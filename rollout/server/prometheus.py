"""/metrics in Prometheus' text format.

Always true: one registry per server, never the process's own, so that several servers, tests and a trainer's metrics do
not meet. The engine's numbers are read when somebody asks, and their names and help come from `rollout.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout.errors import RolloutError
from rollout.metrics import METRICS, Kind
from rollout.requests.request import DynamicInferenceRequest

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = tuple(2**power for power in range(18))

_ONLY_HERE = {
    "kv_blocks_total": "blocks of the KV pool",
    "kv_device_bytes": "bytes the KV cache takes on the device",
    "kv_host_bytes": "bytes the KV cache takes on the host",
}
"""Statistics of the engine that are not in `METRICS`."""


class EngineNumbers(Collector):
    """Reads `llm.stats()` whenever the registry is read; an engine that is gone has no numbers but `rollout_engine_up`.

    Args:
        llm: with `stats()` and `num_open`.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def describe(self) -> Iterable[Metric]:
        """Nothing: the engine is not asked while the registry is built."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """The present numbers."""
        try:
            stats = self._llm.stats()
        except RolloutError:
            stats = None
        yield _gauge("engine_up", "whether the engine answers", stats is not None)
        if stats is None:
            return
        yield _gauge("open_groups", "prompts accepted and not ended, over HTTP or not", self._llm.num_open)
        for name, value in stats.items():
            known = METRICS.get(f"rollout/{name}")
            text = f"{known.unit}: {known.help}" if known else _ONLY_HERE.get(name, f"the engine's {name}")
            if known is not None and known.kind is Kind.COUNTER:
                yield CounterMetricFamily(f"rollout_{name}", text, value=value)
            else:
                yield _gauge(name, text, value)


class RequestMetrics:
    """What the HTTP server counts.

    Args:
        llm: whose numbers are shown beside its own.
    """

    def __init__(self, llm: Any) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "rollout_http_requests",
            "replies by path and status; 499: the client went away before",
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
        """A reply has gone out, or its client has.

        Args:
            endpoint: the route's path, not the request's: there must be few.
            status: of HTTP.
            seconds: since the request's head was there.
        """
        self._requests.labels(endpoint, str(status)).inc()
        self._duration.labels(endpoint).observe(seconds)

    def finished(self, results: Iterable[DynamicInferenceRequest]) -> None:
        """Samples have ended; those that failed count only among the engine's numbers."""
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
        """Everything, as `CONTENT_TYPE`."""
        return generate_latest(self._registry)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"rollout_{name}", text, value=float(value))
