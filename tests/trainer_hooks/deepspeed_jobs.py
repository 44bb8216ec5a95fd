"""Jobs of `test_optimizer_hook` on several ranks: DeepSpeed engines step, and the policy version counts."""

from __future__ import annotations

import os
from typing import Any

import torch

from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from tests.engine.weights.weights_jobs import a_manager, loss_of, tokens
from tests.models import greedy, make_model
from trainer_hooks.optimizer import attach

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def _as_launched(rank: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", LOCAL_SIZE="2", DS_ACCELERATOR="cpu",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29599",
    )  # fmt: skip


def engine(rank: int, stage: int, **options: Any) -> Any:
    """DeepSpeed's engine of a small model, with SGD."""
    import deepspeed

    _as_launched(rank)
    model = make_model("llama")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    } | options  # fmt: skip
    made, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, dist_init_required=False
    )
    return made


def _round(stepped: Any, rank: int, manager: RolloutManager, scale: float = 1.0) -> list[int]:
    """Two micro-batches; the version after each."""
    seen = []
    for micro in range(2):
        stepped.backward(loss_of(stepped, rank, micro) * scale)
        stepped.step()
        seen.append(manager.policy_version)
    return seen


def is_prepared(rank: int) -> dict[str, Any]:
    """The same by accelerate, whose backward steps."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from trainer_hooks.accelerate import attach as attach_to_accelerator

    _as_launched(rank)
    config = {"zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "train_micro_batch_size_per_gpu": 2,
              "gradient_accumulation_steps": 2}  # fmt: skip
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=2)
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    # accelerate has DeepSpeed for GPUs only; told that it is on, it goes by it.
    for shared in (PartialState, AcceleratorState):
        shared._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    AcceleratorState._shared_state["deepspeed_plugins"] = {"default": plugin}
    plugin.select(_from_accelerator_state=True)
    model = make_model("llama")
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    versions = []
    with a_manager(model) as manager, attach_to_accelerator(accelerator, manager, checkpoint=False):
        for micro in range(4):
            with accelerator.accumulate(prepared):
                accelerator.backward(loss_of(prepared, rank, micro))
                optimizer.step()
                optimizer.zero_grad()
            versions.append(manager.policy_version)
        manager.generate([[5, 6, 7]], GREEDY)
    return {"versions": versions, "optimizer": type(optimizer).__name__}


def is_stepped(rank: int, stage: int) -> dict[str, Any]:
    """A round, one whose gradients overflow, and another; what is sampled afterwards, beside one process's model."""
    stepped = engine(rank, stage)
    with a_manager(stepped if stage == 3 else stepped.module) as manager:
        attachment = attach(stepped, manager)
        versions = _round(stepped, rank, manager)
        alone = make_model("llama")
        torch.stack([loss_of(alone, each, micro) for each in range(2) for micro in range(2)]).mean().backward()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
        right = tokens(manager.generate([[5, 6, 7]], GREEDY)) == [greedy(alone, [5, 6, 7], 6)]
        versions += _round(stepped, rank, manager, scale=float("inf"))
        skipped = bool(stepped.skipped_steps)
        steps = attachment.steps
        attachment.detach()
        versions += _round(stepped, rank, manager)
    return {"versions": versions, "right": right, "skipped": skipped, "steps": steps}
