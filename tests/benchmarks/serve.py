"""Child side of the benchmark protocol: JSON over the pipe whose number is the last argument. Standard library only.

It is blocked in a read while others are timed, and ends when the other side does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any


def serve(answers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer `{"do": NAME, ...}` with what `answers[NAME](...)` returns, or with `{"error": ...}`."""
    pipe = Connection(int(sys.argv[-1]))
    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = answers[question.pop("do")](**question)
        except Exception as exc:  # noqa: BLE001 - whatever a library raises is this peer's answer
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        pipe.send_bytes(json.dumps(answer).encode())
