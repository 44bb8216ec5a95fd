"""Tests of the core's handling of ranks: readiness, loss, policy versions, cached blocks; message by message."""

from __future__ import annotations

import re

import numpy as np
import pytest

from rollout.distributed.protocol import messages as wire
from tests.distributed.coordinator.core.routers import held
from tests.distributed.coordinator.job import LONG, Job, Line, int32, lose, stretch


def test_samples_of_a_lost_rank_go_on_elsewhere_from_the_last_tokens_known(job):
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit(n=3)
    assign = first.assigned()
    first.progress(stretch(assign, {0: (0, [1, 2]), 1: (0, [3]), 2: (0, [4])}, version=1))
    first.progress(stretch(assign, {0: (2, [5]), 2: (1, [6])}, ended=[2], version=2))
    client.heard.clear()
    first.progress(stretch(assign, {1: (1, [7])}, version=2))
    second.say(wire.EngineMoved("running", 2))
    lose(job, first)
    again = second.assigned()
    assert again.attempt > assign.attempt
    assert (again.request_id, again.indices, again.seed) == (assign.request_id, [0, 1], assign.seed)
    (known,) = again.known
    rows = {each.sample_index: (each.start, each.token_ids) for each in known.deltas()}
    assert rows == {0: (0, int32(1, 2, 5)), 1: (0, int32(3, 7))}
    assert known.versions == [[1, 1, 2, 2, 1], [1, 1, 1, 2, 1]]
    client.heard.clear()
    second.finish(again, [8], version=2)
    (row,) = client.stretches()
    assert row.starts == [3, 2]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({0: (3, [9])}, "continues at token 3: must be 1 or 0"),
        ({0: (1, [9]), 1: (0, [9])}, r"samples \[0, 1\] are not of attempt 1"),
    ],
)
def test_a_rank_whose_tokens_do_not_follow_is_given_up_and_another_goes_on(job, rows, words):
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    assign = first.assigned()
    first.progress(stretch(assign, {0: (0, [8])}))
    client.heard.clear()
    first.progress(stretch(assign, rows))
    refusal = first.hear(wire.Refused)
    assert (refusal.code, refusal.over) == ("malformed", True)
    assert re.search(words, refusal.text)
    assert client.quiet()
    again = second.assigned()
    assert again.known[0].token_ids == int32(8)


def test_an_engine_that_refuses_a_request_ends_that_one_alone(job):
    client, rank = job.client(), job.rank()
    client.submit()
    client.submit()
    first, second = rank.assigned(), rank.assigned()
    rank.say(wire.Decline(first.request_id + 1, first.attempt, "X", "another request"))
    assert client.quiet()
    rank.say(wire.Decline(first.request_id, first.attempt, "InvalidRequestError", "too long"))
    failure = client.failed("InvalidRequestError")
    assert (failure.request_id, failure.text) == (0, "request 0 of client 'client': too long")
    rank.hear(wire.Cancel)
    rank.finish(second)
    assert client.stretches()[0].request_id == 1


def test_a_request_under_which_rank_after_rank_dies_fails_by_name_and_its_neighbours_go_on(job):
    job.core.sessions.max_rank_losses = 3
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
    last = job.rank("a")
    assign = last.assigned()
    assert (assign.request_id, assign.known[0].token_ids) == (1, int32(0, 1, 2))
    last.finish(assign)
    assert client.stretches()[0].request_id == neighbour


def test_tokens_of_a_newer_version_wait_for_a_rank_of_that_version_while_others_go_on(job):
    client = job.client()
    new, old = job.rank("new"), job.rank("old")
    client.submit()
    assign = new.assigned()
    new.say(wire.EngineMoved("running", 3))
    new.progress(stretch(assign, {0: (0, [1])}, version=3))
    lose(job, new)
    assert old.quiet()
    assert job.core.status()["queued_samples"] == 1
    client.submit()
    assert old.assigned().request_id == 1
    old.say(wire.EngineMoved("running", 2))
    assert old.quiet()
    old.say(wire.EngineMoved("running", 3))
    again = old.assigned()
    assert (again.request_id, again.known[0].versions) == (0, [[3, 3, 1]])


def test_tokens_that_are_too_new_for_every_rank_fail_by_name_in_the_end():
    job = Job(no_rank_timeout_s=20.0)
    client = job.client()
    new, old = job.rank("new"), job.rank("old")
    client.submit()
    assign = new.assigned()
    new.progress(stretch(assign, {0: (0, [1])}, version=3))
    client.hear(wire.Update)
    lose(job, new)
    job.wait(19.0)
    assert client.quiet()
    job.wait(2.0)
    assert "no rank has had policy version 3" in client.failed("RequestTimeoutError").text
    assert old.quiet()


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
    assert held(job.core.dispatcher.router, "a") == set()
    second.say(wire.EngineMoved("suspended", 5))
    assert job.core.status()["ranks"][1]["state"] == "suspended"
    assert job.core.control.policy_version == 5


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


# --- weights of the asker, and ranks that rest ----------------------------------------------------------------------------


def test_what_is_held_for_a_rank_that_stays_behind_goes_to_one_that_has_the_weights():
    job = Job(heartbeat_timeout_s=30.0)
    client = job.client()
    old, new = job.rank("old"), job.rank("new", version=1)
    client.submit(min_policy_version=1)
    client.submit(min_policy_version=1)
    assert new.assigned().request_id == 0
    job.wait(4.0)
    assert new.assigned().request_id == 1
    assert old.quiet()
    assert job.core.status()["ranks"][1]["assigned_samples"] == 0


def test_a_rank_that_rests_keeps_its_share_for_a_moment_and_then_others_compute_it():
    """It had stalled, the others went on without it; back again it waits for them, and they for it."""
    job = Job(heartbeat_timeout_s=30.0)
    client = job.client()
    back, resting = job.rank("back"), job.rank("gone-on")
    resting.say(wire.EngineMoved("running", 0, True))
    client.submit(n=2)
    client.submit(n=2)
    back.assigned()
    left = resting.assigned()
    resting.progress(stretch(left, {0: (0, [7])}))
    client.heard.clear()
    job.wait(4.0)
    assert resting.hear(wire.Cancel).attempt == left.attempt
    again = back.assigned()
    assert (again.request_id, again.indices, again.known[0].token_ids) == (left.request_id, [0, 1], int32(7))
    client.submit()
    assert back.assigned().request_id == 2
    assert resting.quiet()
    resting.say(wire.EngineMoved("running", 0, False))
    for _ in range(2):
        client.submit()
    assert resting.assigned().request_id == 3


def test_while_everybody_rests_nothing_is_taken_from_anybody(job):
    client = job.client()
    ranks = [job.rank("a"), job.rank("b")]
    client.submit(n=2)
    client.submit(n=2)
    for rank in ranks:
        rank.assigned()
        rank.say(wire.EngineMoved("running", 0, True))
    job.wait(60.0)
    assert all(rank.quiet() for rank in ranks)
    # The first to come back waits for the other one a moment, as in every round.
    ranks[0].say(wire.EngineMoved("running", 0, False))
    job.wait(1.0)
    ranks[1].say(wire.EngineMoved("running", 0, False))
    job.wait(60.0)
    assert all(rank.quiet() for rank in ranks)


# --- a member that catches up -----------------------------------------------------------------------------------------


def member_rank(job: Job, name: str, version: int) -> Line:
    """A rank with one slot, whose training loop alone decides on its version."""
    rank = job.rank(name, 1, version=version, ready=False)
    rank.say(wire.EngineMoved("running", version))
    return rank


def left_behind(job: Job) -> tuple[Line, Line]:
    """The client of a member that the others have left behind at version 3, and the rank of another one at version 5."""
    other, client = job.client("b", member=True), job.client("a", member=True)
    other.say(wire.Barrier(0, "generate()", 4))
    lose(job, client)
    job.wait(15.0)
    other.hear(wire.BarrierDone)
    return job.client("a", member=True), member_rank(job, "b", 5)


def test_a_rank_that_is_ahead_computes_nothing_for_a_member_that_catches_up():
    job = Job(data_parallel_size=2)
    client, ahead = left_behind(job)
    own = member_rank(job, "a", 3)
    for _ in range(3):
        client.submit(min_policy_version=3)
    first = [own.assigned(), own.assigned()]
    assert (own.quiet(), ahead.quiet()) == (True, True)
    own.finish(first[0], version=3)
    assert own.assigned().request_id == 2
    own.say(wire.EngineMoved("running", 5))
    client.submit(min_policy_version=5)
    assert ahead.assigned().request_id == 3
