"""Outgoing frames: one bounded queue per peer, several frames per message.

Always true: a peer receives its frames in order; one that does not read holds at most `MAX_BACKLOG_BYTES` and delays nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import zmq

from rollout.distributed.protocol.frames import MAX_FRAME_BYTES

MAX_FRAMES_PER_MESSAGE = 512
MAX_BYTES_PER_MESSAGE = 1 << 20
"""Maximum size of several frames in one message; a longer frame is sent alone."""
FRAME_OVERHEAD_BYTES = 64
"""Memory overhead counted per queued frame."""
MAX_BACKLOG_BYTES = 2 * MAX_FRAME_BYTES
"""Unsent data after which a peer that does not read counts as lost."""


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
    """Outgoing frame queues, one per peer.

    Args:
        send: sends [identity, frame, frame, …] as one message; raises `zmq.Again` if the peer's pipe is full, and a
            `zmq.ZMQError` with EHOSTUNREACH if it is gone.
    """

    def __init__(self, send: Callable[[list[bytes]], object]) -> None:
        self._send = send
        self._queues: dict[bytes, _Queue] = {}
        self._deaf: set[bytes] = set()

    @property
    def waiting(self) -> bool:
        return bool(self._queues)

    def put(self, peer: bytes, frame: bytes) -> None:
        queue = self._queues.get(peer)
        if queue is None:
            queue = self._queues[peer] = _Queue()
        queue.frames.append(frame)
        queue.size += len(frame) + FRAME_OVERHEAD_BYTES

    def flush(self) -> list[tuple[bytes, str]]:
        """Send as many frames as the peers' pipes accept, without blocking.

        Returns:
            (identity, reason) of peers that are gone or exceed the limit; their queues are dropped.
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
        elif queue.size > MAX_BACKLOG_BYTES:
            self._deaf.add(peer)
            return f"it does not read: {queue.size} bytes wait for it, at most {MAX_BACKLOG_BYTES} may"
        return None
