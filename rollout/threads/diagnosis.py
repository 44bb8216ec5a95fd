"""A report of everything in this process that can hang: engines, managers, connections, coordinator, threads.

Every `DeadlineError` has the report as a note. Building the report takes no lock, because a lock's holder may be what hangs.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from rollout.errors import DeadlineError

FRAMES = 8
"""The number of innermost frames that are shown for each thread."""
_STDERR = 2


_watched: dict[int, weakref.ref[Any]] = {}
_numbers = count()


def watch(watched: Any) -> None:
    """Include an object in every later report for as long as the object exists.

    Args:
        watched: an object with a method `describe_state()`, which returns lines of text, with details indented. The method
            must not take a lock; it may raise.
    """
    number = next(_numbers)
    _watched[number] = weakref.ref(watched, lambda _: _watched.pop(number, None))


def report() -> str:
    """Return the state of all objects that were passed to `watch`, and the stacks of all threads."""
    lines = [f"state of process {os.getpid()} at {time.strftime('%Y-%m-%d %H:%M:%S')}"]
    # Copy the values first: list() is atomic in the interpreter, so no other thread can change the dict meanwhile.
    for reference in list(_watched.values()):
        watched = reference()
        if watched is None:
            continue
        try:
            lines.extend(watched.describe_state())
        except Exception as exc:  # noqa: BLE001 - an object may be incomplete or changing, but the others are still useful
            lines.append(f"{type(watched).__name__}: cannot be read now ({type(exc).__name__}: {exc})")
    return "\n".join([*lines, *thread_lines()])


DeadlineError.note = staticmethod(lambda: report() if _watched else "")


def thread_name(ident: int | None) -> str:
    """Return the quoted name of one of this process's threads; `no thread` for None."""
    if ident is None:
        return "no thread"
    return next((repr(each.name) for each in threading.enumerate() if each.ident == ident), f"thread {ident}")


def thread_lines() -> Iterator[str]:
    """Yield the name and innermost `FRAMES` frames of each thread, the innermost frame last."""
    for ident, frame in list(sys._current_frames().items()):
        here = " (reports this)" if ident == threading.get_ident() else ""
        yield f"thread {thread_name(ident)}{here}"
        for entry in traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES, lookup_lines=False)[
            ::-1
        ]:
            yield f"  {'/'.join(Path(entry.filename).parts[-3:])}:{entry.lineno} {entry.name}"


def answer_signal() -> None:
    """Write the stacks of all threads to stderr at every SIGUSR1, unless the program handles or ignores this signal.

    The process continues. Its forked children answer the signal too. This works even if the main thread is stuck in C code.
    """
    number = getattr(signal, "SIGUSR1", None)
    if number is not None and signal.getsignal(number) is signal.SIG_DFL:
        faulthandler.register(number, file=_STDERR)
