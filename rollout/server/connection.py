"""One connection, and what a client may cost before a request of its is there: bytes and time of its head, and how long
it may leave unread what it asked for.

uvicorn and llhttp check the grammar, but set no limit to either; the answers here have OpenAI's shape as all others.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from rollout.server.errors import ApiError

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers. What arrives in one piece with the head's first byte does not count."""

HEAD_TIMEOUT_S = 30.0
"""From a connection's, or a request's, first byte to the end of its headers."""

STALL_TIMEOUT_S = 60.0
"""How long a client may read nothing while its buffers are full."""


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with the limits of this file."""

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

    def data_received(self, data: bytes) -> None:
        """Count what comes while a head is not whole."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
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
