"""A coordinator made of a plain ROUTER socket in a thread: it stores what it receives and sends what a test orders."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import zmq

from rollout.distributed.protocol.frames import Sequencer, decode, encode
from rollout.distributed.protocol.messages import Connect, ConnectAck, Heartbeat, Message

DEADLINE_S = 120.0
Answer = Callable[["FakeCoordinator", bytes, Message], object]


def welcome(**changes: Any) -> ConnectAck:
    """A handshake's answer, with heartbeats too rare to matter."""
    values = {
        "state": "running",
        "policy_version": 0,
        "heartbeat_interval_s": 100.0,
        "heartbeat_timeout_s": 1000.0,
    }
    return ConnectAck(**(values | changes))


_numbers = itertools.count()


class FakeCoordinator:
    """`answer(self, peer, message)` runs in the thread for each message except heartbeats."""

    def __init__(self, answer: Answer = lambda *_: None, *, greet: bool = True) -> None:
        self.heard: queue.Queue[tuple[bytes, int, Message]] = queue.Queue()
        self.heartbeats = 0
        self.peers: list[bytes] = []
        self._answer, self._greet = answer, greet
        self._sequencers: dict[bytes, Sequencer] = {}
        self._orders: queue.SimpleQueue[list[bytes] | None] = queue.SimpleQueue()
        context = zmq.Context.instance()
        self._router = context.socket(zmq.ROUTER)
        # A ROUTER drops what a full queue does not take.
        self._router.sndhwm = 0
        self._router.linger = 0
        self.address = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        # Not its address: libzmq may still hold the endpoint of one that lay there before.
        endpoint = f"inproc://fake-{next(_numbers)}"
        self._inside, self._outside = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._inside.bind(endpoint)
        self._outside.connect(endpoint)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, peer: bytes, *messages: Message) -> None:
        """Send messages together, numbered rightly; from any one thread at a time."""
        numbers = self._sequencers.setdefault(peer, Sequencer())
        self.say_raw(peer, *(encode(numbers.next(), each) for each in messages))

    def say_raw(self, peer: bytes, *frames: bytes) -> None:
        """Send bytes, whatever they are."""
        if threading.current_thread() is self._thread:
            self._router.send_multipart([peer, *frames])
        else:
            self._orders.put([peer, *frames])
            self._outside.send(b"")

    def hear(self, kind: type[Message] | None = None) -> Message:
        """The next message, or the next one of a kind."""
        while True:
            _, _, message = self.heard.get(timeout=DEADLINE_S)
            if kind is None or isinstance(message, kind):
                return message

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._inside, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._inside in ready:
                self._inside.recv()
                order = self._orders.get()
                if order is None:
                    return
                self._router.send_multipart(order)
            if self._router in ready:
                peer, *frames = self._router.recv_multipart()
                for frame in frames:
                    self._take(peer, *decode(frame))

    def _take(self, peer: bytes, sequence: int, message: Message) -> None:
        if isinstance(message, Heartbeat):
            self.heartbeats += 1
            return
        if isinstance(message, Connect):
            self.peers.append(peer)
            if self._greet:
                self.say(peer, welcome())
        self.heard.put((peer, sequence, message))
        self._answer(self, peer, message)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.put(None)
        self._outside.send(b"")
        self._thread.join(DEADLINE_S)
        for socket in (self._router, self._inside, self._outside):
            socket.close(linger=0)
