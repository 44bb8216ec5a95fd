"""One connection, and what a client may cost before a request of its is there: bytes and time of its head, and how long
it may leave unread what it asked for.

Always true: when it is lost, every request that it brought hears of it, also those sent before the reply to another; a
client that offers to go on in another protocol is answered in this one.

uvicorn and llhttp check the grammar, but set no limit to either; the answers here have OpenAI's shape as all others.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rollout.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. What arrives in one piece with the head's first byte does not count."""

HEAD_TIMEOUT_S = 30.0
"""From a connection's, or a request's, first byte to the end of its headers."""

STALL_TIMEOUT_S = 60.0
"""How long a client may read nothing while its buffers are full."""

MAX_AHEAD = 8
"""Requests that a client may send before it has the reply to the first: with more we stop reading, and do not notice
either that it goes away."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with the limits of this file."""

    _cycles: tuple[RequestResponseCycle, ...] = ()
    """Requests that are not answered."""
    _in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head has to come in time."""
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives it."""
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)
        # uvicorn tells the last one only.
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Count what comes while a head is not whole."""
        if self._in_head:
            self._head_bytes += len(data)
        self._feed(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes: send less"))

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._end_head()
        super().on_headers_complete()
        self._cycles = (*self._unanswered(), self.cycle)
        if 1 < len(self._cycles) <= MAX_AHEAD:
            # uvicorn has stopped reading, which is how one hears that the client goes away.
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        """The client reads slower than we write."""
        super().pause_writing()
        self._end_stall()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        self._end_stall()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's answer to what is no HTTP."""
        self._refuse(ApiError(400, msg))

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _decline(self, rest: bytes) -> None:
        """Stay with HTTP/1.1. The parser has taken the body for the other protocol's: another one reads it as what it is."""
        framing = [each for each in self.headers if each[0] in (b"content-length", b"transfer-encoding")]
        self.cycle.keep_alive = False
        self.cycle.more_body = True
        self.parser = httptools.HttpRequestParser(_BodyOnly(self))
        self._feed(b"".join([b"POST / HTTP/1.1\r\n", *(b"%b: %b\r\n" % each for each in framing), b"\r\n", rest]))

    def _unanswered(self) -> tuple[RequestResponseCycle, ...]:
        return tuple(cycle for cycle in self._cycles if not cycle.response_complete)

    def _begin_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _end_head(self) -> None:
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _refuse(self, error: ApiError) -> None:
        response = error.response()
        head = [STATUS_LINE[error.status], *(b"%s: %s\r\n" % header for header in response.raw_headers)]
        self.transport.write(b"".join([*head, b"connection: close\r\n\r\n", bytes(response.body)]))
        self.transport.close()


class _BodyOnly:
    """Hears of one request's body and of nothing else."""

    def __init__(self, connection: Connection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete
