"""The delivery of an engine's results: finished samples to their groups, new tokens to streams at a bounded rate."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rollout.distributed.client.futures import Readers, RequestFuture, RequestStream
from rollout.engine.engine import DynamicInferenceEngine
from rollout.requests.delta import growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams

DELTAS_PER_S = 1000
"""The maximum number of pieces of text per second over all streams. At a higher token rate, a piece has several tokens.

Over HTTP a piece takes 40 to 60 µs of one core, mostly in Python code that delays the steps, and 25 µs of the client's core.
At the maximum rate this slows the steps by about 5 %.
"""

_NOTHING_KNOWN = (0, 0, 0)

Listener = RequestFuture | RequestStream
"""A receiver of a group's tokens or samples, notified once when the group has finished or failed."""


@dataclass(eq=False, slots=True)
class Group:
    """An open group: its request, its listener and its finished samples."""

    number: int
    tokens: list[int]
    params: SamplingParams
    listener: Listener
    priority: int
    interval: int
    arrival_time: float
    ends_at: float
    """The deadline of the request, in seconds of `time.monotonic`; infinite if there is none."""
    in_engine: int | None = None
    """The group's engine request id; None until the group is queued in the engine."""
    ended: dict[int, DynamicInferenceRequest] = field(default_factory=dict)
    steps: int = 0
    """The number of steps since tokens of this group were last delivered."""
    begun: bool = False
    """Whether any tokens were delivered. The first tokens are never delayed."""
    known: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """The delivered part of each unfinished sample: index → (token count, prompt's policy version, event count)."""


class Delivery:
    """The open groups of one engine, to which results are delivered. Only the thread that steps the engine may use it.

    Attributes:
        groups: group number → open group.
        readers: the stream readers that wait for tokens; `tell` wakes them."""

    def __init__(self, engine: DynamicInferenceEngine) -> None:
        self._engine = engine
        self.groups: dict[int, Group] = {}
        self.readers = Readers()
        self._by_request: dict[int, Group] = {}
        self._streams: dict[int, tuple[Group, RequestStream]] = {}
        self._next_deltas = 0.0

    @property
    def num_streams(self) -> int:
        """The number of streams whose group is queued in the engine."""
        return len(self._streams)

    def queued(self, group: Group) -> None:
        """Start delivering results to a group, now that the engine has accepted it as request `group.in_engine`."""
        assert group.in_engine is not None
        self._by_request[group.in_engine] = group
        if isinstance(group.listener, RequestStream) and not group.listener.whole:
            self._streams[group.in_engine] = group, group.listener
            group.known = dict.fromkeys(range(group.params.n), _NOTHING_KNOWN)

    def tell(self, ended: list[DynamicInferenceRequestRecord], *, everything: bool) -> None:
        """Deliver the results of a step to their groups and streams.

        Args:
            ended: the records of the samples that finished in this step.
            everything: whether to also deliver stream tokens that are not due yet.
        """
        for record in ended:
            group = self._by_request.get(record.request_id)
            if group is not None:
                try:
                    self._take_ended(group, record)
                except Exception as exc:  # noqa: BLE001 - if a result cannot be built, only its group fails
                    self.fail(group, exc)
        if self._streams:
            self._tell_streams(everything)
        self.readers.flush()

    def _take_ended(self, group: Group, record: DynamicInferenceRequestRecord) -> None:
        sample = record.merge()
        sample.request_id, sample.prompt = group.number, group.listener.prompt
        group.ended[record.sample_index] = sample
        if (streamed := self._streams.get(record.request_id)) is not None:
            streamed[1].take(growth(record, *group.known.pop(record.sample_index)), sample)
        if len(group.ended) == group.params.n:
            self._forget(group)
            group.listener.end([group.ended[index] for index in range(group.params.n)])

    def _tell_streams(self, everything: bool) -> None:
        now, step = time.monotonic(), self._engine.parts.stepper.last
        early = now < self._next_deltas
        # Check only this step's prefills for first tokens, because a sample gets its first token in the step of its
        # prefill. Checking every stream that waits for its first token would take longer.
        fresh = set() if step is None else {sample.record.request_id for sample in step.prefills}
        due: dict[tuple[int, int], tuple[int, int, int]] = {}
        for number, (group, stream) in self._streams.items():
            group.steps += self._engine.parts.stepper.made
            if (
                everything
                or number in fresh
                or (group.begun and not early and group.steps >= group.interval and stream.wants_more)
            ):
                group.steps = 0
                for index, known in group.known.items():
                    due[number, index] = known
        if not early:
            self._next_deltas = now + len(due) / DELTAS_PER_S
        for grown in self._engine.progress(due):
            group, stream = self._streams[grown.request_id]
            group.begun = True
            group.known[grown.sample_index] = (grown.start + grown.count, grown.prompt_version, grown.num_events)
            stream.take(grown)

    def fail(self, group: Group, error: BaseException) -> None:
        """Abort a group in the engine, and finish its listener with `error`."""
        self._forget(group)
        if (number := group.in_engine) is not None and len(group.ended) < group.params.n:
            self._engine.abort_request(number)
            self._engine.take_ended(lambda key: key[0] == number)
        group.listener.fail(error)

    def _forget(self, group: Group) -> None:
        self.groups.pop(group.number, None)
        if group.in_engine is not None:
            self._by_request.pop(group.in_engine, None)
            self._streams.pop(group.in_engine, None)
