"""The core, told word by word: sessions, requests, ranks that are lost, texts, limits, silence."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from rollout.coordinator.core import MAX_REQUEST_BYTES, CoordinatorCore
from rollout.coordinator.open_requests import MAX_SAMPLES
from rollout.coordinator.peers import UPDATE_BYTES
from rollout.frames import MAX_FRAME_BYTES, encode
from rollout.protocol import (
    PROTOCOL_VERSION,
    Abort,
    Accepted,
    Assign,
    Barrier,
    BarrierDone,
    Cancel,
    Connect,
    Decline,
    Disconnect,
    EngineMoved,
    Heartbeat,
    Message,
    Progress,
    Refused,
    Register,
    Shutdown,
    Status,
    StatusQuery,
    Submit,
    Update,
)
from rollout.seeds import stream_key
from tests.coordinator.job import BLOCK, Job, Line, int32, stretch

LONG = tuple(range(40))


def lose(job: Job, rank: Line) -> None:
    job.core.unreachable(rank.identity, "its connection is gone", job.now)
    job.carry()


# --- sessions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("message", [Heartbeat(), Submit(0, b"", 1, b""), Progress([]), StatusQuery(0)])
def test_a_stranger_is_told_to_connect_anew(message):
    job = Job()
    stranger = Line(job, b"stranger")
    stranger.say(message)
    refusal = stranger.hear(Refused)
    assert (refusal.code, refusal.over) == ("unknown_peer", True)
    assert "connect anew" in refusal.text
    assert stranger.numbers == [0]


def test_a_stranger_that_takes_leave_is_not_answered():
    job = Job()
    stranger = Line(job, b"stranger")
    stranger.say(Disconnect())
    assert stranger.quiet()


def test_a_session_does_not_begin_in_the_middle():
    job = Job()
    stranger = Line(job, b"stranger")
    stranger.said = 1
    stranger.say(Connect(PROTOCOL_VERSION, "x"))
    assert stranger.hear(Refused).code == "unknown_peer"


@pytest.mark.parametrize(("version", "older"), [(PROTOCOL_VERSION - 1, "this side"), (99, "the coordinator")])
def test_another_protocol_version_is_told_which_side_to_upgrade(version, older):
    job = Job()
    for message in (Connect(version, "x"), Register(version, "x", 1, BLOCK, "running", 0)):
        stranger = Line(job, b"stranger")
        stranger.say(message)
        refusal = stranger.hear(Refused)
        assert (refusal.code, refusal.over) == ("version", True)
        assert refusal.text.endswith(f"upgrade {older}")


@pytest.mark.parametrize(("slots", "block_size"), [(0, BLOCK), (1, BLOCK + 1)])
def test_a_rank_without_slots_or_with_other_blocks_is_refused_by_value(slots, block_size):
    job = Job()
    rank = Line(job, b"rank")
    rank.say(Register(PROTOCOL_VERSION, "rank", slots, block_size, "running", 0))
    refusal = rank.hear(Refused)
    assert (refusal.code, refusal.over) == ("malformed", True)
    assert f"slots={slots}, block_size={block_size}" in refusal.text
    assert f"block_size_tokens={BLOCK}" in refusal.text
    assert rank.is_gone()


def test_what_is_said_to_each_peer_is_numbered_from_0_without_a_gap():
    job = Job()
    client, other, rank = job.client(), job.client("other"), job.rank()
    for _ in range(3):
        for each in (client, other):
            each.submit()
            rank.finish(rank.assigned())
        job.wait(2.0)
    for line in (client, other, rank):
        assert line.numbers == list(range(len(line.numbers)))
        assert len(line.numbers) > 4


def test_a_repeated_frame_is_ignored_and_does_not_count_as_a_sign_of_life():
    job = Job()
    client = job.client()
    client.submit()
    job.now = 5.0
    client.said -= 1
    client.submit(request_id=1)
    assert [request.client_request_id for request in job.core._open_requests()] == [0]
    assert job.core.peers.get(client.identity).heard == 0.0


def test_a_lost_frame_ends_the_session_and_what_it_had_goes_on_elsewhere_at_once():
    job = Job()
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    first.assigned()
    first.said += 1
    first.say(Heartbeat())
    refusal = first.hear(Refused)
    assert (refusal.code, refusal.over) == ("lost_frames", True)
    assert first.is_gone()
    assert second.assigned().request_id == 0


def test_a_frame_that_cannot_be_read_does_not_cost_the_session():
    job = Job()
    client = job.client()
    job.core.unreadable(client.identity, "it is no msgpack")
    client.said += 1
    job.carry()
    refusal = client.hear(Refused)
    assert (refusal.code, refusal.text, refusal.over) == ("malformed", "it is no msgpack", False)
    client.submit()
    assert job.rank().assigned().request_id == 0


def test_a_frame_of_a_stranger_that_cannot_be_read_is_answered():
    job = Job()
    stranger = Line(job, b"stranger")
    job.core.unreadable(stranger.identity, "it is no msgpack")
    job.carry()
    assert stranger.hear(Refused).over


def test_a_peer_that_says_what_is_not_its_to_say_is_told_so_and_goes_on():
    job = Job()
    client, rank = job.client(), job.rank()
    client.say(Progress([]))
    rank.say(Shutdown())
    for peer, words in ((client, "a client does not send Progress"), (rank, "a rank does not send Shutdown")):
        refusal = peer.hear(Refused)
        assert (refusal.code, refusal.text, refusal.over) == ("not_yours", words, False)
    client.submit()
    assert rank.assigned().request_id == 0


def test_whoever_is_silent_is_told_that_it_must_live():
    job = Job(heartbeat_interval_s=1.0)
    client = job.client()
    before = len(client.numbers)
    job.wait(5.0)
    assert len(client.numbers) >= before + 5


def test_a_silent_rank_is_given_up_and_its_work_goes_elsewhere():
    job = Job(heartbeat_timeout_s=10.0)
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    first.assigned()
    job.wait(10.0, silent=[first])
    assert not first.is_gone()
    job.wait(1.0, silent=[first])
    refusal = first.hear(Refused)
    assert (refusal.code, refusal.over) == ("silent", True)
    assert "10.0 s" in refusal.text
    assert second.assigned().request_id == 0


def test_a_silent_client_is_given_up_and_its_requests_are_aborted():
    job = Job(heartbeat_timeout_s=10.0)
    client, rank = job.client(), job.rank()
    client.submit()
    assign = rank.assigned()
    job.wait(11.0, silent=[client])
    assert client.hear(Refused).code == "silent"
    assert rank.hear(Cancel) == Cancel(assign.request_id, assign.attempt)
    assert job.core.router.pending("rank") == 0


def test_when_the_coordinator_itself_stood_still_nobody_is_given_up_for_its_silence():
    job = Job(heartbeat_timeout_s=10.0)
    client, rank = job.client(), job.rank()
    job.now += 100.0
    job.core.tick(job.now)
    assert not client.is_gone()
    assert not rank.is_gone()
    job.wait(11.0, silent=[rank])
    assert not client.is_gone()
    assert rank.is_gone()


def test_a_new_process_of_the_same_name_replaces_a_rank_and_takes_up_its_work():
    job = Job()
    client = job.client()
    old = job.rank("a")
    client.submit()
    old.assigned()
    new = job.rank("a")
    refusal = old.hear(Refused)
    assert (refusal.code, refusal.over) == ("replaced", True)
    assert old.is_gone()
    assert new.assigned().request_id == 0
    assert job.core.router.ranks == ("a",)


def test_when_a_rank_is_replaced_the_others_take_up_its_work_at_once():
    job = Job()
    client = job.client()
    old, other = job.rank("a"), job.rank("b")
    client.submit()
    old.assigned()
    job.rank("a", ready=False)
    assert other.assigned().request_id == 0


def test_a_member_is_replaced_by_name_and_other_clients_may_share_one():
    job = Job()
    member, plain = job.client("loop", member=True), Line(job, b"plain")
    plain.say(Connect(PROTOCOL_VERSION, "loop"))
    assert not member.is_gone()
    again = Line(job, b"again")
    again.say(Connect(PROTOCOL_VERSION, "loop", True))
    assert member.hear(Refused).code == "replaced"
    assert not plain.is_gone()
    assert not again.is_gone()


@pytest.mark.parametrize("how", ["disconnects", "is unreachable"])
def test_a_client_that_leaves_takes_its_requests_along_and_harms_no_other(how):
    job = Job()
    client, other, rank = job.client(), job.client("other"), job.rank()
    client.submit()
    other.submit()
    mine, theirs = rank.assigned(), rank.assigned()
    if how == "disconnects":
        client.say(Disconnect("going"))
    else:
        lose(job, client)
    assert client.quiet()
    assert rank.hear(Cancel).attempt == mine.attempt
    rank.finish(mine)
    rank.finish(theirs)
    assert other.stretches()[0].request_id == 0
    assert client.quiet()


def test_a_rank_that_leaves_in_order_is_no_loss_that_counts():
    job = Job(max_rank_losses=1)
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    first.assigned()
    first.say(Disconnect("the job is done"))
    assert second.assigned().request_id == 0
    assert client.quiet()


def test_a_member_that_leaves_is_waited_for_no_longer():
    job = Job(data_parallel_size=2)
    first, second = job.client("one", member=True), job.client("two", member=True)
    second.say(Disconnect())
    assert job.core.status()["barrier_waits_for"] == []
    assert not first.is_gone()


def test_a_member_whose_session_is_lost_is_waited_for_while_it_may_come_back():
    """Else the others would leave, and what it wants would lie with ranks that compute no more."""
    job = Job(data_parallel_size=2, heartbeat_timeout_s=10.0)
    first, second = job.client("one", member=True), job.client("two", member=True)
    first.say(Barrier(0))
    job.core.unreachable(second.identity, "unreachable", job.now)
    job.wait(9.0)
    assert job.core.barriers.passed == -1
    again = job.client("two", member=True)
    job.wait(9.0)
    assert job.core.barriers.passed == -1
    again.say(Barrier(0))
    assert first.hear(BarrierDone).index == again.hear(BarrierDone).index == 0


def test_a_member_that_does_not_come_back_is_given_up():
    job = Job(data_parallel_size=2, heartbeat_timeout_s=10.0)
    first, second = job.client("one", member=True), job.client("two", member=True)
    first.say(Barrier(0))
    job.core.unreachable(second.identity, "unreachable", job.now)
    job.wait(11.0)
    assert first.hear(BarrierDone).index == 0


def test_on_shutdown_every_peer_is_told_why():
    job = Job()
    client, rank = job.client("boss"), job.rank()
    client.submit()
    rank.assigned()
    client.say(Shutdown())
    for peer in (client, rank):
        assert peer.hear(Disconnect).reason == "client 'boss' has shut the coordinator down"
    assert job.core.finished


def test_it_ends_when_it_has_been_without_peers_for_long_and_not_before():
    job = Job(idle_exit_s=5.0)
    job.wait(4.0)
    client = job.client()
    job.wait(20.0)
    client.say(Disconnect())
    job.wait(4.5)
    assert not job.core.finished
    job.wait(1.0)
    assert job.core.finished


def test_a_visit_between_two_looks_counts_as_one():
    job = Job(idle_exit_s=5.0)
    job.wait(4.9, 4.9)
    job.client().say(Disconnect())
    job.wait(4.5)
    assert not job.core.finished
    job.wait(1.0)
    assert job.core.finished


def test_the_status_says_how_things_stand():
    job = Job(data_parallel_size=2)
    client = job.client("loop", member=True)
    rank = job.rank("a", slots=1)
    client.submit(n=3)
    client.submit(n=2)
    rank.progress(running=1, waiting=2)
    job.wait(2.0, silent=[rank])
    client.heard.clear()
    client.say(StatusQuery(4))
    status = client.hear(Status)
    assert status.call_id == 4
    table = status.table
    (seen,) = table.pop("ranks")
    assert seen.pop("silent_for_s") == seen.pop("since_progress_s") == 2.0
    assert seen == {
        "name": "a", "state": "running", "policy_version": 0, "ready": True, "slots": 1, "assigned_samples": 3,
        "running": 1, "waiting": 2,
    }  # fmt: skip
    assert table == {
        "instance": "this life",
        "state": "running",
        "policy_version": 0,
        "queued_samples": 2,
        "clients": [{"name": "loop", "open_requests": 2, "member": True}],
        "barrier_waits_for": ["1 that have not connected"],
    }


# --- requests -----------------------------------------------------------------------------------------------------------


def test_a_request_goes_to_a_rank_and_its_results_to_its_client_under_its_own_number():
    job = Job()
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
    assert (row.request_id, row.attempt, row.token_ids, row.outcomes) == (40, 0, int32(8, 9, 9), [None, b"ended"])
    assert job.core.router.pending("rank") == 2
    rank.progress(stretch(assign, {0: (1, [8])}, ended=[0]))
    (row,) = client.stretches()
    assert (row.starts, row.outcomes) == ([1], [b"ended"])
    assert job.core.router.pending("rank") == 1
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


def test_request_ids_must_rise():
    job = Job()
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
def test_what_can_never_be_served_fails_at_once_and_the_next_is_served(fields, error, words):
    job = Job()
    client, rank = job.client(), job.rank()
    client.submit(**fields)
    assert words in client.failed(error).text
    client.submit()
    assert rank.assigned().request_id == 0


def test_the_largest_group_is_taken():
    job = Job()
    client, rank = job.client(), job.rank()
    client.submit(n=MAX_SAMPLES)
    assert len(rank.assigned().indices) == MAX_SAMPLES


def test_a_prompt_that_would_not_fit_into_a_frame_again_is_refused():
    job = Job()
    client = job.client()
    client.say(Submit(0, bytes(MAX_REQUEST_BYTES + 4), 1, b""))
    assert f"{MAX_REQUEST_BYTES + 4} bytes" in client.failed("InvalidRequestError").text
    client.say(Submit(1, bytes(MAX_REQUEST_BYTES), 1, b""))
    assert client.quiet()


def test_a_client_has_only_so_many_requests_open():
    job = Job(max_open_requests=2)
    client, other, rank = job.client(), job.client("other"), job.rank()
    for _ in range(3):
        client.submit()
    assert "max_open_requests" in client.failed("QueueFullError").text
    other.submit()
    assert other.quiet()
    rank.finish(rank.assigned())
    client.hear(Update)
    client.submit()
    assert client.quiet()


def test_a_client_has_only_so_many_bytes_of_prompts_open():
    job = Job(max_open_mb=1)
    client, rank = job.client(), job.rank()
    prompt = range(1 << 17)
    client.submit(prompt)
    client.submit(prompt)
    client.submit((1,))
    assert "max_open_mb=1" in client.failed("QueueFullError").text
    rank.finish(rank.assigned())
    client.hear(Update)
    client.submit(prompt)
    assert client.quiet()
    client.say(Abort(1))
    client.failed("RequestAbortedError")
    client.submit(prompt)
    assert client.quiet()


def test_higher_priority_first_then_the_order_of_arrival():
    job = Job()
    client = job.client()
    for priority in (0, 2, -1, 2, 0):
        client.submit(priority=priority)
    assert job.rank().assigned_ids() == [1, 3, 0, 4, 2]


def test_what_a_lost_rank_had_keeps_its_place():
    job = Job()
    client = job.client()
    first = job.rank("a", slots=2)
    for _ in range(5):
        client.submit()
    assert first.assigned_ids() == [0, 1, 2]
    lose(job, first)
    assert job.rank("b").assigned_ids() == [0, 1, 2, 3, 4]


def test_order_of_arrival_survives_suspend_and_resume():
    job = Job()
    client, rank = job.client(), job.rank(slots=1)
    for _ in range(4):
        client.submit()
    running = [rank.assigned(), rank.assigned()]
    for signal in ("pause", "suspend"):
        client.call(signal)
        rank.obey()
        client.answered()
    client.submit()
    for signal in ("resume", "unpause"):
        client.call(signal)
        rank.obey()
        client.answered()
    for assign in running:
        rank.finish(assign)
    later = [rank.assigned(), rank.assigned()]
    for assign in later:
        rank.finish(assign)
    assert [each.request_id for each in later] + rank.assigned_ids() == [2, 3, 4]


@pytest.mark.parametrize("state", ["running", "paused", "suspended"])
def test_requests_are_taken_and_aborted_in_every_state(state):
    job = Job()
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


def test_what_is_aborted_while_it_waits_never_reaches_a_rank():
    job = Job()
    client = job.client()
    first = client.submit()
    client.submit()
    client.say(Abort(first))
    client.failed("RequestAbortedError")
    assert job.rank().assigned_ids() == [1]


def test_an_abort_of_what_has_ended_is_ignored():
    job = Job()
    client, rank = job.client(), job.rank()
    client.submit()
    rank.finish(rank.assigned())
    client.hear(Update)
    client.say(Abort(0), Abort(77))
    assert client.quiet()


def test_a_request_fails_by_name_when_its_own_time_has_passed():
    job = Job()
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


def test_the_time_of_a_request_that_has_ended_means_nothing():
    job = Job()
    client, rank = job.client(), job.rank()
    client.submit(timeout_s=3.0)
    client.submit(timeout_s=3.0)
    rank.finish(rank.assigned())
    client.say(Abort(1))
    client.heard.clear()
    job.wait(5.0)
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


def test_a_rank_that_comes_at_the_last_moment_is_in_time():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    client.submit()
    job.wait(19.9, 19.9)
    rank = job.rank()
    job.wait(30.0)
    assert rank.assigned().request_id == 0
    assert client.quiet()


def test_a_rank_that_never_gets_ready_is_none():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    client.submit()
    job.rank(ready=False)
    job.wait(21.0)
    assert "1 of data_parallel_size=1 are here" in client.failed("RequestTimeoutError").text


def test_the_time_without_ranks_starts_anew_with_each_loss():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    client.submit()
    job.wait(15.0)
    lose(job, job.rank())
    job.wait(19.0)
    assert client.quiet()
    job.wait(2.0)
    client.failed("RequestTimeoutError")


def test_a_group_that_is_continued_starts_where_it_stood_and_only_what_is_wanted_is_computed():
    job = Job()
    client, rank = job.client(), job.rank()
    known = stretch(Assign(9, 9, [], b"", b"", 0, 0, 0.0, 0, []), {1: (0, [5, 6]), 2: (0, [])}, version=0)
    client.submit(n=4, known=[known], wanted=[1, 2])
    assign = rank.assigned()
    assert assign.indices == [1, 2]
    (row,) = assign.known
    assert [(index, start, count) for index, start, count, *_ in row.samples()] == [(1, 0, 2), (2, 0, 0)]
    rank.progress(stretch(assign, {1: (2, [7]), 2: (0, [8])}, ended=[1, 2]))
    (row,) = client.stretches()
    assert row.starts == [2, 0]
    assert not job.core.peers.clients[client.identity].requests


@pytest.mark.parametrize(
    ("rows", "ended", "words"),
    [
        ({0: (3, [5])}, (), "goes on at token 3: must be 0 or 0"),
        ({0: (0, [5])}, (0,), "a sample that has ended is not continued"),
        ({3: (0, [5])}, (), "sample 3 of request 0 is not open"),
    ],
)
def test_what_is_said_to_be_known_must_make_sense(rows, ended, words):
    job = Job()
    client, rank = job.client(), job.rank()
    known = stretch(Assign(9, 9, [], b"", b"", 0, 0, 0.0, 0, []), rows, ended=ended)
    client.submit(n=2, known=[known])
    assert words in client.failed("InvalidRequestError").text
    assert rank.quiet()


# --- ranks --------------------------------------------------------------------------------------------------------------


def test_a_rank_gets_nothing_before_it_is_ready_and_then_what_waits():
    job = Job()
    client, rank = job.client(), job.rank(ready=False)
    client.submit()
    assert rank.quiet()
    rank.say(EngineMoved("running", 0))
    assert rank.assigned().request_id == 0


def test_a_rank_that_is_lost_before_it_is_ready_holds_nobody_up():
    job = Job()
    client, ready = job.client(), job.rank("b")
    lose(job, job.rank("a", ready=False))
    client.submit()
    assert ready.assigned().request_id == 0


def test_samples_of_a_lost_rank_go_on_elsewhere_from_the_last_tokens_known():
    job = Job()
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit(n=3)
    assign = first.assigned()
    first.progress(stretch(assign, {0: (0, [1, 2]), 1: (0, [3]), 2: (0, [4])}, version=1))
    first.progress(stretch(assign, {0: (2, [5]), 2: (1, [6])}, ended=[2], version=2))
    client.heard.clear()
    first.progress(stretch(assign, {1: (1, [7])}, version=2))
    second.say(EngineMoved("running", 2))
    lose(job, first)
    again = second.assigned()
    assert again.attempt > assign.attempt
    assert (again.request_id, again.indices, again.seed) == (assign.request_id, [0, 1], assign.seed)
    (known,) = again.known
    rows = {index: (start, tokens) for index, start, _, tokens, *_ in known.samples()}
    assert rows == {0: (0, int32(1, 2, 5)), 1: (0, int32(3, 7))}
    assert known.versions == [[1, 1, 2, 2, 1], [1, 1, 1, 2, 1]]
    client.heard.clear()
    second.finish(again, [8], version=2)
    (row,) = client.stretches()
    assert row.starts == [3, 2]


def test_what_a_given_up_rank_still_says_is_not_believed():
    job = Job()
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    assign = first.assigned()
    lose(job, first)
    second.assigned()
    first.finish(assign)
    assert first.hear(Refused).code == "unknown_peer"
    second.finish(assign)
    assert client.quiet()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({0: (3, [9])}, "goes on at token 3: must be 1 or 0"),
        ({0: (1, [9]), 1: (0, [9])}, r"samples \[0, 1\] are not of attempt 1"),
    ],
)
def test_a_rank_whose_tokens_do_not_follow_is_given_up_and_another_goes_on(rows, words):
    job = Job()
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    assign = first.assigned()
    first.progress(stretch(assign, {0: (0, [8])}))
    client.heard.clear()
    first.progress(stretch(assign, rows))
    refusal = first.hear(Refused)
    assert (refusal.code, refusal.over) == ("malformed", True)
    assert re.search(words, refusal.text)
    assert client.quiet()
    again = second.assigned()
    assert again.known[0].token_ids == int32(8)


def test_a_sample_that_starts_afresh_goes_on_from_there_alone():
    job = Job()
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    assign = first.assigned()
    first.progress(stretch(assign, {0: (0, [1, 2, 3])}))
    first.progress(stretch(assign, {0: (0, [4])}))
    first.progress(stretch(assign, {0: (1, [5])}))
    lose(job, first)
    (known,) = second.assigned().known
    assert (known.starts, known.token_ids) == ([0], int32(4, 5))


def test_an_engine_that_refuses_a_request_ends_that_one_alone():
    job = Job()
    client, rank = job.client(), job.rank()
    client.submit()
    client.submit()
    first, second = rank.assigned(), rank.assigned()
    rank.say(Decline(first.request_id + 1, first.attempt, "X", "another request"))
    assert client.quiet()
    rank.say(Decline(first.request_id, first.attempt, "InvalidRequestError", "too long"))
    failure = client.failed("InvalidRequestError")
    assert (failure.request_id, failure.text) == (0, "request 0 of client 'client': too long")
    rank.hear(Cancel)
    rank.finish(second)
    assert client.stretches()[0].request_id == 1


def test_a_request_under_which_rank_after_rank_dies_fails_by_name_and_its_neighbours_go_on():
    job = Job(max_rank_losses=3)
    client = job.client()
    poison, neighbour = client.submit(), client.submit()
    for life in range(3):
        rank = job.rank("a")
        assigns = [rank.assigned(), rank.assigned()]
        assert [each.request_id for each in assigns] == [0, 1]
        rank.progress(stretch(assigns[1], {0: (life, [life])}))
        assert client.stretches()[0].request_id == neighbour
        lose(job, rank)
    failure = client.failed("RankLostError")
    assert failure.request_id == poison
    assert "3 ranks were lost" in failure.text
    assert "'a', because: its connection is gone" in failure.text
    assert "max_rank_losses=3" in failure.text
    last = job.rank("a")
    assign = last.assigned()
    assert (assign.request_id, assign.known[0].token_ids) == (1, int32(0, 1, 2))
    last.finish(assign)
    assert client.stretches()[0].request_id == neighbour


def test_tokens_of_a_newer_version_wait_for_a_rank_of_that_version_while_others_go_on():
    job = Job()
    client = job.client()
    new, old = job.rank("new"), job.rank("old")
    client.submit()
    assign = new.assigned()
    new.say(EngineMoved("running", 3))
    new.progress(stretch(assign, {0: (0, [1])}, version=3))
    lose(job, new)
    assert old.quiet()
    assert job.core.status()["queued_samples"] == 1
    client.submit()
    assert old.assigned().request_id == 1
    old.say(EngineMoved("running", 2))
    assert old.quiet()
    old.say(EngineMoved("running", 3))
    again = old.assigned()
    assert (again.request_id, again.known[0].versions) == (0, [[3, 3, 1]])


def test_tokens_that_are_too_new_for_every_rank_fail_by_name_in_the_end():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    new, old = job.rank("new"), job.rank("old")
    client.submit()
    assign = new.assigned()
    new.progress(stretch(assign, {0: (0, [1])}, version=3))
    client.hear(Update)
    lose(job, new)
    job.wait(19.0)
    assert client.quiet()
    job.wait(2.0)
    assert "no rank has reached policy version 3" in client.failed("RequestTimeoutError").text
    assert old.quiet()


def test_what_is_aborted_while_it_waits_for_a_version_is_forgotten():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    new, old = job.rank("new"), job.rank("old")
    client.submit()
    new.progress(stretch(new.assigned(), {0: (0, [1])}, version=3))
    lose(job, new)
    client.say(Abort(0))
    client.heard.clear()
    assert job.core.status()["queued_samples"] == 0
    job.wait(25.0)
    old.say(EngineMoved("running", 3))
    assert client.quiet()
    assert old.quiet()


def test_the_time_for_a_rank_of_that_version_starts_anew_with_each_wait():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    new = job.rank("new")
    job.rank("old")
    client.submit()
    new.progress(stretch(new.assigned(), {0: (0, [1])}, version=3))
    lose(job, new)
    job.wait(15.0)
    again = job.rank("new", version=3)
    again.assigned()
    lose(job, again)
    client.heard.clear()
    job.wait(19.0)
    assert client.quiet()
    job.wait(2.0)
    client.failed("RequestTimeoutError")


def test_a_version_change_empties_the_table_of_that_rank():
    job = Job(data_parallel_size=2)
    client, rank = job.client(), job.rank("a")
    job.rank("b")
    client.submit(LONG)
    assign = rank.assigned()
    rank.progress(stretch(assign, {0: (0, [1])}, ended=[0]), blocks_added=np.arange(3, dtype="<i8").tobytes())
    assert job.core.router.held("a") == {0, 1, 2}
    rank.say(EngineMoved("running", 1))
    assert job.core.router.held("a") == set()
    rank.progress(blocks_added=np.arange(5, dtype="<i8").tobytes())
    rank.say(EngineMoved("paused", 1))
    rank.progress(blocks_removed=np.arange(2, dtype="<i8").tobytes())
    assert job.core.router.held("a") == {2, 3, 4}
    rank.progress(blocks_added=np.arange(7, 8, dtype="<i8").tobytes(), flushed=True)
    assert job.core.router.held("a") == {7}


def test_state_and_version_that_an_engine_acknowledges_are_believed_like_those_it_tells_of_itself():
    job = Job(data_parallel_size=2)
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    first.progress(blocks_added=np.arange(3, dtype="<i8").tobytes())
    client.call("set_version", 2)
    first.obey(state="paused")
    second.obey(error="RuntimeError: no", version=0)
    seen = [(each["state"], each["policy_version"]) for each in job.core.status()["ranks"]]
    assert seen == [("paused", 2), ("running", 0)]
    assert job.core.router.held("a") == set()
    second.say(EngineMoved("suspended", 5))
    assert job.core.status()["ranks"][1]["state"] == "suspended"
    assert job.core.policy_version == 5


def test_a_request_that_waits_for_a_version_goes_on_when_a_rank_acknowledges_it():
    job = Job()
    client = job.client()
    new, old = job.rank("new"), job.rank("old")
    client.submit()
    new.progress(stretch(new.assigned(), {0: (0, [1])}, version=1))
    lose(job, new)
    client.heard.clear()
    client.call("set_version", 1)
    old.obey()
    assert old.assigned().request_id == 0


def test_what_a_rank_holds_at_registration_counts():
    job = Job(data_parallel_size=2)
    rank = Line(job, b"rank")
    rank.say(Register(PROTOCOL_VERSION, "a", 4, BLOCK, "running", 0, np.arange(3, dtype="<i8").tobytes()))
    assert job.core.router.held("a") == {0, 1, 2}


def test_every_decision_is_told_with_what_was_found():
    job = Job(data_parallel_size=2)
    client = job.client()
    job.rank("a")
    job.rank("b")
    client.submit(LONG)
    client.submit(LONG)
    client.submit((9, 9))
    made = job.core.take_decisions()
    assert [(each.request_id, each.rank_index, each.num_hashes, each.num_matched) for each in made] == [
        (0, 0, 10, 0),
        (1, 0, 10, 10),
        (2, 1, 0, 0),
    ]
    assert job.core.take_decisions() == []


# --- size ---------------------------------------------------------------------------------------------------------------


def test_stretches_of_one_turn_travel_as_one_update_in_order():
    job = Job()
    client, rank = job.client(), job.rank()
    client.submit(n=1)
    client.submit(n=1)
    first, second = rank.assigned(), rank.assigned()
    rank.progress(stretch(first, {0: (0, [1])}), stretch(second, {0: (0, [2])}), stretch(first, {0: (1, [3])}))
    assert [row.token_ids for row in client.stretches()] == [int32(1), int32(2), int32(3)]
    assert client.quiet()


def test_what_is_said_after_tokens_arrives_after_them():
    job = Job()
    client, rank = job.client(), job.rank()
    client.submit()
    assign = rank.assigned()
    with job.one_turn():
        rank.progress(stretch(assign, {0: (0, [1])}))
        client.say(Abort(0))
    assert client.stretches()[0].token_ids == int32(1)
    client.failed("RequestAbortedError")


def test_a_client_that_leaves_in_the_turn_of_its_tokens_is_said_nothing():
    job = Job()
    client, rank = job.client(), job.rank()
    client.submit()
    assign = rank.assigned()
    with job.one_turn():
        rank.progress(stretch(assign, {0: (0, [1])}))
        lose(job, client)
    assert client.quiet()


def update_sizes(fill: Callable[[Assign, int], Message]) -> list[int]:
    """Frame lengths of the updates of one turn with so much to tell that it does not fit into one."""
    core = CoordinatorCore(Job(max_open_requests=10_000).config, "x")
    core.receive(b"client", 0, Connect(PROTOCOL_VERSION, "client"), 0.0)
    core.receive(b"rank", 0, Register(PROTOCOL_VERSION, "rank", 4096, BLOCK, "running", 0), 0.0)
    core.receive(b"rank", 1, EngineMoved("running", 0), 0.0)
    for number in range(8):
        core.receive(b"client", 1 + number, Submit(number, int32(1), 512, b""), 0.0)
    assigns = [message for _, _, message in core.take_outbox() if isinstance(message, Assign)]
    for number, assign in enumerate(assigns):
        core.receive(b"rank", 2 + number, fill(assign, number), 0.0)
    updates = [(sequence, message) for _, sequence, message in core.take_outbox() if isinstance(message, Update)]
    assert sum(len(message.stretches) for _, message in updates) == len(assigns)
    return [len(encode(sequence, message)) for sequence, message in updates]


def test_an_update_stays_below_the_length_of_a_frame_whatever_fills_it():
    def tokens(assign: Assign, number: int) -> Message:
        return Progress([stretch(assign, {index: (0, [0] * 500) for index in assign.indices})])

    def outcomes(assign: Assign, number: int) -> Message:
        row = stretch(assign, {index: (0, [1]) for index in assign.indices}, ended=assign.indices)
        row.outcomes = [bytes(4000)] * len(assign.indices)
        return Progress([row])

    def top_n(assign: Assign, number: int) -> Message:
        return Progress(
            [stretch(assign, {index: (0, [1]) for index in assign.indices}, top_n=[bytes(4000)] * len(assign.indices))]
        )

    for fill in (tokens, outcomes, top_n):
        sizes = update_sizes(fill)
        assert len(sizes) > 1
        assert max(sizes) < 1.1 * UPDATE_BYTES
    assert UPDATE_BYTES * 4 < MAX_FRAME_BYTES


def test_what_is_known_of_a_group_travels_as_one_stretch_however_often_it_was_told():
    """It was one stretch for each report: of a long group more values than a frame may have, and no rank could go on."""
    job = Job()
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit(n=4)
    assign = first.assigned()
    for position in range(300):
        version = position // 100
        first.progress(stretch(assign, {index: (position, [position]) for index in range(4)}, version=version))
    second.say(EngineMoved("running", 2))
    lose(job, first)
    (known,) = second.assigned().known
    assert known.counts == [300] * 4
    assert known.versions == [[0, 0, 100, 1, 100, 2, 100]] * 4
    assert known.token_ids == int32(*range(300)) * 4


def test_a_group_of_which_too_much_is_known_for_one_frame_goes_on_in_parts(monkeypatch):
    monkeypatch.setattr("rollout.coordinator.open_requests.MAX_KNOWN_BYTES", 100)
    job = Job()
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit(n=4)
    assign = first.assigned()
    rows = {0: (0, range(5)), 1: (0, range(5)), 2: (0, range(50)), 3: (0, range(1))}
    first.progress(stretch(assign, rows))
    job.decisions()
    lose(job, first)
    again = [second.assigned() for _ in range(3)]
    assert [each.indices for each in again] == [[0, 1], [2], [3]]
    assert [each.known[0].indices for each in again] == [[0, 1], [2], [3]]
    assert len({each.attempt for each in again}) == 3
    assert job.decisions() == [(0, 0)]
    assert job.core.router.pending("b") == 4
    for each in again:
        second.finish(each)
    assert job.core.router.pending("b") == 0
    assert not job.core.peers.clients[client.identity].requests


# --- text ---------------------------------------------------------------------------------------------------------------


def test_a_text_becomes_tokens_that_its_client_hears_before_anything_else():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("hello")
    (text,) = job.text_jobs()
    assert (text.text, text.token_ids) == ("hello", None)
    assert rank.quiet()
    job.core.tokenized(text.job_id, [4, 5], job.now)
    job.carry()
    assign = rank.assigned()
    assert assign.prompt == int32(4, 5)
    rank.progress(stretch(assign, {0: (0, [1])}))
    assert client.hear(Accepted) == Accepted(0, int32(4, 5))
    client.hear(Update)


def test_a_text_that_cannot_be_tokenised_fails_by_name_and_the_others_are_served():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("bad")
    client.submit((1, 2))
    (text,) = job.text_jobs()
    assert rank.assigned().request_id == 1
    job.core.tokenized(text.job_id, ValueError("no tokenizer there"), job.now)
    job.carry()
    failure = client.failed("InvalidRequestError")
    assert failure.text == "request 0 of client 'client': its prompt cannot be tokenised: no tokenizer there"


def test_a_text_of_more_tokens_than_fit_into_a_frame_is_refused():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("long")
    (text,) = job.text_jobs()
    job.core.tokenized(text.job_id, np.zeros(MAX_REQUEST_BYTES // 4 + 1, "<i4"), job.now)
    job.carry()
    assert f"at most {MAX_REQUEST_BYTES // 4}" in client.failed("InvalidRequestError").text
    assert rank.quiet()


def test_an_open_text_weighs_what_its_tokens_do():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("text")
    (text,) = job.text_jobs()
    job.core.tokenized(text.job_id, [1] * 100, job.now)
    job.carry()
    assert job.core.peers.clients[client.identity].open_bytes == 400
    rank.finish(rank.assigned(), [3])
    (ended,) = job.text_jobs()
    job.core.detokenized(ended.job_id, ["x"], job.now)
    assert job.core.peers.clients[client.identity].open_bytes == 0


def test_a_text_that_is_aborted_while_it_becomes_tokens_reaches_no_rank():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("hello")
    (text,) = job.text_jobs()
    client.say(Abort(0))
    client.failed("RequestAbortedError")
    job.core.tokenized(text.job_id, [1], job.now)
    job.carry()
    assert client.quiet()
    assert rank.quiet()
    job.core.tokenized(text.job_id, [1], job.now)


def test_a_text_keeps_its_place_behind_tokens_that_came_before_and_before_those_that_came_after():
    job = Job(tokenizer="made up")
    client = job.client()
    client.submit((1,))
    client.submit("hello")
    client.submit((2,))
    (text,) = job.text_jobs()
    job.core.tokenized(text.job_id, [1], job.now)
    assert job.rank().assigned_ids() == [0, 1, 2]


def test_completions_become_text_and_the_other_samples_do_not_wait_for_it():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit(n=2)
    assign = rank.assigned()
    rank.progress(stretch(assign, {0: (0, [1, 2]), 1: (0, [3])}))
    client.hear(Update)
    rank.progress(stretch(assign, {0: (2, [4]), 1: (1, [5])}, ended=[0]))
    (going_on,) = client.stretches()
    assert going_on.indices == [1]
    (first,) = job.text_jobs()
    assert first.token_ids == [int32(1, 2, 4)]
    rank.progress(stretch(assign, {1: (2, [6])}, ended=[1]))
    (second,) = job.text_jobs()
    assert second.token_ids == [int32(3, 5, 6)]
    job.core.detokenized(second.job_id, ["two"], job.now)
    job.carry()
    (row,) = client.stretches()
    assert (row.indices, row.texts) == ([1], ["two"])
    assert job.core.peers.clients[client.identity].requests
    job.core.detokenized(first.job_id, [None], job.now)
    job.carry()
    (row,) = client.stretches()
    assert (row.indices, row.texts, row.token_ids) == ([0], [None], int32(4))
    assert not job.core.peers.clients[client.identity].requests


def test_the_text_of_a_sample_that_went_on_elsewhere_and_started_afresh_is_of_its_last_tokens():
    job = Job(tokenizer="made up")
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit(n=2)
    assign = first.assigned()
    first.progress(stretch(assign, {0: (0, [1]), 1: (0, [2])}))
    first.progress(stretch(assign, {1: (0, [3])}))
    lose(job, first)
    again = second.assigned()
    second.finish(again, [9])
    (ended,) = job.text_jobs()
    assert ended.token_ids == [int32(1, 9), int32(3, 9)]


def test_a_text_that_the_engine_has_made_is_passed_on():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit()
    rank.progress(stretch(rank.assigned(), {0: (0, [1])}, ended=[0], texts=["done"]))
    assert client.stretches()[0].texts == ["done"]
    assert job.text_jobs() == []


def test_a_request_that_is_aborted_while_its_text_is_made_ends_once():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit()
    rank.finish(rank.assigned())
    (ended,) = job.text_jobs()
    client.say(Abort(0))
    client.failed("RequestAbortedError")
    job.core.detokenized(ended.job_id, ["late"], job.now)
    job.carry()
    assert client.quiet()


def test_a_client_that_leaves_while_its_text_is_made_harms_nobody():
    job = Job(tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("a")
    client.submit((1,))
    rank.finish(rank.assigned())
    asked, ended = job.text_jobs()
    lose(job, client)
    job.core.tokenized(asked.job_id, [1], job.now)
    job.core.detokenized(ended.job_id, ["late"], job.now)
    job.carry()
    assert client.quiet()
    assert rank.quiet()


# --- deterministic mode -------------------------------------------------------------------------------------------------


def decisions_of(seed: int) -> list[tuple[int, int]]:
    """The same arrivals, everything else at other times: ranks come and get ready, texts and completions are done."""
    rng = random.Random(seed)
    job = Job(data_parallel_size=3, deterministic_mode=True, tokenizer="made up")
    client = job.client()
    order = random.Random(7)
    arrivals = [
        (
            order.choice(["text", tuple(range(order.choice([4, 8, 40])))]),
            order.choice([1, 2, 4, 9]),
            order.choice([0, 3]),
        )
        for _ in range(40)
    ]
    missing = ["a", "b", "c"]
    rng.shuffle(missing)
    waiting, open_assigns, unready, texts, made = [], [], [], [], []
    while arrivals or missing or unready or open_assigns or texts:
        choice = rng.randrange(5)
        if choice == 0 and missing:
            unready.append(job.rank(missing.pop(), slots=4, ready=False))
            waiting.append(unready[-1])
        elif choice == 1 and unready:
            unready.pop(rng.randrange(len(unready))).say(EngineMoved("running", 0))
        elif choice == 2 and arrivals:
            prompt, n, priority = arrivals.pop(0)
            client.submit(prompt, n, priority=priority)
        elif choice == 3 and open_assigns:
            rank, assign = open_assigns.pop(rng.randrange(len(open_assigns)))
            rank.progress(
                stretch(
                    assign,
                    {each: (0, [1]) for each in assign.indices},
                    ended=assign.indices,
                    texts=[""] * len(assign.indices),
                )
            )
        elif choice == 4 and texts:
            job.core.tokenized(texts.pop(rng.randrange(len(texts))).job_id, list(range(40)), job.now)
        job.carry()
        texts += job.text_jobs()
        made += job.decisions()
        for rank in waiting:
            while rank.heard:
                open_assigns.append((rank, rank.assigned()))
    return made


def test_in_deterministic_mode_the_order_of_arrival_alone_decides():
    first = decisions_of(0)
    assert [request for request, _ in first] == sorted(request for request, _ in first)
    assert {rank for _, rank in first} == {0, 1, 2}
    for seed in range(1, 30):
        assert decisions_of(seed) == first


def test_in_deterministic_mode_requests_wait_for_all_ranks_and_fail_by_name_when_they_do_not_come():
    job = Job(data_parallel_size=2, deterministic_mode=True, no_rank_timeout_s=20.0)
    client, rank = job.client(), job.rank()
    client.submit()
    job.wait(19.0)
    assert rank.quiet()
    job.wait(2.0)
    assert "1 of data_parallel_size=2 are here" in client.failed("RequestTimeoutError").text


def test_in_deterministic_mode_a_text_that_fails_holds_nobody_up():
    job = Job(deterministic_mode=True, tokenizer="made up")
    client, rank = job.client(), job.rank()
    client.submit("bad")
    client.submit((1,))
    assert rank.quiet()
    (text,) = job.text_jobs()
    job.core.tokenized(text.job_id, ValueError("no"), job.now)
    job.carry()
    client.failed("InvalidRequestError")
    assert rank.assigned().request_id == 1
