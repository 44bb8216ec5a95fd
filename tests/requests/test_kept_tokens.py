"""Kept tokens as values: slices, joins, bytes, and records that hold them."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.errors import ConfigError, SerializationError
from rollout.requests.delta import growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.token_columns import KeptTokens, pack_kept, packed_sets, unpack_kept
from rollout.sampling_params import MAX_KEPT_TOKENS, SamplingParams

SETS = st.lists(st.sets(st.integers(0, 2**31 - 1), min_size=1, max_size=6).map(sorted), max_size=8)
PARAMS = SamplingParams(top_p=0.9, return_kept_tokens=True, max_tokens=64)


def record_of(parts: list[list[list[int]]]) -> DynamicInferenceRequestRecord:
    """A record with one segment per part, each token the largest id of its set."""
    first = DynamicInferenceRequest(request_id=3, prompt_tokens=[1, 2], sampling_params=PARAMS, seed=0)
    record = DynamicInferenceRequestRecord.from_request(first)
    for index, sets in enumerate(parts):
        live = record.checkpoint() if index else record[-1]
        live.generated_tokens = [ids[-1] for ids in sets]
        live.generated_log_probs = [-1.0] * len(sets)
        live.generated_kept_tokens = KeptTokens.of(sets)
        live.policy_spans.extend_to(live.total_length, 0)
    return record


@given(SETS, st.integers(0, 8), st.integers(0, 8))
def test_slices_joins_and_bytes_keep_every_set(sets: list[list[int]], start: int, stop: int) -> None:
    kept = KeptTokens.of(sets)
    assert kept.tolist() == sets
    assert len(kept) == len(sets)
    assert kept[start:stop].tolist() == sets[start:stop]
    assert [kept[index].tolist() for index in range(len(sets))] == sets
    assert KeptTokens.join([kept[:start], kept[start:]]).tolist() == sets
    packed = pack_kept(kept)
    assert unpack_kept(packed).tolist() == sets
    assert b"".join(packed_sets(kept)) == packed == pack_kept(kept[:start]) + pack_kept(kept[start:])
    assert unpack_kept(packed).ids.dtype == np.int32


@settings(max_examples=50)
@given(st.lists(SETS, min_size=1, max_size=3), st.integers(0, 20))
def test_a_record_with_kept_tokens_survives_every_serialisation(parts: list[list[list[int]]], known: int) -> None:
    record, sets = record_of(parts), [ids for part in parts for ids in part]
    copy = DynamicInferenceRequestRecord.deserialize(msgpack.unpackb(msgpack.packb(record.serialize())))
    assert [segment.generated_kept_tokens.tolist() for segment in copy if segment.generated_kept_tokens] == [
        segment.generated_kept_tokens.tolist() for segment in record if segment.generated_kept_tokens
    ]
    whole = copy.merge()
    assert whole.generated_kept_tokens is not None
    assert whole.generated_kept_tokens.tolist() == sets
    known = min(known, len(sets))
    delta = growth(record, known, 0)
    assert delta.kept is not None
    assert unpack_kept(delta.kept).tolist() == sets[delta.start :]
    request = growth(record, 0, 0).to_request(3, [1, 2], PARAMS)
    assert request.generated_kept_tokens is not None
    assert request.generated_kept_tokens.tolist() == sets


@pytest.mark.parametrize("packed", [b"\1", b"\0\0\0\0", b"\2\0\0\0\1\0\0\0", b"\xff\xff\xff\xff\1\0\0\0"])
def test_malformed_bytes_are_refused(packed: bytes) -> None:
    with pytest.raises(SerializationError, match="kept_tokens"):
        unpack_kept(packed)


def test_sets_that_are_not_those_of_the_tokens_are_refused_and_never_dropped() -> None:
    delta = growth(record_of([[[4, 7], [5]]]), 0, 0)
    delta.kept = pack_kept(KeptTokens.of([[4, 7]]))
    with pytest.raises(SerializationError, match="1 sets for 2 tokens"):
        delta.to_request(3, [1, 2], PARAMS)
    delta.kept = None
    with pytest.raises(SerializationError, match=r"known\.kept"):
        delta.to_request(3, [1, 2], PARAMS)
    assert KeptTokens.of([[4, 7], [6]]).wrong_for([7, 5]) == "token 5 at 1 is not in its own set"
    assert "ascend" in str(KeptTokens.of([[7, 4]]).wrong_for([7]))
    record = record_of([[[4, 7]], [[5]]])
    record[0].generated_kept_tokens = None
    with pytest.raises(ValueError, match="must have as many as there are tokens"):
        record.merge()


def test_the_parameters_bound_the_sets() -> None:
    assert SamplingParams(min_p=0.1, return_kept_tokens=True).top_k == MAX_KEPT_TOKENS
    assert SamplingParams(top_k=50, return_kept_tokens=True).top_k == 50
    for params, named in (
        ({}, "without top_k"), ({"top_k": 5, "temperature": 0}, "temperature=0"), ({"top_k": 5000}, "at most 4096"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=named):
            SamplingParams(**params, return_kept_tokens=True)
