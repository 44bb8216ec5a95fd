"""Tests of outcomes: conversion from records, and round trip through bytes."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.distributed.protocol.outcome import Outcome, pack, unpack
from rollout.distributed.protocol.stretch import PartialGroup, stretch_of
from rollout.errors import SerializationError
from rollout.requests.delta import growth
from rollout.requests.events import pack_events
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import unpack_top_n
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason

PLAIN = Outcome(
    "stop",
    2,
    None,
    3,
    VersionSpans([(3, 300)]),
    VersionSpans([(3, 299)]),
    [0.5, 0.25],
    0.1,
    3.0,
    12,
    None,
    None,
    max_tokens=256,
    seed=2**63 - 1,
)

seconds = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**63 - 1)
runs = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4).map(VersionSpans)
rows = st.lists(st.lists(st.tuples(st.integers(0, 99), seconds), max_size=3), max_size=4)
outcomes = st.builds(
    Outcome,
    st.sampled_from([reason.value for reason in FinishReason]),
    st.none() | st.text(max_size=5) | st.integers(0, 99),
    st.none() | st.text(max_size=20),
    counts,
    runs,
    runs,
    st.lists(seconds, max_size=5),
    st.none() | seconds,
    st.none() | seconds,
    counts,
    st.none() | st.lists(seconds, max_size=5),
    st.none() | rows,
    counts,
    counts,
    st.none() | counts,
)


@given(outcomes)
def test_what_is_packed_is_unpacked(one: Outcome) -> None:
    assert unpack(pack(one)) == one


@given(st.binary(max_size=60))
def test_bytes_that_are_no_outcome_are_refused_by_name(noise: bytes) -> None:
    for read in (unpack, unpack_top_n):
        with pytest.raises(SerializationError):
            read(noise)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("finish_reason", "tired"),
        ("finish_reason", ["stop"]),
        ("stop_reason", 1.5),
        ("stop_reason", True),
        ("error", 3),
        ("policy_version", -1),
        ("policy_version", True),
        ("policy_spans", [1]),
        ("policy_spans", [1, 0]),
        ("kv_spans", "no"),
        ("tpot", b"123"),
        ("ttft", "soon"),
        ("latency", True),
        ("num_cached_tokens", None),
        ("prompt_log_probs", [1.0]),
        ("prompt_top_n", {"counts": b""}),
        ("max_tokens", 2**63),
        ("seed", "7"),
        ("block_size_tokens", -16),
    ],
)
def test_a_malformed_field_is_named(field: str, value: Any) -> None:
    names = list(Outcome.__dataclass_fields__)
    row = msgpack.unpackb(pack(PLAIN))
    row[names.index(field)] = value
    with pytest.raises(SerializationError, match=rf"Outcome\.{field}: "):
        unpack(msgpack.packb(row))


def test_a_row_of_another_length_is_refused() -> None:
    row = msgpack.unpackb(pack(PLAIN))
    with pytest.raises(SerializationError, match="a row of 15 fields"):
        unpack(msgpack.packb(row[:-1]))


# --- from a record ----------------------------------------------------------------------------------------------------


def record_of_three_segments() -> DynamicInferenceRequestRecord:
    """Prompt of 3; 2 tokens under version 1, 2 more under 1 and 2, 1 under 4."""
    live = DynamicInferenceRequest(
        request_id=7,
        sample_index=2,
        prompt_tokens=[5, 6, 7],
        sampling_params=SamplingParams(max_tokens=9, logprobs=1),
        seed=77,
        policy_version=1,
        ttft=0.5,
        num_cached_tokens=2,
    )
    record = DynamicInferenceRequestRecord.from_request(live)
    made = 0
    for tokens, versions in (([10, 11], [1, 1]), ([12, 13], [1, 2]), ([14], [4])):
        live = record[-1]
        for token, version in zip(tokens, versions, strict=True):
            live.advance_version(version)
            live.generated_tokens.append(token)
            live.generated_log_probs.append(-0.5 * made)
            live.generated_top_n_logprobs.append([(token, -0.5 * made)])
            made += 1
        live.tpot = [0.25] * (len(tokens) - 1)
        if made < 5:
            record.checkpoint()
    return record


@pytest.mark.parametrize("known", range(6))
def test_growth_is_what_lies_behind_what_is_known(known: int) -> None:
    record = record_of_three_segments()
    merged = record.merge()
    row = growth(record, known, 1)
    assert (row.request_id, row.sample_index, row.start, row.count) == (7, 2, known, 5 - known)
    assert np.frombuffer(row.token_ids, "<i4").tolist() == merged.generated_tokens[known:]
    assert np.frombuffer(row.log_probs, "<f4").tolist() == merged.generated_log_probs[known:]
    assert row.top_n_rows() == merged.generated_top_n_logprobs[known:]
    assert row.prompt_version == 1
    assert row.policy_versions() == [1, 1, 1, 2, 4][known:]
    assert row.ttft == (None if known else 0.5)


def test_what_happened_to_a_sample_stays_with_it_where_it_goes_on() -> None:
    record = record_of_three_segments()
    for number, segment in enumerate(record):
        segment.add_event_add_engine(timestamp=float(number))
        segment.add_event_evict(timestamp=number + 0.5)
    (delta,) = stretch_of(record).deltas()
    elsewhere = delta.to_request(7, record[0].prompt_tokens, record[0].sampling_params)
    assert elsewhere.events == record.merge().events
    assert elsewhere.event_add_engine == record[0].events[0]
    afresh = stretch_of(DynamicInferenceRequestRecord.from_request(elsewhere))
    known = PartialGroup()
    known.take(stretch_of(record))
    known.take(afresh)
    assert known.deltas([2])[2].events == 2 * pack_events(elsewhere.events)
