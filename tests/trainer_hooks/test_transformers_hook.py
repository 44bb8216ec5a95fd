"""Tests of the Trainer callback: versions count optimizer steps, logs have metrics, checkpoints have the rollout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState

from rollout.manager.manager import RolloutManager
from rollout.observe.metric_table import LOGGED
from rollout.sampling_params import SamplingParams
from tests.distributed.job.rank_jobs import samples
from tests.models import make_tokenizer
from tests.rollouts import make_rollout
from tests.trainer_hooks.transformers_jobs import Watching, a_trainer, small, tiny
from trainer_hooks.transformers import RolloutCallback

ROOT = Path(__file__).parents[2]
CHECKPOINTS = {"save_strategy": "steps", "save_steps": 2}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny()


@pytest.fixture
def manager(model: PreTrainedModel) -> Iterator[RolloutManager]:
    with make_rollout(model, make_tokenizer()) as manager:
        yield manager


def hooks(trainer: Trainer) -> int:
    return len(trainer.optimizer.optimizer._optimizer_step_post_hooks)


# --- the version ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_version_counts_steps_and_the_hooks_go_with_the_training(model, manager, tmp_path, accumulation):
    callback, watching = RolloutCallback(manager), Watching(manager)
    options = {"gradient_accumulation_steps": accumulation, "max_grad_norm": 0.1}
    trainer = a_trainer(model, tmp_path, callback, watching, **options)
    trainer.train()
    assert watching.versions == [1, 2, 3, 4]
    assert callback.attachment is None
    assert hooks(trainer) == 0
    trainer.train()
    assert watching.versions[4:] == [5, 6, 7, 8]


class Breaks(TrainerCallback):
    """Raises after a step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        raise KeyboardInterrupt


def test_after_an_exception_the_next_training_takes_over_and_a_with_block_detaches(model, manager, tmp_path):
    callback, breaks = RolloutCallback(manager), Breaks()
    trainer = a_trainer(model, tmp_path, callback, breaks)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert hooks(trainer) == 1
    trainer.remove_callback(breaks)
    trainer.train()
    assert manager.policy_version == 5
    assert hooks(trainer) == 0
    trainer.add_callback(breaks)
    with pytest.raises(KeyboardInterrupt), callback:
        trainer.train()
    assert hooks(trainer) == 0


def test_weights_that_the_trainer_brings_back_at_the_end_are_a_version_more(model, manager, tmp_path):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    a_trainer(model, tmp_path, RolloutCallback(manager), **options, **CHECKPOINTS).train()
    assert manager.policy_version == 5


# --- logs -------------------------------------------------------------------------------------------------------------


class Hearing(TrainerCallback):
    """A reporter that comes after the rollout's callback."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append(dict(logs))


def test_metrics_join_the_logs_once_per_step_and_an_evaluation_takes_none_away(model, manager, tmp_path):
    hearing = Hearing()
    callbacks = [Watching(manager, samples=True), RolloutCallback(manager), hearing]
    trainer = a_trainer(model, tmp_path, *callbacks, logging_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    ours = [{name: value for name, value in log.items() if name in LOGGED} for log in hearing.logs]
    assert [("loss" in log, bool(metrics)) for log, metrics in zip(hearing.logs, ours, strict=True)] == [
        (False, False), (True, True), (False, False), (False, False), (True, True), (False, False), (False, False),
    ]  # fmt: skip
    assert [metrics["rollout/requests_finished"] for metrics in ours if metrics] == [2, 2]
    assert [metrics["rollout/policy_version"] for metrics in ours if metrics] == [2, 4]
    kept = [entry for entry in trainer.state.log_history if "rollout/policy_version" in entry]
    assert [entry["step"] for entry in kept] == [2, 4]
    assert all("loss" in entry for entry in kept)


def test_wandb_gets_them_under_their_own_names_on_the_trainers_axis(model, manager, tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    points: list[dict[str, Any]] = []
    with wandb.init(project="test", dir=str(tmp_path)) as run:
        log = run.log
        monkeypatch.setattr(wandb, "log", lambda point: (points.append(dict(point)), log(point)))
        callbacks = [Watching(manager, samples=True), RolloutCallback(manager)]
        trainer = a_trainer(model, tmp_path, *callbacks, logging_steps=2, report_to=["wandb"])
        trainer.train()
        assert run.summary["rollout/policy_version"] == 4
    ours = [point for point in points if "rollout/policy_version" in point]
    assert [(point["train/global_step"], point["rollout/policy_version"]) for point in ours] == [(2, 2), (4, 4)]
    assert set().union(*ours) - set(LOGGED) == {"train/global_step"}
    assert not any(name.startswith("train/rollout") for point in points for name in point)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def run(folder: Path, resume: str | bool | None = None, stop_at: int = 4, **callback: Any) -> dict[str, Any]:
    """A Trainer with groups in flight from one step to the next; all of it new."""
    model = small()
    with make_rollout(model, make_tokenizer()) as manager:
        if resume is None:
            manager.submit(["long"] * 2, SamplingParams(n=2, max_tokens=60, ignore_eos=True))
        watching = Watching(manager, samples=True)
        ours = RolloutCallback(manager, mode="recompute", **callback)
        trainer = a_trainer(model, folder, watching, ours, Stop(stop_at), **CHECKPOINTS)
        trainer.train(resume_from_checkpoint=resume)
        rest = manager.generate([], min_groups=manager.groups_in_flight)
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"versions": watching.versions, "short": watching.made, "long": samples(rest), "weights": weights}


class Stop(TrainerCallback):
    """Ends the training early."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step == self.step
        return control


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of four steps, with checkpoints after two and four."""
    folder = tmp_path_factory.mktemp("trainer")
    return folder, run(folder)


def copy_of(folder: Path, there: Path, *checkpoints: str) -> Path:
    for name in checkpoints:
        shutil.copytree(folder / name, there / name)
    return there


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(uninterrupted, tmp_path):
    folder, expected = uninterrupted
    resumed = run(copy_of(folder, tmp_path, "checkpoint-2"), resume=True)
    assert expected["versions"] == [1, 2, 3, 4]
    assert resumed["versions"] == [3, 4]
    assert resumed["short"] == expected["short"][2:]
    assert resumed["long"] == expected["long"]
    assert {version for sample in resumed["long"] for version in sample.versions} == {0, 1, 2, 3, 4}
    for name, value in expected["weights"].items():
        assert torch.equal(resumed["weights"][name], value), name


def test_a_folder_elsewhere_is_asked_for_and_taken_when_it_is_the_one(uninterrupted, tmp_path):
    folder, expected = uninterrupted
    elsewhere = copy_of(folder, tmp_path / "elsewhere", "checkpoint-2", "checkpoint-4")
    here = copy_of(folder, tmp_path / "here", "checkpoint-2")
    path = here / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    # A checkpoint of another run with the same name.
    state["log_history"][0]["loss"] += 1
    path.write_text(json.dumps(state))
    resume, other = str(elsewhere / "checkpoint-2"), elsewhere / "checkpoint-4"
    with pytest.raises(ValueError, match=r"resumes at step 2, and none of .*resume_from_checkpoint=FOLDER"):
        run(here, resume=resume, resume_from_checkpoint=other)
    assert run(here, resume=resume, resume_from_checkpoint=resume)["long"] == expected["long"]


def test_a_checkpoint_without_a_rollout_is_refused_unless_none_is_wanted(uninterrupted, tmp_path):
    folder, _ = uninterrupted
    copy_of(folder, tmp_path, "checkpoint-2")
    (tmp_path / "checkpoint-2" / "rollout_rank_0_of_1.msgpack").unlink()
    with pytest.raises(FileNotFoundError, match=r"it holds no state of a rollout.*checkpoint=False"):
        run(tmp_path, resume=True)
    assert run(tmp_path, resume=True, stop_at=3, checkpoint=False)["versions"] == [1]
    assert not list(tmp_path.glob("*/rollout_rank*"))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_another_model_than_the_trainers_is_refused_with_the_cure(model, tmp_path):
    with make_rollout(tiny()) as manager:
        trainer = a_trainer(model, tmp_path, RolloutCallback(manager))
        with pytest.raises(ValueError, match=r"none of them belongs to the LlamaForCausalLM that samples"):
            trainer.train()
        assert hooks(trainer) == 0


def test_the_file_of_a_rank_has_its_number_and_the_size_of_the_job(manager, tmp_path):
    callback, state = RolloutCallback(manager), TrainerState(global_step=2)
    callback.attachment = object()
    callback.on_save(SimpleNamespace(output_dir=tmp_path, process_index=1, world_size=2), state, None)
    assert (tmp_path / "checkpoint-2" / "rollout_rank_1_of_2.msgpack").exists()
    callback.attachment = None
