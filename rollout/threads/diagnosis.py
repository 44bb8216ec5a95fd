"""A report of everything in this process that can hang: engines, managers, connections, coordinator, threads.

Every `DeadlineError` carries it as a note. SIGUSR1 writes it to stderr while the process continues (`kill -USR1 PID`),
unless the program handles that signal itself. Reading takes no lock, because the holder of a lock may be what hangs.
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
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Protocol

from rollout.errors import DeadlineError
from rollout.threads import forks

FRAMES = 8
"""Innermost frames shown of each thread."""
THREAD_NAME = "rollout-diagnosis"
"""The thread that answers the signal; it lives as long as the process."""

_STDERR = 2


class Watched(Protocol):
    """An object that can describe its state."""

    def describe_state(self) -> Iterable[str]:
        """Lines of text, details indented. Must take no lock; may raise."""


_watched: dict[int, weakref.ref[Watched]] = {}
_numbers = count()
_answering = False


def watch(watched: Watched) -> None:
    """Include an object in every report from now on, as long as it lives."""
    number = next(_numbers)

    def forget(_: weakref.ref[Watched]) -> None:
        _watched.pop(number, None)

    _watched[number] = weakref.ref(watched, forget)


def report() -> str:
    """State of all registered objects, and the stacks of all threads."""
    lines = [f"state of process {os.getpid()} at {time.strftime('%Y-%m-%d %H:%M:%S')}"]
    # list() of a dictionary's values is atomic in the interpreter, so no other thread can interfere.
    for reference in list(_watched.values()):
        watched = reference()
        if watched is not None:
            lines += _lines_of(watched)
    return "\n".join([*lines, *thread_lines()])


DeadlineError.note = staticmethod(lambda: report() if _watched else "")


def _lines_of(watched: Watched) -> list[str]:
    lines: list[str] = []
    try:
        lines.extend(watched.describe_state())
    except Exception as exc:  # noqa: BLE001 - it may be half built, or changing; the others are still worth reading
        lines.append(f"{type(watched).__name__}: cannot be read now ({type(exc).__name__}: {exc})")
    return lines


def thread_name(ident: int | None) -> str:
    """Name of a thread of this process, quoted; `no thread` for None."""
    if ident is None:
        return "no thread"
    return next((repr(each.name) for each in threading.enumerate() if each.ident == ident), f"thread {ident}")


def thread_lines() -> Iterator[str]:
    """Name and innermost `FRAMES` frames of each thread, the innermost last."""
    for ident, frame in list(sys._current_frames().items()):
        here = " (reports this)" if ident == threading.get_ident() else ""
        yield f"thread {thread_name(ident)}{here}"
        for entry in traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES, lookup_lines=False)[
            ::-1
        ]:
            yield f"  {_short(entry.filename)}:{entry.lineno} {entry.name}"


def _short(filename: str) -> str:
    return "/".join(Path(filename).parts[-3:])


# --- the signal -----------------------------------------------------------------------------------------------------------


def answer_signal() -> None:
    """Write `report()` to stderr at every SIGUSR1, unless the program handles or ignores it. From any thread."""
    global _answering
    number = getattr(signal, "SIGUSR1", None)
    if number is None or _answering or signal.getsignal(number) is not signal.SIG_DFL:
        return
    _answering = True
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Not signal.signal, whose handlers wait for the main thread, which may be what hangs. This handler writes the stacks
    # from inside the signal handler; they only wake the thread that writes the report.
    faulthandler.register(number, file=writing, all_threads=False)
    forks.in_child(_answer, lambda _: _stop_answering(number))
    threading.Thread(target=_answer, args=(reading,), name=THREAD_NAME, daemon=True).start()


def _answer(reading: int) -> None:
    while os.read(reading, 65536):
        # Wait for the rest of one signal's output.
        time.sleep(0.05)
        os.set_blocking(reading, False)
        try:
            while os.read(reading, 65536):
                pass
        except BlockingIOError:
            pass
        os.set_blocking(reading, True)
        os.write(_STDERR, f"{report()}\n".encode(errors="replace"))


def _stop_answering(number: signal.Signals) -> None:
    # A forked child would wake its parent's thread. A handler that the program has set since then stays.
    if signal.getsignal(number) is signal.SIG_DFL:
        faulthandler.unregister(number)
