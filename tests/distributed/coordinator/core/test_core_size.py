"""Tests of the core's message size: below the frame limit, and in order."""

from __future__ import annotations

from collections.abc import Callable

from rollout.distributed.coordinator.core import peers
from rollout.distributed.coordinator.core.coordinator import CoordinatorCore
from rollout.distributed.coordinator.core.peers import UPDATE_BYTES
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.frames import MAX_FRAME_BYTES, encode
from tests.distributed.coordinator.job import BLOCK, Job, int32, lose, stretch


def update_sizes(fill: Callable[[wire.Assign, int], wire.Message]) -> list[int]:
    """Frame lengths of the updates of one turn with so much to tell that it does not fit into one."""
    core = CoordinatorCore(Job().config)
    core.receive(b"client", 0, wire.Connect(wire.PROTOCOL_VERSION, "client"), 0.0)
    core.receive(b"rank", 0, wire.Register(wire.PROTOCOL_VERSION, "rank", 4096, BLOCK, "running", 0), 0.0)
    core.receive(b"rank", 1, wire.EngineMoved("running", 0), 0.0)
    for number in range(8):
        core.receive(b"client", 1 + number, wire.Submit(number, int32(1), 512, b""), 0.0)
    assigns = [message for _, _, message in core.take_outbox() if isinstance(message, wire.Assign)]
    for number, assign in enumerate(assigns):
        core.receive(b"rank", 2 + number, fill(assign, number), 0.0)
    updates = [(sequence, message) for _, sequence, message in core.take_outbox() if isinstance(message, wire.Update)]
    assert sum(len(message.stretches) for _, message in updates) == len(assigns)
    return [len(encode(sequence, message)) for sequence, message in updates]


def test_an_update_holds_no_more_stretches_than_its_client_decodes(monkeypatch):
    """A client with very many requests, each of which got a token in one turn, refused the update and lost its session."""
    monkeypatch.setattr(peers, "MAX_STRETCHES", 3)
    job = Job()
    client, rank = job.client(), job.rank()
    for _ in range(7):
        client.submit()
    rank.progress(*(stretch(rank.assigned(), {0: (0, [1])}) for _ in range(7)))
    assert [len(client.stretches()) for _ in range(3)] == [3, 3, 1]
    assert client.quiet()


def test_an_update_stays_below_the_length_of_a_frame_whatever_fills_it():
    def tokens(assign: wire.Assign, number: int) -> wire.Message:
        return wire.Progress([stretch(assign, {index: (0, [0] * 500) for index in assign.indices})])

    def outcomes(assign: wire.Assign, number: int) -> wire.Message:
        row = stretch(assign, {index: (0, [1]) for index in assign.indices}, ended=assign.indices)
        row.columns["outcome"] = [bytes(4000)] * len(assign.indices)
        return wire.Progress([row])

    def top_n(assign: wire.Assign, number: int) -> wire.Message:
        return wire.Progress(
            [stretch(assign, {index: (0, [1]) for index in assign.indices}, top_n=[bytes(4000)] * len(assign.indices))]
        )

    for fill in (tokens, outcomes, top_n):
        sizes = update_sizes(fill)
        assert len(sizes) > 1
        assert max(sizes) < 1.1 * UPDATE_BYTES
    assert UPDATE_BYTES * 4 < MAX_FRAME_BYTES


def test_what_is_known_of_a_group_travels_as_one_stretch_however_often_it_was_told(job):
    """It was one stretch for each report: of a long group more values than a frame may have, and no rank could go on."""
    client = job.client()
    first, second = job.rank("a"), job.rank("b")
    client.submit(n=4)
    assign = first.assigned()
    for position in range(300):
        version = position // 100
        first.progress(stretch(assign, {index: (position, [position]) for index in range(4)}, version=version))
    second.say(wire.EngineMoved("running", 2))
    lose(job, first)
    (known,) = second.assigned().known
    assert known.counts == [300] * 4
    assert known.versions == [[0, 0, 100, 1, 100, 2, 100]] * 4
    assert known.token_ids == int32(*range(300)) * 4


def test_a_group_of_which_too_much_is_known_for_one_frame_goes_on_in_parts(monkeypatch):
    monkeypatch.setattr("rollout.distributed.coordinator.core.requests.MAX_KNOWN_BYTES", 100)
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
    assert job.core.status()["ranks"][0]["assigned_samples"] == 4
    for each in again:
        second.finish(each)
    assert job.core.status()["ranks"][0]["assigned_samples"] == 0
    assert not job.core.peers.clients[client.identity].requests
