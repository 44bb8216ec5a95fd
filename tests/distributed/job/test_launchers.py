"""Tests of what survives a killed rank under which launcher; docs/how-to/distributed.md has the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.coordinator.processes import free_port
from tests.distributed.job.launched_rank import LENGTHS, SHORT
from tests.distributed.job.nursery import ROOT

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SCRIPT = str(ROOT / "tests" / "distributed" / "job" / "launched_rank.py")
LIMIT_S = 300.0


def start(command: list[str], folder: Path, **environment: str) -> subprocess.Popen[bytes]:
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, SCRIPT, str(folder)], env=os.environ | paths | environment, cwd=folder, stdout=subprocess.PIPE
    )


def told(folder: Path, rank: int, life: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / f"rank-{rank}.{life}").read_text())
    return said


def assert_everything(answers: list[Any]) -> None:
    """Every group came back once, whole."""
    assert [(number, len(tokens)) for number, tokens in answers] == list(enumerate(LENGTHS))


def test_torchrun_ends_the_other_ranks_and_a_restart_keeps_what_had_ended(tmp_path: Path) -> None:
    command = [*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port())]
    with start(command, tmp_path) as first:
        assert first.wait(LIMIT_S) != 0
    assert not list(tmp_path.glob("rank-*.1"))
    with start(command, tmp_path) as second:
        assert second.wait(LIMIT_S) == 0
    again = [told(tmp_path, rank, 2) for rank in range(2)]
    for each in again:
        assert_everything(each["answers"])
    ended = sum(sorted(LENGTHS)[:SHORT])
    computed = sum(each["computed"] for each in again)
    assert computed <= 2 * sum(LENGTHS) - ended, "what the journal had was computed again"
