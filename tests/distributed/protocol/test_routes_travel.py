"""Expert routes of any record survive every form in which a record is stored or sent, and are bounded by its tokens."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.distributed.client.group import OpenGroup
from rollout.distributed.protocol.outcome import outcome, pack
from rollout.distributed.protocol.stretch import Stretch
from rollout.errors import SerializationError
from rollout.requests.delta import growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import REQUEST, DynamicInferenceRequest
from rollout.requests.token_columns import Routes, check_routes
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status


def ended(prompt: int, made: list[int], routes: Routes) -> DynamicInferenceRequestRecord:
    """A record with a segment of so many tokens for each of `made`, and the rows of routes that belong to each."""
    first = DynamicInferenceRequest(
        request_id=7, prompt_tokens=list(range(prompt)), sampling_params=SamplingParams(max_tokens=99), seed=3
    )
    record = DynamicInferenceRequestRecord.from_request(first)
    at = 0
    for index, count in enumerate(made):
        live = record.checkpoint() if index else record[-1]
        live.generated_tokens = list(range(count))
        live.generated_log_probs = [-1.0] * count
        live.tpot = [0.5] * (count - 1)
        live.policy_spans.extend_to(live.total_length, 0)
        live.kv_spans.extend_to(live.total_length - 1, 0)
        live.finished_chunk_token_count = len(live.prompt_tokens)
        live.routing_indices, at = routes[at : live.total_length - 1], live.total_length - 1
    record[-1].status, record[-1].finish_reason = Status.COMPLETED, FinishReason.LENGTH
    return record


@st.composite
def records(draw: st.DrawFn) -> tuple[DynamicInferenceRequestRecord, Routes]:
    prompt, made = draw(st.integers(1, 5)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    layers, k = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    dtype, most = draw(st.sampled_from([(np.uint8, 256), (np.int16, 2**15)]))
    draws = np.random.default_rng(draw(st.integers(0, 99)))
    routes = draws.integers(0, most, (prompt + sum(made) - 1, layers, k)).astype(dtype)
    return ended(prompt, made, routes), routes


def same(routes: Routes | None, wanted: Routes) -> None:
    assert routes is not None
    assert routes.dtype == wanted.dtype
    np.testing.assert_array_equal(routes, wanted)


@settings(deadline=None, max_examples=50)
@given(records())
def test_routes_survive_every_serialisation(given_record: tuple[DynamicInferenceRequestRecord, Routes]) -> None:
    record, routes = given_record
    whole = record.merge()
    same(whole.routing_indices, routes)
    # a checkpoint
    plain = msgpack.unpackb(msgpack.packb(record.serialize(), use_bin_type=True))
    same(DynamicInferenceRequestRecord.deserialize(plain).merge().routing_indices, routes)
    # a journal
    back = REQUEST.decode(msgpack.unpackb(msgpack.packb(REQUEST.encode(whole))))
    same(back.routing_indices, routes)
    # from rank to client, a stretch per segment
    group = OpenGroup(7, np.asarray(whole.prompt_tokens, "<i4").tobytes(), whole.sampling_params, 0, 0.0)
    known = 0
    for count in range(1, len(record) + 1):
        part = growth(DynamicInferenceRequestRecord(segments=record.segments[:count]), known, 0)
        known += part.count
        part.outcome = pack(outcome(record)) if count == len(record) else None
        stretch = Stretch.of(7, 0, [part])
        stretch.check()
        group.take(stretch)
    same(group.request(0).routing_indices, routes)
    # a request that another rank continues
    continued = growth(record, 0, 0).to_request(7, whole.prompt_tokens, whole.sampling_params)
    same(continued.routing_indices, routes)


def test_routes_of_a_wrong_shape_are_named() -> None:
    with pytest.raises(SerializationError, match=r"routes.*float64 \[3, 1, 1\].*integers \[3, layers, k\]"):
        check_routes("routes", np.zeros((3, 1, 1)), 3)
