"""Outgoing frames: one bounded queue per peer, several frames per message.

Always true: a peer receives its frames in order; a peer that does not read holds at most `MAX_BACKLOG_BYTES` and does not
delay the others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

import zmq

from rollout.distributed.protocol.frames import MAX_FRAME_BYTES

MAX_FRAMES_PER_MESSAGE = 512
MAX_BYTES_PER_MESSAGE = 1 << 20
"""Maximum size of several frames in one message; a longer frame is sent alone."""
FRAME_OVERHEAD_BYTES = 64
"""Memory overhead counted per queued frame."""
MAX_BACKLOG_BYTES = 2 * MAX_FRAME_BYTES
"""Unsent data after which a peer that does not read counts as lost."""


class Outgoing:
    """Outgoing frame queues, one per peer.

    Args:
        send: sends [identity, frame, frame, …] as one message; raises `zmq.Again` if the peer's pipe is full, and a
            `zmq.ZMQError` with EHOSTUNREACH if it is gone.
    """

    def __init__(self, send: Callable[[list[bytes]], object]) -> None:
        self._send = send
        self._queues: dict[bytes, deque[bytes]] = {}
        self._sizes: Counter[bytes] = Counter()
        self._deaf: set[bytes] = set()

    @property
    def waiting(self) -> bool:
        return bool(self._queues)

    def put(self, peer: bytes, frame: bytes) -> None:
        self._queues.setdefault(peer, deque()).append(frame)
        self._sizes[peer] += len(frame) + FRAME_OVERHEAD_BYTES

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
            if why is not None or not queue:
                del self._queues[peer], self._sizes[peer]
        return lost

    def _send_all(self, peer: bytes, queue: deque[bytes]) -> str | None:
        while queue:
            batch = _first_message(queue)
            try:
                self._send([peer, *batch])
            except zmq.Again:
                return self._wait(peer, queue)
            except zmq.ZMQError as exc:
                if exc.errno != zmq.EHOSTUNREACH:
                    raise
                self._deaf.discard(peer)
                return "its connection is gone"
            for frame in batch:
                queue.popleft()
                self._sizes[peer] -= len(frame) + FRAME_OVERHEAD_BYTES
        return None

    def _wait(self, peer: bytes, queue: deque[bytes]) -> str | None:
        size = self._sizes[peer]
        if peer in self._deaf:
            queue.clear()
        elif size > MAX_BACKLOG_BYTES:
            self._deaf.add(peer)
            return f"it does not read: {size} bytes wait for it, at most {MAX_BACKLOG_BYTES} may"
        return None


def _first_message(queue: deque[bytes]) -> list[bytes]:
    taken: list[bytes] = []
    room = MAX_BYTES_PER_MESSAGE
    for frame in queue:
        room -= len(frame)
        if taken and (room < 0 or len(taken) == MAX_FRAMES_PER_MESSAGE):
            break
        taken.append(frame)
    return taken
