"""Jobs of `test_accelerate_hook`, each run on every rank as `accelerate launch` does."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

from rollout.config import Advanced, InferenceConfig
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from tests.distributed.job.rank_jobs import samples, the_model
from tests.models import make_tokenizer
from trainer_hooks.accelerate import attach


class FakeRollout:
    """Remembers what it was told with the weights at that time, and the weights when its state was loaded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.policy_version = 0
        self.told: list[object] = []
        self.in_flight = "nothing"
        self.loaded_at: list[float] = []

    def before_optimizer_step(self, mode: object) -> None:
        self.told.append(("before", mode, self.weights()))

    def weights_updated(self) -> None:
        self.policy_version += 1
        self.told.append(("after", self.weights()))

    def metrics(self) -> dict[str, float]:
        return {"rollout/policy_version": float(self.policy_version)}

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.policy_version, "in_flight": self.in_flight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.policy_version, self.in_flight = state["version"], state["in_flight"]
        self.loaded_at = self.weights()

    def weights(self) -> list[float]:
        return [float(parameter.detach().sum()) for parameter in self.model.parameters()]


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def as_launched(rank: int, **options: Any) -> Accelerator:
    """In a rank: what `accelerate launch` would have set, then the Accelerator."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    return Accelerator(cpu=True, **options)


def train(accelerator: Accelerator, prepared: nn.Module, optimizer: Any, seed: int) -> None:
    """One step of two micro-batches, other ones on each rank."""
    for micro in range(2):
        generator = torch.Generator().manual_seed(100 * seed + 10 * micro + accelerator.process_index)
        ids = torch.randint(3, 97, (2, 8), generator=generator)
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(ids).logits.float().log_softmax(-1)[..., 5].mean())
            optimizer.step()
            optimizer.zero_grad()


def a_rollout_of_its_own(model: PreTrainedModel) -> RolloutManager:
    config = InferenceConfig(
        kv_cache_blocks=256, max_requests=16, advanced=Advanced(block_size_tokens=4, verify_model=False)
    )
    return RolloutManager(model, make_tokenizer(), config, coordinator=False)


def is_trained(rank: int, folder: str, resumes: bool) -> dict[str, Any]:
    """Two steps with groups in flight, a checkpoint there, a step more and what is left; or from the checkpoint on."""
    accelerator = as_launched(rank, gradient_accumulation_steps=2)
    assert accelerator.distributed_type is DistributedType.MULTI_CPU
    model = the_model()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    assert type(prepared) is nn.parallel.DistributedDataParallel
    # Every rank for itself: how the ranks would share the work, and so what is in flight, is not the same in every run.
    with a_rollout_of_its_own(model) as manager, attach(accelerator, manager, mode="recompute") as attachment:
        if resumes:
            accelerator.load_state(folder)
        else:
            manager.submit(["long"] * (2 + rank), SamplingParams(n=2, max_tokens=60, ignore_eos=True))
            for step in range(2):
                manager.generate(["short"], SamplingParams(max_tokens=6), min_groups=1, progress=False)
                train(accelerator, prepared, optimizer, step)
            accelerator.save_state(folder)
        saved = {"version": manager.policy_version, "in_flight": manager.groups_in_flight}
        made = [samples(manager.generate(["more"], SamplingParams(max_tokens=6), min_groups=1, progress=False))]
        train(accelerator, prepared, optimizer, 2)
        made.append(samples(manager.generate(["anew"], min_groups=manager.groups_in_flight + 1, progress=False)))
        steps, version = attachment.steps, manager.policy_version
    return saved | {"samples": made, "steps": steps, "after": version}


def is_sharded(rank: int, folder: str) -> dict[str, Any]:
    """accelerate has FSDP2 for GPUs only; told that it is on, it shards over gloo as it would there."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = as_launched(rank, gradient_accumulation_steps=2, fsdp_plugin=plugin)
    for shared in (PartialState, AcceleratorState):
        shared._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    assert accelerator.is_fsdp2
    model = the_model()
    prepared, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    manager = FakeRollout(model)
    manager.in_flight = f"of rank {rank}"
    attachment = attach(accelerator, manager)
    for step in range(3):
        train(accelerator, prepared, optimizer, step)
    accelerator.save_state(folder)
    saved, manager.in_flight = manager.policy_version, "nothing"
    accelerator.load_state(folder)
    return {"saved": saved, "loaded": manager.policy_version, "in_flight": manager.in_flight, "steps": attachment.steps}
