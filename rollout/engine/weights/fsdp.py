"""Weights that FSDP2 shards. They are gathered while the engine generates, and resharded afterwards.

Always true:
- Between `gather` and `release`, forward passes are not collective, so each rank may run a different number of them.
- After `release`, training continues as if nothing had been gathered, even after an interrupted forward pass. Gradients of
  accumulated micro-batches are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from rollout.engine.weights.base import GatheredWeights
from rollout.engine.weights.fingerprints import persistent_tensors
from rollout.engine.weights.tensor_parallel import expert_parallel_mesh, tensor_parallel_mesh
from rollout.errors import UnsupportedModelError


class ShardedWeights(GatheredWeights):
    """FSDP2 weights. `gather` unshards every module to which `fully_shard` was applied, until `release` reshards it.

    While gathered, the weights take the memory of the shards and of one whole model in the dtype of the mixed-precision
    policy. `state_dict` always returns the shards. A parameter that is also tensor-parallel keeps its tensor-parallel split.

    Raises:
        UnsupportedModelError: a parameter is a DTensor that FSDP2 does not manage, or its parallelism is not supported.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        super().__init__(model)
        # Keep one module per unit: fully_shard([a, b]) makes several modules one unit.
        units: dict[Any, Any] = {}
        for module in model.modules():
            if isinstance(module, FSDPModule):
                units.setdefault(state_of(module), module)
        self._units = list(units.values())
        self._names = {module: name for name, module in model.named_modules()}
        managed = self._local()
        if others := [n for n, p in model.named_parameters() if hasattr(p, "to_local") and n not in managed]:
            raise UnsupportedModelError(
                f"{type(model).__name__}: {others[0]} is a DTensor that FSDP2 does not gather: put all of the model into "
                "fully_shard units"
            )
        self.expert_parallel_mesh = expert_parallel_mesh(model)
        self.tensor_parallel_mesh = tensor_parallel_mesh(model, self._gathered_dimensions())

    @property
    def ready(self) -> bool:
        # Check every group: a backward pass reshards the groups that it runs, even if they should stay gathered.
        return super().ready and all(group.is_unsharded for group in self._groups())

    def _gather(self, undo: ExitStack) -> None:
        for unit in self._units:
            # Initialise FSDP now, because initialisation may change `post_forward_mesh_info`, which is saved below.
            state_of(unit)._lazy_init()
        for unit in self._units:
            undo.callback(reshard, unit)
            unit.unshard()
        for group in self._groups():
            undo.callback(setattr, group, "post_forward_mesh_info", group.post_forward_mesh_info)
            group.post_forward_mesh_info = None
            _stay_whole_after_state_dict(group, undo)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return this rank's shards, even while the weights are gathered, and the tensors that FSDP2 does not manage."""
        local = self._local()
        shared = [(name, tensor) for name, tensor in persistent_tensors(self.trained) if name not in local]
        return [(name, tensor) for name, tensor in local.items() if tensor is not None] + shared

    def _local(self) -> dict[str, Tensor | None]:
        """Return this rank's shard of every parameter that FSDP2 manages, by name.

        A tied parameter's shard is listed under its first name, and None under its other names.
        """
        found: dict[str, Tensor | None] = {}
        for each, (first, *others) in self._parameters():
            found[first] = each.sharded_param.to_local()
            for name in others:
                found.setdefault(name, None)
        return found

    def _gathered_dimensions(self) -> dict[str, frozenset[str]]:
        found: dict[str, frozenset[str]] = {}
        for each, names in self._parameters():
            dimensions = each.mesh_info.mesh.mesh_dim_names or each.sharded_param.device_mesh.mesh_dim_names or ("tp",)
            found |= dict.fromkeys(names, frozenset(dimensions))
        return found

    def _groups(self) -> Iterator[Any]:
        for unit in self._units:
            yield from groups_of(state_of(unit))

    def _parameters(self) -> Iterator[tuple[Any, list[str]]]:
        for each in (each for group in self._groups() for each in group.fsdp_params):
            info = each._module_info
            owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            yield each, [f"{self._names[module]}.{name}".removeprefix(".") for module, name in owners]


def state_of(unit: Any) -> Any:
    """Return the FSDP state of a unit, a module to which `fully_shard` was applied."""
    return unit._get_fsdp_state()


def groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP state: any number since torch 2.13, at most one before."""
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [each for each in groups if each is not None]


def reshard(unit: Any) -> None:
    """Free a unit's gathered parameters, even if an exception has interrupted a forward or backward pass of the unit."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    # Reset the state by hand: after an interrupted forward pass, reshard() does nothing. The public remedy,
    # reset_iter_state(), would drop the gradients of accumulated micro-batches.
    state = state_of(unit)
    state._training_state, state._state_ctx.iter_forward_root = TrainingState.IDLE, None
    getattr(state, "_modules_to_run_forward", set()).clear()
    for group in groups_of(state):
        group._training_state = TrainingState.IDLE
    unit.reshard()


def _stay_whole_after_state_dict(group: Any, undo: ExitStack) -> None:
    """Keep the weights gathered after `state_dict` or `load_state_dict`, whose FSDP2 hooks would otherwise free them."""

    def show_shards() -> None:
        for each in group.fsdp_params:
            each._setattr_on_modules(each.sharded_param)

    def show_whole(*_: Any) -> None:
        for each in group.fsdp_params if group.is_unsharded else ():
            each._setattr_on_modules(each._unsharded_param)

    def reshard_really() -> None:
        show = group.__dict__.pop("_to_sharded")
        try:
            type(group).reshard(group)
        finally:
            group._to_sharded = show

    group._to_sharded, group.reshard = show_shards, reshard_really
    for name in ("_to_sharded", "reshard"):
        undo.callback(group.__dict__.pop, name)
    for module in dict.fromkeys(each._module_info.module for each in group.fsdp_params):
        undo.callback(module.register_state_dict_post_hook(show_whole).remove)
        undo.callback(module.register_load_state_dict_post_hook(show_whole).remove)
