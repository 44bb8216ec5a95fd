"""Peers of a coordinator made of nothing but a DEALER socket and frames, for tests of the coordinator's process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import zmq

from rollout.distributed.protocol.frames import Sequencer, decode, encode
from rollout.distributed.protocol.messages import (
    PROTOCOL_VERSION,
    Assign,
    Connect,
    ConnectAck,
    EngineMoved,
    Message,
    Progress,
    Refused,
    Register,
    RegisterAck,
    Status,
    StatusQuery,
    Stretch,
    Submit,
    Update,
)
from rollout.distributed.transport.keys import JobKeys
from tests.distributed.job.nursery import PATIENCE_S

Kind = TypeVar("Kind", bound=Message)

BLOCK_SIZE = 16

_context = zmq.Context()


class RawPeer:
    """One DEALER that counts its frames.

    Args:
        reads_ahead: ZMQ messages that are taken off the wire before somebody asks for them.
    """

    def __init__(self, address: str, keys: JobKeys | None = None, reads_ahead: int = 1000) -> None:
        self.socket = _context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = reads_ahead
        self.socket.routing_id = os.urandom(12)
        if keys is not None:
            keys.secure_client(self.socket)
        self.socket.ipv6 = "[" in address
        self.socket.connect(address)
        self.numbers = Sequencer()
        self.heard: list[Message] = []
        self.stretches: dict[int, list[Stretch]] = {}
        """Request id → stretches of the `Update`s that `answer` has read."""

    def say(self, *messages: Message) -> None:
        self.socket.send_multipart([encode(self.numbers.next(), message) for message in messages])

    def hear(self, kind: type[Kind], patience_s: float = PATIENCE_S) -> Kind:
        deadline = time.monotonic() + patience_s
        position = 0
        while True:
            while position < len(self.heard):
                message = self.heard[position]
                if isinstance(message, kind):
                    del self.heard[position]
                    return message
                position += 1
            if not self.listen(deadline - time.monotonic()):
                raise AssertionError(f"no {kind.__name__} came, but {self.heard[-20:]}")

    def listen(self, seconds: float) -> bool:
        """Wait for a ZMQ message; whether one came. Its frames go into `heard`."""
        if not self.socket.poll(max(0.0, seconds) * 1000):
            return False
        for frame in self.socket.recv_multipart():
            self.heard.append(decode(frame)[1])
        return True

    def vanish(self) -> None:
        """Close the connection without a message, like a killed process."""
        self.socket.close(linger=0)

    def __del__(self) -> None:
        self.vanish()


def connect(address: str, name: str = "client", keys: JobKeys | None = None, reads_ahead: int = 1000) -> RawPeer:
    client = RawPeer(address, keys, reads_ahead)
    client.say(Connect(PROTOCOL_VERSION, name))
    client.hear(ConnectAck)
    return client


def register(address: str, name: str, keys: JobKeys | None = None, slots: int = 64) -> RawPeer:
    rank = RawPeer(address, keys)
    rank.say(Register(PROTOCOL_VERSION, name, slots, BLOCK_SIZE, "running", 0))
    acknowledged = rank.hear(RegisterAck)
    rank.say(EngineMoved("running", acknowledged.policy_version))
    return rank


def submit(request_id: int, prompt: str | list[int] = (1, 2, 3), n: int = 1, **fields: Any) -> Submit:  # type: ignore[assignment]
    packed = prompt if isinstance(prompt, str) else np.array(prompt, "<i4").tobytes()
    return Submit(request_id, packed, n, b"\x80", **fields)


def finished(assign: Assign, tokens: list[int]) -> Progress:
    """Every sample of an assignment, ended with the same tokens."""
    samples, count = len(assign.indices), len(tokens)
    return Progress(
        [
            Stretch(
                assign.request_id,
                assign.attempt,
                assign.indices,
                [0] * samples,
                [count] * samples,
                np.array(tokens * samples, "<i4").tobytes(),
                np.zeros(count * samples, "<f4").tobytes(),
                [[0, 0, count] if count else [0] for _ in assign.indices],
                columns={"outcome": [b"ended"] * samples},
            )
        ]
    )


def answer(client: RawPeer, request_id: int, n: int = 1) -> list[Stretch]:
    while sum(_ended(stretch) for stretch in client.stretches.get(request_id, [])) < n:
        for stretch in client.hear(Update).stretches:
            client.stretches.setdefault(stretch.request_id, []).append(stretch)
    return client.stretches.pop(request_id)


def _ended(stretch: Stretch) -> int:
    return len(stretch.ended())


def status(client: RawPeer, call_id: int = 0) -> dict[str, Any]:
    client.say(StatusQuery(call_id))
    return client.hear(Status).table


@contextmanager
def echo_rank(address: str, name: str = "rank", keys: JobKeys | None = None, slots: int = 1 << 20) -> Iterator[None]:
    """A rank in a thread that ends every sample at once, with the prompt for a completion."""
    rank = register(address, name, keys, slots)
    over = threading.Event()
    said: list[Message] = []

    def work() -> None:
        while not over.is_set():
            rank.listen(0.05)
            heard, rank.heard = rank.heard, []
            said.extend(message for message in heard if isinstance(message, Refused))
            for message in heard:
                if isinstance(message, Assign):
                    rank.say(finished(message, np.frombuffer(message.prompt, "<i4").tolist()))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE_S)
        rank.vanish()
        assert not said
