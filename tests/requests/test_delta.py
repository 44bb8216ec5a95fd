"""Tests of sample deltas: a restart forgets, packed rows join as bytes."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.errors import SerializationError
from rollout.requests.delta import SampleDelta
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import pack_routes, pack_top_n, unpack_routes, unpack_top_n
from rollout.sampling_params import SamplingParams
from tests.rollouts import joined_deltas


def delta(count: int, start: int = 0, version: int = 3, **fields: object) -> SampleDelta:
    tokens = np.arange(start, start + count, dtype="<i4")
    spans = VersionSpans.of_run(version, count)
    return SampleDelta(7, 2, start, tokens.tobytes(), (-tokens).astype("<f4").tobytes(), spans, version, **fields)  # type: ignore[arg-type]


def test_a_restart_drops_what_came_before_it_but_the_events() -> None:
    before = delta(3, ttft=0.25, top_n=b"x", events=b"a", num_events=1)
    after = delta(2, version=4, ttft=0.5, events=b"b", num_events=2)
    joined = joined_deltas(before, delta(0, version=4), after, delta(1, 2, version=5, text="abc"))
    assert (joined.start, joined.token_list(), joined.prompt_version) == (0, [0, 1, 2], 4)
    assert joined.log_prob_list() == [0.0, -1.0, -2.0]
    assert joined.versions == VersionSpans([(4, 2), (5, 1)])
    assert joined.policy_versions() == [4, 4, 5]
    assert (joined.ttft, joined.top_n, joined.text, joined.events) == (0.5, None, "abc", b"ab")


def test_a_request_goes_on_from_its_known_tokens_under_their_versions() -> None:
    known = joined_deltas(delta(2, version=3), delta(1, 2, version=6))
    request = known.to_request(9, [5, 6], SamplingParams(seed=4), priority=1, arrival_time=8.0)
    assert (request.request_id, request.sample_index, request.generated_tokens) == (9, 2, [0, 1, 2])
    assert request.policy_spans == VersionSpans([(3, 4), (6, 1)])
    assert (request.policy_version, request.seed, request.priority, request.arrival_time) == (6, 4, 1, 8.0)
    assert not SampleDelta(9, 0).to_request(9, [5, 6], SamplingParams()).policy_spans


def test_packed_rows_join_as_bytes_and_a_cut_off_row_is_refused() -> None:
    rows = [[(1, -0.5), (2, -1.0)], []]
    packed = pack_top_n(rows) + pack_top_n([]) + pack_top_n(rows)
    assert unpack_top_n(packed) == rows + rows
    for length in range(len(packed)):
        if length not in (len(pack_top_n(rows)), len(pack_top_n(rows) + pack_top_n([]))):
            with pytest.raises(SerializationError):
                unpack_top_n(packed[:length])


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        pack_routes(0, np.zeros((2, 1, 1), np.uint8))[:-1],
        pack_routes(0, np.zeros((2, 1), np.uint8)),
        pack_routes(-1, np.zeros((2, 1, 1), np.uint8)),
        pack_routes(0, np.zeros((2, 1, 1), np.uint8)) + pack_routes(2, np.zeros((2, 1, 2), np.uint8)),
        pack_routes(0, np.zeros((2, 1, 1), np.uint8)) + pack_routes(3, np.zeros((2, 1, 1), np.uint8)),
    ],
)
def test_malformed_routes_are_refused(packed: bytes) -> None:
    with pytest.raises(SerializationError, match="routes"):
        unpack_routes(packed)


def test_routes_that_come_again_replace_those_from_their_first_position_on() -> None:
    rows = np.arange(20, dtype=np.uint8).reshape(-1, 1, 2)
    parts = [(0, rows[:4] + 100), (4, rows[4:5] + 100), (2, rows[2:6]), (6, rows[6:7])]
    first, routes = unpack_routes(b"".join(pack_routes(*part) for part in parts))
    assert first == 0
    np.testing.assert_array_equal(routes, np.concatenate([rows[:2] + 100, rows[2:7]]))
    later = b"".join(pack_routes(*part) for part in (*parts[1:], (0, rows[:9])))
    np.testing.assert_array_equal(unpack_routes(later)[1], rows[:9])


def test_routes_of_another_number_of_positions_are_refused() -> None:
    known = delta(2, routes=pack_routes(0, np.zeros((4, 1, 1), np.uint8)))
    with pytest.raises(SerializationError, match=r"integers \[3, layers, k\]"):
        known.to_request(9, [5, 6], SamplingParams())
    assert known.to_request(9, [5, 6, 7], SamplingParams()).routing_indices is not None
