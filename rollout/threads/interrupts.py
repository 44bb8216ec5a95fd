"""Defers Ctrl-C to the next step boundary.

Half a step would leave queues, block tables and memory in disagreement, and the engine could not be used afterwards.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Deferral:
    """A handler that remembers the first Ctrl-C and passes on the others."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            self.handler(number, frame)
        self.pressed = True


def _handler() -> Callable[[int, FrameType | None], Any] | None:
    """What handles Ctrl-C in Python; None: nothing, or it is not this thread's."""
    # Asked first: getsignal() looks a function up among its own constants, and writes it out for the error it then hides.
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) else None


def interrupt_pending() -> bool:
    """Inside `interrupt_deferred()`: whether Ctrl-C waits for its end."""
    handler = _handler()
    return isinstance(handler, _Deferral) and handler.pressed


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Ctrl-C inside the block takes effect at its end; a second one takes effect at once.

    Whatever handles Ctrl-C handles it as before, only later. Does nothing in a thread (Python interrupts the main one
    only), where no Python function handles Ctrl-C, and inside another such block. Costs about 5 µs.
    """
    handler = _handler()
    if handler is None or isinstance(handler, _Deferral):
        yield
        return
    deferral = _Deferral(handler)
    signal.signal(signal.SIGINT, deferral)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if deferral.pressed:
            handler(signal.SIGINT, None)
