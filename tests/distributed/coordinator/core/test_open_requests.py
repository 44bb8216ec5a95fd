"""Tests of open requests: tokens are contiguous and unique, from any rank, in as few deltas as possible."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.distributed.coordinator.core.heap import LazyHeap
from rollout.distributed.coordinator.core.requests import MAX_KNOWN_BYTES, ClientPeer, OpenRequest
from rollout.distributed.protocol.messages import Assign, Stretch
from rollout.distributed.protocol.stretch import ENTRIES_TOGETHER
from rollout.errors import SerializationError
from tests.distributed.coordinator.job import int32, stretch

NOBODY = Assign(0, 1, [], b"", b"", 0, 0, 0.0, 0, [])


def a_request(n: int) -> OpenRequest:
    client = ClientPeer(b"client", "client", 0.0, 0.0)
    request = OpenRequest(0, client, 0, n, b"", 0, 0, 0.0, 16, float("inf"), 4)
    request.open = set(range(n))
    return request


def told(rows: dict[int, tuple[int, list[int]]], **fields: Any) -> Stretch:
    return stretch(NOBODY, rows, **fields)


def known_of(request: OpenRequest, samples: set[int]) -> dict[int, list[int]]:
    return {index: delta.token_list() for index, delta in request.tokens.deltas(samples).items() if delta.count}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({0: (2, [9])}, "sample 0 continues at token 2: must be 1 or 0"),
        ({1: (0, [9]), 0: (3, [9])}, "sample 0 continues at token 3"),
        ({1: (1, [9])}, "sample 1 continues at token 1: must be 0 or 0"),
        ({5: (0, [9])}, "sample 5 of request 0 is not open"),
    ],
)
def test_what_does_not_follow_changes_nothing(rows, words):
    request = a_request(2)
    request.absorb(told({0: (0, [1])}))
    with pytest.raises(SerializationError, match=words):
        request.absorb(told(rows))
    assert known_of(request, {0, 1}) == {0: [1]}
    assert request.tokens.lengths == {0: 1}


def test_the_newest_version_of_any_token_or_prompt_is_remembered():
    request = a_request(1)
    request.absorb(told({0: (0, [1])}, version=3))
    assert request.newest_version == 3
    later = told({0: (1, [1, 1])})
    later.versions = [[2, 1, 1, 5, 1]]
    request.absorb(later)
    assert request.newest_version == 5
    promise = told({0: (3, [])})
    promise.versions = [[7]]
    request.absorb(promise)
    assert request.newest_version == 7


def test_the_time_to_the_first_token_is_the_first_that_was_told():
    request = a_request(3)
    request.absorb(told({0: (0, [1]), 1: (0, [1]), 2: (0, [])}, ttft=[0.5, None, None]))
    request.absorb(told({0: (1, [1]), 1: (1, [1])}))
    request.absorb(told({0: (2, [1]), 1: (2, [1])}, ttft=[0.75, 0.25]))
    (known,) = request.tokens.known({0, 1, 2})
    assert known.columns["ttft"] == [0.5, 0.25, None]


def test_what_a_prompt_was_of_is_what_the_first_tokens_came_with():
    request = a_request(1)
    first, then = told({0: (0, [1])}), told({0: (1, [1])})
    first.versions, then.versions = [[4, 5, 1]], [[4, 5, 1]]
    request.absorb(first)
    request.absorb(then)
    assert request.tokens.known({0})[0].versions == [[4, 5, 2]]


def test_top_n_rows_are_passed_on_unread():
    request = a_request(2)
    first = told({0: (0, [1]), 1: (0, [2])}, top_n=[b"no msgpack \xc1", None])
    request.absorb(first)
    request.absorb(told({1: (1, [3])}, top_n=[b"b"]))
    request.absorb(told({1: (2, [4])}, top_n=[b"c"]))
    (known,) = request.tokens.known([0])
    assert (known.token_ids, known.columns) == (int32(1), {"top_n": [b"no msgpack \xc1"]})
    (known,) = request.tokens.known([0, 1])
    assert known.columns == {"top_n": [b"no msgpack \xc1", b"bc"]}


def test_portions_count_top_n_rows_and_a_sample_that_is_too_long_goes_alone():
    request = a_request(4)
    packed = [b"", bytes(MAX_KNOWN_BYTES), bytes(MAX_KNOWN_BYTES - 8), None]
    request.absorb(told({index: (0, [1]) for index in range(4)}, top_n=packed))
    assert request.portions([0, 1, 2, 3]) == [[0], [1], [2], [3]]
    assert request.portions([0, 3, 2]) == [[0, 3], [2]]
    assert request.portions([2]) == [[2]]
    assert request.portions([1, 0, 3]) == [[1], [0, 3]]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_was_told_what_is_known_is_what_each_sample_reached(data):
    n = data.draw(st.integers(1, 4))
    request = a_request(n)
    reached: dict[int, list[tuple[int, int]]] = {index: [] for index in range(n)}
    ended: set[int] = set()
    for version in range(data.draw(st.integers(0, 12))):
        going_on = sorted(request.open)
        rows: dict[int, tuple[int, list[int]]] = {}
        for index in data.draw(st.lists(st.sampled_from(going_on), unique=True)) if going_on else []:
            afresh = data.draw(st.integers(0, 5)) == 0
            tokens = data.draw(st.lists(st.integers(0, 99), max_size=3))
            reached[index] = [] if afresh else reached[index]
            rows[index] = (len(reached[index]), tokens)
            reached[index] = reached[index] + [(token, version) for token in tokens]
        now = [index for index in rows if data.draw(st.integers(0, 4)) == 0]
        row = told(rows, ended=now, version=version)
        assert request.absorb(row) == now
        ended.update(now)
        for index in now:
            assert request.tokens.deltas([index])[index].token_ids == int32(*(token for token, _ in reached[index]))
        request.tokens.forget(now)
    wanted = data.draw(st.sets(st.integers(0, n - 1))) - ended
    known = request.tokens.known(wanted)
    assert len(known) <= 1
    for row in known:
        row.check()
        assert set(row.indices) <= wanted
        assert row.starts == [0] * len(row.indices)
    found = {delta.sample_index: delta for row in known for delta in row.deltas()}
    assert {index for index, delta in found.items() if delta.count} == {index for index in wanted if reached[index]}
    for index, delta in found.items():
        assert delta.token_list() == [token for token, _ in reached[index]]
        assert delta.log_prob_list() == [-token for token, _ in reached[index]]
        assert delta.policy_versions() == [version for _, version in reached[index]]


# --- the heap that forgets ----------------------------------------------------------------------------------------------


def test_the_heap_gives_the_least_living_item_and_forgets_the_others():
    dead: set[str] = set()
    heap = LazyHeap[str](lambda item: item not in dead)
    assert (heap.head(), heap.head_key()) == (None, None)
    for key, item in ((3, "c"), (1, "a"), (2, "b"), (2, "also b")):
        heap.put(key, item)
    assert (heap.head(), heap.head_key()) == ("a", 1)
    dead.add("a")
    assert sorted(heap) == ["also b", "b", "c"]
    assert (heap.head(), heap.head_key()) == ("b", 2)
    assert [heap.pop(), heap.pop(), heap.pop()] == ["b", "also b", "c"]
    assert heap.head() is None


def test_nothing_accumulates_in_the_heap_though_nobody_looks_at_it():
    alive: set[int] = set()
    heap = LazyHeap[int](alive.__contains__)
    rng = np.random.default_rng(0)
    most = 0
    for number in range(10_000):
        alive.add(number)
        heap.put(float(rng.random()), number)
        alive.discard(number - 10)
        most = max(most, len(heap))
    assert most <= 65
    assert sorted(heap) == sorted(alive)


def test_what_came_token_by_token_is_kept_in_few_rows():
    """A stream brings one row per token: 256 of them for a minute took hundreds of MB."""
    request = a_request(2)
    for number in range(1000):
        request.absorb(told({0: (number, [number])}))
        request.absorb(told({1: (number, [7, 8][number % 2 :][:1])}))
    assert len(request.tokens.rows) <= 2 * ENTRIES_TOGETHER
    assert known_of(request, {0, 1}) == {0: list(range(1000)), 1: [7, 8] * 500}
    last = told({0: (1000, [5])}, ended=[0])
    assert request.absorb(last) == [0]
    assert request.tokens.deltas([0])[0].count == 1001
