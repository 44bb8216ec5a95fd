"""The recorder of one process: rows in memory about its engines, its trainer, and the history of every sample.

    Stepper, Ledger, EngineControl → EngineTap → EngineLog      steps, finished samples, control calls of one engine
    manager phases, `span`, `mark`  → TraceRecorder             events outside the engines

A trace covers a process, including engines that are built during the recording. Recording only appends to lists, so any
thread may record. After `MAX_ROWS` steps or samples, further rows are counted but not kept.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rollout.errors import EngineStateError
from rollout.requests.events import DynamicInferenceEventType

if TYPE_CHECKING:
    from rollout.requests.record import DynamicInferenceRequestRecord
    from rollout.requests.request import DynamicInferenceRequest


WAITING, PREFILL, DECODE, PREEMPTED, HELD = "waiting", "prefill", "decode", "preempted", "held"
"""The states of a sample. Waiting: it is in the queue. Prefill: its prompt is computed. Decode: its tokens are sampled.
Preempted: its KV was dropped, and it is in the queue again. Held: it has KV, but the engine runs no steps."""


@dataclass(frozen=True)
class Life:
    """The history of one sample.

    Attributes:
        states: (state, start, end) in order of time, in seconds of the engine's clock.
        versions: (time, policy version) of the sample's first token and of every change of version after it.
        prompt_tokens, tokens: lengths of prompt and completion in tokens.
        cached_tokens: number of prompt tokens whose KV came from the prefix cache at the first admission.
        finish: value of the `FinishReason`; "unfinished" if the sample had not finished when the trace stopped.
    """

    request_id: int
    sample_index: int
    states: tuple[tuple[str, float, float], ...]
    versions: tuple[tuple[float, int], ...]
    prompt_tokens: int
    tokens: int
    cached_tokens: int
    finish: str

    @property
    def start(self) -> float:
        return self.states[0][1]

    @property
    def end(self) -> float:
        return self.states[-1][2]


def life_of(record: DynamicInferenceRequestRecord, until: float) -> Life:
    """Build the history of a sample; an unfinished sample's history ends at `until`."""
    first, last = record[0], record[-1]
    at, state = first.arrival_time, WAITING
    states: list[tuple[str, float, float]] = []
    versions: list[tuple[float, int]] = []
    for segment in record:
        first_token = None if segment.ttft is None else segment.arrival_time + segment.ttft
        for event in segment.events:
            following = _FOLLOWS.get(event.type)
            if following is None:
                continue
            at = _close(states, state, at, event.timestamp, first_token)
            state = following
        if first_token is not None:
            _add_versions(versions, segment, first_token)
            if state == PREFILL:
                at = _close(states, state, at, first_token, None)
                state = DECODE
    if state:
        _close(states, state, at, max(until, at), None)
    return Life(
        record.request_id, record.sample_index, tuple(states), tuple(versions), len(first.prompt_tokens),
        sum(len(segment.generated_tokens) for segment in record), first.num_cached_tokens,
        "unfinished" if last.finish_reason is None else last.finish_reason.value,
    )  # fmt: skip


_FOLLOWS = {
    DynamicInferenceEventType.ADD_CONTEXT: PREFILL,
    DynamicInferenceEventType.EVICT: PREEMPTED,
    DynamicInferenceEventType.FINISH: "",
    DynamicInferenceEventType.FAIL: "",
}


def _close(
    states: list[tuple[str, float, float]], state: str, start: float, end: float, first_token: float | None
) -> float:
    """Append an interval to `states`, split into prefill and decode at the first token; return the interval's end."""
    end = max(start, end)
    if state == PREFILL and first_token is not None and start <= first_token < end:
        states.append((PREFILL, start, first_token))
        state, start = DECODE, first_token
    if state:
        states.append((state, start, end))
    return end


def _add_versions(versions: list[tuple[float, int]], segment: DynamicInferenceRequest, first_token: float) -> None:
    position, prompt = 0, len(segment.prompt_tokens)
    for version, count in segment.policy_spans.runs:
        begin, position = position, position + count
        if position <= prompt:
            continue
        token = max(0, begin - prompt)
        if not versions or versions[-1][1] != version:
            versions.append((first_token + sum(segment.tpot[:token]), version))


MAX_ROWS = 500_000
"""The maximum number of rows that are kept of each kind (steps, samples, spans)."""


class StepRow(NamedTuple):
    """One step of an engine. Times are seconds since the epoch; counters count from the engine's construction."""

    start: float
    scheduled: float
    executed: float
    end: float
    decodes: int
    prefills: int
    prefill_tokens: int
    sampled: int
    running: int
    waiting: int
    kv_used: int
    kv_cached: int
    kv_free: int
    kv_on_host: int
    kv_offloaded: int
    kv_loaded: int
    prefill_tokens_saved: int
    preemptions: int
    version: int


class Span(NamedTuple):
    """An interval on a track (one row of the timeline); for an instant, `end` equals `start`."""

    track: str
    name: str
    start: float
    end: float
    args: dict[str, Any]


class EngineLog:
    """The recorded rows of one engine.

    Attributes:
        lives: the histories of finished samples.
        controls: the control calls and weight updates.
        states: (time, value of the `EngineState`) at the start of the log and at every change.
        dropped: number of rows that were not kept because of `MAX_ROWS`.
        saved_before: the counter `prefill_tokens_saved` before the first step.
    """

    def __init__(self, clock: Callable[[], float], state: str) -> None:
        self.clock = clock
        self.steps: list[StepRow] = []
        self.lives: list[Life] = []
        self.controls: list[Span] = []
        self.states: list[tuple[float, str]] = [(clock(), state)]
        self.dropped = 0
        self.saved_before = 0
        self._marks: list[float] = []

    def step_begins(self, tokens_saved: int) -> None:
        """Record the start of a step. `step_reached` and `step_ends` are called next, unless the step is empty or fails."""
        self._marks = [self.clock()]
        if not self.steps:
            self.saved_before = tokens_saved

    def step_reached(self) -> None:
        """Record that the step has been scheduled (first call) or executed (second call)."""
        self._marks.append(self.clock())

    def step_ends(self, numbers: Iterable[int]) -> None:
        """Record that a step has finished; `numbers` are the fields of `StepRow` that follow the times."""
        if len(self.steps) >= MAX_ROWS:
            self.dropped += 1
            return
        start, scheduled, executed = self._marks
        self.steps.append(StepRow(start, scheduled, executed, self.clock(), *numbers))

    def ended(self, record: DynamicInferenceRequestRecord) -> None:
        if len(self.lives) >= MAX_ROWS:
            self.dropped += 1
            return
        self.lives.append(life_of(record, self.clock()))

    def instant(self, name: str, **args: Any) -> None:
        now = self.clock()
        self.controls.append(Span("engine", name, now, now, args))

    def control(self, name: str, start: float, state: str, **args: Any) -> None:
        """Record a control call (such as pause) that began at `start` and has finished, with the engine in `state`."""
        now = self.clock()
        self.controls.append(Span("engine", name, start, now, args))
        self.states.append((now, state))


class TraceRecorder:
    """The rows of one process: a log per engine, and spans of the trainer and job. Times are seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time, destination: str = "") -> None:
        self.clock = clock
        self.destination = destination
        self.started = clock()
        self.ended = 0.0
        self.spans: list[Span] = []
        self._phases: dict[object, tuple[str | None, float]] = {}
        self._of_tap: dict[EngineTap, EngineLog] = {}
        self._lock = threading.Lock()

    def log_of(self, tap: EngineTap) -> EngineLog:
        """Return the log of the engine that reports through `tap`; create the log at the engine's first report."""
        with self._lock:
            if tap not in self._of_tap:
                self._of_tap[tap] = EngineLog(tap.clock, tap.state())
            return self._of_tap[tap]

    @property
    def engines(self) -> list[EngineLog]:
        """The logs, one for each engine that was built or reported during the trace."""
        return list(self._of_tap.values())

    def add(self, span: Span) -> None:
        if len(self.spans) < MAX_ROWS:
            self.spans.append(span)

    def phase(self, of: object, phase: str | None, before: str | None) -> None:
        """Record that `of`, such as a manager, enters `phase`; the phase that it leaves becomes a span.

        Args:
            of: key of the object whose phases are recorded.
            phase: the new phase; None means no phase.
            before: the previous phase of `of`, used only if the trace has not recorded a phase of `of` yet.
        """
        now = self.clock()
        name, since = self._phases.get(of, (before, self.started))
        if name == phase:
            return
        if name is not None:
            self.add(Span("phases", name, since, now, {"phase": name}))
        self._phases[of] = (phase, now)

    def finish(self) -> None:
        """Finish the trace: record the open phases and, once each engine is between two steps, its unfinished samples."""
        self.ended = self.clock()
        for of in list(self._phases):
            self.phase(of, None, None)
        for tap, log in list(self._of_tap.items()):
            log.lives += [life_of(record, self.ended) for record in tap.records()]


_active: TraceRecorder | None = None
_switching = threading.Lock()


class EngineTap:
    """The object through which one engine reports to the active recorder.

    Args:
        clock: the engine's clock, which gives the times of events and steps.
        state: function that returns the value of the engine's `EngineState`.
        records: function that updates and returns the records of the engine's unfinished samples; called when a trace stops.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        state: Callable[[], str],
        records: Callable[[], list[DynamicInferenceRequestRecord]],
    ) -> None:
        self.clock = clock
        self.state = state
        self.records = records

    @property
    def log(self) -> EngineLog | None:
        """The engine's log in the active recorder; None while no trace is recorded."""
        recorder = _active
        return None if recorder is None else recorder.log_of(self)


def start(destination: str, clock: Callable[[], float] = time.time) -> TraceRecorder:
    """Start recording a trace for the file `destination`; raise `EngineStateError` if one is already being recorded."""
    global _active
    with _switching:
        if _active is not None:
            raise EngineStateError(
                f"trace({destination!r}) while {_active.destination!r} is being recorded: a process records one trace at a "
                "time; end that one first"
            )
        _active = TraceRecorder(clock, destination)
        return _active


def stop(recorder: TraceRecorder) -> None:
    """Stop the recording; this has no effect if it has already stopped."""
    global _active
    with _switching:
        if _active is not recorder:
            return
        _active = None
    recorder.finish()


def active() -> TraceRecorder | None:
    """Return the active recorder of this process, or None while no trace is recorded."""
    return _active


@contextmanager
def span(name: str, *, track: str = "trainer", **args: Any) -> Iterator[None]:
    """Show a `with` block as a span on a track of the trace. This has no effect while no trace is recorded.

    Args:
        name: name of the span, such as "reward".
        track: name of the timeline row on which the span is shown.
        args: numbers and strings that the trace shows with the span.
    """
    recorder = _active
    if recorder is None:
        yield
        return
    start_s = recorder.clock()
    try:
        yield
    finally:
        recorder.add(Span(track, name, start_s, recorder.clock(), args))


def mark(name: str, *, track: str = "trainer", **args: Any) -> None:
    """Show an instant on a track of the trace, if one is being recorded. See `span` for the arguments."""
    recorder = _active
    if recorder is not None:
        now = recorder.clock()
        recorder.add(Span(track, name, now, now, args))
