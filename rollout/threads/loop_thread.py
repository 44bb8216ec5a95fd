"""An asyncio event loop on a private thread, for blocking callers.

Always true: a wait fails if the loop is closed in the meantime. Waiting for the loop from the loop itself raises instead of
deadlocking. The thread inherits the caller's current CUDA device, if torch is already loaded, and no other state.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from rollout.errors import DeadlineError

T = TypeVar("T")


class LoopThread:
    """A daemon thread that runs an event loop until `close`.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str = "rollout-loop") -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._closed = False
        # This lock also guards `_closed`, so that `close` cancels all work that was submitted before it.
        self._handing_over = threading.Lock()
        device = _cuda_device()
        self._thread = threading.Thread(target=self._serve, args=(device,), name=name, daemon=True)
        self._thread.start()

    def run_sync(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine on the loop and wait for its result. The caller must not be on the loop's own thread.

        Args:
            timeout_s: seconds after which the coroutine is cancelled, or None if it has its own deadline.

        Raises:
            DeadlineError: the coroutine took longer than `timeout_s`.
            RuntimeError: the caller is on the loop itself, where waiting would deadlock; or the loop is closed before the
                coroutine has finished.
        """
        try:
            self.refuse_inside("run_sync()")
        except RuntimeError:
            coroutine.close()
            raise
        future = self.start(coroutine)
        what = getattr(coroutine, "__qualname__", repr(coroutine))
        try:
            done, _ = wait((future,), timeout_s)
        except BaseException:
            future.cancel()
            raise
        if not done:
            future.cancel()
            raise DeadlineError(f"{self._name}: {what} took longer than timeout_s={timeout_s}")
        try:
            return future.result()
        except CancelledError:
            if not self._closed:
                raise
            raise RuntimeError(f"{self._name} was closed while {what} ran on it") from None

    def refuse_inside(self, what: str) -> None:
        """Raise `RuntimeError` if the caller is on the loop itself, where waiting would deadlock. `what` names the call."""
        if self.inside:
            self._refuse(what)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop from any thread. Return its future; closing the loop cancels it."""
        with self._handing_over:
            if self._closed:
                coroutine.close()
                self._refuse("start()")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Call `function(*args)` in the loop's next iteration. Any thread may call this."""
        with self._handing_over:
            if self._closed:
                self._refuse("call_soon()")
            self._loop.call_soon_threadsafe(function, *args)

    def close(self, timeout_s: float | None = None) -> None:
        """Cancel all tasks and stop the thread; wait for it, up to `timeout_s` if given. Repeated calls have no effect."""
        self.refuse_inside("close()")
        with self._handing_over:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The asyncio event loop of this thread."""
        return self._loop

    @property
    def inside(self) -> bool:
        """Whether the caller runs on this loop's thread."""
        return threading.current_thread() is self._thread

    def _refuse(self, what: str) -> None:
        if self.inside:
            raise RuntimeError(f"{what} on {self._name} from that loop itself would never return: await the coroutine")
        raise RuntimeError(f"{what} on {self._name} after close(): build another LoopThread")

    def _serve(self, device: int | None) -> None:
        if device is not None:
            sys.modules["torch"].cuda.set_device(device)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            running = asyncio.all_tasks(self._loop)
            for task in running:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*running, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def _cuda_device() -> int | None:
    """Return the caller's current CUDA device, or None without CUDA; a new thread would start at device 0."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.current_device()) if cuda is not None and cuda.is_initialized() else None
