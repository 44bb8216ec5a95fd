"""Outgoing frames: one bounded queue per peer, several frames per message (backpressure).

Always true: a peer gets its frames in the order in which they were put; a peer that does not read costs at most the
limit, and no other peer anything. Knows no sockets but the call that sends one message or raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import zmq

MAX_FRAMES_PER_MESSAGE = 512
MAX_BYTES_PER_MESSAGE = 1 << 20
"""Of several frames together; a longer one goes alone."""

FRAME_OVERHEAD_BYTES = 64
"""What a waiting frame costs besides its bytes."""


class _Queue:
    __slots__ = ("frames", "size")

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.size = 0

    def batch(self) -> list[bytes]:
        taken: list[bytes] = []
        room = MAX_BYTES_PER_MESSAGE
        for frame in self.frames:
            room -= len(frame)
            if taken and (room < 0 or len(taken) == MAX_FRAMES_PER_MESSAGE):
                break
            taken.append(frame)
        return taken

    def drop(self, batch: Sequence[bytes]) -> None:
        for frame in batch:
            self.frames.popleft()
            self.size -= len(frame) + FRAME_OVERHEAD_BYTES


class Outgoing:
    """What has not been sent yet.

    Args:
        send: takes [identity, frame, frame, …]; raises `zmq.Again` when the peer's pipe is full, and a `zmq.ZMQError`
            with EHOSTUNREACH when it is gone.
        limit_bytes: most that may wait for one peer.
    """

    def __init__(self, send: Callable[[list[bytes]], object], limit_bytes: int) -> None:
        self._send = send
        self._limit_bytes = limit_bytes
        self._queues: dict[bytes, _Queue] = {}
        self._deaf: set[bytes] = set()

    @property
    def waiting(self) -> bool:
        """Whether some peer has not taken what is there for it."""
        return bool(self._queues)

    def put(self, peer: bytes, frame: bytes) -> None:
        """Queue a frame."""
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = _Queue()
        queue.frames.append(frame)
        queue.size += len(frame) + FRAME_OVERHEAD_BYTES

    def flush(self) -> list[tuple[bytes, str]]:
        """Send what can be sent now.

        Returns:
            (identity, reason) of peers that are gone or take nothing; what was queued for them is dropped. A peer that
            took nothing is sent to again while it is there, but nothing waits for it any more.
        """
        lost = []
        for peer, queue in list(self._queues.items()):
            why = self._send_all(peer, queue)
            if why is not None:
                lost.append((peer, why))
            if why is not None or not queue.frames:
                del self._queues[peer]
        return lost

    def _send_all(self, peer: bytes, queue: _Queue) -> str | None:
        while queue.frames:
            batch = queue.batch()
            try:
                self._send([peer, *batch])
            except zmq.Again:
                return self._wait(peer, queue)
            except zmq.ZMQError as exc:
                if exc.errno != zmq.EHOSTUNREACH:
                    raise
                self._deaf.discard(peer)
                return "its connection is gone"
            queue.drop(batch)
        return None

    def _wait(self, peer: bytes, queue: _Queue) -> str | None:
        if peer in self._deaf:
            queue.frames.clear()
        elif queue.size > self._limit_bytes:
            self._deaf.add(peer)
            return f"it does not read: {queue.size} bytes wait for it, more than max_backlog_mb allows"
        return None
