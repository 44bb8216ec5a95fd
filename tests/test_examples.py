"""Every example runs from its command line, small, and leaves its picture."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ["grpo", "partial_rollouts"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_and_leaves_a_picture(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"WANDB_MODE": "offline"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--quick", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=500, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "held-out" in done.stdout
    pictures = list(tmp_path.glob("*.png"))
    assert pictures, "no picture"
    assert pictures[0].stat().st_size > 10_000
    assert list(tmp_path.rglob("*.wandb")), "wandb has written nothing"


@pytest.mark.slow
@pytest.mark.distributed
def test_the_data_parallel_example_runs_on_two_ranks_and_shows_the_balance(tmp_path: Path) -> None:
    environment = os.environ | {"WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(ROOT / "examples" / "data_parallel_grpo.py"), "--quick", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=500, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 ranks" in done.stdout
    assert "tokens asked → computed by rank, max/mean" in done.stdout
    rows = re.findall(r"([\d,]+) ([\d,]+) → ([\d,]+) ([\d,]+)  \d\.\d\d → \d\.\d\d", done.stdout)
    assert rows, done.stdout
    pictures = list(tmp_path.glob("*.png"))
    assert pictures, "no picture"
    assert pictures[0].stat().st_size > 10_000
    assert list(tmp_path.rglob("*.wandb")), "wandb has written nothing"


def test_the_grpo_loop_stays_under_forty_lines() -> None:
    lines = (ROOT / "examples" / "grpo.py").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("def grpo("))
    end = next(number for number, line in enumerate(lines[start + 1 :], start + 1) if line.startswith("def "))
    loop = [line for line in lines[start:end] if line.strip()]
    assert len(loop) < 40, f"{len(loop)} lines"
