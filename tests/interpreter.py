"""Runs the tests of a file again in a process of its own, with Triton's kernels interpreted on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CANNOT_LOOP = "only 0-dimensional arrays can be converted to Python scalars"
"""What the interpreter of an older Triton says in a loop, with a numpy of stricter rules about scalars."""


def assert_holds_interpreted(file: str, *options: str) -> None:
    """Fail unless the tests of `file` that `options` of pytest choose pass under `TRITON_INTERPRET=1`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", file, *options],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    if CANNOT_LOOP in done.stdout:
        pytest.skip("this Triton's interpreter cannot loop with this numpy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
