"""Futures and streams of `AsyncLLM`, for any thread and any event loop.

Always true: both end, with samples or with an error that names the reason. A waiting task that is cancelled, or a stream
that is left early, ends the request.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from rollout.distributed.client.group import OpenGroup
from rollout.distributed.client.text_stream import GroupText, TextDelta
from rollout.distributed.protocol.messages import Stretch
from rollout.errors import RolloutError
from rollout.requests.request import DynamicInferenceRequest

Samples = list[DynamicInferenceRequest]


class PendingGroup:
    """Future of a prompt's n samples: `await` it, or `result()` in a thread.

    Args:
        abort: ends a request by its number.
        refuse_inside: raises where waiting would keep the samples from coming: on the private loop.

    Attributes:
        request_id: what `abort` takes; also in the samples.
        prompt: as text, where it was given so; also in the samples.
    """

    def __init__(
        self,
        request_id: int,
        prompt: str | None,
        abort: Callable[[int], object],
        refuse_inside: Callable[[str], object],
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self._abort = abort
        self._refuse_inside = refuse_inside
        self._future: Future[Samples] = Future()

    def __await__(self) -> Generator[Any, None, Samples]:
        return self._wait().__await__()

    async def _wait(self) -> Samples:
        future = asyncio.wrap_future(self._future)
        try:
            # Shielded: a cancelled future could not tell whether the request has ended.
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_seen)
            self.abort()
            raise

    def result(self, timeout_s: float | None = None) -> Samples:
        """Block this thread until the samples have ended, and return them.

        Raises:
            TimeoutError: it has not ended within `timeout_s`; it goes on.
            RolloutError: why it ended without samples.
            RuntimeError: it has not ended, and this is the private loop, which would wait for ever.
        """
        if not self.done:
            self._refuse_inside("result()")
        return self._future.result(timeout_s)

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._future.done()

    def abort(self) -> None:
        """End the request soon: waiting calls raise `RequestAbortedError`. Harmless when it has ended."""
        self._abort(self.request_id)

    # --- on the private loop ----------------------------------------------------------------------------------------

    def opened(self, group: OpenGroup) -> None:
        """Attach to the group's callbacks."""
        group.on_done = self._end

    def fail(self, error: BaseException) -> None:
        """End without samples."""
        if not self._future.done():
            self._future.set_exception(error)

    def _end(self, group: OpenGroup) -> None:
        try:
            samples = list(group.result())
        except Exception as exc:  # noqa: BLE001 - passed to the waiting caller, whatever it is
            self.fail(exc)
            return
        for sample in samples:
            sample.request_id, sample.prompt = self.request_id, self.prompt
        if not self._future.done():
            self._future.set_result(samples)


def _seen(future: asyncio.Future[Samples]) -> None:
    """Mark the exception of a future without a waiting task as retrieved, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()


class Readers:
    """Wakes the readers of streams: one call per reader loop and turn of the private loop."""

    def __init__(self) -> None:
        self._due: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}

    def wake(self, loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
        """Set an event of a loop. On the private loop."""
        here = asyncio.get_running_loop()
        if loop is here:
            event.set()
            return
        if not self._due:
            here.call_soon(self._wake_all)
        self._due.setdefault(loop, []).append(event)

    def _wake_all(self) -> None:
        due, self._due = self._due, {}
        for loop, events in due.items():
            # The reader's loop may have ended without it.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


class TextStream:
    """Stream of a prompt's samples: `async for delta in stream`, then `stream.results`.

    One reader, on any loop. `contextlib.aclosing` ends the request at once where an exception leaves the loop.

    Attributes:
        request_id: what `abort` takes; also in the results.
    """

    def __init__(self, pending: PendingGroup, text: GroupText, readers: Readers) -> None:
        self.request_id = pending.request_id
        self._readers = readers
        self._pending = pending
        self._text = text
        self._waiting: deque[TextDelta] = deque()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        # Guards the sleeper, so that a wake-up is neither lost nor sent to a reader that is awake.
        self._lock = threading.Lock()
        self._sleeper: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def results(self) -> Samples:
        """The samples, once the stream has ended.

        Raises:
            RolloutError: why it ended without.
            RuntimeError: it has not ended.
        """
        if not self._pending.done:
            raise RuntimeError(f"request {self.request_id} has not ended: read the stream to its end first")
        return self._pending.result(0)

    def take_waiting(self) -> list[TextDelta]:
        """Deltas that have come and were not read yet; never waits."""
        taken: list[TextDelta] = []
        with suppress(IndexError):
            while True:
                taken.append(self._waiting.popleft())
        return taken

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """The deltas, in order.

        Raises:
            RolloutError: why the request ended without samples, after its last delta.
        """
        try:
            while not self._closed:
                ended = self._ended
                for delta in iter(self._next, None):
                    yield delta
                if ended:
                    if self._error is not None:
                        raise self._error
                    return
                await self._sleep()
        finally:
            await self.aclose()

    def _next(self) -> TextDelta | None:
        return self._waiting.popleft() if self._waiting and not self._closed else None

    async def _sleep(self) -> None:
        event = asyncio.Event()
        with self._lock:
            if self._waiting or self._ended or self._closed:
                return
            self._sleeper = (asyncio.get_running_loop(), event)
        try:
            await event.wait()
        finally:
            with self._lock:
                self._sleeper = None

    async def aclose(self) -> None:
        """End the iteration and, if it has not ended, the request. Harmless when repeated."""
        self._closed = True
        with self._lock:
            sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            sleeper[0].call_soon_threadsafe(sleeper[1].set)
        if not self._pending.done:
            self._pending.abort()

    # --- on the private loop ----------------------------------------------------------------------------------------

    def opened(self, group: OpenGroup) -> None:
        """Attach to the group's callbacks."""
        group.on_update = self._take
        group.on_done = self._end

    def fail(self, error: BaseException) -> None:
        """End without samples."""
        self._pending.fail(error)
        self._error, self._ended = error, True
        self._wake()

    def _take(self, group: OpenGroup, stretch: Stretch) -> None:
        if self._closed or self._error is not None:
            return
        try:
            self._waiting.extend(self._text.take(group, stretch))
        except Exception as exc:  # noqa: BLE001 - a tokenizer that cannot read a token harms this stream alone
            self._error = RolloutError(f"request {self.request_id}: no text of it: {type(exc).__name__}: {exc}")
            self._error.__cause__ = exc
            self._ended = True
            self._pending.abort()
        self._wake()

    def _end(self, group: OpenGroup) -> None:
        self._pending._end(group)
        self._error = self._error or group.error
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            self._readers.wake(*sleeper)
