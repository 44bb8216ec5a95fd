"""New completion tokens of a sample since a known point: `Growth`, read from its record without merging it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from rollout.requests.events import pack_events
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest

MAX_EVENTS_SENT = 1 << 18
"""Most events sent of one sample; later ones are dropped."""

TopN = list[list[tuple[int, float]]]
"""(token id, log-prob) pairs per token, best first."""


@dataclass(slots=True)
class Growth:
    """New completion tokens of one sample."""

    request_id: int
    sample_index: int
    start: int
    """Index of the first one in the whole completion. 0 although more tokens were known: the sample was restarted."""
    count: int
    token_ids: bytes
    """int32 [count]."""
    log_probs: bytes
    """float32 [count]."""
    versions: list[int]
    """The policy version of the prompt, then version, count, version, count, … of the tokens."""
    ttft: float | None = None
    """Seconds from arrival to the first token, where that is among them."""
    top_n: TopN | None = None
    """Top log-probs of each token, if requested."""
    events: bytes | None = None
    """Packed events since the known ones, or None."""
    num_events: int = 0
    """Number of events of the sample, those in `events` included."""


def growth(record: DynamicInferenceRequestRecord, known: int, prompt_version: int, events_known: int = 0) -> Growth:
    """New output of an inactive (waiting or ended) record beyond the known tokens and events.

    Args:
        known: number of known completion tokens.
        prompt_version: policy version of the prompt that came with them.
        events_known: number of known events.
    """
    live = record[-1]
    made = completion_length(live)
    start = first_unknown(live, made, known, prompt_version)
    tokens = (*live.prompt_tokens[live.original_prompt_length + start :], *live.generated_tokens)
    tokens = tokens[len(tokens) - (made - start) :]
    log_probs = joined(record, "generated_log_probs", start)
    return Growth(
        record.request_id,
        record.sample_index,
        start,
        made - start,
        struct.pack(f"<{made - start}i", *tokens),
        struct.pack(f"<{made - start}f", *log_probs),
        versions(live, start, made),
        None if start else first_token_after(record),
        joined(record, "generated_top_n_logprobs", start) if live.sampling_params.logprobs else None,
        *new_events(record, events_known),
    )


def completion_length(live: DynamicInferenceRequest) -> int:
    """Number of completion tokens of all segments up to this one."""
    return live.total_length - live.original_prompt_length


def first_unknown(live: DynamicInferenceRequest, made: int, known: int, prompt_version: int) -> int:
    """Index of the first unknown completion token: `known`, or 0 if the sample was restarted since.

    A restart happens under a later policy version than all earlier tokens, so the prompt's version tells the two runs apart
    even when the second one is already longer than the first.
    """
    same_life = made >= known and (not known or version_of_prompt(live) == prompt_version)
    return known if same_life else 0


def version_of_prompt(live: DynamicInferenceRequest) -> int:
    """Policy version under which the prompt was admitted, or would be now."""
    return live.policy_spans.version_at(0) if live.policy_spans else live.policy_version


def versions(live: DynamicInferenceRequest, start: int, stop: int) -> list[int]:
    """`Growth.versions` of completion tokens `start` … `stop` - 1."""
    spans, first, last = live.policy_spans, live.original_prompt_length + start, live.original_prompt_length + stop
    row = [version_of_prompt(live)]
    for run in spans.window(first, last):
        row += run
    open_end = last - max(first, len(spans))
    if open_end > 0:
        if len(row) > 1 and row[-2] == live.policy_version:
            row[-1] += open_end
        else:
            row += (live.policy_version, open_end)
    return row


def joined(record: DynamicInferenceRequestRecord, name: str, start: int) -> list[Any]:
    """A per-token field of all segments joined, from completion token `start` on."""
    live = record[-1]
    if start >= live.rng_offset:
        rows: list[Any] = getattr(live, name)[start - live.rng_offset :]
        return rows
    return [row for segment in record for row in getattr(segment, name)][start:]


def new_events(record: DynamicInferenceRequestRecord, known: int) -> tuple[bytes | None, int]:
    """(packed events after the first `known` ones, number of events of the sample)."""
    events = record[-1].events if len(record) == 1 else [event for segment in record for event in segment.events]
    count = min(len(events), MAX_EVENTS_SENT)
    return (pack_events(events[known:count]) if count > known else None), count


def first_token_after(record: DynamicInferenceRequestRecord) -> float | None:
    """Seconds from arrival to the first token."""
    return next((segment.ttft for segment in record if segment.ttft is not None), None)
