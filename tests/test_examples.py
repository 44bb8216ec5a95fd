"""Tests of the examples: each runs to its end with `--quick`, is one file of at most 150 lines, and does what it says."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from rollout.observe.metric_table import LOGGED
from tests.distributed.job.nursery import Nursery
from tests.example_runs import fork_example, run_example
from tests.trainer_hooks.wandb_runs import point, read_run

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ALONE = {
    "agent_over_http": r"step   3: found \d\.\d\d, Δlogp \de-\d\d   start",
    "distill": r"student: \d\.\d\d → \d\.\d\d right, teacher \d\.\d\d",
    "lora_grpo": r"the model underneath (\d\.\d\d) → \1",
    "moe_grpo": r"largest gap of a step: \d\.\d{4} routed live, \d\.\d{4} with replay",
    "multi_turn_grpo": r"greedy, found \d\.\d\d of the 16 numbers",
    "ppo": r"values explain -?\d+% of the returns\nheld-out",
    "serve": r"answers over HTTP from versions 0 to 8",
    "trl_grpo": r"held-out, sampled \d\.\d\d → \d\.\d\d\n6 updates",
    "vlm_grpo": r"reward \d\.\d\d; [1-4] drawings encoded for 64 samples",
}
"""Examples of one process that need no flags, and what they print."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One of its own: what examples import is more than what ranks do."""
    with closing(Nursery("tests.example_imports")) as nursery:
        yield nursery


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_is_one_file_of_at_most_150_lines(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    siblings = {each.stem for each in EXAMPLES}
    assert not siblings & set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_the_example_runs(name: str, nursery: Nursery, tmp_path: Path) -> None:
    out = fork_example(nursery, name, tmp_path, "--quick")
    assert re.search(ALONE[name], out), out


@pytest.mark.slow
def test_the_main_example_logs_the_whole_table_of_metrics_and_writes_a_report(tmp_path: Path) -> None:
    out = run_example("grpo", tmp_path, "--quick", "--out", str(tmp_path))
    assert re.search(r"held-out, sampled \d\.\d\d → \d\.\d\d", out), out
    assert "<svg" in (tmp_path / "report.html").read_text(encoding="utf-8")
    points = [point(history) for history in read_run(tmp_path)["history"]]
    assert [each["train/step"] for each in points if "train/reward" in each] == [1, 2, 3, 4]
    logged = {name for each in points for name in each if name.startswith("rollout/")}
    # The gap to the trainer is there once a loop passes its log-probs to `observe_logprobs`.
    assert logged == {name for name in LOGGED if "logprob_diff" not in name}


@pytest.mark.slow
def test_the_asynchronous_example_goes_on_from_its_checkpoint(nursery: Nursery, tmp_path: Path) -> None:
    flags = ["--quick", "--resume", "--out", str(tmp_path)]
    assert "resumed" not in fork_example(nursery, "async_grpo", tmp_path, *flags)
    again = fork_example(nursery, "async_grpo", tmp_path, *flags)
    assert re.search(r"resumed at step 3 with \d+ groups in flight\nstep   4:", again), again


@pytest.mark.slow
def test_distillation_lowers_the_divergence(nursery: Nursery, tmp_path: Path) -> None:
    out = fork_example(nursery, "distill", tmp_path, "--quick", "--lessons", "40", "--steps", "40")
    found = [float(each) for each in re.findall(r"^step +\d+: reverse KL (\d\.\d{3}) nats", out, re.MULTILINE)]
    assert len(found) == 10, out
    assert sum(found[-3:]) < 0.7 * sum(found[:3]), out


@pytest.mark.slow
@pytest.mark.distributed
def test_the_data_parallel_example_computes_each_token_on_one_of_two_ranks(nursery: Nursery, tmp_path: Path) -> None:
    _assert_all_computed(fork_example(nursery, "data_parallel_grpo", tmp_path, "--quick", ranks=2))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_data_parallel_example_runs_on_workers_of_ray_train(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    # Paths of Ray's sockets may have at most 107 characters.
    with tempfile.TemporaryDirectory() as short:
        environment |= {"RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "data_parallel_grpo.py"), "--quick", "--ray", "2"],
            capture_output=True, text=True, timeout=1200, cwd=tmp_path, check=False, env=environment,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_all_computed(done.stdout)


def _assert_all_computed(out: str) -> None:
    assert "on 2 ranks" in out
    rows = re.findall(r"tokens by rank \[([\d.]+), ([\d.]+)\] → \[([\d.]+), ([\d.]+)\]", out)
    assert len(rows) == 3, out
    for asked_0, asked_1, computed_0, computed_1 in rows:
        assert float(asked_0) + float(asked_1) == float(computed_0) + float(computed_1), out


@pytest.mark.slow
@pytest.mark.distributed
def test_with_accelerate_each_of_two_ranks_keeps_half_of_the_weights(nursery: Nursery, tmp_path: Path) -> None:
    out = fork_example(nursery, "accelerate_fsdp2_grpo", tmp_path, "--quick", ranks=2)
    whole, kept = re.findall(r"parameters: (\S+) MB whole, (\S+) MB on each of 2 ranks", out)[0]
    assert float(kept) == pytest.approx(float(whole) / 2, rel=0.05)
    assert "reward" in out
    assert "policy version 6" in out


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [None, 2])
def test_the_example_without_a_training_loop_answers_alone_and_on_two_ranks(
    ranks: int | None, nursery: Nursery, tmp_path: Path
) -> None:
    if ranks is None:
        out = fork_example(nursery, "offline", tmp_path, "--max-tokens", "4")
        assert re.search(r"\[7, 8, 9\] came in [1-4] pieces, 4 tokens", out), out
        assert out.count("answered after") == 4
    else:
        out = run_example("offline", tmp_path, "--max-tokens", "4", ranks=ranks)
        assert sorted(re.findall(r"rank (\d) computed", out)) == ["0", "1"]
    assert len(re.findall(r"→ \[.*\]  4 tokens", out)) == 8, out


def test_the_model_that_no_engine_knows_is_inspected_sampled_and_trained(nursery: Nursery, tmp_path: Path) -> None:
    out = fork_example(nursery, "own_model", tmp_path, "--quick")
    assert "MISSING" not in out
    assert "served by: the module's own, because GatedModel is none of the families" in out
    assert float(re.findall(r"largest difference of a log-prob (\S+)", out)[-1]) < 1e-5
    assert float(re.findall(r"reward (\d\.\d+)", out)[-1]) > 0.6, out


def test_the_advantages_of_ppo_are_the_discounted_sums_of_surprises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    ppo = importlib.import_module("ppo")
    monkeypatch.setattr(ppo, "GAMMA", 0.9)
    torch.manual_seed(0)
    values, scores = torch.randn(3, 9), torch.tensor([1.0, 0.0, 0.5])
    mask, expected = torch.zeros(3, 9, dtype=torch.bool), torch.zeros(3, 9)
    for row, (start, end) in enumerate([(2, 9), (4, 7), (3, 4)]):
        mask[row, start:end] = True
        for t in range(start, end):
            for k in range(t, end):
                last = k == end - 1
                surprise = (scores[row] if last else 0.9 * values[row, k + 1]) - values[row, k]
                expected[row, t] += (0.9 * ppo.LAMBDA) ** (k - t) * surprise
    torch.testing.assert_close(ppo.estimate_advantages(scores, values, mask), expected)
