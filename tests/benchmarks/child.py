"""Benchmark peer in a separate interpreter: started, queried with deadlines, terminated. The other end is `serve.py`.

Promises: no wait without a deadline; a child that dies, hangs or answers nonsense raises `PeerFailed` with the end of what
it printed, and is gone afterwards; Ctrl-C in the terminal reaches the race, not the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

TAIL = 300
"""Characters of a failed child's output that an error shows."""


class NotRun(Exception):  # noqa: N818 - not an error: the cell of the table says why
    """This peer does not take part; the message says why."""


class PeerFailed(Exception):  # noqa: N818 - read as "error: ..." in the table
    """This peer took part and failed."""


class Late(PeerFailed):
    """This peer did not answer in time."""


def clean_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without what belongs to its own interpreter, then `changes`."""
    mine = ("PYTHON", "VIRTUAL_ENV", "LD_PRELOAD", "CONDA")
    return {name: value for name, value in os.environ.items() if not name.startswith(mine)} | dict(changes)


class Child:
    """One process that answers JSON lines.

    Args:
        command: what to start.
        environment: of the process; see `clean_environment`.
        log: file that takes its stderr.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._pending = b""
        self._closed = False
        try:
            with log.open("wb") as errors:
                self._process = subprocess.Popen(
                    list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=dict(environment),
                    start_new_session=True,
                )  # fmt: skip
        except OSError as exc:
            raise PeerFailed(f"{command[0]} does not start: {exc}") from exc

    def ask(self, deadline_s: float, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one question and wait for its answer, at most `deadline_s` seconds.

        Raises:
            Late: it did not answer in time; it has been ended.
            PeerFailed: it is dead or answered nonsense, and has been ended; or it answered with an error, and lives.
        """
        if self._closed:
            raise PeerFailed("its process was ended after an earlier failure")
        end = time.monotonic() + deadline_s
        try:
            self._send(json.dumps({"do": do, **arguments}).encode() + b"\n", end)
            line = self._read_line(end)
        except TimeoutError:
            self.close()
            raise Late(f"no answer to {do!r} within {deadline_s:g} s{self._tail()}") from None
        except OSError:
            self._give_up(f"died at {do!r}")
        try:
            answer = json.loads(line)
        except ValueError:
            self._give_up(f"answered {do!r} with {line[:80]!r}")
        if not isinstance(answer, dict):
            self._give_up(f"answered {do!r} with {line[:80]!r}")
        if "error" in answer:
            raise PeerFailed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End it. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send(self, data: bytes, end: float) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        os.set_blocking(pipe.fileno(), False)
        while data:
            _, ready, _ = select.select([], [pipe], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            data = data[os.write(pipe.fileno(), data) :]

    def _read_line(self, end: float) -> bytes:
        pipe = self._process.stdout
        assert pipe is not None
        while b"\n" not in self._pending:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(pipe.fileno(), 2**16)
            if not part:
                raise BrokenPipeError
            self._pending += part
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _give_up(self, what: str) -> NoReturn:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
        code = self._process.poll()
        self.close()
        raise PeerFailed(f"the process {what}{'' if code is None else f' (exit status {code})'}{self._tail()}")

    def _tail(self) -> str:
        text = " ".join(self._log.read_text(encoding="utf-8", errors="replace").split())
        return f": … {text[-TAIL:]}" if text else ""
