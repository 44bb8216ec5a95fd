"""Runs tests again in a process of its own, with Triton's kernels interpreted on the CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest

CANNOT_LOOP = "only 0-dimensional arrays can be converted to Python scalars"
"""What the interpreter of an older Triton says in a loop, with a numpy of stricter rules about scalars."""


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def combined(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of the values of the axes; in the interpreter, which takes a second for what a device does in a
    millisecond, each value beside the others in turn."""
    if not INTERPRETED:
        return list(product(*axes))
    lengths = list(map(len, axes))
    count = min(math.lcm(*lengths), 2 * max(lengths))
    return list(zip(*[islice(cycle(axis), count) for axis in axes], strict=True))


def assert_holds_interpreted(*options: str) -> None:
    """Fail unless the tests that `options` of pytest choose pass under `TRITON_INTERPRET=1`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *options],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    if CANNOT_LOOP in done.stdout:
        pytest.skip("this Triton's interpreter cannot loop with this numpy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
