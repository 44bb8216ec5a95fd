"""Benchmark peer in a separate interpreter: started, queried with deadlines, terminated. The other end is `serve.py`.

Promises: no wait without a deadline; a child that dies, hangs or answers nonsense raises `PeerFailed` with the end of what
it printed, and is gone afterwards; Ctrl-C in the terminal reaches the race, not the child.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

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
    """One process that answers JSON.

    Args:
        command: what to start; the number of a pipe is added.
        environment: of the process; see `clean_environment`.
        log: file that takes its output.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._pipe, theirs = Pipe()
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=dict(environment), start_new_session=True, pass_fds=[theirs.fileno()],
                )  # fmt: skip
        except OSError as exc:
            self._pipe.close()
            raise PeerFailed(f"{command[0]} does not start: {exc}") from exc
        finally:
            theirs.close()

    def ask(self, deadline_s: float, do: str, **arguments: Any) -> dict[str, Any]:
        """Send one question and wait for its answer, at most `deadline_s` seconds.

        Raises:
            Late: it did not answer in time; it has been ended.
            PeerFailed: it is dead or answered nonsense, and has been ended; or it answered with an error, and lives.
        """
        if self._pipe.closed:
            raise PeerFailed("its process was ended after an earlier failure")
        try:
            self._pipe.send_bytes(json.dumps({"do": do, **arguments}).encode())
            if not self._pipe.poll(deadline_s):
                self.close()
                raise Late(f"no answer to {do!r} within {deadline_s:g} s{self._tail()}")
            answer: dict[str, Any] = json.loads(self._pipe.recv_bytes())
        except (OSError, EOFError, ValueError) as exc:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
            code = self._process.poll()
            self.close()
            status = "" if code is None else f" (exit status {code})"
            raise PeerFailed(f"the process died at {do!r}{status}{self._tail()}") from exc
        if "error" in answer:
            raise PeerFailed(str(answer["error"]))
        return answer

    def close(self) -> None:
        """End it. Harmless when repeated."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._pipe.close()

    def _tail(self) -> str:
        text = " ".join(self._log.read_text(encoding="utf-8", errors="replace").split())
        return f": … {text[-TAIL:]}" if text else ""
