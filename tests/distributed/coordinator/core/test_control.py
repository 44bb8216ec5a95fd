"""Tests of control calls: every engine acknowledges, missing ones are named, refusals list the permitted states."""

from __future__ import annotations

import pytest

from rollout.distributed.protocol.messages import Control
from tests.distributed.coordinator.job import Job


def in_state(state: str, **options: object) -> Job:
    job = Job(**options)
    client = job.client("whoever was first")
    ranks = [job.rank("a"), job.rank("b")]
    way = {"running": [], "paused": ["pause"], "suspended": ["pause", "suspend"], "stopping": ["pause", "stop"]}
    for signal in way[state]:
        client.call(signal)
        for rank in ranks:
            rank.obey()
        assert client.answered().error is None
    assert job.core.control.state.value == state
    return job


def ranks_of(job: Job):
    return [job.lines[identity] for identity in job.core.peers.ranks]


def test_a_call_is_done_when_every_engine_has_done_it_and_not_before():
    job = in_state("running")
    client = job.client()
    call = client.call("pause")
    first, second = ranks_of(job)
    first.obey(state="paused")
    assert client.quiet()
    second.obey(state="paused")
    done = client.answered()
    assert (done.call_id, done.error, done.engines) == (call, None, [])


@pytest.mark.parametrize(
    ("state", "signal", "argument", "words"),
    [
        ("running", "suspend", None, "suspend while running: allowed when paused; pause first"),
        ("running", "stop", None, "stop while running: allowed when paused or suspended; pause first"),
        ("suspended", "unpause", None, "unpause while suspended: allowed when paused; resume first"),
        ("stopping", "pause", None, "pause while stopping: allowed when running; start another coordinator"),
        ("stopping", "resume", None, "resume while stopping: allowed when suspended; start another coordinator"),
        ("stopping", "set_version", 9, "set_version() while stopping: allowed before; start another coordinator"),
    ],
)
def test_an_illegal_call_says_the_state_the_rule_and_the_cure_and_changes_nothing(state, signal, argument, words):
    job = in_state(state)
    client = job.client() if state != "stopping" else next(iter(job.lines.values()))
    client.call(signal, argument)
    done = client.answered()
    assert (done.error, done.text) == ("ControlError", words)
    assert job.core.control.state.value == state
    assert job.core.control.policy_version == 0
    assert all(rank.quiet() for rank in ranks_of(job))


@pytest.mark.parametrize(
    ("state", "signal"),
    [
        ("paused", "pause"),
        ("suspended", "pause"),
        ("running", "unpause"),
        ("suspended", "suspend"),
        ("paused", "resume"),
        ("running", "resume"),
        ("stopping", "stop"),
    ],
)
def test_a_harmless_call_completes_when_every_engine_has_answered_and_changes_nothing(state, signal):
    job = in_state(state)
    client = job.client() if state != "stopping" else next(iter(job.lines.values()))
    client.call(signal)
    for rank in ranks_of(job):
        assert client.quiet()
        rank.obey()
    assert client.answered().error is None
    assert job.core.control.state.value == state


@pytest.mark.parametrize("version", [2, -1, "3", None])
def test_versions_only_rise(job, version):
    client = job.client()
    client.call("set_version", 3)
    assert client.answered().error is None
    if version == -1:
        job.core.receive(client.identity, client.said, Control(9, "set_version", version, 8.0), job.now)
        job.carry()
    else:
        client.call("set_version", version)
    done = client.answered()
    assert done.error == "ControlError"
    assert done.text == f"set_version({version!r}): must be an integer of at least 3; versions only rise"
    assert job.core.control.policy_version == 3


def test_at_the_deadline_the_engines_that_did_not_answer_are_named():
    job = in_state("running")
    client, late = job.client(), job.rank("late")
    client.call("pause", timeout_s=3.0)
    for rank in ranks_of(job):
        if rank is not late:
            rank.obey()
    job.wait(2.9, 0.1)
    assert client.quiet()
    job.wait(0.2, 0.1)
    done = client.answered()
    assert (done.error, done.engines) == ("ControlError", ["late"])
    assert done.text == "pause: late did not answer within 3.0 s; all others have"
    late.obey()
    assert client.quiet()


def test_an_engine_that_could_not_is_named_with_its_reason_once_all_have_answered():
    job = in_state("running")
    client = job.client()
    client.call("suspend")
    client.answered()
    client.call("pause")
    first, second = ranks_of(job)
    second.obey(error="MemoryError: too little")
    assert client.quiet()
    first.obey()
    done = client.answered()
    assert (done.error, done.engines) == ("ControlError", ["b"])
    assert done.text == "pause: b: MemoryError: too little"


def test_when_stopped_what_waits_in_the_queue_fails_at_once_and_what_runs_when_the_engines_have_stopped(job):
    client = job.client()
    rank = job.rank(slots=1)
    client.submit(n=1)
    client.submit(n=1)
    client.submit(n=1)
    running, ahead = rank.assigned(), rank.assigned()
    client.call("pause")
    rank.obey()
    client.answered()
    client.call("stop")
    assert client.failed("RequestAbortedError").request_id == 2
    assert client.quiet()
    rank.finish(running)
    assert client.stretches()[0].request_id == running.request_id
    rank.obey(state="stopped")
    failure = client.failed("RequestAbortedError")
    assert failure.request_id == ahead.request_id
    assert "request 1 of client 'client': the engines were stopped" in failure.text
    assert client.answered().error is None
    assert job.core.control.stopped


def test_when_stopped_everything_ends_at_the_deadline_though_an_engine_is_silent(job):
    client, rank = job.client(), job.rank()
    client.submit()
    rank.assigned()
    client.call("pause")
    rank.obey()
    client.answered()
    client.call("stop", timeout_s=2.0)
    job.wait(1.9, 0.1)
    assert client.quiet()
    job.wait(0.2, 0.1)
    assert client.failed("RequestAbortedError").request_id == 0
    assert client.answered().engines == ["rank"]


def test_after_stop_nothing_is_taken_and_nobody_is_let_in():
    job = in_state("stopping")
    client = next(iter(job.lines.values()))
    client.submit()
    failure = client.failed("EngineStateError")
    assert "accepts no requests" in failure.text
    with pytest.raises(AssertionError, match="code='stopping'"):
        job.client("late")


def test_after_stop_the_coordinator_ends_with_its_last_peer():
    job = in_state("stopping")
    assert not job.core.finished
    for line in list(job.lines.values()):
        job.core.unreachable(line.identity, "gone", job.now)
    assert job.core.finished


def test_a_welcome_says_where_everything_stands():
    job = Job(heartbeat_timeout_s=60.0)
    client = job.client()
    client.call("pause")
    client.call("set_version", 4)
    for told in (job.rank(ready=False).told, job.client("other").told):
        assert (told.state, told.policy_version) == ("paused", 4)
        assert (told.heartbeat_interval_s, told.heartbeat_timeout_s) == (2.0, 60.0)
