"""Tests of the accelerate integration: the version counts optimizer steps, checkpoints include the rollout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

from tests.distributed.job.rank_jobs import Sample
from tests.ranks import run_together
from tests.trainer_hooks.accelerate_jobs import FakeRollout, a_model, is_sharded, is_trained, sgd
from trainer_hooks import optimizer as optimizer_hook
from trainer_hooks.accelerate import attach

ROOT = Path(__file__).parents[2]


@pytest.fixture
def accelerator_of() -> Iterator[Callable[..., Accelerator]]:
    """An Accelerator on the CPU; what it leaves in its classes is taken away."""
    yield lambda **options: Accelerator(cpu=True, **options)
    forget()


def forget() -> None:
    for shared in (AcceleratorState, GradientState, PartialState):
        shared._reset_state()


def micro_step(accelerator: Accelerator, prepared: nn.Module, *optimizers: Any, scale: float = 1.0) -> None:
    with accelerator.accumulate(prepared):
        accelerator.backward((prepared(torch.ones(2, 4)) * scale).sum())
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- the version ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_version_counts_steps_and_not_micro_batches(accelerator_of, accumulation):
    accelerator = accelerator_of(gradient_accumulation_steps=accumulation)
    model = a_model()
    manager = FakeRollout(model)
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    attachment = attach(accelerator, manager, mode="recompute")
    for done in range(1, 9):
        before = manager.weights()
        micro_step(accelerator, prepared, optimizer)
        assert manager.policy_version == attachment.steps == done // accumulation
        assert (manager.weights() != before) == (done % accumulation == 0)
    assert [each[:2] for each in manager.told[::2]] == [("before", "recompute")] * (8 // accumulation)


def test_a_step_that_the_scaler_skips_does_not_count(accelerator_of):
    """accelerate refuses fp16 without a GPU; a scaler put in before `prepare` is used like its own."""
    accelerator = accelerator_of()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = a_model()
    manager = FakeRollout(model)
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    attach(accelerator, manager)
    versions = []
    for scale in (1.0, float("inf"), 1.0):
        micro_step(accelerator, prepared, optimizer, scale=scale)
        versions.append(manager.policy_version)
        assert optimizer.step_was_skipped == (scale != 1.0)
    assert versions == [1, 1, 2]


def test_two_optimizers_of_the_policy_count_and_a_critics_does_not(accelerator_of):
    accelerator = accelerator_of()
    model, critic = a_model(), a_model()
    manager = FakeRollout(model)
    prepared, _, *optimizers = accelerator.prepare(
        model, critic, torch.optim.SGD([model.weight], lr=0.1), sgd(critic), torch.optim.Adam([model.bias])
    )
    attachment = attach(accelerator, manager)
    assert [type(each.optimizer) for each in attachment.optimizers] == [torch.optim.SGD, torch.optim.Adam]
    for _ in range(3):
        micro_step(accelerator, prepared, *optimizers)
    assert manager.policy_version == attachment.steps == 6


# --- saving and loading -----------------------------------------------------------------------------------------------


def test_a_checkpoint_carries_the_rollout_and_it_is_loaded_after_the_weights(accelerator_of, tmp_path):
    def run(steps: int) -> tuple[Accelerator, FakeRollout, Any]:
        accelerator = accelerator_of()
        model = a_model()
        manager = FakeRollout(model)
        prepared, optimizer = accelerator.prepare(model, sgd(model))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer.optimizer)
        accelerator.register_for_checkpointing(schedule)
        attachment = attach(accelerator, manager)
        for _ in range(steps):
            micro_step(accelerator, prepared, optimizer)
        return accelerator, manager, attachment

    accelerator, manager, _ = run(3)
    manager.in_flight = "two groups"
    accelerator.save_state(tmp_path)
    assert (tmp_path / "custom_checkpoint_1_rank_0_of_1.msgpack").exists()
    forget()
    again, fresh, attachment = run(0)
    again.load_state(tmp_path)
    assert (fresh.policy_version, fresh.in_flight) == (3, "two groups")
    assert fresh.loaded_at == manager.weights()
    assert attachment.steps == 0


def test_after_detach_nothing_of_it_is_left(accelerator_of, tmp_path):
    accelerator = accelerator_of()
    model = a_model()
    manager = FakeRollout(model)
    prepared, optimizer = accelerator.prepare(model, sgd(model))
    with pytest.raises(KeyError), attach(accelerator, manager) as attachment:
        raise KeyError
    attachment.detach()
    micro_step(accelerator, prepared, optimizer)
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert manager.told == []
    assert not list(tmp_path.glob("custom_checkpoint*"))
    attach(accelerator, manager)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_copy_of_the_model_is_refused_with_the_cure(accelerator_of):
    accelerator = accelerator_of()
    model = a_model()
    for count in range(2):
        with pytest.raises(
            ValueError, match=rf"none of the {count} optimizers.*call accelerator\.prepare.*not of a copy"
        ):
            attach(accelerator, FakeRollout(copy.deepcopy(model)))
        accelerator.prepare(model, sgd(model))


def test_attaching_twice_is_refused_and_nothing_of_the_second_remains(accelerator_of, tmp_path):
    accelerator = accelerator_of()
    model = a_model()
    manager = FakeRollout(model)
    first, second = torch.optim.SGD([model.weight], lr=0.1), torch.optim.SGD([model.bias], lr=0.1)
    accelerator.prepare(model, first, second)
    by_hand = optimizer_hook.attach(second, manager)
    with pytest.raises(ValueError, match=r"attached to this rollout already"):
        attach(accelerator, manager)
    assert not first._optimizer_step_post_hooks
    accelerator.save_state(tmp_path)
    assert not list(tmp_path.glob("custom_checkpoint*"))
    by_hand.detach()
    attach(accelerator, manager)
    with pytest.raises(ValueError, match=r"attached to this rollout already"):
        attach(accelerator, manager)


# --- several ranks ----------------------------------------------------------------------------------------------------


@pytest.mark.distributed
@pytest.mark.slow
def test_two_ranks_save_and_new_processes_go_on_as_if_nothing_had_happened(nursery, tmp_path):
    folder = str(tmp_path / "saved")
    uninterrupted = run_together(nursery, 2, is_trained, folder=folder, resumes=False)
    resumed = run_together(nursery, 2, is_trained, folder=folder, resumes=True)
    for rank, (one, other) in enumerate(zip(uninterrupted, resumed, strict=True)):
        assert one["version"] == other["version"] == 2
        assert one["in_flight"] == other["in_flight"] == 2 + rank
        assert (one["steps"], other["steps"]) == (3, 1)
        assert one["after"] == other["after"] == 3
        for mine, theirs in zip(other["samples"], one["samples"], strict=True):
            assert_same(mine, theirs)
    rest = [sample for each in resumed for sample in each["samples"][1]]
    assert any(set(sample.versions) == {0, 1, 2, 3} for sample in rest)
    assert any(set(sample.versions) == {3} for sample in rest)


def assert_same(mine: list[Sample], theirs: list[Sample]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert (one.prompt, one.tokens, one.versions) == (other.prompt, other.tokens, other.versions)
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.distributed
@pytest.mark.slow
def test_fsdp2_steps_count_once_and_every_rank_keeps_its_own(nursery, tmp_path):
    answers = run_together(nursery, 2, is_sharded, folder=str(tmp_path / "saved"))
    assert answers == [
        {"saved": 3, "loaded": 3, "in_flight": f"of rank {rank}", "steps": 3} for rank in range(2)
    ]  # fmt: skip
