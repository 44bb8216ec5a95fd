"""Tests of the core's limits: memory is charged before use, work per message is bounded, errors are short."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.distributed.coordinator.core import dispatch
from rollout.distributed.coordinator.core.peers import MAX_ERROR_CHARACTERS, shortened
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.frames import MAX_FRAME_BYTES
from tests.distributed.coordinator.core.routers import held
from tests.distributed.coordinator.job import Job, int32, stretch

HALF = 600 << 10
"""More than half of a budget of 1 MiB."""


def charged(job: Job) -> int:
    return sum(client.open_bytes for client in job.core.peers.clients.values())


def known(size: int) -> wire.Stretch:
    tokens = size // 8
    return wire.Stretch(0, 0, [0], [0], [tokens], bytes(4 * tokens), bytes(4 * tokens), [[0, 0, tokens]])


# --- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "heavy",
    [
        lambda number: wire.Submit(number, bytes(HALF), 1, b""),
        lambda number: wire.Submit(number, int32(1), 1, bytes(HALF)),
        lambda number: wire.Submit(number, int32(1), 1, b"", known=[known(HALF)]),
        lambda number: wire.Submit(number, int32(1), 5000, b""),
    ],
    ids=["prompt", "params", "known tokens", "samples"],
)
@pytest.mark.parametrize("leave", [False, True], ids=["abort", "leave"])
def test_whatever_a_request_brings_is_charged_until_it_ends(heavy, leave):
    job = Job(max_open_mb=1)
    client, other = job.client(), job.client("other")
    client.say(heavy(0))
    assert HALF - 1024 <= charged(job) < 2 * HALF
    client.say(heavy(1))
    assert "max_open_mb=1" in client.failed("QueueFullError").text
    other.say(heavy(0))
    assert other.quiet()
    client.say(wire.Disconnect() if leave else wire.Abort(0))
    other.say(wire.Abort(0))
    assert charged(job) == 0


def test_tokens_that_ranks_compute_are_charged_and_never_refused():
    job = Job(max_open_mb=1)
    client, rank = job.client(), job.rank()
    client.submit()
    assign = rank.assigned()
    before = charged(job)
    for start in range(0, 200_000, 50_000):
        rank.progress(stretch(assign, {0: (start, [1] * 50_000)}))
        client.hear(wire.Update)
    assert charged(job) == before + 8 * 200_000
    client.submit()
    client.failed("QueueFullError")
    rank.finish(wire.Assign(0, assign.attempt, [0], b"", b"", 0, 0, 0.0, 0, [known(8 * 200_000)]))
    assert charged(job) == 0


# --- one frame ----------------------------------------------------------------------------------------------------------


def test_an_assignment_that_outgrew_a_frame_fails_its_request_and_no_rank(job):
    client, rank = job.client(), job.rank()
    client.submit()
    assign = rank.assigned()
    job.core.too_long(rank.identity, assign, MAX_FRAME_BYTES + 1, job.now)
    job.carry()
    assert f"takes {MAX_FRAME_BYTES + 1} bytes" in client.failed("InvalidRequestError").text
    rank.hear(wire.Cancel)
    client.submit()
    rank.finish(rank.assigned())
    client.hear(wire.Update)
    job.core.too_long(rank.identity, assign, MAX_FRAME_BYTES + 1, job.now)
    job.carry()
    assert client.quiet()
    job.core.too_long(client.identity, wire.Update([]), MAX_FRAME_BYTES + 1, job.now)
    job.carry()
    assert client.hear(wire.Refused).code == "too_long"
    assert client.is_gone()


# --- one message --------------------------------------------------------------------------------------------------------


def test_of_very_many_hashes_the_first_are_looked_at(monkeypatch):
    """Each of 7.8 million was made an integer: nobody else was served for 82 seconds."""
    monkeypatch.setattr(dispatch, "MAX_HASHES", 100)
    job = Job()
    rank = job.rank()
    hashes = np.arange(1000, dtype="<i8")
    router = job.core.dispatcher.router
    rank.progress(blocks_added=hashes.tobytes())
    assert sorted(held(router, "rank")) == list(range(100))
    rank.progress(blocks_removed=hashes[:100].tobytes())
    assert not held(router, "rank")
    rank.progress(blocks_added=hashes[:50].tobytes())
    rank.progress(blocks_added=hashes[60:70].tobytes(), blocks_removed=hashes[100:].tobytes())
    assert sorted(held(router, "rank")) == list(range(60, 70))


# --- errors -------------------------------------------------------------------------------------------------------------


def test_no_error_repeats_megabytes(job):
    """`wanted=[2**62] * 900_000` brought 19 MB back, each time."""
    client, rank = job.client(), job.rank()
    client.submit(wanted=[2**62] * 100_000)
    client.submit()
    assign = rank.assigned()
    rank.say(wire.Decline(assign.request_id, assign.attempt, "InvalidRequestError", "x" * 1_000_000))
    rank.hear(wire.Cancel)
    client.call("pause")
    rank.say(wire.CommandAck(rank.hear(wire.Command).command_id, "running", 0, "y" * 1_000_000))
    while not client.quiet():
        message = client.heard.popleft()
        assert isinstance(message, wire.RequestFailed | wire.ControlDone)
        assert len(message.text) < MAX_ERROR_CHARACTERS + 100
    assert shortened("a" * 5000).startswith("aaa")
    assert "3000 characters" in shortened("a" * 5000)
