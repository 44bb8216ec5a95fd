"""Locks that serve waiting threads in order of arrival: `FairLock` around a step, `Turns` around whole requests."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout.errors import DeadlineError
from rollout.threads.diagnosis import thread_name
from rollout.threads.interrupts import interruptible, uninterrupted

POLL_S = 0.1
"""The seconds between two checks for a second Ctrl-C while a thread waits for a lock."""


class FairLock:
    """A reentrant lock. A thread that releases it cannot reacquire it before a thread that is already waiting.

    With a plain lock, a loop of steps would nearly always win, and a waiting `pause` would take thousands of steps.

    Attributes:
        asked: 1 from the time that another thread starts to wait or calls `ask` until the holder calls `heard`; else 0. The
            holder's native code can read this value.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self.asked = ctypes.c_int32(0)

    def ask(self) -> None:
        """Ask the holder to release the lock soon, even if no thread waits for it. Any thread may call this method."""
        self.asked.value = 1

    def heard(self) -> None:
        """Acknowledge all earlier calls of `ask`. While a thread still waits for the lock, `wanted` stays True."""
        self.asked.value = 0

    @property
    def wanted(self) -> bool:
        """Whether another thread waits for the lock, so that the holder can release it early."""
        return self._next.locked()

    def describe(self) -> str:
        """Return a string that names the holder and says whether threads wait, without taking a lock."""
        return f"held by {thread_name(self._owner)}{', wanted by others' if self.wanted else ''}"

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            self._depth += 1
        else:
            try:
                with uninterrupted():
                    self._wait()
                    self._owner, self._depth = threading.get_ident(), 1
            except BaseException:
                if self._owner == threading.get_ident():
                    self.__exit__()
                raise

    def __exit__(self, *exc_info: object) -> None:
        # Make no other call before the release: Ctrl-C may raise at any call, which would leave the lock held.
        if self._depth > 1:
            self._depth -= 1
        else:
            self._depth, self._owner = 0, None
            self._lock.release()

    def _wait(self) -> None:
        # Acquire `_next` first: the waiter for `_lock` holds it, so a thread that releases `_lock` cannot overtake it.
        _acquire(self._next)
        try:
            if not self._lock.acquire(blocking=False):
                self.ask()
                _acquire(self._lock)
        finally:
            self._next.release()


def _acquire(lock: threading.Lock) -> None:
    """Wait for a lock. A second Ctrl-C interrupts the wait, but never once the lock has been acquired."""
    while not lock.acquire(timeout=POLL_S):
        with interruptible():
            pass


class Turns:
    """A queue of threads that use one engine one at a time, because they would otherwise take each other's results.

    A turn is the `with` block of `taken`, and finishes even if the block raises. Ctrl-C interrupts a waiting thread.

    Args:
        check: function that is called before each turn; it may raise.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._changed = threading.Condition()
        self._queue: list[object] = []
        self._holder: threading.Thread | None = None

    @contextmanager
    def taken(self, timeout_s: float | None = None) -> Iterator[None]:
        """Wait for a turn, and keep other threads waiting during a `with` block. The same thread may nest such blocks.

        Raises:
            DeadlineError: earlier turns did not finish within `timeout_s` seconds; None means no limit.
        """
        self._check()
        me, ticket = threading.current_thread(), object()
        if self._holder is me:
            yield
            return
        try:
            with self._changed:
                self._queue.append(ticket)
                if not self._changed.wait_for(lambda: self._queue[0] is ticket, timeout_s):
                    raise DeadlineError(
                        f"thread {me.name!r} waited {timeout_s} s for thread {self._name()!r}, which generates with the "
                        "same engine; nothing of this call was queued"
                    )
            self._holder = me
            yield
        finally:
            with uninterrupted(), self._changed:
                if self._holder is me:
                    self._holder = None
                if ticket in self._queue:
                    self._queue.remove(ticket)
                self._changed.notify_all()

    def describe(self) -> str:
        """Return a string with the holder's name and the length of the queue, without taking a lock."""
        holder = self._holder
        return "free" if holder is None else f"held by {holder.name!r}, {len(self._queue) - 1} waiting"

    def _name(self) -> str:
        holder = self._holder
        return "?" if holder is None else holder.name
