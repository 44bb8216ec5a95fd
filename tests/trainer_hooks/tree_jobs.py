"""Jobs of `test_tree_hook`, each run on two ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rollout.manager.batch.batch import RolloutBatch
from tests.engine.weights.weights_jobs import sharded
from tests.models import make_model
from tests.trees import loss_of, make_batch, padded_logprobs, tree_logprobs
from trainer_hooks.tree import attach


def gradients(rank: int) -> dict[str, dict[str, list[float]]]:
    """Averaged gradients under each wrapper, by the padded batch and by the tree; a batch of its own on each rank."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    batch, answer = make_batch(seed=rank), {}
    wrappers: dict[str, Any] = {
        "DDP": DistributedDataParallel,
        "accelerate": Accelerator(cpu=True).prepare,
        "FSDP2": sharded,
    }
    for wrapper, wrap in wrappers.items():
        model = make_model("llama", num_hidden_layers=2)
        model.gradient_checkpointing_enable()
        attach(model)
        wrapped = wrap(model)
        answer[wrapper] = {
            "padded": _gradient(wrapped, batch, padded_logprobs),
            "tree": _gradient(wrapped, batch, tree_logprobs),
        }
    return answer


def _gradient(wrapped: nn.Module, batch: RolloutBatch, logprobs_of: Any) -> list[float]:
    wrapped.zero_grad()
    loss_of(logprobs_of(wrapped, batch)).backward()
    parts = [each.grad for each in wrapped.parameters()]
    return torch.cat([(each.full_tensor() if isinstance(each, DTensor) else each).flatten() for each in parts]).tolist()
