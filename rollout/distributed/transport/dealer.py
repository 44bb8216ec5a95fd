"""A ZMQ DEALER socket on an asyncio loop: ordered frames, heartbeats, and detection of lost connections.

- `on_lost` is called at most once per connection, and no message is delivered after it.
- A sent message reaches ZMQ in the loop's next iteration.
- The queue of unsent frames is unbounded but stays small, because the coordinator limits each client's requests. If the
  coordinator stops reading, its heartbeats stop too, so the connection is soon lost and the queue dropped.
- Call every method on the thread of the event loop that ran `open`.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from rollout.distributed.protocol.frames import MAX_FRAME_BYTES, Sequencer, decode, encode
from rollout.distributed.protocol.messages import Disconnect, Heartbeat, Message, session_end
from rollout.errors import ConfigError, ConnectionLostError, SerializationError
from rollout.threads import forks

if TYPE_CHECKING:
    from rollout.distributed.transport.keys import JobKeys

MAX_IDENTITY_BYTES = 200
"""The maximum length of `identity_name`, in bytes. It is part of the ZMQ identity, which is limited to 255 bytes."""
TURNS_AT_ONCE = 200
"""The number of messages in each direction that are handled before the event loop's other callbacks may run."""
FRAMES_TOGETHER = 128
"""The maximum number of frames per ZMQ message."""
BYTES_TOGETHER = 1 << 20
"""The size, in bytes, after which no further frame is added to a ZMQ message."""
LINGER_MS = 1000
"""Milliseconds for which a closed socket still tries to deliver its last messages."""


class Dealer:
    """A connection to a coordinator over a ZMQ DEALER socket. It may be reopened after `close`.

    Args:
        address: the coordinator's address, `tcp://host:port`, with an IPv6 host in brackets.
        identity_name: the prefix of the ZMQ identity. Each `open` appends eight new random bytes.
        keys: the job's keys, which encrypt and authenticate the connection; if None, it is not encrypted.
        on_message: called with each message in order, except heartbeats and messages that end the session.
        on_lost: called with the reason when the connection is lost: the coordinator ended the session, frames are missing or
            malformed, or no frame arrived for too long. It is not called after `close`.
    """

    def __init__(
        self,
        address: str,
        identity_name: str,
        *,
        keys: JobKeys | None = None,
        on_message: Callable[[Message], None],
        on_lost: Callable[[ConnectionLostError], None],
    ) -> None:
        self.address = address
        self._name = identity_name
        self._keys = keys
        self._on_message = on_message
        self._on_lost = on_lost
        self._socket: zmq.Socket[bytes] | None = None
        self._unsent: deque[bytes] = deque()
        self._sequencer = Sequencer()
        self._turn_is_due = False
        self._end = "not connected; await start() first"
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = self._timeout_s = float("inf")
        self._said = self._heard = 0.0
        # Close the connections in forked children. libzmq's sockets close on exec, but a child without exec keeps them open.
        forks.in_child(self, lambda dealer: forks.close_connections(dealer.address))

    @property
    def is_open(self) -> bool:
        """Whether the connection is open, so that messages can be sent."""
        return self._socket is not None

    def open(self) -> None:
        """Connect under a new identity. Frames that are sent before the coordinator listens are queued.

        Raises:
            ConfigError: the address is invalid.
            RuntimeError: the connection is open already, or no event loop is running.
        """
        if self._socket is not None:
            raise RuntimeError(f"{self.address}: open() on a connection that is open; close() it first")
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        try:
            self._prepare(socket)
        except zmq.ZMQError as exc:
            self._close_socket(socket, 0)
            raise ConfigError(f"address={self.address!r}: must be tcp://host:port ({exc})") from exc
        self._sequencer = Sequencer()
        self._socket = socket
        self._loop.add_reader(socket.FD, self._turn)
        # Run one turn soon: the descriptor is edge-triggered, so an event before `add_reader` is not reported again.
        self._turn_soon()

    def _prepare(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.IDENTITY, self._name.encode()[:MAX_IDENTITY_BYTES] + b"-" + os.urandom(8))
        # Enable IPv6 only for a literal IPv6 address. If it were enabled for a host name that has both kinds of address,
        # ZMQ would never try the IPv4 address.
        socket.setsockopt(zmq.IPV6, int("[" in self.address))
        socket.setsockopt(zmq.RCVHWM, 0)
        # Limit the linger time. If a socket is dropped without close(), the garbage collector would otherwise block
        # until all its messages are delivered.
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        if self._keys is not None:
            self._keys.secure_client(socket)
        socket.connect(self.address)

    def send(self, message: Message) -> None:
        """Queue a message. All messages that are queued in one iteration of the event loop are sent together.

        Raises:
            ConnectionLostError: the connection is not open.
        """
        if self._socket is None:
            raise ConnectionLostError(f"{self.address}: {self._end}")
        self._queue(message)
        self._turn_soon()

    def heartbeat(self, interval_s: float, timeout_s: float) -> None:
        """Start to send heartbeats and to check that the coordinator is not silent.

        Args:
            interval_s: seconds without a sent message after which a heartbeat is sent.
            timeout_s: seconds without a received message after which the connection counts as lost.
        """
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._said = self._heard = self._loop.time()
        self._set_timer()

    def close(self, reason: str, *, quietly: bool = False) -> None:
        """Send a `Disconnect` with the reason, cut to 256 characters, and close the connection. Idempotent.

        Args:
            quietly: whether to send nothing and drop queued frames. After an unanswered handshake this must be True, or the
                handshake could reach the next coordinator at this address after a newer handshake.
        """
        self._shut(None if quietly else reason, f"the connection was closed ({reason})")

    # --- sending and receiving ----------------------------------------------------------------------------------

    def _queue(self, message: Message) -> None:
        self._unsent.append(encode(self._sequencer.next(), message))
        self._said = self._loop.time()

    def _turn_soon(self) -> None:
        if not self._turn_is_due and self._socket is not None:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        settled = False
        try:
            settled = self._settle()
        finally:
            # Run another turn if messages may be left, because there were many or a callback raised. The edge-triggered
            # descriptor would not report these messages again.
            if not settled:
                self._turn_soon()

    def _settle(self) -> bool:
        """Send and receive until neither is possible, and return True; return False after `TURNS_AT_ONCE` messages.

        The EVENTS flags are read again for each message: sending or receiving may consume the file descriptor's event.
        """
        for _ in range(TURNS_AT_ONCE):
            if self._socket is None:
                return True
            events = int(self._socket.getsockopt(zmq.EVENTS))
            writing = bool(self._unsent and events & zmq.POLLOUT)
            reading = bool(events & zmq.POLLIN)
            writing = writing and self._write(self._socket)
            if reading:
                self._take(self._socket.recv_multipart(zmq.NOBLOCK))
            if not writing and not reading:
                return True
        return False

    def _write(self, socket: zmq.Socket[bytes]) -> bool:
        """Send queued frames in one ZMQ message; return True. If ZMQ rejects it, keep the frames and return False."""
        together: list[bytes] = []
        size = 0
        while self._unsent and len(together) < FRAMES_TOGETHER and size < BYTES_TOGETHER:
            frame = self._unsent.popleft()
            together.append(frame)
            size += len(frame)
        try:
            socket.send_multipart(together, zmq.NOBLOCK)
        except zmq.Again:
            self._unsent.extendleft(reversed(together))
            return False
        return True

    def _take(self, frames: list[bytes]) -> None:
        self._heard = self._loop.time()
        for frame in frames:
            try:
                sequence, message = decode(frame)
                # Check for the session's end before the sequence number: a restarted coordinator, which has no record of
                # this session, numbers its rejection 0.
                if (error := session_end(message)) is not None:
                    self._lose(str(error), tell=False, final=error.final)
                elif self._sequencer.accept(sequence) and not isinstance(message, Heartbeat):
                    self._on_message(message)
            except SerializationError as exc:
                self._lose(f"a malformed frame was received: {exc}", cause=exc)
            if self._socket is None:
                return

    # --- heartbeats and silence ---------------------------------------------------------------------------------

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = min(self._said + self._interval_s, self._heard + self._timeout_s)
        self._timer = self._loop.call_at(due, self._beat, due)

    def _beat(self, due: float) -> None:
        now = self._loop.time()
        if self._silent(now):
            # Read the frames that have arrived before declaring the coordinator silent: they may be unread because this
            # process itself stalled.
            self._turn()
            if self._silent(now) and now - due > self._interval_s:
                self._heard = now - self._timeout_s + self._interval_s
            if self._silent(now):
                self._lose(f"no frame from the coordinator for {self._timeout_s} s")
        if self._socket is None:
            return
        if now - self._said >= self._interval_s:
            self.send(Heartbeat())
        self._set_timer()

    def _silent(self, now: float) -> bool:
        return self._socket is not None and now - self._heard >= self._timeout_s

    # --- end of the connection ----------------------------------------------------------------------------------

    def _lose(self, why: str, *, tell: bool = True, cause: Exception | None = None, final: bool = False) -> None:
        if self._socket is None:
            return
        self._shut(why if tell else None, why)
        error = ConnectionLostError(f"{self.address}: {why}", final)
        error.__cause__ = cause
        self._on_lost(error)

    def _shut(self, tell: str | None, why: str) -> None:
        socket, timer = self._socket, self._timer
        if socket is None:
            return
        if tell is not None:
            self._queue(Disconnect(tell[:256]))
            while self._unsent and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT and self._write(socket):
                pass
        self._loop.remove_reader(socket.FD)
        self._socket = self._timer = None
        if timer is not None:
            timer.cancel()
        self._interval_s = self._timeout_s = float("inf")
        self._end = why
        self._unsent.clear()
        self._close_socket(socket, 0 if tell is None else LINGER_MS)

    def _close_socket(self, socket: zmq.Socket[bytes], linger_ms: int) -> None:
        """Close a socket and its context in the background, on a non-daemon thread, so that the process waits for it."""
        socket.close(linger=linger_ms)
        try:
            threading.Thread(target=self._context.term, name="rollout-linger").start()
        except RuntimeError:
            # Close on this thread: the interpreter is shutting down and cannot start threads.
            self._context.term()
