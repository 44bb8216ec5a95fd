"""Child side of the benchmark protocol: JSON lines on stdin, one JSON line out per line in. Standard library only.

Whatever a library prints to stdout goes to stderr, so that the answers have the real stdout to themselves. Blocked in a
read while others are timed; ends when stdin does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(answers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer `{"do": NAME, ...}` with what `answers[NAME](...)` returns, or with `{"error": ...}`."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        for line in sys.stdin:
            question = json.loads(line)
            try:
                answer = answers[question.pop("do")](**question)
            except Exception as exc:  # noqa: BLE001 - whatever a library raises is this peer's answer
                answer = {"error": f"{type(exc).__name__}: {exc}"}
            sys.stdout.flush()
            out.write(json.dumps(answer) + "\n")
            out.flush()
