"""The fuzz test of every route, in a process of its own (see `fuzzing`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROUTES = 28
"""At least so many operations are described."""


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_every_route_does_what_the_servers_description_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/server/fuzzing.py"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= ROUTES, done.stdout
