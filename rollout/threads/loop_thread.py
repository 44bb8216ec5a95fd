"""An asyncio event loop on a private thread, for blocking callers.

Always true: whoever waits has a deadline, and is told when the loop ends under it; waiting for the loop from the loop
itself raises instead of deadlocking. Of what a thread inherits by hand, only CUDA's current device is carried over, and
only where torch is loaded already. Knows no sockets and no messages.
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
        name: of the thread.
    """

    def __init__(self, name: str = "rollout-loop") -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._handed_over: list[tuple[Callable[..., object], tuple[Any, ...]]] = []
        # What is handed over before `close` asks the loop to stop is there when it looks for tasks to cancel.
        self._handing_over = threading.Lock()
        device = _cuda_device()
        self._thread = threading.Thread(target=self._serve, args=(device,), name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine on the loop and wait for its result.

        Args:
            timeout_s: give up after so many seconds; the coroutine is cancelled.

        Raises:
            DeadlineError: it took longer.
            RuntimeError: called on the loop itself, which would wait for ever; or the loop is closed, before or
                meanwhile.
        """
        future = self.start_from_outside(coroutine, "run()")
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

    def start_from_outside(self, coroutine: Coroutine[Any, Any, T], what: str = "waiting") -> Future[T]:
        """`start`, for whoever is going to wait for it in this thread.

        Raises:
            RuntimeError: called on the loop itself, which would wait for ever; or the loop is closed.
        """
        try:
            self.refuse_inside(what)
        except RuntimeError:
            coroutine.close()
            raise
        return self.start(coroutine)

    def refuse_inside(self, what: str) -> None:
        """Raises: RuntimeError: called on the loop itself, which would wait for ever."""
        if self._inside():
            self._refuse(what)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop and do not wait for it; from any thread.

        Returns:
            Its result to be; cancelled when the loop is closed before.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._handing_over:
            if self._closed:
                coroutine.close()
                self._refuse("start()")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call_soon(self, function: Callable[..., object], *args: Any) -> None:
        """Have the loop call `function(*args)` in its next turn; from any thread.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._handing_over:
            if self._closed:
                self._refuse("call_soon()")
            # One wake-up for all that is handed over before the loop has its turn: each is a system call, at which the
            # caller gives the interpreter away and waits to have it back.
            if not self._handed_over:
                self._loop.call_soon_threadsafe(self._take_over)
            self._handed_over.append((function, args))

    def _take_over(self) -> None:
        with self._handing_over:
            taken, self._handed_over = self._handed_over, []
        for function, args in taken:
            try:
                function(*args)
            except Exception as exc:  # noqa: BLE001 - as the loop itself does for each of its callbacks
                self._loop.call_exception_handler(
                    {"message": f"{self._name}: {function!r} has raised", "exception": exc}
                )

    def close(self) -> None:
        """Cancel what runs on the loop and end its thread. Harmless when repeated.

        Raises:
            RuntimeError: called on the loop itself, which would wait for ever.
        """
        self.refuse_inside("close()")
        with self._handing_over:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _inside(self) -> bool:
        return threading.current_thread() is self._thread

    def _refuse(self, what: str) -> None:
        if self._inside():
            raise RuntimeError(f"{what} on {self._name} from that loop itself would wait for ever: await the coroutine")
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
    """The calling thread's CUDA device, where torch is loaded and uses CUDA; a new thread would begin at device 0."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.current_device()) if cuda is not None and cuda.is_initialized() else None
