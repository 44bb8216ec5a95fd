"""Where the engine takes its weights from: the module itself, a gathered module, or a copy.

    plain module, DDP, autocast    shared: the very tensors the optimizer steps, nothing moves
    FSDP2, FSDP1, ZeRO-3           gathered: whole while the engine generates, sharded again afterwards, no second copy
    another dtype or device        copied, by choice only: one pass after each update

Always true: what `trained` holds is the trainer's business, and after `release` it is as the trainer left it. `gather` of
a `collective` source is entered by every rank or by none; `release` speaks to nobody.
"""

from __future__ import annotations

import sys
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rollout.engine.weights.copied import CopiedWeights
from rollout.engine.weights.fingerprints import persistent_tensors
from rollout.engine.weights.fsdp import ShardedWeights, UnitWeights, unmanaged_shard
from rollout.engine.weights.zero3 import PartitionedWeights, is_partitioned
from rollout.errors import EngineStateError, UnsupportedModelError


class Weights(Protocol):
    """What an engine asks of the weights it samples with."""

    @property
    def trained(self) -> nn.Module:
        """The Hugging Face model the optimizer steps, out of its wrappers."""

    @property
    def sampled(self) -> nn.Module:
        """The module whose forward the engine runs."""

    @property
    def collective(self) -> bool:
        """Whether `gather` needs every rank."""

    @property
    def ready(self) -> bool:
        """Whether `sampled` holds whole, current weights."""

    def gather(self) -> None:
        """Make it so; nothing to do where it is so already."""

    def release(self) -> None:
        """Leave `trained` as the trainer had it. Local, harmless when repeated, right also after an interrupted forward."""

    def changed(self) -> None:
        """The weights have changed: what was gathered or copied is old."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Name and local part of every parameter and persistent buffer of `trained`, tied ones under each name."""

    def stale(self) -> list[str]:
        """Names of tensors in which `sampled`, though ready, is not what `trained` says; only a copy can have any."""


class SharedWeights:
    """The trainer's own tensors: always ready."""

    collective = False
    ready = True

    def __init__(self, model: nn.Module) -> None:
        self.trained = self.sampled = model

    def gather(self) -> None:
        """They are."""

    def release(self) -> None:
        """They were never taken."""

    def changed(self) -> None:
        """The engine reads them where they lie."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and persistent buffers."""
        return persistent_tensors(self.trained)

    def stale(self) -> list[str]:
        """There is no second one."""
        return []


def weights_of(model: nn.Module, *, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Weights:
    """The source that fits a model: DDP, FSDP1 and compiled wrappers are taken off.

    Args:
        model: what the trainer calls.
        dtype, device: of a separate copy to sample with; both None: there is none.

    Raises:
        UnsupportedModelError: the weights are spread over the ranks in a way that cannot be gathered; names it.
    """
    source = _source(_unwrapped(model))
    if dtype is None and device is None:
        return source
    return CopiedWeights(source, dtype, device)


def fully_sharded_since(weights: Weights) -> bool:
    """Whether weights that were whole when their source was chosen are FSDP2's now, in the same module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if weights.collective or fsdp is None:
        return False
    return any(isinstance(module, fsdp.FSDPModule) for module in weights.trained.modules())


def refuse_sharded_since(weights: Weights) -> None:
    """Look whether the trainer has spread weights over the ranks that were whole when their source was chosen.

    Raises:
        EngineStateError: it has; names where.
    """
    if weights.collective or not (dist.is_available() and dist.is_initialized()):
        return
    model = weights.trained
    name = unmanaged_shard(model, ()) or next((n for n, p in model.named_parameters() if hasattr(p, "ds_id")), None)
    if name is None:
        # By either FSDP; the wrapper of FSDP1 may be around the model, out of sight.
        marked = (n for n, m in model.named_modules() if getattr(m, "_is_fsdp_managed_module", False))
        name = next((n or type(model).__name__ for n in marked), None)
    if name is not None:
        raise EngineStateError(
            f"{type(model).__name__}: {name} was sharded after the rollout was built, so that every forward would wait for "
            "the other ranks: build it after fully_shard, accelerator.prepare or the trainer's own wrapping"
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
        whole = isinstance(model, fsdp.FullyShardedDataParallel)
        first = any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules())
        second = any(isinstance(module, fsdp.FSDPModule) for module in model.modules())
        if first and second:
            raise UnsupportedModelError(f"{type(model).__name__} mixes FSDP1 and FSDP2: wrap all of it by fully_shard")
        if first and not whole:
            raise UnsupportedModelError(
                f"{type(model).__name__} holds FullyShardedDataParallel modules and is none itself: pass the outermost "
                "wrapper, the one that the trainer calls"
            )
        if first:
            return UnitWeights(model)
        if second:
            return ShardedWeights(model)
    if (name := unmanaged_shard(model, ())) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__}: {name} is a DTensor and no FSDP2 module gathers it (tensor parallelism?): every "
            "forward would wait for the other ranks; shard by torch.distributed.fsdp.fully_shard instead"
        )
    return SharedWeights(model)
