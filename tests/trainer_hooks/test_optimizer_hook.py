"""Tests of the optimizer hooks: the policy version counts each step that changed the weights, and no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from rollout.errors import ConfigError
from tests.ranks import run_together
from tests.trainer_hooks import deepspeed_jobs, generate_jobs
from tests.trainer_hooks.accelerate_jobs import FakeRollout, a_model
from trainer_hooks.optimizer import attach


@pytest.fixture
def model() -> nn.Module:
    return a_model()


@pytest.fixture
def manager(model: nn.Module) -> FakeRollout:
    return FakeRollout(model)


def backward(model: nn.Module, scale: float = 1.0) -> torch.Tensor:
    loss = (model(torch.ones(2, 4)) * scale).sum()
    loss.backward()
    return loss


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
    ],
)
def test_every_step_counts_once_between_the_two_calls(model, manager, make):
    optimizer = make(model.parameters())
    attachment = attach(optimizer, manager)
    start = manager.weights()
    backward(model)
    optimizer.step()
    assert manager.told == [("before", None, start), ("after", manager.weights())]
    assert manager.weights() != start
    for _ in range(3):
        optimizer.step()
    assert (manager.policy_version, attachment.steps) == (4, 4)


class WithoutGradients(torch.optim.SGD):
    """Evolution strategies step without gradients."""

    def step(self, closure=None):
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(0.1)


def test_a_step_without_gradients_is_no_update_unless_the_optimizer_may_do_without(model, manager):
    """It raised the version, and with it emptied the prefix cache."""
    start = manager.weights()
    for make in (torch.optim.SGD, torch.optim.AdamW):
        optimizer = make(model.parameters(), lr=0.1)
        with attach(optimizer, manager) as attachment:
            optimizer.step()
            optimizer.step()
        assert (manager.told, attachment.steps, manager.weights()) == ([], 0, start)
    other = WithoutGradients(model.parameters(), lr=0.1)
    with attach(other, manager):
        other.step()
    assert [each[0] for each in manager.told] == ["before", "after"]
    backward(model)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    with attach(still, manager):
        still.step()
    assert len(manager.told) == 4


def test_a_closure_evaluated_many_times_is_one_step(model, manager):
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    evaluations = []

    def closure() -> torch.Tensor:
        evaluations.append(1)
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    attach(optimizer, manager)
    optimizer.step(closure)
    assert len(evaluations) > 1
    assert manager.policy_version == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
        lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    ],
)
def test_a_step_skipped_for_an_infinite_gradient_does_not_count(model, manager, make):
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attach(optimizer, manager)
    versions = []
    for scale in (1.0, float("inf"), 1.0, float("inf")):
        before = manager.weights()
        optimizer.zero_grad()
        scaler.scale((model(torch.ones(2, 4)) * scale).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        versions.append(manager.policy_version)
        assert (manager.weights() != before) == (scale == 1.0)
    optimizer.zero_grad()
    backward(model)
    # Without the scaler, whose `found_inf` must not be left.
    optimizer.step()
    assert [*versions, manager.policy_version] == [1, 1, 2, 2, 3]


def test_a_step_that_raises_does_not_count_and_the_next_one_does(model, manager):
    class Flaky(torch.optim.SGD):
        broken = True

        def step(self, closure=None):
            if self.broken:
                raise RuntimeError("device lost")
            return super().step(closure)

    optimizer = Flaky(model.parameters(), lr=0.1)
    attachment = attach(optimizer, manager)
    with pytest.raises(RuntimeError, match="device lost"):
        optimizer.step()
    assert (manager.policy_version, attachment.steps) == (0, 0)
    optimizer.broken = False
    optimizer.step()
    assert (manager.policy_version, attachment.steps) == (1, 1)


def test_a_subclass_that_calls_the_step_of_its_parent_counts_once_and_at_its_end(model, manager):
    """torch hooks `step` of every class that was ever built, so that both levels of a subclass call the hooks: counted
    naively, the version moved twice, and the first time before the subclass had done its own change."""

    class Decaying(torch.optim.SGD):
        def step(self, closure=None):
            loss = super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    torch._foreach_mul_(group["params"], 0.5)
            return loss

    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Decaying(model.parameters(), lr=0.1)
    attach(optimizer, manager)
    start = manager.weights()
    backward(model)
    optimizer.step()
    assert manager.told == [("before", None, start), ("after", manager.weights())]


def test_the_empty_step_that_fills_a_fresh_optimizers_state_does_not_count(model, manager):
    """torch.distributed.checkpoint steps with a learning rate of 0 to have a state to save or to load into: with FSDP2,
    accelerate's first save_state moved the version."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    attach(optimizer, manager)
    saved = get_optimizer_state_dict(model, optimizer)
    assert optimizer.state
    optimizer.state.clear()
    set_optimizer_state_dict(model, optimizer, saved)
    assert manager.told == []
    backward(model)
    optimizer.step()
    assert manager.policy_version == 1


def test_a_compiled_step_counts(model, manager):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(optimizer, manager)
    step = torch.compile(optimizer.step, backend="eager")
    for expected in (1, 2):
        backward(model)
        step()
        assert manager.policy_version == expected


def test_a_rollout_that_cannot_stop_keeps_the_weights_from_moving(model, manager):
    def refuse(mode: object) -> None:
        raise RuntimeError("a forward is running")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager.before_optimizer_step = refuse
    attach(optimizer, manager)
    start = manager.weights()
    backward(model)
    with pytest.raises(RuntimeError, match="a forward is running"):
        optimizer.step()
    assert manager.weights() == start
    assert manager.policy_version == 0


def test_a_with_block_detaches_also_after_an_exception(model, manager):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(KeyError), attach(optimizer, manager):
        raise KeyError
    optimizer.step()
    assert manager.policy_version == 0


def test_a_pair_is_attached_once_and_again_after_detach_and_an_optimizer_to_two_rollouts(model, manager):
    backward(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = attach(optimizer, manager)
    with pytest.raises(ValueError, match=r"attached to this rollout already.*detach\(\)"):
        attach(optimizer, manager)
    first.detach()
    attach(optimizer, manager)
    other = FakeRollout(model)
    attach(optimizer, other)
    optimizer.step()
    assert (manager.policy_version, other.policy_version) == (1, 1)


def test_an_optimizer_that_steps_a_part_of_the_model_is_accepted(model, manager):
    backward(model)
    optimizer = torch.optim.SGD([model.bias, nn.Parameter(torch.zeros(1))], lr=0.1)
    attach(optimizer, manager)
    optimizer.step()
    assert manager.policy_version == 1


def test_what_cannot_be_attached_is_refused_with_the_cure(model, manager):
    critic = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"steps 2 parameters.*Linear.*Pass the policy's optimizer"):
        attach(critic, manager)
    for nothing in (None, object(), nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="pass the torch optimizer"):
            attach(nothing, manager)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"mode='sleep'.*'persist', 'offload', 'recompute'"):
        attach(optimizer, manager, mode="sleep")
    assert not optimizer._optimizer_step_pre_hooks


# --- DeepSpeed --------------------------------------------------------------------------------------------------------


class FakeZero:
    """Shaped as DeepSpeed's optimizers: steps a flat copy by the torch optimizer inside, and skips by itself."""

    def __init__(self, model: nn.Module) -> None:
        self.bit16_groups = [list(model.parameters())]
        self.flat = nn.Parameter(torch.cat([each.detach().flatten() for each in model.parameters()]))
        self.optimizer = torch.optim.SGD([self.flat], lr=0.1)
        self.param_groups = self.optimizer.param_groups
        self.overflow = False

    def step(self, closure: object = None) -> None:
        grad = torch.cat([each.grad.flatten() for each in self.bit16_groups[0] if each.grad is not None])
        self.overflow = not bool(grad.isfinite().all())
        if self.overflow:
            return
        self.flat.grad = grad
        self.optimizer.step()
        with torch.no_grad():
            start = 0
            for each in self.bit16_groups[0]:
                each.copy_(self.flat[start : start + each.numel()].view(each.shape))
                start += each.numel()


FakeZero.__module__ = "deepspeed.runtime.zero.stage_1_and_2"


def test_deepspeeds_own_step_counts_and_not_those_of_the_optimizer_in_it_nor_a_skipped_one(model, manager):
    zero = FakeZero(model)
    attachment = attach(SimpleNamespace(optimizer=zero), manager)
    start = manager.weights()
    backward(model)
    zero.step()
    assert manager.told == [("before", None, start), ("after", manager.weights())]
    assert manager.weights() != start
    backward(model, scale=float("inf"))
    zero.step()
    assert (attachment.steps, manager.policy_version, len(manager.told)) == (1, 1, 3)


def test_a_deepspeed_optimizer_is_given_back_and_tells_several_rollouts_each_once(model, manager):
    zero, other = FakeZero(model), FakeRollout(model)
    backward(model)
    with attach(zero, manager):
        with pytest.raises(ValueError, match="attached to this rollout already"):
            attach(zero, manager)
        with attach(zero, other):
            zero.step()
        zero.step()
    zero.step()
    assert (manager.policy_version, other.policy_version) == (2, 1)
    assert "step" not in vars(zero)


def test_a_deepspeed_optimizer_that_cannot_be_followed_is_refused_by_name_with_the_cure(model, manager):
    critic, unknown = FakeZero(nn.Linear(4, 1)), FakeZero(model)
    with pytest.raises(ValueError, match=r"FakeZero steps 2 parameters.*with DeepSpeed, pass its engine"):
        attach(critic, manager)
    del unknown.bit16_groups
    with pytest.raises(TypeError, match=r"DeepSpeed's FakeZero.*manager.weights_updated\(\) after every engine.step"):
        attach(unknown, manager)


@pytest.mark.distributed
@pytest.mark.slow
def test_deepspeed_engines_of_every_stage_count_the_steps_they_made(nursery):
    """The engines that `FakeZero` replaces; also through accelerate."""
    pytest.importorskip("deepspeed")
    for stage in (1, 2, 3):
        for answer in run_together(nursery, 2, deepspeed_jobs.is_stepped, stage=stage):
            assert answer == {"versions": [0, 1, 1, 1, 1, 1], "right": True, "skipped": True, "steps": 1}
    for answer in run_together(nursery, 2, deepspeed_jobs.is_prepared):
        assert answer == {"versions": [0, 1, 1, 2], "optimizer": "DeepSpeedOptimizerWrapper"}
    for answer in run_together(nursery, 2, generate_jobs.generates_under_zero_3):
        assert answer == {"equal": [True] * 3, "version": 2, "served": 3}


def test_a_hook_imports_its_own_framework_alone():
    program = (
        "import sys, trainer_hooks.wandb\n"
        "assert not {'wandb', 'torch'} & set(sys.modules)\n"
        "import trainer_hooks.accelerate\n"
        "assert not {'transformers', 'trl', 'peft', 'wandb', 'rollout.manager.manager'} & set(sys.modules)\n"
        "import trainer_hooks.transformers\n"
        "assert not {'transformers.trainer', 'trl', 'wandb', 'rollout.manager.manager'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)
