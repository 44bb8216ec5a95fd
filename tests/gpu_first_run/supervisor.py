"""Runs stages in a process that is replaced when a stage hangs, dies, or leaves the device unusable."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.gpu_first_run import report
from tests.gpu_first_run.findings import say

START_S = 120.0
"""For imports, and to end after a stage's last finding."""
GRACE_S = 20.0
"""Beyond a stage's limit, at which it raises by itself unless it waits inside of a library."""


def supervise(
    names: Sequence[str],
    command: Callable[[Sequence[str]], Sequence[str]],
    out: Path,
    limits: Mapping[str, float],
    seconds: float = math.inf,
) -> int:
    """Run stages to their end; returns the number of those that failed or were not run.

    Args:
        command: starts a process that runs the stages it is given and prints their findings, a line of JSON each.
        limits: seconds of each stage.
        seconds: of all together; a stage that is running then is killed, and later ones are not run.
    """
    left, end, failed = list(names), time.monotonic() + seconds, 0
    while left and time.monotonic() < end:
        failed += _one_process(left, command(left), out, limits, end)
        report.write(out)
    for name in left:
        say(out, "stage", name=name, ok=False, seconds=0.0, why=f"not run: the {seconds:g} s of this call were over")
    report.write(out)
    return failed + len(left)


def _one_process(
    left: list[str], command: Sequence[str], out: Path, limits: Mapping[str, float], end: float
) -> int:  # fmt: skip
    """Follow one process; takes the stages that have ended from `left` and returns how many of them failed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process, lines), daemon=True).start()
    begun, ended, failed, since = "", 0, 0, time.monotonic()
    deadline = since + START_S
    try:
        while left:
            try:
                line = lines.get(timeout=max(0.0, min(deadline, end, time.monotonic() + 60) - time.monotonic()))
            except queue.Empty:
                if time.monotonic() < min(deadline, end):
                    continue
                why = f"killed after {time.monotonic() - since:.0f} s: it hung, or the call's time was over"
                break
            if line is None:
                why = f"its process ended with status {process.wait()}"
                if ended and not begun:
                    # A stage before lost the device: the next one begins in a process of its own.
                    return failed
                break
            found = _finding(line)
            print(line, end="", flush=True)
            if found.get("what") == "begins":
                begun, since = str(found["name"]), time.monotonic()
                deadline = since + limits[begun] + GRACE_S
            elif found.get("what") == "stage":
                ended, failed = ended + 1, failed + (not found["ok"])
                left.remove(begun)
                begun, since = "", time.monotonic()
                deadline = since + START_S
                report.write(out)
        else:
            return failed
        name = left.pop(0)
        say(out, "stage", name=name, ok=False, seconds=time.monotonic() - since, why=why)
        return failed + 1
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def _finding(line: str) -> dict[str, Any]:
    if not line.startswith('{"what": '):
        return {}
    with suppress(ValueError):
        found: dict[str, Any] = json.loads(line)
        return found
    return {}
