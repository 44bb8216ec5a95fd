"""Bounds what libzmq buffers of a TCP connection before a message can be read.

libzmq hands over a message when its last frame is there. It limits neither the frames that it collects until then nor
the handshakes of strangers, only the length of each frame. So the kernel's count of what libzmq has read from a
connection (`tcp_info`) is looked at beside what was taken: one that has sent more than the longest messages have, and
nothing of it is there when everything has been taken that can be, is closed. Of strangers, who have not said anything
yet, much less is waited for, and where all of them together hold too much, the one that holds most is closed.

Always true: a peer whose messages are no longer than they may be is never closed, however long nobody reads. Costs a
thread that looks once a second while nothing arrives. Where the kernel does not count (not Linux), nothing is watched.
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
"""While something arrives: at a gigabyte per second, ten megabytes too late."""

SWEEP_EVERY_S = 1.0
"""Every connection is looked at after so long without an arrival."""

STRANGER_BYTES = 4 << 20
"""Of a connection of which nothing was taken yet: a greeting, with the hashes that a rank may bring."""

STRANGERS_BYTES = 64 << 20
"""Of all of these together."""

_RECEIVED = struct.Struct("Q")
_RECEIVED_AT = 128
"""Where `struct tcp_info` has `tcpi_bytes_received`, since Linux 4.1."""


class _Connection:
    """One connection of libzmq's. `taken` is the loop's, the rest is the thread's, once it has been greeted."""

    __slots__ = ("counted", "mark", "received", "suspected", "taken")

    def __init__(self) -> None:
        self.taken = 0
        """Messages."""
        self.counted = 0
        """`taken`, when it was last looked at."""
        self.mark = 0
        """Bytes received when something was last seen to have been taken."""
        self.received = 0
        self.suspected: int | None = None
        """`ConnectionWatch._emptied`, when more was waiting than the longest messages have."""

    @property
    def waiting(self) -> int:
        """Bytes that came since something was taken."""
        return self.received - self.mark


class ConnectionWatch:
    """Closes connections of a ROUTER that send and never complete a message.

    Its owner watches `events`, calls `greet` when there is something to read, and tells what was taken.

    Args:
        router: not listening yet.
        limit_bytes: of two of the longest messages, one read and one on its way. A connection that holds more is closed
            if nothing of it was there when everything had been taken that could be.
        read_ahead: messages of a connection that libzmq reads before they are taken.
        wake: makes the owner take what is there; from any thread.
    """

    def __init__(self, router: Socket, limit_bytes: int, read_ahead: int, wake: Callable[[], None]) -> None:
        self.closed = 0
        """Connections so far."""
        self._router = router
        self._limit_bytes = limit_bytes
        self._hard_limit_bytes = limit_bytes * (read_ahead + 1)
        self._wake = wake
        self._emptied = 0
        self._connections: dict[int, _Connection] = {}
        """By libzmq's descriptor."""
        self.events: Socket = router.get_monitor_socket(zmq.EVENT_ACCEPTED)
        self._arrivals = select.epoll()
        self._again: set[int] = set()
        """Descriptors to look at though nothing arrives; the thread's alone."""
        self._accepted: deque[int] = deque()
        """Descriptors that the thread has not looked at yet; a byte in the pipe wakes it."""
        self._over, self._end = os.pipe()
        self._arrivals.register(self._over, select.EPOLLIN)
        self._thread = threading.Thread(target=self._work, name="coordinator-connections", daemon=True)
        if sys.platform == "linux":
            self._thread.start()

    # --- the loop's -------------------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Watch those that have connected, without waiting."""
        while int(self.events.get(zmq.EVENTS)) & zmq.POLLIN:
            event = recv_monitor_message(self.events, zmq.NOBLOCK)
            if event["event"] == zmq.EVENT_ACCEPTED:
                descriptor = int(event["value"])
                self._connections[descriptor] = _Connection()
                # Closed again already: the descriptor is free, or that of another connection.
                with suppress(OSError):
                    self._arrivals.register(descriptor, select.EPOLLIN | select.EPOLLET)
                # What libzmq has read before is no arrival.
                self._accepted.append(descriptor)
                if self._thread.ident is not None:
                    os.write(self._end, b"\0")

    def took(self, messages: Mapping[int, int], emptied: bool) -> None:
        """So many messages that came over these descriptors were read; `emptied`: no further one was there."""
        # Whoever has sent one was accepted before: a descriptor that is in use again starts afresh.
        self.greet()
        for descriptor, count in messages.items():
            connection = self._connections.get(descriptor)
            if connection is not None:
                connection.taken += count
        self._emptied += emptied

    def close(self) -> None:
        """End; before the socket is closed. Harmless when repeated."""
        if self._end < 0:
            return
        os.close(self._end)
        self._end = -1
        if self._thread.ident is not None:
            self._thread.join()
        self._router.disable_monitor()
        self._arrivals.close()
        os.close(self._over)

    # --- the thread's -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            patience = LOOK_EVERY_S if self._again else SWEEP_EVERY_S
            arrived = {descriptor for descriptor, _ in self._arrivals.poll(patience)}
            if self._over in arrived and not os.read(self._over, 1 << 12):
                return
            arrived.discard(self._over)
            while self._accepted:
                arrived.add(self._accepted.popleft())
            # Nothing for so long: an arrival that was read at once may have been missed.
            looked_at, self._again = arrived | self._again or set(self._connections), set()
            for descriptor in looked_at:
                self._look(descriptor, self._limit_bytes)
            self._look_at_strangers()
            time.sleep(LOOK_EVERY_S)

    def _look_at_strangers(self) -> None:
        if sum(self._strangers().values()) <= STRANGERS_BYTES:
            return
        for descriptor in self._strangers():
            # Those that have left are forgotten.
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
            # A copy: what is looked at and what is closed is one connection, whatever libzmq does meanwhile.
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=os.dup(descriptor)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + _RECEIVED.size)
                unread = int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)
                received = _RECEIVED.unpack_from(info, _RECEIVED_AT)[0] - unread
                if unread or received != known.received:
                    # epoll reports no arrival that libzmq has read before it is asked.
                    self._again.add(descriptor)
                known.received = received
                if known.taken != known.counted:
                    known.counted, known.mark, known.suspected = known.taken, known.received, None
                if self._is_too_much(descriptor, known, limit_bytes):
                    self.closed += 1
                    connection.shutdown(socket.SHUT_RDWR)
                    known.mark = known.received
        except (OSError, struct.error):
            # It has left; or the kernel does not count.
            if self._connections.get(descriptor) is known:
                del self._connections[descriptor]

    def _is_too_much(self, descriptor: int, known: _Connection, limit_bytes: int) -> bool:
        if not known.taken:
            return known.waiting > min(limit_bytes, STRANGER_BYTES)
        if known.waiting <= limit_bytes or known.waiting > self._hard_limit_bytes:
            return known.waiting > limit_bytes
        if known.suspected is None:
            known.suspected = self._emptied
        # The first may have begun before.
        if self._emptied >= known.suspected + 2:
            return True
        self._again.add(descriptor)
        self._wake()
        return False
