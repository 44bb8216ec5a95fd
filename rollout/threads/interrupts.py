"""Defers Ctrl-C to the next step boundary.

An interrupted step would leave queues, block tables and memory inconsistent and the engine unusable.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Deferral:
    """Signal handler that remembers the first Ctrl-C, and passes on a second one where nothing is shielded from it.

    Attributes:
        presses: since the block began; 1 again once a second one was passed on.
        shielded: whether a second one has to wait, too.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.presses = 0
        self.shielded = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.presses += 1
        self.pass_on()

    def pass_on(self) -> None:
        """Let a second Ctrl-C take effect, if there was one and nothing is shielded from it."""
        if self.presses > 1 and not self.shielded:
            self.presses = 1
            self.handler(signal.SIGINT, None)


def _handler() -> Callable[[int, FrameType | None], Any] | None:
    """The Python handler of Ctrl-C; None if there is none or this is not the main thread."""
    # Checked first: getsignal() is slow, it compares the handler with its constants and formats a hidden error.
    if threading.current_thread() is not threading.main_thread():
        return None
    handler = signal.getsignal(signal.SIGINT)
    return handler if callable(handler) else None


def interrupt_pending() -> bool:
    """Whether a Ctrl-C is deferred by the enclosing `interrupt_deferred()`."""
    handler = _handler()
    return isinstance(handler, _Deferral) and handler.presses > 0


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Context manager that delays a Ctrl-C to the end of the block; a second one takes effect immediately, outside of
    `uninterrupted()`.

    The installed handler is called, only later. No-op outside the main thread (Python interrupts only that one), without a
    Python handler of Ctrl-C, and nested in another such block. Costs about 5 µs.
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
        # Or another one would leave this handler in place.
        deferral.shielded = True
        signal.signal(signal.SIGINT, handler)
        if deferral.presses:
            handler(signal.SIGINT, None)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context manager that delays every Ctrl-C to the end of the block, a second one too: for what must not be half done.

    Inside the block, one in `interruptible()` takes effect. No-op where `interrupt_deferred()` is.
    """
    with interrupt_deferred():
        deferral = _handler()
        if not isinstance(deferral, _Deferral):
            yield
            return
        before = deferral.shielded
        try:
            deferral.shielded = True
            yield
        finally:
            deferral.shielded = before
            deferral.pass_on()


@contextmanager
def interruptible() -> Iterator[None]:
    """Context manager inside `uninterrupted()` in which a second Ctrl-C takes effect at once, also one that has waited: for
    what may take long."""
    deferral = _handler()
    if not isinstance(deferral, _Deferral):
        yield
        return
    before = deferral.shielded
    try:
        deferral.shielded = False
        deferral.pass_on()
        yield
    finally:
        deferral.shielded = before
