"""Tests of incomplete and slow messages: an invalid one ends its connection, a slow one is delivered."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator

import pytest
import zmq

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.connections import STRANGER_BYTES, ConnectionWatch
from rollout.distributed.coordinator.process import DataParallelInferenceCoordinator

pytestmark = pytest.mark.distributed

PATIENCE_S = 120.0
LIMIT = 8 << 20
MORE, COMMAND = 0x03, 0x06


class Bench:
    """A watched ROUTER, and peers."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.rcvhwm = 1
        self.watch = ConnectionWatch(self.router, LIMIT, 4, lambda: None)
        self.listen()

    def listen(self, secret: bytes | None = None) -> None:
        if secret is not None:
            self.router.curve_secretkey = secret
            self.router.curve_server = True
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")

    def dealer(self) -> zmq.Socket[bytes]:
        dealer: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{self.port}")
        return dealer

    def raw(self, mechanism: bytes = b"NULL") -> socket.socket:
        """A connection after the greetings: the handshake of its mechanism follows."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(PATIENCE_S)
        connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32))
        greeting = b""
        while len(greeting) < 64:
            more = connection.recv(64 - len(greeting))
            assert more
            greeting += more
        if mechanism == b"NULL":
            connection.sendall(ready())
        return connection

    def take(self) -> bytes:
        """The next message; the watch hears of it."""
        assert self.router.poll(PATIENCE_S * 1000)
        address, *frames = self.router.recv_multipart(copy=False)
        self.watch.took({int(address.get(zmq.SRCFD)): 1}, False)
        return b"".join(frame.bytes for frame in frames)

    def goes_on(self, seconds: float = 0.2) -> None:
        """Accept connections for some seconds without reading a message."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.watch.greet()
            time.sleep(0.005)

    def close(self) -> None:
        self.watch.close()
        self.watch.close()
        self.context.destroy(linger=0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def ready() -> bytes:
    """The end of a handshake."""

    def told(name: bytes, value: bytes) -> bytes:
        return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value

    body = b"\x05READY" + told(b"Socket-Type", b"DEALER") + told(b"Identity", os.urandom(8))
    return b"\x04" + bytes([len(body)]) + body


def frame(flags: int, size: int) -> bytes:
    return bytes([flags]) + struct.pack(">Q", size) + bytes(size)


def sent_until_closed(bench: Bench, connection: socket.socket, part: bytes, most: int) -> int:
    """Bytes that went out before the other side closed."""
    sent = 0
    try:
        while sent < most:
            connection.sendall(part)
            sent += len(part)
            bench.watch.took({}, True)
        end = time.monotonic() + PATIENCE_S
        while bench.watch.closed == 0 and time.monotonic() < end:
            bench.watch.took({}, True)
            time.sleep(0.005)
        while connection.recv(1 << 16):
            pass
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


def test_a_message_without_end_of_a_stranger_costs_little_more_than_a_greeting(bench):
    connection = bench.raw()
    sent_until_closed(bench, connection, frame(MORE, 1 << 18), 2 * STRANGER_BYTES)
    assert bench.watch.closed == 1


def test_a_message_without_end_of_a_peer_costs_as_much_as_the_longest_messages(bench):
    connection = bench.raw()
    connection.sendall(b"\x00\x05hello")
    assert bench.take() == b"hello"
    connection.sendall(frame(MORE, LIMIT - (1 << 20)))
    bench.goes_on()
    assert bench.watch.closed == 0
    sent_until_closed(bench, connection, frame(MORE, 1 << 18), 2 * LIMIT)
    assert bench.watch.closed == 1


def test_a_handshake_without_end_is_cut_short(bench):
    """Without any key, 30 strangers made the coordinator hold 1.7 GB for 10 seconds, and again."""
    bench.router.unbind(bench.router.LAST_ENDPOINT)
    bench.listen(secret=zmq.curve_keypair()[1])
    connection = bench.raw(b"CURVE")
    head = bytes([COMMAND]) + struct.pack(">Q", 58 << 20)
    connection.sendall(head)
    sent_until_closed(bench, connection, bytes(1 << 18), 2 * STRANGER_BYTES)
    assert bench.watch.closed == 1


def test_of_strangers_that_together_hold_too_much_the_largest_leaves(bench, monkeypatch):
    monkeypatch.setattr("rollout.distributed.coordinator.connections.STRANGERS_BYTES", 4 << 20)
    strangers = []
    for size in (3 << 20, 1 << 19, 1 << 20):
        connection = bench.raw()
        connection.sendall(frame(MORE, size))
        bench.goes_on(0.1)
        strangers.append(connection)
    assert sent_until_closed(bench, strangers[0], b"", 0) == 0
    assert bench.watch.closed == 1


def test_the_longest_messages_wait_as_long_as_nobody_reads(bench):
    dealer = bench.dealer()
    dealer.send(b"hello")
    assert bench.take() == b"hello"
    for number in range(4):
        dealer.send(bytes([number]) * (3 << 20))
    bench.goes_on()
    assert [bench.take()[0] for _ in range(4)] == [0, 1, 2, 3]
    assert bench.watch.closed == 0


def test_another_connection_on_the_same_descriptor_begins_as_a_stranger(bench):
    first = bench.dealer()
    first.send(b"hello")
    bench.take()
    first.close(linger=0)
    bench.goes_on(0.1)
    connection = bench.raw()
    sent_until_closed(bench, connection, frame(MORE, 1 << 18), 2 * STRANGER_BYTES)
    assert bench.watch.closed == 1


def test_of_a_peer_whose_messages_are_not_read_two_are_taken():
    """Sixteen complete ones were, of 64 MB each if the peer liked."""
    coordinator = DataParallelInferenceCoordinator(CoordinatorConfig())
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger, dealer.sndhwm = 0, 1
    try:
        dealer.connect(coordinator.bind())
        sent = 0
        # The kernel and the sender's own queue hold some, too.
        while sent < 12 and dealer.poll(300, zmq.POLLOUT):
            dealer.send(bytes(16 << 20), zmq.NOBLOCK)
            sent += 1
        assert 2 <= sent <= 6
    finally:
        dealer.close()
        coordinator.close()
