"""Tests of the examples: each runs from its command line, small, and writes its picture."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rollout import Advanced, InferenceConfig, RolloutManager
from rollout.observe.metric_table import LOGGED
from tests.distributed.job.nursery import Nursery
from tests.example_runs import fork_example, run_example
from tests.trainer_hooks.wandb_runs import point, read_run

ROOT = Path(__file__).parent.parent
EXAMPLES = ["grpo", "partial_rollouts", "ppo", "async_grpo", "lora_grpo", "multi_turn_grpo"]
FLAGS = {"grpo": ["--report"], "partial_rollouts": ["--discard", "4"], "async_grpo": ["--resume"]}
WITH_SAMPLES = ["grpo", "ppo", "async_grpo"]
"""Those that log tables of sample rollouts."""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """One of its own: what examples import is more than what ranks do."""
    nursery = Nursery("tests.example_imports")
    try:
        yield nursery
    finally:
        nursery.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_runs_leaves_a_picture_and_logs_the_whole_table_of_metrics(
    name: str, nursery: Nursery, tmp_path: Path
) -> None:
    flags = ["--quick", "--out", str(tmp_path), *FLAGS.get(name, [])]
    # One by its command line; the others spare the imports.
    out = run_example(name, tmp_path, *flags) if name == "grpo" else fork_example(nursery, name, tmp_path, *flags)
    assert "held-out" in out
    assert (tmp_path / "log" / "report.html").is_file() is (name == "grpo")
    pictures = list(tmp_path.glob("*.png"))
    assert pictures, "no picture"
    assert pictures[0].stat().st_size > 10_000
    points = [point(history) for history in read_run(tmp_path)["history"]]
    steps = [each["train/step"] for each in points if "train/reward" in each]
    assert steps == list(range(1, len(steps) + 1))
    logged = set().union(*points)
    assert {each for each in logged if each.startswith("rollout/")} == set(LOGGED)
    assert {"train/reward", "train/loss", "train/held_out"} <= logged
    assert ({"samples/table", "samples/completion_length"} <= logged) is (name in WITH_SAMPLES)
    if "--resume" in flags:
        assert "supervised steps" in out
        again = fork_example(nursery, name, tmp_path, *flags)
        assert re.search(r"resumed at step 3 with \d+ groups in flight", again), again
        assert "supervised steps" not in again


@pytest.mark.slow
def test_the_example_with_images_encodes_a_drawing_once_for_its_samples(nursery: Nursery, tmp_path: Path) -> None:
    out = fork_example(nursery, "vlm_grpo", tmp_path, "--quick", "--out", str(tmp_path))
    encoded = re.findall(r"(\d+) drawings encoded for 64 samples", out)
    assert len(encoded) == 2, out
    assert int(encoded[-1]) <= 4
    assert list(tmp_path.glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [("serve", "answers over HTTP from versions"), ("agent_over_http", "reward, first")]
)
def test_the_example_over_http_runs(name: str, words: str, nursery: Nursery, tmp_path: Path) -> None:
    assert words in fork_example(nursery, name, tmp_path, "--quick")


@pytest.mark.slow
def test_the_example_of_distillation_scores_under_its_teacher_and_lowers_the_divergence(
    nursery: Nursery, tmp_path: Path
) -> None:
    out = fork_example(nursery, "distill", tmp_path, "--quick", "--lessons", "40", "--steps", "40")
    found = [float(each) for each in re.findall(r"^step +\d+: reverse KL (\d\.\d{3}) nats", out, re.MULTILINE)]
    assert len(found) == 10, out
    assert sum(found[-3:]) < 0.7 * sum(found[:3]), out
    assert re.search(r"student: \d\.\d\d → \d\.\d\d right, teacher \d\.\d\d", out), out


@pytest.mark.slow
def test_the_example_with_verifiers_trains_on_the_tokens_and_log_probs_that_were_sampled(
    nursery: Nursery, tmp_path: Path
) -> None:
    pytest.importorskip("verifiers.v1", exc_type=ImportError)
    out = fork_example(nursery, "verifiers_grpo", tmp_path, "--quick")
    rows = re.findall(r"^ +(\d+) +[01]\.\d\d █* *(\d+)  (\de[-+]\d\d)  \d", out, re.MULTILINE)
    assert [number for number, *_ in rows] == ["1", "2"], out
    assert all(int(tokens) > 0 and float(difference) < 1e-4 for _, tokens, difference in rows), out
    assert "held-out, sampled" in out


@pytest.mark.slow
def test_the_example_with_trls_own_trainer_runs_and_leaves_a_picture(nursery: Nursery, tmp_path: Path) -> None:
    assert "held-out" in fork_example(nursery, "trl_grpo", tmp_path, "--quick", "--out", str(tmp_path))
    assert [each for each in tmp_path.glob("*.png") if each.stat().st_size > 10_000]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_data_parallel_example_runs_on_two_ranks_and_shows_the_balance(nursery: Nursery, tmp_path: Path) -> None:
    out = fork_example(nursery, "data_parallel_grpo", tmp_path, "--quick", "--out", str(tmp_path), ranks=2)
    assert "on 2 ranks" in out
    assert "tokens asked → computed by rank, max/mean" in out
    rows = re.findall(r"([\d,]+) ([\d,]+) → ([\d,]+) ([\d,]+)  \d\.\d\d → \d\.\d\d", out)
    assert rows, out
    pictures = list(tmp_path.glob("*.png"))
    assert pictures, "no picture"
    assert pictures[0].stat().st_size > 10_000
    assert list(tmp_path.rglob("*.wandb")), "wandb has written nothing"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(1300)
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_data_parallel_example_runs_on_workers_of_ray_train(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    # Of Ray's sockets, whose paths may have 107 characters.
    with tempfile.TemporaryDirectory() as short:
        environment |= {"WANDB_MODE": "offline", "RAY_TMPDIR": short, "RAY_AUTH_MODE": "disabled"}
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "ray_grpo.py"), "--quick", "--out", "out"],
            capture_output=True, text=True, timeout=1200, cwd=tmp_path, check=False,
            env=environment | {"RAY_USAGE_STATS_ENABLED": "0"},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 ranks" in done.stdout
    computed = re.findall(r"→ ([\d,]+) ([\d,]+)  \d\.\d\d → \d\.\d\d", done.stdout)
    assert computed, done.stdout
    assert (tmp_path / "out" / "seed-0.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_with_accelerate_runs_on_two_ranks_and_each_keeps_half_of_the_weights(
    nursery: Nursery, tmp_path: Path
) -> None:
    out = fork_example(nursery, "accelerate_fsdp2_grpo", tmp_path, "--quick", "--out", str(tmp_path), ranks=2)
    assert "sharded over 2 ranks" in out
    whole, kept = re.findall(r"parameters: (\S+) MB whole, (\S+) MB on this rank", out)[0]
    assert float(kept) == pytest.approx(float(whole) / 2, rel=0.05)
    assert list(tmp_path.glob("*.png")), "no picture"
    assert list(tmp_path.rglob("*.wandb")), "wandb has written nothing"


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [None, 2])
def test_the_example_without_a_training_loop_answers_alone_and_on_two_ranks(
    ranks: int | None, nursery: Nursery, tmp_path: Path
) -> None:
    if ranks is None:
        out = fork_example(nursery, "offline", tmp_path, "--max-tokens", "4")
        assert re.search(r"7\+8= came in [1-4] pieces", out), out
        assert out.count("answered after") == 4
    else:
        out = run_example("offline", tmp_path, "--max-tokens", "4", ranks=ranks)
        assert sorted(re.findall(r"rank (\d) computed", out)) == ["0", "1"]
    assert out.count("tokens, ") == 8


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize(
    "truncated", [{"top_p": 0.5, "top_k": 0}, {"top_p": 1.0, "top_k": 3}, {"top_p": 1.0, "top_k": 0}], ids=str
)
def test_the_ratio_of_the_first_step_is_one_also_where_sampling_is_truncated(
    name: str, truncated: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probs of the whole vocabulary would differ by those of the mass cut off, here by more than half a nat."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example, arithmetic, policy = map(importlib.import_module, (name, "arithmetic", "policy"))
    tokenizer = policy.character_tokenizer()
    model = policy.small_model(tokenizer, max_length=64, seed=0).cpu()
    problems = arithmetic.Problems(arithmetic.sums(), held_out=4, seed=0)
    options = argparse.Namespace(steps=1, prompts=4, lr=1e-3, **truncated)
    subject = example.ActorCritic(model) if name == "ppo" else model
    config = InferenceConfig(kv_cache_blocks=64, max_requests=32, advanced=Advanced(verify_model=False))
    values = subject.value_head if name == "ppo" else None
    with RolloutManager(model, tokenizer, config, token_values=values) as rollout:
        batch = next(getattr(example, name)(subject, rollout, problems, options)).batch
        # Observed before the first update.
        assert rollout.metrics()["rollout/logprob_diff_max"] < 1e-5
        sets = batch.kept_tokens
        assert (sets is None) is (truncated == {"top_p": 1.0, "top_k": 0})
        if sets is not None:
            sizes = sets.counts[batch.response_mask]
            assert 1 <= sizes.min() <= sizes.max() < 0.8 * len(tokenizer)


def test_the_model_that_no_engine_knows_is_inspected_sampled_and_trained(nursery: Nursery, tmp_path: Path) -> None:
    out = fork_example(nursery, "own_model", tmp_path, "--quick")
    assert "MISSING" not in out
    assert "served by: the module's own, because GatedModel is none of the families" in out
    assert float(re.findall(r"largest difference of a log-prob (\S+)", out)[-1]) < 1e-5
    assert float(re.findall(r"reward (\d\.\d+)", out)[-1]) > 0.6, out


def test_values_that_ppo_samples_are_those_of_its_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    ppo, policy = map(importlib.import_module, ("ppo", "policy"))
    tokenizer = policy.character_tokenizer()
    subject = ppo.ActorCritic(policy.small_model(tokenizer, max_length=64, seed=0).cpu())
    torch.nn.init.normal_(subject.value_head.weight, std=0.1)
    config = InferenceConfig(kv_cache_blocks=64, advanced=Advanced(verify_model=False))
    with RolloutManager(subject.policy, tokenizer, config, token_values=subject.value_head) as rollout:
        batch = rollout.generate(["1+2=", "34+5="], n=3, max_tokens=9, progress=False)
    assert batch.token_values is not None
    with torch.no_grad():
        _, values = subject(batch, torch.arange(len(batch)))
    torch.testing.assert_close(
        batch.token_values[..., 0][batch.response_mask], values[batch.response_mask], atol=1e-5, rtol=0
    )


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


def test_the_grpo_loop_stays_under_forty_lines() -> None:
    lines = (ROOT / "examples" / "grpo.py").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("def grpo("))
    end = next(number for number, line in enumerate(lines[start + 1 :], start + 1) if line.startswith("def "))
    loop = [line for line in lines[start:end] if line.strip()]
    assert len(loop) < 40, f"{len(loop)} lines"
