"""Tests of the core's sessions: connection, silence, replacement, disconnection; message by message."""

from __future__ import annotations

import struct

import pytest

from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import GIVEN_UP
from tests.distributed.coordinator.job import BLOCK, Job, Line


@pytest.mark.parametrize(
    "message", [wire.Heartbeat(), wire.Submit(0, b"", 1, b""), wire.Progress([]), wire.StatusQuery(0)]
)
def test_a_stranger_is_told_to_connect_anew(job, message):
    stranger = Line(job, b"stranger")
    stranger.say(message)
    refusal = stranger.hear(wire.Refused)
    assert (refusal.code, refusal.over) == ("unknown_peer", True)
    assert "reconnect" in refusal.text
    assert stranger.numbers == [0]


@pytest.mark.parametrize(("version", "older"), [(wire.PROTOCOL_VERSION - 1, "this side"), (99, "the coordinator")])
def test_another_protocol_version_is_told_which_side_to_upgrade(job, version, older):
    for message in (wire.Connect(version, "x"), wire.Register(version, "x", 1, BLOCK, "running", 0)):
        stranger = Line(job, b"stranger")
        stranger.say(message)
        refusal = stranger.hear(wire.Refused)
        assert (refusal.code, refusal.over) == ("version", True)
        assert refusal.text.endswith(f"upgrade {older}")


@pytest.mark.parametrize(("slots", "block_size"), [(0, BLOCK), (1, BLOCK + 1)])
def test_a_rank_without_slots_or_with_other_blocks_is_refused_by_value(job, slots, block_size):
    rank = Line(job, b"rank")
    rank.say(wire.Register(wire.PROTOCOL_VERSION, "rank", slots, block_size, "running", 0))
    refusal = rank.hear(wire.Refused)
    assert (refusal.code, refusal.over) == ("malformed", True)
    assert f"max_requests={slots}, block_size={block_size}" in refusal.text
    assert f"block_size_tokens={BLOCK}" in refusal.text
    assert rank.is_gone()


def test_a_peer_that_says_what_is_not_its_to_say_is_told_so_and_goes_on(job):
    client, rank = job.client(), job.rank()
    client.say(wire.Progress([]))
    rank.say(wire.Abort(0))
    for peer, words in ((client, "a client does not send Progress"), (rank, "a rank does not send Abort")):
        refusal = peer.hear(wire.Refused)
        assert (refusal.code, refusal.text, refusal.over) == ("not_yours", words, False)
    client.submit()
    assert rank.assigned().request_id == 0


def test_a_silent_rank_is_given_up_and_its_work_goes_elsewhere():
    job = Job(heartbeat_timeout_s=10.0)
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    first.assigned()
    job.wait(10.0, silent=[first])
    assert not first.is_gone()
    job.wait(1.0, silent=[first])
    refusal = first.hear(wire.Refused)
    assert (refusal.code, refusal.over) == ("silent", True)
    assert "10.0 s" in refusal.text
    assert second.assigned().request_id == 0


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


def test_a_new_process_of_the_same_name_replaces_a_rank_and_takes_up_its_work(job):
    client = job.client()
    old = job.rank("a")
    client.submit()
    old.assigned()
    new = job.rank("a")
    refusal = old.hear(wire.Refused)
    assert (refusal.code, refusal.over) == ("replaced", True)
    assert old.is_gone()
    assert new.assigned().request_id == 0
    assert job.core.dispatcher.router.ranks == ("a",)


def test_a_member_is_replaced_by_name_and_other_clients_may_share_one(job):
    member, plain = job.client("loop", member=True), Line(job, b"plain")
    plain.say(wire.Connect(wire.PROTOCOL_VERSION, "loop"))
    assert not member.is_gone()
    again = Line(job, b"again")
    again.say(wire.Connect(wire.PROTOCOL_VERSION, "loop", 0))
    assert member.hear(wire.Refused).code == "replaced"
    assert not plain.is_gone()
    assert not again.is_gone()


def test_a_rank_that_leaves_in_order_is_no_loss_that_counts(job):
    job.core.sessions.max_rank_losses = 1
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit()
    first.assigned()
    first.say(wire.Disconnect("the job is done"))
    assert second.assigned().request_id == 0
    assert client.quiet()


def test_a_member_that_leaves_is_waited_for_no_longer():
    job = Job(data_parallel_size=2)
    first, second = job.client("one", member=True), job.client("two", member=True)
    second.say(wire.Disconnect())
    assert job.core.status()["barrier_waits_for"] == []
    assert not first.is_gone()


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_member_whose_session_is_lost_is_waited_for_while_it_may_come_back(comes_back):
    """Else the others would leave, and what it wants would lie with ranks that compute no more."""
    job = Job(data_parallel_size=2, heartbeat_timeout_s=10.0)
    first, second = job.client("one", member=True), job.client("two", member=True)
    first.say(wire.Barrier(0))
    job.core.unreachable(second.identity, "unreachable", job.now)
    job.wait(9.0)
    assert job.core.barriers.passed == -1
    if comes_back:
        again = job.client("two", member=True)
        job.wait(9.0)
        assert job.core.barriers.passed == -1
        again.say(wire.Barrier(0))
        assert again.hear(wire.BarrierDone).index == 0
    else:
        job.wait(2.0)
    assert first.hear(wire.BarrierDone).index == 0


def test_whoever_is_no_rank_of_the_job_opens_no_barrier_and_is_not_remembered():
    """A wrong name that came and went used to count as a member that had left."""
    job = Job(data_parallel_size=2)
    first = job.client("rank-0", member=True)
    stranger = Line(job, b"stranger")
    stranger.say(wire.Connect(wire.PROTOCOL_VERSION, "rank-00", 2))
    refusal = stranger.hear(wire.Refused)
    assert (refusal.code, refusal.text) == ("malformed", "member=2: must be below data_parallel_size=2")
    for life in range(20):
        again = Line(job, b"again%d" % life)
        again.say(wire.Connect(wire.PROTOCOL_VERSION, f"rank-{life}", 1), wire.Disconnect())
    second = job.client("rank-1", member=True)
    first.say(wire.Barrier(0))
    assert first.quiet()
    second.say(wire.Barrier(0))
    assert first.hear(wire.BarrierDone).index == 0
    assert len(job.core.barriers._departed) == 0


def test_an_arrival_that_was_given_up_agrees_with_every_call_that_comes_later():
    """A generate that timed out on one rank left its name there, and the other's next call failed by it."""
    job = Job(data_parallel_size=2)
    first, second = job.client("rank-0", member=True), job.client("rank-1", member=True)
    first.say(wire.Barrier(0, "generate()", 0))
    first.say(wire.Barrier(0, GIVEN_UP, 0))
    second.say(wire.Barrier(0, "suspend()", 1))
    assert first.hear(wire.BarrierDone).differences == second.hear(wire.BarrierDone).differences == ""
    first.say(wire.Barrier(1, "generate()", 1))
    second.say(wire.Barrier(1, "suspend()", 1))
    assert "generate()" in first.hear(wire.BarrierDone).differences


def test_the_status_says_how_things_stand():
    job = Job(data_parallel_size=2)
    client = job.client("loop", member=True)
    rank = job.rank("a", slots=1)
    client.submit(n=3)
    client.submit(n=2)
    rank.progress(running=1, waiting=2, latencies=struct.pack("<4f", 0.5, 0.25, 2.0, 1.0))
    job.wait(2.0, silent=[rank])
    client.heard.clear()
    client.say(wire.StatusQuery(4))
    status = client.hear(wire.Status)
    assert status.call_id == 4
    table = status.table
    (seen,) = table.pop("ranks")
    assert seen.pop("silent_for_s") == seen.pop("since_progress_s") == 2.0
    assert seen == {
        "name": "a", "state": "running", "policy_version": 0, "ready": True, "resting": False, "max_requests": 1,
        "assigned_samples": 3, "running": 1, "waiting": 2, "tokens": 0,
    }  # fmt: skip
    assert table == {
        "state": "running",
        "policy_version": 0,
        "queued_samples": 2,
        "oldest_request_s": 2.0,
        "first_token_s": [0.5, 0.5],
        "per_token_s": [0.25, 0.25],
        "clients": [{"name": "loop", "open_requests": 2, "member": True}],
        "barrier_waits_for": ["1 that have not connected"],
    }
