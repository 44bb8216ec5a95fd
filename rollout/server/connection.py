"""uvicorn's HTTP/1.1 connection with what it lacks: limits on header size, header time and unread replies.

When a connection is lost, all its requests are notified, pipelined ones included. An offered protocol upgrade is declined
and the request is answered over HTTP/1.1. Errors have OpenAI's shape.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rollout.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""Maximum bytes of request line and headers; bytes that arrive in the same read as the first one are not counted."""
HEAD_TIMEOUT_S = 30.0
"""Seconds from the start of a connection or request to the end of its headers, after which the connection is cut."""
STALL_TIMEOUT_S = 60.0
"""Seconds for which a client may leave full buffers unread before the connection is cut."""
MAX_AHEAD = 8
"""Pipelined requests up to which the connection keeps reading. Beyond, reading stops (backpressure), and a disconnect is
not noticed until it resumes."""


class Connection(HttpToolsProtocol):
    _cycles: tuple[RequestResponseCycle, ...] = ()
    """Requests without a complete reply."""
    _in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)
        # uvicorn notifies only the last one.
        for cycle in self._unanswered():
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        self._feed(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(ApiError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes: send less"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        self._cycles = (*self._unanswered(), self.cycle)
        if 1 < len(self._cycles) <= MAX_AHEAD:
            # uvicorn has stopped reading; a disconnect is only noticed while reading.
            self.flow.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_stall()
        self._stall_timer = self.loop.call_later(STALL_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_stall()

    def send_400_response(self, msg: str) -> None:
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
        """Decline an upgrade. The parser treats the body as the other protocol's data, so a second parser reads it."""
        framing = [each for each in self.headers if each[0] in (b"content-length", b"transfer-encoding")]
        self.cycle.keep_alive = False
        self.cycle.more_body = True
        body_only = SimpleNamespace(on_body=self.on_body, on_message_complete=self.on_message_complete)
        self.parser = httptools.HttpRequestParser(body_only)
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
