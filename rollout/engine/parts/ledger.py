"""The ledger of one engine: the unfinished samples, the finished records not yet returned, and counters.

Always true: an accepted sample is either in `live` or in `ended`, until `take` returns its record exactly once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout.engine.parts.controller import TextGenerationController
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequences import Sequence as Sample
from rollout.errors import InvalidRequestError
from rollout.observe.metric_table import ENGINE_STATS
from rollout.observe.recorder import EngineTap
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.state import FinishReason

_COUNTED: dict[FinishReason | None, str] = {
    FinishReason.ERROR: "requests_failed",
    FinishReason.ABORT: "requests_aborted",
    FinishReason.STALE: "requests_stale",
}


def _counters() -> dict[str, int]:
    return {name: 0 for name, metric in ENGINE_STATS.items() if metric.read.startswith("ledger.")}


@dataclass(eq=False)
class Ledger:
    """The samples of one engine that were accepted and not returned yet.

    Attributes:
        live: the unfinished samples, by request id and then by sample index.
        ended: the finished records that were not returned yet.
        counters: the counters that the ledger keeps (steps, prompt tokens, requests), by their names in `ENGINE_STATS`.
    """

    _scheduler: Scheduler
    _controller: TextGenerationController
    _clock: Callable[[], float]
    _tap: EngineTap
    live: dict[int, dict[int, Sample]] = field(default_factory=dict)
    ended: list[DynamicInferenceRequestRecord] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=_counters)

    def free_indices(self, number: int, n: int, samples: Sequence[int] | None) -> Sequence[int]:
        """Return the sample indices that a request adds: `samples`, or all `n` if `samples` is None.

        Raises:
            InvalidRequestError: an index is in use, repeated, or not in [0, n).
        """
        live = self.live.get(number, {}).keys()
        if samples is None:
            if live:
                raise InvalidRequestError(f"request_id={number} is in use by an unfinished request; choose another")
            return range(n)
        if not samples or len(set(samples)) < len(samples) or not 0 <= min(samples) <= max(samples) < n:
            raise InvalidRequestError(f"samples={list(samples)!r}: must be different ones of the n={n}, at least one")
        if not live.isdisjoint(samples):
            raise InvalidRequestError(
                f"request {number} samples {sorted(live & set(samples))} are here already; abort them first"
            )
        return samples

    def accept(self, *samples: Sample) -> None:
        """Add samples to `live`. The scheduler must already have queued them."""
        for sample in samples:
            number, index = sample.key
            self.live.setdefault(number, {})[index] = sample

    def unfinished(self) -> list[Sample]:
        """Return all unfinished samples."""
        # Copy the collections, because another thread may finish a sample during the iteration.
        return [sample for samples in list(self.live.values()) for sample in list(samples.values())]

    def oldest_arrival(self) -> float:
        """Return the arrival time of the oldest unfinished request, in seconds since the epoch; 0 if there is none."""
        # Compare all requests: a request continued from a checkpoint may be older than requests with lower ids.
        firsts = (next(iter(list(samples.values())), None) for samples in list(self.live.values()))
        return min((sample.record[0].arrival_time for sample in firsts if sample is not None), default=0.0)

    def staleness(self, sample: Sample) -> int:
        """Return the number of weight updates since a sample's oldest completion token; 0 if it has no tokens yet."""
        request = sample.request
        oldest = request.policy_spans.oldest(start=request.original_prompt_length)
        return 0 if oldest is None else self._scheduler.version - oldest

    def end(self, sample: Sample, reason: FinishReason, error: str | None = None) -> None:
        """Finish a sample that the scheduler has removed from its queues, and collect its record."""
        self._scheduler.leave(sample, reason, error)
        self.collect(sample)

    def fail(self, samples: Sequence[Sample], exc: Exception) -> None:
        """Finish samples with the error `exc`, and add an error event to each."""
        now = self._clock()
        for sample in samples:
            sample.request.add_event_error_nontransient(exc, timestamp=now)
            self.end(sample, FinishReason.ERROR, f"{type(exc).__name__}: {exc}")

    def collect(self, sample: Sample) -> None:
        """Fill in a finished sample's text and latency, count the sample, and move it from `live` to `ended`."""
        record, request = sample.record, sample.request
        if (counter := _COUNTED.get(request.finish_reason)) is not None:
            self.counters[counter] += 1
        record.completion_text = self._text(sample)
        record.latency = self._clock() - record[0].arrival_time
        if (log := self._tap.log) is not None:
            log.ended(record)
        self.ended.append(record)
        self.forget(sample)

    def forget(self, sample: Sample) -> None:
        """Remove a sample from `live`, the unfinished samples."""
        number, index = sample.key
        self.live[number].pop(index, None)
        if not self.live[number]:
            del self.live[number]

    def take(self, keys: Callable[[tuple[int, int]], bool] = lambda key: True) -> list[DynamicInferenceRequestRecord]:
        """Remove and return the finished records whose (request_id, sample_index) the predicate `keys` accepts."""
        taken: list[DynamicInferenceRequestRecord] = []
        stay: list[DynamicInferenceRequestRecord] = []
        for record in self.ended:
            (taken if keys((record.request_id, record.sample_index)) else stay).append(record)
        self.ended = stay
        return taken

    def put_back(self, taken: Sequence[DynamicInferenceRequestRecord]) -> None:
        """Put back records that `take` removed but that did not reach the user, so that the next `take` returns them."""
        self.ended[:0] = taken

    def _text(self, sample: Sample) -> str | None:
        if sample.text is not None:
            return str(sample.text.text())
        request = sample.request
        try:
            return self._controller.detokenize(request.completion_tokens)
        except Exception as exc:  # noqa: BLE001 - if the tokenizer fails, only this request loses its text
            warnings.warn(
                f"request {request.request_id} sample {sample.record.sample_index} has tokens and no text: the tokenizer "
                f"raised {type(exc).__name__}: {exc}",
                stacklevel=2,
            )
            return None
