"""Completion tokens of a sample since a known point, read from its record without merging it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from rollout.requests.delta import SampleDelta, pack_top_n
from rollout.requests.events import pack_events
from rollout.requests.kept_tokens import pack_kept
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.routes import first_unread, pack_routes, route_rows
from rollout.requests.spans import VersionSpans

MAX_EVENTS_SENT = 1 << 18
"""Most events sent of one sample; later ones are dropped."""


def growth(
    record: DynamicInferenceRequestRecord, known: int, prompt_version: int, events_known: int = 0
) -> SampleDelta:
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
    delta = SampleDelta(
        record.request_id,
        record.sample_index,
        start,
        struct.pack(f"<{made - start}i", *tokens),
        struct.pack(f"<{made - start}f", *log_probs),
        versions(live, start, made),
        version_of_prompt(live),
        ttft=None if start else record.ttft,
    )
    if live.sampling_params.logprobs:
        delta.top_n = pack_top_n(joined(record, "generated_top_n_logprobs", start))
    last = live.original_prompt_length + made - 1
    # Samples that failed in their prompt have routes of a part of it.
    if (made > start or not made) and 0 < last <= route_rows(record):
        first = first_unread(computed_length(record), live.original_prompt_length + start)
        routes = [each.routing_indices for each in record if each.routing_indices is not None]
        delta.routes = pack_routes(first, np.concatenate(routes)[first:last])
    if live.sampling_params.return_kept_tokens:
        delta.kept = kept_since(record, start, made)
    delta.events, delta.num_events = new_events(record, events_known)
    return delta


def completion_length(live: DynamicInferenceRequest) -> int:
    """Number of completion tokens of all segments up to this one."""
    return live.total_length - live.original_prompt_length


def computed_length(record: DynamicInferenceRequestRecord) -> int:
    """Prompt length of the segment that the last token was sampled in, of the first if there is none."""
    sampled = (each for each in reversed(record.segments) if each.generated_tokens)
    return len(next(sampled, record[0]).prompt_tokens)


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


def versions(live: DynamicInferenceRequest, start: int, stop: int) -> VersionSpans:
    """Policy versions of completion tokens `start` … `stop` - 1; those after the recorded spans have the live one."""
    first, last = live.original_prompt_length + start, live.original_prompt_length + stop
    spans = VersionSpans(live.policy_spans.window(first, last))
    spans.extend_to(last - first, live.policy_version)
    return spans


def joined(record: DynamicInferenceRequestRecord, name: str, start: int) -> list[Any]:
    """A per-token field of all segments joined, from completion token `start` on."""
    live = record[-1]
    if start >= live.rng_offset:
        rows: list[Any] = getattr(live, name)[start - live.rng_offset :]
        return rows
    return record.joined(name)[start:]


def kept_since(record: DynamicInferenceRequestRecord, start: int, stop: int) -> bytes:
    """Packed sets of completion tokens `start` … `stop` - 1, from the segments that hold them."""
    packed = b""
    for segment in record.segments if start < stop else ():
        low, sets = segment.rng_offset, segment.generated_kept_tokens
        if sets is not None and low < stop and start < low + len(sets):
            packed += pack_kept(sets[max(0, start - low) : stop - low])
    return packed


def new_events(record: DynamicInferenceRequestRecord, known: int) -> tuple[bytes | None, int]:
    """(packed events after the first `known` ones, number of events of the sample)."""
    events = record.joined("events") if len(record.segments) > 1 else record.segments[0].events
    count = min(len(events), MAX_EVENTS_SENT)
    return (pack_events(events[known:count]) if count > known else None), count
