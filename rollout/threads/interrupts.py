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
    """A signal handler that defers the first Ctrl-C, and passes on a second Ctrl-C unless the code is shielded.

    Attributes:
        presses: number of Ctrl-C presses since the block began.
        waiting: number of presses that have to wait for the end of the block.
        shielded: whether further presses also wait.
        wholly: whether further presses wait for the end even inside `interruptible()`.
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
        """Call the original handler for a pending Ctrl-C, unless the code is shielded or every press must wait."""
        if self.presses > self.waiting and not self.shielded:
            self.presses = self.waiting
            self.handler(signal.SIGINT, None)

    @contextmanager
    def changed(self, *, waiting: int, shielded: bool, wholly: bool = False) -> Iterator[None]:
        """Set the attributes `waiting`, `shielded` and `wholly` inside the block."""
        before = self.waiting, self.shielded, self.wholly
        self.waiting, self.shielded, self.wholly = waiting, shielded, wholly
        try:
            yield
        finally:
            self.waiting, self.shielded, self.wholly = before


class _Thread(threading.local):
    deferral: _Deferral | None = None
    """The handler of the enclosing `interrupt_deferred()`."""


_thread = _Thread()


def _on_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def interrupt_pending() -> bool:
    """Return whether the enclosing `interrupt_deferred()` has deferred a Ctrl-C."""
    return _thread.deferral is not None and _thread.deferral.presses > 0


@contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block; a second Ctrl-C takes effect at once.

    The installed handler still runs, only later. The block has no effect outside the main thread (the only thread that
    Python interrupts), without a Python handler for Ctrl-C, and inside another such block.
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
    """Delay every Ctrl-C until the end of a block that must not be interrupted.

    Unless `wholly` is set, a second Ctrl-C takes effect in an `interruptible()` inside the block. The block has no effect
    outside the main thread or without a Python handler for Ctrl-C.
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
    """Let a second Ctrl-C, even an earlier one, interrupt this block in `uninterrupted()`; with `first`, one is enough."""
    deferral = _thread.deferral
    if deferral is None or deferral.wholly:
        yield
        return
    with deferral.changed(waiting=0 if first else deferral.waiting, shielded=False):
        deferral.pass_on()
        yield
