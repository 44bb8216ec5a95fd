"""Bounds what libzmq buffers of a TCP connection before a message can be read.

libzmq delivers a message when its last frame has arrived. It limits the length of each frame, but neither the number of
frames buffered until then nor the handshakes of unknown peers. So a thread compares the bytes that libzmq has read from
each connection (`tcp_info`) with the messages delivered: a connection that has sent more than the longest messages,
without one of them being delivered when the socket is drained, is closed. Connections without any delivered message have
a much lower limit, and a limit on their total, beyond which the largest is closed.

Always true: a peer that respects the message limits is never closed, however long the socket is not read. The thread
checks once a second while nothing arrives. On kernels without the counter (not Linux) nothing is watched.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from rollout.distributed.transport.keys import Socket

LOOK_EVERY_S = 0.01
"""Interval between two checks while data arrives; at 1 GB/s a limit is exceeded by 10 MB at most."""

SWEEP_EVERY_S = 1.0
"""Interval of checks of all connections while nothing arrives."""

STRANGER_BYTES = 4 << 20
"""Limit of a connection without a delivered message; a handshake with a rank's block hashes fits."""

STRANGERS_BYTES = 64 << 20
"""Limit of all such connections together."""

_RECEIVED = struct.Struct("Q")
_RECEIVED_AT = 128
"""Offset of `tcpi_bytes_received` in `struct tcp_info`, since Linux 4.1."""


class _Connection:
    """Counters of one TCP connection. `taken` belongs to the loop; the rest to the thread, after `greet`."""

    __slots__ = ("counted", "mark", "received", "suspected", "taken")

    def __init__(self) -> None:
        self.taken = 0
        """Messages delivered."""
        self.counted = 0
        """`taken` at the last check."""
        self.mark = 0
        """Bytes received when the last delivery was noticed."""
        self.received = 0
        self.suspected: int | None = None
        """Value of `ConnectionWatch._emptied` when the limit was first exceeded."""

    @property
    def waiting(self) -> int:
        """Bytes received since the last delivery."""
        return self.received - self.mark


class ConnectionWatch:
    """Closes connections of a ROUTER that send without ever completing a message.

    The owner polls `events`, calls `greet` when it is readable, and reports delivered messages by `took`.

    Args:
        router: a socket that is not bound yet.
        limit_bytes: size of two of the longest messages, one read and one in transit. A connection with more is closed if
            draining the socket delivers none of it.
        read_ahead: messages per connection that libzmq buffers.
        wake: makes the owner drain the socket; thread-safe.
    """

    def __init__(self, router: Socket, limit_bytes: int, read_ahead: int, wake: Callable[[], None]) -> None:
        self.closed = 0
        """Number of connections closed."""
        self._router = router
        self._limit_bytes = limit_bytes
        self._hard_limit_bytes = limit_bytes * (read_ahead + 1)
        self._wake = wake
        self._emptied = 0
        self._connections: dict[int, _Connection] = {}
        """Connections by libzmq's descriptor."""
        self.events: Socket = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._arrivals = select.epoll()
        self._again: set[int] = set()
        """Descriptors to check again even if nothing arrives; used by the thread alone."""
        self._accepted: deque[int] = deque()
        """Descriptors that the thread has not checked yet; a byte in the pipe wakes it."""
        self._over, self._end = os.pipe()
        self._arrivals.register(self._over, select.EPOLLIN)
        self._thread = threading.Thread(target=self._work, name="coordinator-connections", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    # --- called by the loop -----------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Start watching new connections, without blocking."""
        while int(self.events.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.events, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_ACCEPTED:
                descriptor = int(event["value"])
                self._connections[descriptor] = _Connection()
                # An OSError means that the connection is closed already; its descriptor may have been reused.
                with suppress(OSError):
                    self._arrivals.register(descriptor, select.EPOLLIN | select.EPOLLET)
                # Data that libzmq has read before the registration causes no event.
                self._accepted.append(descriptor)
                if self._thread.ident is not None:
                    os.write(self._end, b"\0")

    def took(self, messages: Mapping[int, int], emptied: bool) -> None:
        """Report messages delivered per descriptor; `emptied`: the socket was drained."""
        # Senders were accepted before: greet first, so that a reused descriptor starts with new counters.
        self.greet()
        for descriptor, count in messages.items():
            connection = self._connections.get(descriptor)
            if connection is not None:
                connection.taken += count
        self._emptied += emptied

    def close(self) -> None:
        """Stop watching; to be called before the socket is closed. Idempotent."""
        if self._end < 0:
            return
        os.close(self._end)
        self._end = -1
        if self._thread.ident is not None:
            self._thread.join()
        self._router.disable_monitor()
        self._arrivals.close()
        os.close(self._over)

    # --- on the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            patience = LOOK_EVERY_S if self._again else SWEEP_EVERY_S
            arrived = {descriptor for descriptor, _ in self._arrivals.poll(patience)}
            if self._over in arrived and not os.read(self._over, 1 << 12):
                return
            arrived.discard(self._over)
            while self._accepted:
                arrived.add(self._accepted.popleft())
            # After a quiet interval check all: data that libzmq read at once may have caused no event.
            looked_at, self._again = arrived | self._again or set(self._connections), set()
            for descriptor in looked_at:
                self._look(descriptor, self._limit_bytes)
            self._look_at_strangers()
            time.sleep(LOOK_EVERY_S)

    def _look_at_strangers(self) -> None:
        if sum(self._strangers().values()) <= STRANGERS_BYTES:
            return
        for descriptor in self._strangers():
            # A check removes closed connections.
            self._look(descriptor, self._limit_bytes)
        strangers = self._strangers()
        excess = sum(strangers.values()) - STRANGERS_BYTES
        for descriptor in sorted(strangers, key=lambda each: -strangers[each]):
            if excess <= 0:
                return
            excess -= strangers[descriptor]
            self._look(descriptor, 0)

    def _strangers(self) -> dict[int, int]:
        known = list(self._connections.items())
        return {descriptor: each.waiting for descriptor, each in known if not each.taken and each.waiting}

    def _look(self, descriptor: int, limit_bytes: int) -> None:
        known = self._connections.get(descriptor)
        if known is None:
            return
        try:
            # A duplicate, so that the same connection is checked and closed, even if libzmq closes its descriptor.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=os.dup(descriptor)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
                unread = int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)
                received = _RECEIVED.unpack_from(info, _RECEIVED_AT)[0] - unread
                if unread or received != known.received:
                    # epoll does not report data that libzmq has read before epoll_wait.
                    self._again.add(descriptor)
                known.received = received
                if known.taken != known.counted:
                    known.counted, known.mark, known.suspected = known.taken, known.received, None
                if self._is_too_much(descriptor, known, limit_bytes):
                    self.closed += 1
                    connection.shutdown(socket.SHUT_RDWR)
                    known.mark = known.received
        except (OSError, struct.error):
            # The connection is closed, or the kernel lacks the counter.
            if self._connections.get(descriptor) is known:
                del self._connections[descriptor]

    def _is_too_much(self, descriptor: int, known: _Connection, limit_bytes: int) -> bool:
        if not known.taken:
            return known.waiting > min(limit_bytes, STRANGER_BYTES)
        if known.waiting <= limit_bytes or known.waiting > self._hard_limit_bytes:
            return known.waiting > limit_bytes
        if known.suspected is None:
            known.suspected = self._emptied
        # The first drain may have begun before the limit was exceeded.
        if self._emptied >= known.suspected + 2:
            return True
        self._again.add(descriptor)
        self._wake()
        return False
