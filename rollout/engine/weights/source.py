"""The choice of the engine's weight source: the module itself, a gathered module, or a copy.

    plain module, DDP, autocast    shared: the engine uses the tensors that the optimizer updates
    tensor parallel (DTensors)     shared: every rank of the group computes with its shard (which FSDP2 may also gather)
    FSDP2, ZeRO-3                  gathered: the weights are whole while the engine generates; there is no second copy
    another dtype or device        copied: on request, a second module is created, and refreshed once after each update

Always true: a source's method `release()` restores its module `trained` for the trainer. If a source is `collective`,
either every rank calls its `gather()` or none does. DeepSpeed is imported only for a model that it partitions.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollout.engine.weights.base import GatheredWeights, Weights
from rollout.engine.weights.copied import CopiedWeights
from rollout.engine.weights.fsdp import ShardedWeights
from rollout.engine.weights.tensor_parallel import tensor_parallel_mesh
from rollout.errors import EngineStateError, UnsupportedModelError


def weights_of(model: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Weights:
    """Choose the weight source for a model, after removing the wrappers of DDP and torch.compile.

    Args:
        model: the module that the trainer calls.
        dtype: dtype of a separate copy to sample with. If None, the copy has the model's dtype.
        device: device of the copy. If None, the copy is on the model's device. If both are None, there is no copy.

    Raises:
        UnsupportedModelError: the weights are sharded in a way that cannot be gathered.
    """
    copied = dtype is not None or device is not None
    source = _source(_unwrapped(model))
    if not copied:
        return source
    if source.tensor_parallel_mesh is not None:
        raise UnsupportedModelError(
            f"{type(source.trained).__name__} is tensor-parallel, and no copy of it in another dtype or on another device "
            "is made: leave InferenceConfig.inference_dtype and inference_device out"
        )
    return CopiedWeights(source, dtype, device)


def fully_sharded_since(weights: Weights) -> bool:
    """Return whether `fully_shard` was applied to the model after this weight source was chosen."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if weights.collective or fsdp is None:
        return False
    return any(isinstance(module, fsdp.FSDPModule) for module in weights.trained.modules())


def refuse_sharded_since(weights: Weights) -> None:
    """Check that the weights were not sharded after this weight source was chosen.

    Raises:
        EngineStateError: the weights were sharded. The message names the first sharded parameter or module.
    """
    if weights.collective or not (dist.is_available() and dist.is_initialized()):
        return
    model, split = weights.trained, weights.tensor_parallel_mesh is not None
    shards = [n for n, p in model.named_parameters() if hasattr(p, "ds_id") or (hasattr(p, "to_local") and not split)]
    # Look for the attribute that FSDP1 and FSDP2 both set: FSDP1's wrapper may enclose the model and is then not found.
    shards += [n or "it" for n, m in model.named_modules() if getattr(m, "_is_fsdp_managed_module", False)]
    if shards:
        raise EngineStateError(
            f"{type(model).__name__}: {shards[0]} was sharded after the rollout was built, so that every forward would wait "
            "for the other ranks: build it after fully_shard, accelerator.prepare or the trainer's own wrapping"
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _source(model: nn.Module) -> Weights:
    if is_partitioned(model):
        return PartitionedWeights(model)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        if any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
            raise UnsupportedModelError(
                f"{type(model).__name__} is sharded by FSDP1, whose weights the engine does not gather: shard it by "
                "fully_shard (FSDP2; fsdp_version=2 of accelerate and of Trainer)"
            )
        if any(isinstance(module, fsdp.FSDPModule) for module in model.modules()):
            return ShardedWeights(model)
    return Weights(model, tensor_parallel_mesh(model, {}))


def is_partitioned(model: nn.Module) -> bool:
    """Return whether the model is a DeepSpeed engine or has parameters that DeepSpeed partitions."""
    return type(model).__module__.partition(".")[0] == "deepspeed" or any(
        hasattr(parameter, "ds_id") for parameter in model.parameters()
    )


class PartitionedWeights(GatheredWeights):
    """The weights of a DeepSpeed engine, gathered by DeepSpeed's `unwrap_model_for_generation` if ZeRO-3 partitions them.

    Raises:
        UnsupportedModelError: the trainer passed the partitioned module instead of the DeepSpeed engine.
    """

    def __init__(self, engine: Any) -> None:
        if not isinstance(getattr(engine, "module", None), nn.Module):
            raise UnsupportedModelError(
                f"{type(engine).__name__} is partitioned by DeepSpeed ZeRO-3, whose engine alone can gather it: pass what "
                "deepspeed.initialize returned, or train with ZeRO-2 or FSDP2"
            )
        self._context: Any = importlib.import_module("deepspeed.runtime.zero").unwrap_model_for_generation
        self._engine = engine
        super().__init__(engine.module)

    def _gather(self, undo: ExitStack) -> None:
        undo.enter_context(self._context(self._engine))

    def tensors(self) -> list[tuple[str, Tensor]]:
        parts = ((name, getattr(each, "ds_tensor", None)) for name, each in self.trained.named_parameters())
        return [(name, part) for name, part in parts if isinstance(part, Tensor)]
