"""Tests of the wandb logger: logged names are those of the metrics table, and it never prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.telemetry import MetricsRecorder
from rollout.observe.metric_table import LOGGED
from rollout.observe.page import AGES
from rollout.requests.request import DynamicInferenceRequest
from rollout.state import FinishReason, Status
from tests.test_metrics import Clock, fill
from tests.trainer_hooks.wandb_runs import point, read_run
from trainer_hooks.wandb import SAMPLE_COLUMNS, WandbLogger

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quiet(monkeypatch, tmp_path):
    """wandb as for a user who has never logged in, with what costs time switched off."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "staged"))
    for name in ("WANDB_SILENT", "WANDB_DISABLE_GIT", "WANDB_DISABLE_CODE", "WANDB_X_DISABLE_STATS"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    return tmp_path


def recorded_everything() -> dict[str, float]:
    clock = Clock()
    recorder = MetricsRecorder(clock)
    fill(recorder, clock)
    return recorder.snapshot()


def test_what_an_offline_run_holds_is_exactly_the_table(quiet):
    with WandbLogger("laws", config={"lr": 1e-3}, directory=quiet, name="offline") as logger:
        logger.log(7, recorded_everything(), {"train/reward": torch.tensor(0.5), "train/lr": np.float32(0.25)})
    run = read_run(quiet)
    (logged,) = (point(history) for history in run["history"])
    assert set(logged) == {*LOGGED, "train/step", "train/reward", "train/lr"}
    assert (logged["train/step"], logged["train/reward"], logged["train/lr"]) == (7, 0.5, 0.25)
    axes = {metric.name or metric.glob_name: metric.step_metric for metric in run["metric"]}
    assert axes == {
        "train/step": "",
        "train/*": "train/step",
        "rollout/*": "train/step",
        "samples/*": "train/step",
    }


def sample_batch() -> RolloutBatch:
    """Three prompts, two samples each: completions of 1 … 6 tokens, all sampled one update ago."""
    return RolloutBatch.from_requests(
        [
            DynamicInferenceRequest(
                request_id=index // 2,
                sample_index=index % 2,
                prompt_tokens=[1, 2],
                generated_tokens=list(range(10, 11 + index)),
                generated_log_probs=[-1.0] * (1 + index),
                generated_text=None if index == 0 else f"text {index}",
                status=Status.COMPLETED,
                finish_reason=FinishReason.STOP,
                policy_version=1,
            )
            for index in range(6)
        ],
        policy_version=2,
        pad_token_id=0,
    )


def test_the_table_shows_samples_from_the_worst_to_the_best(fake):
    logger = WandbLogger("p")
    logger.samples(1, sample_batch(), [5, 4, 3, 2, 1, 0], rows=3)
    table = logger.run.points[0]["samples/table"]
    assert [row["reward"] for row in table] == [0, 2, 5]
    assert [row["length"] for row in table] == [6, 4, 1]
    assert table[0] | {"by_version": ""} == dict(
        zip(SAMPLE_COLUMNS, (1, "text 5", 0.0, 6, "stop", 1.0, ""), strict=True)
    )
    assert f'background:{AGES[1]}" title="version 1, 1 update ago, 6 tokens"' in table[0]["by_version"]
    assert logger.run.points[0]["samples/completion_length"] == [1, 2, 3, 4, 5, 6]


def test_the_page_of_a_run_is_logged_as_it_is(fake, tmp_path):
    (tmp_path / "report.html").write_text("<p>a run</p>", encoding="utf-8")
    logger = WandbLogger("p")
    logger.report(4, tmp_path / "report.html")
    assert logger.run.points[-1] == {"train/step": 4, "samples/report": "<p>a run</p>"}


def test_an_empty_batch_has_no_samples_to_show(fake):
    logger = WandbLogger("p")
    logger.samples(1, RolloutBatch.from_requests([], policy_version=0, pad_token_id=0), [])
    assert logger.run.points == []


def test_rewards_that_are_not_one_per_sample_are_refused(fake):
    with pytest.raises(ValueError, match=r"shape \(5,\) for 6 samples"):
        WandbLogger("p").samples(1, sample_batch(), [0.0] * 5)


class FakeRun:
    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.exit_codes: list[int] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, data: dict[str, Any]) -> None:
        self.points.append(data)

    def finish(self, exit_code: int) -> None:
        self.exit_codes.append(exit_code)


class FakeWandb(SimpleNamespace):
    """The part of wandb the logger meets, without a service behind it."""

    def __init__(self) -> None:
        super().__init__(run=None, asked=None, Histogram=list, Html=lambda text, inject: text)

    def login(self, prompt: bool, verify: bool) -> bool:
        return False

    def init(self, **asked: Any) -> FakeRun:
        self.asked = asked
        return FakeRun()

    def Table(self, columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]


@pytest.fixture
def fake(quiet, monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.mark.parametrize(
    ("environment", "login", "mode"),
    [(None, False, "offline"), (None, True, "online"), ("disabled", True, "disabled"), ("", True, "online")],
)
def test_a_run_is_online_if_there_is_a_login_and_the_environment_allows_it(fake, monkeypatch, environment, login, mode):
    if environment is not None:
        monkeypatch.setenv("WANDB_MODE", environment)
    fake.login = lambda prompt, verify: login
    WandbLogger("p")
    assert fake.asked["mode"] == mode


def test_online_without_a_login_is_refused_instead_of_asking(fake):
    with pytest.raises(ValueError, match=r"wandb login.*mode='offline'"):
        WandbLogger("p", mode="online")
    assert fake.asked is None


def test_a_run_of_somebody_else_is_joined_and_left_open(fake):
    fake.run = FakeRun()
    fake.run.config["seed"] = 1
    fake.run.config = SimpleNamespace(update=lambda values, allow_val_change: fake.run.points.append(values))
    with WandbLogger("p", config={"lr": 0.1}) as logger:
        logger.log(1, {"train/loss": 2.0})
    assert fake.asked is None
    assert fake.run.points == [{"lr": 0.1}, {"train/step": 1, "train/loss": 2.0}]
    assert fake.run.exit_codes == []


def test_a_block_that_raises_ends_the_run_as_failed(fake):
    with pytest.raises(RuntimeError), WandbLogger("p") as logger:
        raise RuntimeError
    assert logger.run.exit_codes == [1]


def test_a_name_that_is_not_in_the_table_is_refused_with_the_nearest(fake):
    logger = WandbLogger("p")
    with pytest.raises(KeyError, match="rollout/preemptions"):
        logger.log(1, {"rollout/preemption": 1})
    assert logger.run.points == []


@pytest.mark.parametrize("again", [{"train/loss": 2.0}, {"train/step": 3}])
def test_a_name_that_comes_twice_is_refused(fake, again):
    logger = WandbLogger("p")
    with pytest.raises(ValueError, match="comes twice"):
        logger.log(1, {"train/loss": 1.0}, again)
