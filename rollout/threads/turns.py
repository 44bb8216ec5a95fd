"""FIFO turns: one thread at a time runs requests to their end.

Two threads that step one engine would take each other's results. Always true: a turn ends with its `with` block, whether
or not that raises, and waiting can be interrupted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout.errors import DeadlineError
from rollout.threads.interrupts import uninterrupted

_log = logging.getLogger(__name__)

LOGGED_WAIT_S = 60.0
"""Wait for a turn, in seconds, after which it is logged."""


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
                if not self._wait(ticket, timeout_s):
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

    def _wait(self, ticket: object, timeout_s: float | None) -> bool:
        """Wait for a turn; return whether it came in time. A long wait without a limit is logged: it may have no end."""

        def mine() -> bool:
            return self._queue[0] is ticket

        if timeout_s is not None or self._changed.wait_for(mine, LOGGED_WAIT_S):
            return self._changed.wait_for(mine, timeout_s)
        _log.warning(
            "thread %r has waited %g s for thread %r, which generates with the same engine; if that one plays environments "
            "that wait for this thread, neither continues: sample by `await manager.sample(prompt)` there",
            threading.current_thread().name, LOGGED_WAIT_S, self._name(),
        )  # fmt: skip
        return self._changed.wait_for(mine)

    def describe(self) -> str:
        """Holder and length of the queue; without waiting."""
        holder = self._holder
        return "free" if holder is None else f"held by {holder.name!r}, {len(self._queue) - 1} waiting"

    def _name(self) -> str:
        holder = self._holder
        return "?" if holder is None else holder.name
