"""Tests of the core's handling of requests: admission, order, aborts, timeouts, continuation; message by message."""

from __future__ import annotations

import pytest

from rollout.distributed.coordinator.core.requests import MAX_SAMPLES
from rollout.distributed.protocol.messages import Abort, Assign, Cancel, Refused
from rollout.requests.block_hash import stream_key
from tests.distributed.coordinator.job import Job, int32, stretch


def test_a_request_goes_to_a_rank_and_its_results_to_its_client_under_its_own_number(job):
    client, rank = job.client(), job.rank()
    other = job.client("other")
    other.submit()
    rank.assigned()
    client.submit((5, 6), n=2, request_id=40, priority=3, arrival_time=12.5, interval=9, seed=77)
    assign = rank.assigned()
    assert (assign.request_id, assign.indices, assign.prompt, assign.params) == (1, [0, 1], int32(5, 6), b"\x80")
    assert (assign.seed, assign.priority, assign.arrival_time, assign.interval) == (77, 3, 12.5, 9)
    assert assign.known == []
    rank.progress(stretch(assign, {0: (0, [8]), 1: (0, [9, 9])}, ended=[1]))
    (row,) = client.stretches()
    assert (row.request_id, row.attempt, row.token_ids, row.columns["outcome"]) == (
        40,
        0,
        int32(8, 9, 9),
        [None, b"ended"],
    )
    assert job.core.status()["ranks"][0]["assigned_samples"] == 2
    rank.progress(stretch(assign, {0: (1, [8])}, ended=[0]))
    (row,) = client.stretches()
    assert (row.starts, row.columns["outcome"]) == ([1], [b"ended"])
    assert job.core.status()["ranks"][0]["assigned_samples"] == 1
    assert not job.core.peers.clients[client.identity].requests
    assert other.quiet()


def test_without_interval_and_arrival_time_the_coordinators_hold():
    job = Job(progress_interval=11)
    client, rank = job.client(), job.rank()
    client.submit()
    assign = rank.assigned()
    assert (assign.interval, assign.arrival_time) == (11, 0.0)


def test_requests_without_a_seed_get_one_by_their_order_of_arrival():
    job = Job(seed=5)
    first, second, rank = job.client(), job.client("other"), job.rank()
    first.submit()
    second.submit(n=0)
    second.submit(seed=99)
    first.submit()
    seeds = [rank.assigned().seed for _ in range(3)]
    assert seeds == [stream_key(5, 0), 99, stream_key(5, 2)]


def test_request_ids_must_rise(job):
    client, rank = job.client(), job.rank()
    client.submit(request_id=5)
    for request_id in (5, 4):
        client.submit(request_id=request_id)
        refusal = client.hear(Refused)
        assert (refusal.code, refusal.over) == ("malformed", False)
        assert refusal.text == f"request id {request_id}: must be above 5, the last one of this client"
    client.submit(request_id=6)
    assert rank.assigned_ids() == [0, 1]


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"n": 0}, "InvalidRequestError", f"n=0: must be in [1, {MAX_SAMPLES}]"),
        ({"n": MAX_SAMPLES + 1}, "InvalidRequestError", f"n={MAX_SAMPLES + 1}: must be in"),
        ({"n": 2, "wanted": [1, 2]}, "InvalidRequestError", "wanted=[1, 2]: must be samples below n=2"),
        ({"prompt": "text"}, "InvalidRequestError", "send token ids, or set CoordinatorConfig.tokenizer"),
    ],
)
def test_what_can_never_be_served_fails_at_once_and_the_next_is_served(job, fields, error, words):
    client, rank = job.client(), job.rank()
    client.submit(**fields)
    assert words in client.failed(error).text
    client.submit()
    assert rank.assigned().request_id == 0


def test_higher_priority_first_then_the_order_of_arrival(job):
    client = job.client()
    for priority in (0, 2, -1, 2, 0):
        client.submit(priority=priority)
    assert job.rank().assigned_ids() == [1, 3, 0, 4, 2]


@pytest.mark.parametrize("state", ["running", "paused", "suspended"])
def test_requests_are_taken_and_aborted_in_every_state(job, state):
    client, rank = job.client(), job.rank()
    for signal in {"running": [], "paused": ["pause"], "suspended": ["pause", "suspend"]}[state]:
        client.call(signal)
        rank.obey(state=state)
        client.answered()
    request_id = client.submit()
    assign = rank.assigned()
    client.say(Abort(request_id))
    assert client.failed("RequestAbortedError").text == "request 0 of client 'client': it was aborted"
    assert rank.hear(Cancel).attempt == assign.attempt


def test_a_request_fails_by_name_when_its_own_time_has_passed(job):
    client, rank = job.client(), job.rank()
    client.submit(timeout_s=3.0)
    client.submit()
    assign = rank.assigned()
    rank.assigned()
    assert job.core.next_deadline() <= 3.0
    job.wait(2.75, 0.25)
    assert client.quiet()
    job.wait(0.25)
    assert job.core.next_deadline() > job.now
    failure = client.failed("RequestTimeoutError")
    assert failure.request_id == 0
    assert "timeout_s" in failure.text
    assert rank.hear(Cancel).attempt == assign.attempt
    assert client.quiet()


def test_without_any_rank_requests_wait_and_fail_by_name_after_the_configured_time():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    client.submit()
    job.wait(19.0)
    assert client.quiet()
    job.wait(2.0)
    failure = client.failed("RequestTimeoutError")
    assert "no_rank_timeout_s" in failure.text
    assert "0 of data_parallel_size=1 are here" in failure.text


def test_a_rank_that_never_gets_ready_is_none():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    client.submit()
    job.rank(ready=False)
    job.wait(21.0)
    assert "1 of data_parallel_size=1 are here" in client.failed("RequestTimeoutError").text


def test_a_group_that_is_continued_starts_where_it_stood_and_only_what_is_wanted_is_computed(job):
    client, rank = job.client(), job.rank()
    known = stretch(Assign(9, 9, [], b"", b"", 0, 0, 0.0, 0, []), {1: (0, [5, 6]), 2: (0, [])}, version=0)
    client.submit(n=4, known=[known], wanted=[1, 2])
    assign = rank.assigned()
    assert assign.indices == [1, 2]
    (row,) = assign.known
    assert [(each.sample_index, each.start, each.count) for each in row.deltas()] == [(1, 0, 2), (2, 0, 0)]
    rank.progress(stretch(assign, {1: (2, [7]), 2: (0, [8])}, ended=[1, 2]))
    (row,) = client.stretches()
    assert row.starts == [2, 0]
    assert not job.core.peers.clients[client.identity].requests


@pytest.mark.parametrize(
    ("rows", "ended", "words"),
    [
        ({0: (3, [5])}, (), "continues at token 3: must be 0 or 0"),
        ({0: (0, [5])}, (0,), "a sample that has ended is not continued"),
        ({3: (0, [5])}, (), "sample 3 of request 0 is not open"),
    ],
)
def test_what_is_said_to_be_known_must_make_sense(job, rows, ended, words):
    client, rank = job.client(), job.rank()
    known = stretch(Assign(9, 9, [], b"", b"", 0, 0, 0.0, 0, []), rows, ended=ended)
    client.submit(n=2, known=[known])
    assert words in client.failed("InvalidRequestError").text
    assert rank.quiet()
