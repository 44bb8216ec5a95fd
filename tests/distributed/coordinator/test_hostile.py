"""Tests of hostile frames: the coordinator keeps serving other peers within its memory.

One coordinator for the whole file, in a process of its own, with an honest client and an honest rank. What a peer may
do by right (pause or end the job, register as a rank and get work) is not among the bad frames.
"""

from __future__ import annotations

import os
import random
import socket
import string
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import count
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.launch import launch_coordinator
from rollout.distributed.coordinator.process import MAX_FRAMES_PER_MESSAGE
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.frames import MAX_FRAME_BYTES, decode, encode
from rollout.errors import SerializationError
from tests.distributed.raw_peers import (
    BLOCK_SIZE,
    PATIENCE_S,
    RawPeer,
    answer,
    connect,
    echo_rank,
    finished,
    register,
    status,
    submit,
)

pytestmark = pytest.mark.distributed

MEMORY_ALLOWED_MB = 420
"""Above what it has when nobody has done anything; a frame of the longest kind alone is there several times over."""

FORBIDDEN = (wire.Control, wire.EngineMoved)
"""Of a hostile session: what it may do by right and would end the test."""


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
    handle = launch_coordinator(CoordinatorConfig(heartbeat_timeout_s=600.0))
    with echo_rank(handle.address, "honest rank"):
        site = Site(handle.address, handle.process.pid)
        try:
            yield site
            site.check()
        finally:
            site.close()
            handle.kill()


# --- bad frames ---------------------------------------------------------------------------------------------------------


def a_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(10 if depth < 3 else 7)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice([0, 1, -1, 7, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), rng.randrange(1000)])
    if kind == 2:
        return rng.choice([0.0, -1.5, float("nan"), float("inf"), 1e308])
    if kind in (3, 4):
        return rng.randbytes(rng.choice([0, 1, 3, 4, 8, 16, 100]))
    if kind in (5, 6):
        return "".join(rng.choices(string.printable + "\u2603\U0001f600", k=rng.choice([0, 1, 5, 257])))
    if kind == 9:
        return {"k": a_value(rng, depth + 1)}
    return [a_value(rng, depth + 1) for _ in range(rng.randrange(5))]


def a_stretch(rng: random.Random) -> list[Any]:
    """Columns that agree, of a request that may be somebody's."""
    samples, length = rng.randrange(4), rng.randrange(3)
    tokens = bytes(4 * samples * length)
    versions = [[rng.randrange(3), rng.randrange(3), length] if length else [rng.randrange(3)] for _ in range(samples)]
    outcomes = rng.choice([None, [rng.choice([None, b"ended"]) for _ in range(samples)]])
    starts, counts = [rng.choice([0, 0, 1, 5])] * samples, [length] * samples
    request_id, attempt = rng.randrange(500), rng.randrange(500)
    row = [request_id, attempt, list(range(samples)), starts, counts, tokens, tokens, versions]
    return [*row, {} if outcomes is None else {"outcome": outcomes}]


GOOD_VALUES: dict[str, Callable[[random.Random], Any]] = {
    "protocol_version": lambda rng: rng.choice([wire.PROTOCOL_VERSION, 0, wire.PROTOCOL_VERSION + 1, 2**62]),
    "name": lambda rng: f"x{rng.randrange(50)}",
    "instance": lambda rng: "x",
    "state": lambda rng: rng.choice(["running", "paused", "suspended", "stopping"]),
    "signal": lambda rng: rng.choice(["pause", "resume", "stop", "set_version"]),
    "prompt": lambda rng: rng.choice([rng.randbytes(4 * rng.randrange(40)), "text"]),
    "n": lambda rng: rng.choice([0, 1, 1, 2, 16, 200, 2**16 + 1, 2**62]),
    "block_size": lambda rng: rng.choice([BLOCK_SIZE, 0, 1]),
    "max_requests": lambda rng: rng.choice([0, 1, 2**62]),
    "stretches": lambda rng: [a_stretch(rng) for _ in range(rng.randrange(3))],
    "known": lambda rng: [a_stretch(rng) for _ in range(rng.choice([0, 0, 1]))],
    "wanted": lambda rng: rng.choice([[], [], [0], [1, 1], [2**62]]),
    "indices": lambda rng: [0],
    "table": lambda rng: {},
    "error": lambda rng: rng.choice(["Whatever", ""]),
    "text": lambda rng: "why",
    "reason": lambda rng: "why",
    "over": lambda rng: True,
    "member": lambda rng: rng.choice([None, 0, 1, 7]),
    "flushed": lambda rng: rng.choice([True, False]),
    "code": lambda rng: "malformed",
    "params": lambda rng: b"\x80",
    "priority": lambda rng: rng.choice([0, 2**31, -(2**31)]),
    "timeout_s": lambda rng: rng.choice([0.0, -1.0, 0.01, 1e300]),
    "arrival_time": lambda rng: rng.choice([None, 0.0, -1e300]),
    "argument": lambda rng: rng.choice([None, 3, "offload"]),
    "blocks_added": lambda rng: rng.randbytes(8 * rng.randrange(40)),
    "blocks_removed": lambda rng: rng.randbytes(8 * rng.randrange(40)),
    "hashes": lambda rng: rng.randbytes(8 * rng.randrange(40)),
}


SAYS = {
    "stranger": list(wire.MESSAGES),
    "client": [
        wire.Heartbeat.header,
        *(kind.header for kind in (wire.Submit, wire.Submit, wire.Submit, wire.Abort, wire.Barrier, wire.StatusQuery)),
    ],
    "rank": [
        wire.Heartbeat.header,
        *(kind.header for kind in (wire.Progress, wire.Progress, wire.Progress, wire.Decline, wire.CommandAck)),
    ],
}
"""Headers by who may send them; some weigh more."""


def a_row(rng: random.Random, kind: str, sequence: int) -> list[Any]:
    """A header that exists, of such a peer mostly, and fields that could be right."""
    header = rng.choice(SAYS[kind if rng.random() < 0.9 else "stranger"])
    row: list[Any] = [header, sequence]
    for field in fields(wire.MESSAGES[header]):  # type: ignore[arg-type]
        default: Callable[[random.Random], Any] = lambda rng: rng.choice([0, 1, rng.randrange(500), 2**62])  # noqa: E731
        row.append(GOOD_VALUES.get(field.name, default)(rng))
    return row


def spoil(rng: random.Random, frame: bytes) -> bytes:
    spoiled = bytearray(frame)
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(spoiled) + 1)
        match rng.randrange(4):
            case 0:
                spoiled[place : place + 1] = rng.randbytes(1)
            case 1:
                del spoiled[place:]
            case 2:
                spoiled[place:place] = rng.randbytes(rng.randrange(1, 5))
            case 3:
                del spoiled[place : place + 1]
    return bytes(spoiled)


def a_frame(rng: random.Random, kind: str, sequence: int) -> bytes:
    """A frame of one of the bad kinds; the last, which could be right, is as frequent as the others together."""
    match rng.randrange(12):
        case 0:
            return rng.randbytes(rng.choice([0, 1, 2, 10, 100]))
        case 1:
            return msgpack.packb(a_value(rng))
        case 2:
            return msgpack.packb([rng.choice([6, 19, 29, 62, 2**31, -1]), sequence, *[a_value(rng) for _ in range(3)]])
        case 3:
            return spoil(rng, msgpack.packb(a_row(rng, kind, sequence)))
        case 4:
            row = a_row(rng, kind, sequence)
            for _ in range(rng.randrange(1, 3)):
                row[rng.choice([0, *range(2, len(row))])] = a_value(rng)
            return msgpack.packb(row)
        case 5:
            row = a_row(rng, kind, sequence)
            return msgpack.packb(row[: rng.randrange(len(row))] if rng.random() < 0.5 else [*row, a_value(rng)])
        case _:
            wrong = rng.random() < 0.02
            return msgpack.packb(a_row(rng, kind, rng.choice([0, sequence + 1, 2**62]) if wrong else sequence))


class Hostile:
    """A peer that sends bad frames: without a session, as a client, or as a rank."""

    def __init__(self, address: str, kind: str, rng: random.Random) -> None:
        self.peer = RawPeer(address)
        self._rng = rng
        self._kind = kind
        self.sequence = 0
        if kind == "client":
            self.peer.say(wire.Connect(wire.PROTOCOL_VERSION, f"hostile {kind}"))
            self.sequence = 1
        elif kind == "rank":
            self.peer.say(wire.Register(wire.PROTOCOL_VERSION, f"hostile {rng.random()}", 1, BLOCK_SIZE, "running", 0))
            self.sequence = 1

    def attack(self, frames: int) -> None:
        batch: list[bytes] = []
        while len(batch) < frames:
            frame = a_frame(self._rng, self._kind, self.sequence)
            sequence, message = understood(frame)
            if isinstance(message, FORBIDDEN):
                continue
            batch.append(frame)
            if message is not None and sequence == self.sequence:
                self.sequence += 1
        self.peer.socket.send_multipart(batch)

    def hear(self) -> Counter[str]:
        """What came back, by code; whether its session has ended is under "over"."""
        heard: Counter[str] = Counter()
        while self.peer.listen(0):
            pass
        for message in self.peer.heard:
            if isinstance(message, wire.Refused):
                heard[message.code] += 1
                heard["over"] += message.over
            else:
                heard[type(message).__name__] += 1
        self.peer.heard.clear()
        return heard


def understood(frame: bytes) -> tuple[int, wire.Message | None]:
    try:
        return decode(frame)
    except SerializationError:
        return -1, None


def test_bad_frames_harm_nobody(site):
    seed = int(os.environ.get("HOSTILE_SEED", random.randrange(2**32)))
    print(f"HOSTILE_SEED={seed}")
    rng = random.Random(seed)
    heard: Counter[str] = Counter()
    kinds = ("stranger", "client", "rank")
    peers = {kind: Hostile(site.address, kind, rng) for kind in kinds}
    sent = 0
    while sent < 30_000:
        for kind in kinds:
            size = rng.choice([1, 5, 20, 100])
            peers[kind].attack(size)
            sent += size
            said = peers[kind].hear()
            heard += said
            if said["over"] or rng.random() < 0.1:
                peers[kind].peer.vanish()
                peers[kind] = Hostile(site.address, kind, rng)
        site.serves()
    site.check()
    assert {"malformed", "unknown_peer", "version", "not_yours", "lost_frames"} <= set(heard), heard


# --- what a session may not do ------------------------------------------------------------------------------------------


def test_nobody_ends_or_answers_the_requests_of_others(site):
    config = CoordinatorConfig(heartbeat_timeout_s=600.0)
    handle = launch_coordinator(config)
    try:
        victim, rank = connect(handle.address, "victim"), register(handle.address, "true rank")
        victim.say(submit(0), submit(1))
        assigned = [rank.hear(wire.Assign), rank.hear(wire.Assign)]
        other, liar = connect(handle.address, "other"), register(handle.address, "liar", slots=1)
        for request_id in range(3):
            other.say(wire.Abort(request_id))
            liar.say(*(wire.Decline(request_id, attempt, "InvalidRequestError", "no") for attempt in range(10)))
        for assign in assigned:
            liar.say(finished(assign, [666]))
        status(other)
        for assign in assigned:
            rank.say(finished(assign, [7, 8]))
        for request_id in (0, 1):
            (stretch,) = answer(victim, request_id)
            assert np.frombuffer(stretch.token_ids, "<i4").tolist() == [7, 8]
    finally:
        handle.kill()


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
