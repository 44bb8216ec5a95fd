"""FIFO turns: one thread at a time runs requests to their end.

Two threads that step one engine would take each other's results. Always true: a turn ends with its `with` block, whether
or not that raises, and waiting can be interrupted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout.errors import DeadlineError
from rollout.threads.interrupts import uninterrupted


class Turns:
    """Queue of the threads that generate with one engine.

    Args:
        check: called before each turn; may raise.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        self._changed = threading.Condition()
        self._queue: list[object] = []
        self._holder: threading.Thread | None = None

    @contextmanager
    def taken(self, timeout_s: float | None = None) -> Iterator[None]:
        """Context manager that excludes other threads; reentrant.

        Args:
            timeout_s: to wait for earlier turns; None: no limit.

        Raises:
            DeadlineError: earlier turns have not ended in time.
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
        """Holder and length of the queue; without waiting."""
        holder = self._holder
        return "free" if holder is None else f"held by {holder.name!r}, {len(self._queue) - 1} waiting"

    def _name(self) -> str:
        holder = self._holder
        return "?" if holder is None else holder.name
