"""The life of a sample as states with times, read from the events and token times that its record holds anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.requests.events import DynamicInferenceEventType

if TYPE_CHECKING:
    from rollout.requests.record import DynamicInferenceRequestRecord
    from rollout.requests.request import DynamicInferenceRequest

WAITING, PREFILL, DECODE, PREEMPTED, HELD, TOOL = "waiting", "prefill", "decode", "preempted", "held", "tool"
STATES = (WAITING, PREFILL, DECODE, PREEMPTED, HELD, TOOL)
"""In the queue; its prompt is computed; tokens are sampled; in the queue after its KV was dropped; it has KV, and the
engine stands still; it has ended, and its episode waits for a tool."""


@dataclass(frozen=True)
class Life:
    """One sample.

    Attributes:
        request_id, sample_index: of the engine.
        states: (state, start, end) in order of time, seconds by the engine's clock.
        versions: (time, policy version) of its first token and of every change of version.
        prompt_tokens, tokens: lengths of prompt and completion.
        cached_tokens: prompt tokens whose KV came from the prefix cache at its first admission.
        finish: value of the `FinishReason`; "unfinished" at the end of the trace.
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
        """Seconds of its arrival."""
        return self.states[0][1]

    @property
    def end(self) -> float:
        """Seconds of its end, or of the trace's."""
        return self.states[-1][2]


def life_of(record: DynamicInferenceRequestRecord, until: float) -> Life:
    """Life of a sample; one that has not ended lives `until` that time."""
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
    """Append `state`, in two parts where a prefill has led to a first token; returns its end, at least `start`."""
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
