"""Server-sent events: the encoding of chunks, and the streaming response.

Deltas that queued up while the socket was busy are merged into one chunk per sample. An error after the first byte is sent
as an `error` event without `[DONE]`. When the client disconnects, the source of the chunks is closed immediately.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollout.distributed.client.text_stream import TextDelta
from rollout.errors import RequestAbortedError
from rollout.server.errors import describe, shutting_down
from rollout.server.openai.samples import merged
from rollout.server.serving import Serving, or_disconnected

DONE = b"data: [DONE]\n\n"

_log = logging.getLogger(__name__)

Burst = list[tuple[int, TextDelta]]
"""The (prompt index, delta) pairs that are sent together, with at most one delta per sample."""


def encode(value: Any) -> bytes:
    """Encode a value as JSON. NaN and infinities become null."""
    return to_json(value, inf_nan_mode="null")


def event(value: Any) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


class Chunks:
    """The encoder of the chunks of one reply.

    Args:
        head: fields common to all chunks, which are encoded once.
        with_usage: whether the last chunk has the usage, and all other chunks have `"usage": null`.
    """

    def __init__(self, head: dict[str, Any], *, with_usage: bool) -> None:
        self._head = b"data: " + encode(head)[:-1] + b',"policy_version":'
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"

    def choice(self, choice: dict[str, Any], policy_version: int, beside: dict[str, Any] | None = None) -> bytes:
        """Encode a chunk with one choice, and with the fields `beside` next to the choices."""
        others = b"" if not beside else b"," + encode(beside)[1:-1]
        return b'%b%d%b,"choices":[%b%b' % (self._head, policy_version, others, encode(choice), self._tail)

    def usage(self, usage: dict[str, Any], policy_version: int) -> bytes:
        """Encode the final chunk, with the usage and no choice."""
        return b'%b%d,"choices":[],"usage":%b}\n\n' % (self._head, policy_version, encode(usage))


async def bursts(streams: Sequence[Any]) -> AsyncGenerator[Burst]:
    """Yield the deltas that have arrived since the previous burst, merged per sample; close the streams at the end."""
    try:
        if len(streams) == 1:
            async for delta in streams[0]:
                yield [(0, each) for each in merged([delta, *streams[0].take_waiting()])]
        else:
            async with aclosing(_together(streams)) as together:
                async for burst in together:
                    yield burst
    finally:
        for stream in streams:
            await stream.aclose()


async def _together(streams: Sequence[Any]) -> AsyncGenerator[Burst]:
    waiting: dict[int, list[TextDelta]] = {}
    arrived = asyncio.Event()

    async def listen(index: int) -> None:
        async for delta in streams[index]:
            waiting.setdefault(index, []).append(delta)
            arrived.set()

    listeners = [asyncio.ensure_future(listen(index)) for index in range(len(streams))]
    for listener in listeners:
        listener.add_done_callback(lambda _: arrived.set())
    try:
        while True:
            over = all(listener.done() for listener in listeners)
            taken, waiting = waiting, {}
            arrived.clear()
            if taken:
                yield [(index, each) for index, deltas in taken.items() for each in merged(deltas)]
            for listener in listeners:
                if listener.done():
                    listener.result()
            if over:
                return
            await arrived.wait()
    finally:
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)


class EventStream(Response):
    """A response that streams events until the source is exhausted or the client disconnects.

    Args:
        serving: state of the server. While the server is stopping, aborts are reported as a shutdown.
        first: first bytes of the body. They are sent with status 200, so a later error becomes an `error` event.
        source: generator of the remaining bytes. It is always closed at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, serving: Serving, first: bytes, source: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # Remove this header, because the length of a stream is unknown until the end.
        del self.headers["content-length"]
        self._serving = serving
        self._first = first
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole reply. If the client disconnects, close the source and raise `ClientGoneError`."""
        async with aclosing(self._source):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await or_disconnected(Request(scope, receive), self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        try:
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for chunk in self._source:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as exc:  # noqa: BLE001 - the status is sent, so the stream reports the error
            await send({"type": "http.response.body", "body": self._explain(exc), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _explain(self, exc: Exception) -> bytes:
        if self._serving.stopping and isinstance(exc, RequestAbortedError):
            return event(shutting_down().body())
        error = describe(exc)
        if error.code == "internal_error":
            _log.error("a stream failed", exc_info=exc)
        return event(error.body())
