"""Runs tests again in a process of its own, with Triton's kernels interpreted on the CPU.

There this file is a plugin of pytest, by which the programs of a launch run in random order: the interpreter runs them one
after the other, a GPU in any order.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest
import torch

CANNOT_LOOP = "only 0-dimensional arrays can be converted to Python scalars"
"""The message of an older Triton's interpreter in a loop, with a numpy of stricter rules about scalars."""


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def on_a_gpu(function: Any) -> Any:
    """Mark a test that needs a CUDA device."""
    function = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(function)
    return pytest.mark.gpu(function)


def on_the_device(function: Any) -> Any:
    """Mark a test that runs in the interpreter, and on a GPU."""
    return function if INTERPRETED else on_a_gpu(function)


def combined(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of the values of the axes; in the interpreter, which takes a second for what a device does in a
    millisecond, each value beside the others in turn."""
    if not INTERPRETED:
        return list(product(*axes))
    count = max(map(len, axes))
    return list(zip(*[islice(cycle(axis), count) for axis in axes], strict=True))


def assert_holds_interpreted(*options: str) -> None:
    """Fail unless the tests that `options` of pytest choose pass under `TRITON_INTERPRET=1`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", __name__, *options],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    if CANNOT_LOOP in done.stdout:
        pytest.skip("this Triton's interpreter cannot loop with this numpy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def pytest_configure() -> None:
    """Have the interpreter's programs run in random order."""
    from triton.runtime.interpreter import interpreter_builder

    shuffle_programs(interpreter_builder, random.Random(0))


def shuffle_programs(builder: Any, chance: random.Random) -> None:
    """Have `builder`, which is told the grid of a launch and the place of each program in turn, run another one there."""
    begin, place, order = builder.set_grid_dim, builder.set_grid_idx, list[int]()

    def set_grid_dim(*sizes: int) -> None:
        begin(*sizes)
        count = math.prod(sizes)
        order[:] = chance.sample(range(count), count)

    def set_grid_idx(x: int, y: int, z: int) -> None:
        _, rows, columns = builder.grid_dim
        index = order[(x * rows + y) * columns + z]
        place(index // (rows * columns), index // columns % rows, index % columns)

    builder.set_grid_dim, builder.set_grid_idx = set_grid_dim, set_grid_idx
