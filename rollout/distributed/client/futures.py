"""`RequestFuture` and `RequestStream`: the result of one group, and the group's new tokens as they arrive.

A future or stream finishes once, with the group's samples or with an error that gives the reason. Cancelling the future or
closing the stream aborts the request.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import suppress
from contextvars import Context
from typing import TYPE_CHECKING, Any

from rollout.distributed.client.text_stream import GroupText, TextDelta
from rollout.errors import DeadlineError, RequestAbortedError, RolloutError
from rollout.requests.delta import SampleDelta
from rollout.requests.request import DynamicInferenceRequest

if TYPE_CHECKING:
    from rollout.distributed.client.group import OpenGroup

Told = Callable[["RequestFuture"], object]
Sleeper = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class RequestFuture(asyncio.Future[Any]):
    """The future of a group's n samples: an `asyncio.Future` that any thread may finish and wait for.

    `await` it on any event loop, or call `result()` in a thread. Callbacks run on `get_loop()`. Cancelling the future, or a
    task that awaits it, aborts the request. To prevent the abort, await `asyncio.shield(future)`.

    Args:
        loop: the event loop that runs the callbacks.
        abort: a function that aborts the request with the given id.
        refuse_to_block: a function that raises an error if a blocking `result()` on the current thread would keep the
            samples from arriving. If None, `result()` raises an error on the thread that runs `loop`.

    Attributes:
        request_id: the request's id, which is also the `request_id` of the samples.
        prompt: the prompt's text; None if the prompt was not given as text.
        group: the group with the tokens received so far; None for a future that an `LLM` returns.
    """

    def __init__(
        self,
        request_id: int,
        abort: Callable[[int], object],
        *,
        loop: asyncio.AbstractEventLoop,
        prompt: str | None = None,
        group: OpenGroup | None = None,
        refuse_to_block: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(loop=loop)
        self.request_id = request_id
        self.prompt = prompt
        self.group = group
        self._abort = abort
        self._refuse_to_block = refuse_to_block
        # Store callbacks here, because the base class would call them on the thread that finishes the future.
        self._told: list[tuple[Told, asyncio.AbstractEventLoop | None, Context | None]] = []
        self._changing = threading.RLock()

    def result(self, timeout_s: float | None = None) -> Any:
        """Return the samples, in order; block this thread until all samples have finished.

        Args:
            timeout_s: seconds to wait; if None, there is no limit.

        Raises:
            DeadlineError: the samples did not finish within `timeout_s`. The request continues.
            RolloutError: the request failed.
            asyncio.CancelledError: the future was cancelled.
            RuntimeError, asyncio.InvalidStateError: this thread runs the event loop on which the samples arrive.
        """
        if not self.done():
            if self._refuse_to_block is not None:
                self._refuse_to_block()
            elif asyncio._get_running_loop() is self.get_loop():
                raise asyncio.InvalidStateError(
                    f"request {self.request_id} has not ended, and result() on its own event loop would never return: await "
                    "it"
                )
            ended = threading.Event()

            def tell(_: object) -> None:
                ended.set()

            self._tell(tell, None, None)
            if not ended.wait(timeout_s) and not self.done():
                self.remove_done_callback(tell)
                raise DeadlineError(f"request {self.request_id} has not ended within timeout_s={timeout_s}")
        return super().result()

    def __await__(self) -> Generator[Any, None, Any]:
        if self.done() or asyncio.get_running_loop() is self.get_loop():
            return super().__await__()
        return self._ended_elsewhere().__await__()

    async def _ended_elsewhere(self) -> Any:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        self._tell(lambda _: _wake_all([ended]), loop, None)
        try:
            await ended
        except asyncio.CancelledError:
            self.cancel()
            raise
        return super().result()

    def abort(self) -> None:
        """Abort the request: it fails with `RequestAbortedError`, unless it has already finished."""
        self._abort(self.request_id)

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the future and abort the request. Return False if the future had already finished."""
        cancelled = self._finish(super().cancel, msg)
        if cancelled:
            self.abort()
        return cancelled

    def add_done_callback(self, fn: Told, /, *, context: Context | None = None) -> None:
        """Call `fn(self)` on `get_loop()` once the future has finished. Any thread may call this."""
        self._tell(fn, self.get_loop(), context)

    def remove_done_callback(self, fn: Told, /) -> int:
        """Remove all callbacks that equal `fn`; return the number of removed callbacks."""
        with self._changing:
            kept = [each for each in self._told if each[0] != fn]
            removed = len(self._told) - len(kept)
            self._told = kept
        return removed

    def end(self, samples: Any) -> None:
        """Finish the future with its samples. Any thread may call this. No effect if the future has already finished."""
        self._finish(super().set_result, samples)

    def fail(self, error: type | BaseException) -> None:
        """Finish the future with an error. Any thread may call this. No effect if the future has already finished."""
        if self._finish(super().set_exception, error) and isinstance(error, RequestAbortedError):
            # Retrieve the exception, or asyncio would log that it was never retrieved.
            self.exception()

    set_result, set_exception = end, fail

    def _finish(self, finish: Callable[..., object], *args: Any) -> bool:
        with self._changing:
            if self.done():
                return False
            finish(*args)
            told, self._told = self._told, []
        for each in told:
            self._call(*each)
        return True

    def _tell(self, fn: Told, loop: asyncio.AbstractEventLoop | None, context: Context | None) -> None:
        """Call `fn(self)` once the future has finished, on `loop` or (without a loop) on the thread that finishes it."""
        with self._changing:
            if not self.done():
                self._told.append((fn, loop, context))
                return
        self._call(fn, loop, context)

    def _call(self, fn: Told, loop: asyncio.AbstractEventLoop | None, context: Context | None) -> None:
        if loop is None:
            fn(self)
        elif asyncio._get_running_loop() is loop:
            loop.call_soon(fn, self, context=context)
        else:
            # Ignore a loop that has been closed since the callback was added.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(fn, self, context=context)


# --- streams ----------------------------------------------------------------------------------------------------------


Delta = TextDelta
"""The delta that `InferenceClient.add_request_streaming` yields. Only a sample's last delta contains text."""


class Readers:
    """A collector of stream readers to wake. `flush` wakes all readers on an event loop with a single thread-safe call.

    Args:
        schedule: a function that is given `flush` and runs it soon. It is called for the first reader to wake since the last
            `flush`. If None, the owner of this object must call `flush`.
    """

    def __init__(self, schedule: Callable[[Callable[[], None]], object] | None = None) -> None:
        self._schedule = schedule
        self._due: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}

    def wake(self, sleeper: Sleeper) -> None:
        """Wake a reader, given as (loop, future): now if the loop runs on this thread, otherwise at the next `flush`."""
        if asyncio._get_running_loop() is sleeper[0]:
            _wake_all([sleeper[1]])
            return
        first = not self._due
        self._due.setdefault(sleeper[0], []).append(sleeper[1])
        if first and self._schedule is not None:
            self._schedule(self.flush)

    def flush(self) -> None:
        """Wake all readers collected since the last `flush`."""
        due, self._due = self._due, {}
        for loop, sleepers in due.items():
            # Ignore a reader whose loop has been closed since it began to wait.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_wake_all, sleepers)


def _wake_all(sleepers: list[asyncio.Future[None]]) -> None:
    for sleeper in sleepers:
        if not sleeper.done():
            sleeper.set_result(None)


class RequestStream:
    """A stream of a group's samples: `async for delta in stream`, then `stream.results`.

    A stream has one reader, on any event loop. Leaving the iteration early aborts the request: at once inside
    `contextlib.aclosing`, otherwise when Python finalises the iterator. A delta is built on the reader's thread.

    Args:
        future: the future of the same group.
        reader: the builder of the yielded deltas.
        readers: the registry through which this stream's reader is woken when tokens arrive.
        whole: whether to yield each sample once, as a whole, when the group has finished.
    """

    def __init__(self, future: RequestFuture, reader: GroupText, readers: Readers, *, whole: bool = False) -> None:
        self.future = future
        self.whole = whole
        self._reader = reader
        self._readers = readers
        self._waiting: deque[tuple[SampleDelta | None, DynamicInferenceRequest | None]] = deque()
        self._closed = False
        # Guard `_sleeper` with a lock, so that no wake-up is lost or sent to a reader that is already awake.
        self._lock = threading.Lock()
        self._sleeper: Sleeper | None = None

    @property
    def request_id(self) -> int:
        """The request's id, which is also the `request_id` of the results."""
        return self.future.request_id

    @property
    def prompt(self) -> str | None:
        """The prompt's text; None if the prompt was not given as text."""
        return self.future.prompt

    @property
    def results(self) -> Any:
        """The finished samples. Raises `RolloutError` if the request failed, and `RuntimeError` if it has not finished."""
        if not self.future.done():
            raise RuntimeError(f"request {self.request_id} has not ended: read the stream to its end first")
        return self.future.result()

    result = results

    def take_waiting(self) -> list[TextDelta]:
        """Return the deltas that have arrived but were not read yet, without waiting for further deltas."""
        return list(iter(self._next, None))

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Yield the deltas in order; if the request fails, raise its `RolloutError` at the end."""
        try:
            while not self._closed:
                ended = self.future.done()
                for delta in iter(self._next, None):
                    yield delta
                if ended:
                    self.future.result()
                    return
                await self._sleep()
        finally:
            await self.aclose()

    def _next(self) -> TextDelta | None:
        while self._waiting and not self._closed:
            try:
                delta = self._reader.take(*self._waiting.popleft())
            except Exception as exc:
                self._waiting.clear()
                self.future.abort()
                raise RolloutError(
                    f"request {self.request_id}: its tokens cannot be read: {type(exc).__name__}: {exc}"
                ) from exc
            if delta is not None:
                return delta
        return None

    async def _sleep(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._waiting or self.future.done() or self._closed:
                return
            woken = loop.create_future()
            self._sleeper = (loop, woken)
        try:
            await woken
        finally:
            with self._lock:
                self._sleeper = None

    async def aclose(self) -> None:
        """Stop the iteration, and abort the request if it has not finished. Idempotent."""
        self._closed = True
        with self._lock:
            sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            sleeper[0].call_soon_threadsafe(_wake_all, [sleeper[1]])
        if not self.future.done():
            self.future.abort()

    # --- called by the engine's side, on any thread -----------------------------------------------------------------

    @property
    def wants_more(self) -> bool:
        """Whether the reader has read all delivered tokens. If not, new tokens may be held back for a while."""
        return not self._waiting and not self._closed

    def take(self, delta: SampleDelta, ended: DynamicInferenceRequest | None = None) -> None:
        """Add new tokens of a sample; for the arguments see `GroupText.take`."""
        self._waiting.append((delta, ended))
        self._wake()

    def end(self, samples: Any) -> None:
        """Finish the stream with its samples. Their tokens were already passed to `take`, unless `whole` is set."""
        if self.whole:
            self._waiting.extend((None, sample) for sample in samples)
        self.future.end(samples)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Finish the stream with an error."""
        self.future.fail(error)
        if not self.future.cancelled():
            # Retrieve the exception, or asyncio would log it. The reader gets it by iterating over the stream.
            self.future.exception()
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            sleeper, self._sleeper = self._sleeper, None
        if sleeper is not None:
            self._readers.wake(sleeper)
