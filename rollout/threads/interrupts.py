"""Context managers that defer Ctrl-C to the next step boundary.

An interrupted step would leave queues, block tables and memory inconsistent and the engine unusable.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any


class _Deferral:
    """A signal handler that defers the first Ctrl-C to the end of a `with` block, or every Ctrl-C while `shielded` is set.

    Attributes:
        presses: number of Ctrl-C presses that the original handler has not received yet.
        waiting: number of presses that have to wait for the end of the `with` block.
        shielded: whether further presses also wait, because the running code must not be interrupted.
        wholly: whether further presses wait even inside `interruptible()`.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.presses = 0
        self.waiting = 1
        self.shielded = self.wholly = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.presses += 1
        self.pass_on()

    def pass_on(self) -> None:
        """Call the original handler if more Ctrl-C presses are pending than may wait, unless interrupts are forbidden."""
        if self.presses > self.waiting and not self.shielded:
            self.presses = self.waiting
            self.handler(signal.SIGINT, None)

    @contextmanager
    def changed(self, *, waiting: int, shielded: bool, wholly: bool = False) -> Iterator[None]:
        """Set the attributes `waiting`, `shielded` and `wholly` for the duration of a `with` block."""
        before = self.waiting, self.shielded, self.wholly
        self.waiting, self.shielded, self.wholly = waiting, shielded, wholly
        try:
            yield
        finally:
            self.waiting, self.shielded, self.wholly = before


class _Thread(threading.local):
    deferral: _Deferral | None = None
    """The handler that the enclosing `interrupt_deferred()` has installed; None outside of such a block."""


_thread = _Thread()


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def interrupt_pending() -> bool:
    """Return whether the enclosing `interrupt_deferred()` has deferred a Ctrl-C."""
    return _thread.deferral is not None and _thread.deferral.presses > 0


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the end of a `with` block; a second Ctrl-C takes effect at once.

    The installed handler still runs, only later. This context manager has no effect outside the main thread (the only one
    that Python interrupts), if no Python handler for Ctrl-C is installed, or inside another such block.
    """
    handler = signal.getsignal(signal.SIGINT) if _thread.deferral is None and _on_main_thread() else None
    if not callable(handler):
        yield
        return
    deferral = _Deferral(handler)
    signal.signal(signal.SIGINT, deferral)
    _thread.deferral = deferral
    try:
        yield
    finally:
        # Shield first: if a further Ctrl-C raised KeyboardInterrupt here, `deferral` would stay installed.
        deferral.shielded = True
        _thread.deferral = None
        signal.signal(signal.SIGINT, handler)
        if deferral.presses:
            handler(signal.SIGINT, None)


def uninterrupted(*, wholly: bool = False) -> AbstractContextManager[None]:
    """Delay every Ctrl-C until the end of a `with` block that must not be interrupted.

    Unless `wholly` is set, a second Ctrl-C takes effect in an `interruptible()` inside the block. This context manager has
    no effect outside the main thread or if no Python handler for Ctrl-C is installed.
    """
    # Save the cost of a block if an enclosing one already gives this protection: a step nests dozens of them.
    deferral = _thread.deferral
    needed = _on_main_thread() if deferral is None else not deferral.shielded or (wholly and not deferral.wholly)
    return _shielded(wholly) if needed else nullcontext()


@contextmanager
def _shielded(wholly: bool) -> Iterator[None]:
    with interrupt_deferred():
        deferral = _thread.deferral
        if deferral is None:
            yield
            return
        try:
            with deferral.changed(waiting=1, shielded=True, wholly=wholly or deferral.wholly):
                yield
        finally:
            deferral.pass_on()


@contextmanager
def interruptible(*, first: bool = False) -> Iterator[None]:
    """Let a second Ctrl-C, even an earlier one, interrupt a `with` block in `uninterrupted()`. If `first`, one is enough."""
    deferral = _thread.deferral
    if deferral is None or deferral.wholly:
        yield
        return
    with deferral.changed(waiting=0 if first else deferral.waiting, shielded=False):
        deferral.pass_on()
        yield
