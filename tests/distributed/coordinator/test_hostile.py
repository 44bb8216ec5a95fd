"""Tests of hostile frames: the coordinator keeps serving other peers within its memory.

One coordinator for the whole file, in a process of its own, with an honest client and an honest rank. What a peer may
do by right (pause or end the job, register as a rank and get work) is not among the bad frames.
"""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from itertools import count

import msgpack
import psutil
import pytest

from rollout.distributed.coordinator.launch import launch_coordinator
from rollout.distributed.coordinator.process import MAX_FRAMES_PER_MESSAGE
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.frames import MAX_FRAME_BYTES, decode, encode
from rollout.errors import SerializationError
from tests.configs import coordinator_config
from tests.distributed.coordinator.job import BLOCK, Job, Line
from tests.distributed.coordinator.simulation import Peer, World
from tests.distributed.raw_peers import (
    PATIENCE_S,
    RawPeer,
    answer,
    connect,
    echo_rank,
    status,
    submit,
)

pytestmark = pytest.mark.distributed

MEMORY_ALLOWED_MB = 420
"""Above what it has when nobody has done anything; a frame of the longest kind alone is there several times over."""

FORBIDDEN = (wire.Control, wire.EngineMoved)
"""Messages that any session may send: they stop the job, or fetch its work."""


class Site:
    """A coordinator under attack, an honest client, and a watch over the coordinator's memory."""

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        self.client = connect(address, "honest")
        self._ids = count()
        self._process = psutil.Process(pid)
        self._before = self._process.memory_info().rss
        self.worst = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._watch.start()

    def serves(self, requests: int = 1) -> None:
        for _ in range(requests):
            request_id = next(self._ids)
            self.client.say(submit(request_id))
            answer(self.client, request_id)
        assert not any(isinstance(message, wire.Refused) for message in self.client.heard)
        self.client.heard.clear()

    def check(self) -> None:
        """It lives, serves, and has kept its memory."""
        assert self._process.is_running()
        assert self._process.status() != psutil.STATUS_ZOMBIE
        self.serves(10)
        assert self.worst < MEMORY_ALLOWED_MB << 20, f"{self.worst >> 20} MB more than at the start"

    def close(self) -> None:
        self._over.set()
        self._watch.join(PATIENCE_S)

    def _look(self) -> None:
        while not self._over.wait(0.02):
            try:
                self.worst = max(self.worst, self._process.memory_info().rss - self._before)
            except psutil.NoSuchProcess:
                return


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    handle = launch_coordinator(coordinator_config(heartbeat_timeout_s=600.0))
    with echo_rank(handle.address, "honest rank"):
        site = Site(handle.address, handle.process.pid)
        try:
            yield site
            site.check()
        finally:
            site.close()
            handle.kill()


# --- bad frames ---------------------------------------------------------------------------------------------------------


def frames_of_jobs(seeds: range) -> list[bytes]:
    """Messages of clients and ranks in simulated jobs."""
    said: list[bytes] = []

    class Heard(World):
        def deliver_to_core(self, peer: Peer) -> None:
            said.append(encode(*peer.outbox[0]))
            super().deliver_to_core(peer)

    for seed in seeds:
        world = Heard(seed)
        for _ in range(80):
            world.event()
    return said


def spoilt(rng: random.Random, frame: bytes, sequence: int) -> bytes:
    """The frame with some values of any kind instead of its own, or with some other bytes."""
    row = msgpack.unpackb(frame)
    row[1] = sequence if rng.random() < 0.98 else rng.choice([0, sequence + 1, 2**62])
    for _ in range(rng.choice([0, 1, 1, 3])):
        values = [
            None,
            True,
            -1,
            7,
            2**63 - 1,
            2**64 - 1,
            float("nan"),
            b"",
            rng.randbytes(12),
            "text",
            [],
            [[7]],
            {"k": 7},
        ]
        row[rng.choice([0, *range(2, len(row))])] = rng.choice([*values, rng.randrange(64)])
    if rng.random() < 0.1:
        row = row[: rng.randrange(len(row))]
    packed = bytearray(msgpack.packb(row))
    if rng.random() < 0.2:
        place = rng.randrange(len(packed))
        packed[place : place + rng.randrange(3)] = rng.randbytes(rng.randrange(4))
    return bytes(packed)


def test_bad_frames_end_their_own_session_at_most():
    rng = random.Random(seed := int(os.environ.get("HOSTILE_SEED", random.randrange(2**32))))
    print(f"HOSTILE_SEED={seed}")
    said, heard = frames_of_jobs(range(20)), set()
    job = Job()
    honest, rank = job.client("honest"), job.rank("honest rank")
    greetings = {
        b"client": wire.Connect(wire.PROTOCOL_VERSION, "hostile client"),
        b"rank": wire.Register(wire.PROTOCOL_VERSION, "hostile rank", 1, BLOCK, "running", 0),
    }
    hostile = {identity: Line(job, identity) for identity in (*greetings, b"stranger")}
    for number in range(20_000):
        identity = rng.choice(list(hostile))
        if job.core.peers.get(identity) is None and identity in greetings:
            job.core.receive(identity, 0, greetings[identity], job.now)
        peer = job.core.peers.get(identity)
        frame = spoilt(rng, rng.choice(said), 0 if peer is None else peer.frames._received)
        try:
            sequence, message = decode(frame)
        except SerializationError as exc:
            job.core.unreadable(identity, str(exc))
        else:
            if not isinstance(message, FORBIDDEN):
                job.core.receive(identity, sequence, message, job.now)
        job.carry()
        heard |= {each.code for line in hostile.values() for each in line.heard if isinstance(each, wire.Refused)}
        for line in hostile.values():
            line.heard.clear()
        if number % 200 == 0:
            honest.submit()
            while rank.heard:
                if isinstance(message := rank.heard.popleft(), wire.Assign):
                    rank.finish(message)
            assert honest.stretches()
    assert {"malformed", "unknown_peer", "not_yours", "lost_frames"} <= heard


def test_a_barrier_after_which_no_other_can_be_numbered_is_unreadable():
    """The coordinator offered the next client a barrier number that the client could not read."""
    with pytest.raises(SerializationError, match=r"Barrier.index: 9223372036854775807 .* integer in \[0, 2\*\*62\)"):
        decode(encode(1, wire.Barrier(2**63 - 1)))


# --- too much -----------------------------------------------------------------------------------------------------------


def test_a_frame_that_is_too_long_is_refused_and_a_longer_one_costs_the_connection(site):
    peer = connect(site.address)
    peer.socket.send(bytes(MAX_FRAME_BYTES + 1))
    assert "at most" in peer.hear(wire.Refused).text
    site.serves()
    peer.vanish()
    monster = connect(site.address)
    monster.socket.send(bytes(MAX_FRAME_BYTES + (1 << 20)))
    site.serves(20)
    monster.vanish()
    site.check()


def test_a_message_of_too_many_frames_is_refused_unread(site):
    peer = RawPeer(site.address)
    heartbeat = encode(0, wire.Heartbeat())
    peer.socket.send_multipart([heartbeat] * (MAX_FRAMES_PER_MESSAGE + 1))
    assert f"{MAX_FRAMES_PER_MESSAGE + 1} frames" in peer.hear(wire.Refused).text
    peer.socket.send_multipart([heartbeat] * 100_000)
    assert "100000 frames" in peer.hear(wire.Refused).text
    peer.vanish()
    site.check()


def test_bytes_that_are_no_zmq_at_all_are_nobodys_problem(site):
    host, _, port = site.address.removeprefix("tcp://").rpartition(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(100)]
    for connection in connections:
        connection.sendall(os.urandom(1000))
    site.serves(20)
    for connection in connections:
        connection.close()
    site.check()


def test_a_client_that_floods_and_never_reads_is_given_up_while_others_are_served(site):
    flooder = connect(site.address, "flooder", reads_ahead=1)
    prompt = list(range(2000))
    numbers = iter(range(200_000))
    while "flooder" in [each["name"] for each in status(site.client)["clients"]]:
        for _ in range(50):
            flooder.say(submit(next(numbers), prompt))
        site.serves()
    for _ in range(1000):
        flooder.say(submit(next(numbers), prompt))
    site.check()
