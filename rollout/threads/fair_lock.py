"""Fair reentrant lock: waiters are served in order of arrival.

With a plain lock, a thread that releases and immediately reacquires it (a loop of steps) nearly always wins, and another
thread's `pause` waits for thousands of steps.
"""

from __future__ import annotations

import ctypes
import threading

from rollout.threads.diagnosis import thread_name
from rollout.threads.interrupts import interruptible, uninterrupted

POLL_S = 0.1
"""Polling interval for a second Ctrl-C while waiting."""


class FairLock:
    """Reentrant lock; a waiting thread gets it before its last holder can reacquire it.

    Attributes:
        asked: 1 since another thread began to wait or called `ask`, until the holder's `heard`: for code of the holder that
            runs without the interpreter.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self.asked = ctypes.c_int32(0)

    def ask(self) -> None:
        """Ask the holder to come to an end soon, though no thread waits for the lock; from any thread."""
        self.asked.value = 1

    def heard(self) -> None:
        """Note that the holder looks at everything it can be asked for from here on; those that wait stay `wanted`."""
        self.asked.value = 0

    @property
    def wanted(self) -> bool:
        """Whether another thread waits for the lock, so that the holder can release it early."""
        return self._next.locked()

    def describe(self) -> str:
        """Holder and waiters; without waiting."""
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
        # Without a call before the release: a Ctrl-C takes effect at calls.
        if self._depth > 1:
            self._depth -= 1
        else:
            self._depth, self._owner = 0, None
            self._lock.release()

    def _wait(self) -> None:
        # Held by the first waiter: the last holder queues behind it.
        _acquire(self._next)
        try:
            if not self._lock.acquire(blocking=False):
                self.ask()
                _acquire(self._lock)
        finally:
            self._next.release()


def _acquire(lock: threading.Lock) -> None:
    """Wait for a lock; a second Ctrl-C ends the wait, never with the lock taken."""
    while not lock.acquire(timeout=POLL_S):
        with interruptible():
            pass
