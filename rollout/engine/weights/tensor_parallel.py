"""Tensor- and expert-parallel weights: the mesh dimensions that split a model's parameters; other parallelism raises.

A parameter is tensor-parallel if it is a DTensor on a dimension that FSDP2 does not gather, whether transformers' `tp_plan`
or torch's `parallelize_module` made it. Transformers' meshes show how experts are split:

    ep_size == tp_size    the ranks of the tensor-parallel group hold some experts each, and share every batch: one group
    ep_size > tp_size     ranks with their own batches exchange tokens inside each layer: an expert-parallel group
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rollout.errors import UnsupportedModelError

_OTHERS = {
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "sp": "sequence parallelism",
    "ep": "expert parallelism other than transformers' own",
}


def expert_parallel_mesh(model: nn.Module) -> Any:
    """Return the one-dimensional mesh of the ranks that exchange tokens inside each layer; None: no layer does.

    Raises:
        UnsupportedModelError: some batches belong to a whole tensor-parallel group.
    """
    manager: Any = getattr(model, "_mesh_manager", None)
    if "ep" not in _sizes(manager, "_expert_mesh"):
        return None
    experts, tensor = manager.get_mesh("ep"), manager.get_mesh("tp")
    if experts.size() == 1 or experts.mesh.tolist() == tensor.mesh.tolist():
        return None
    if tensor.size() > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__}: ep_size={experts.size()} with tp_size={tensor.size()}: experts that are exchanged "
            "between tensor-parallel groups are not served; use ep_size=tp_size, or tp_size=1"
        )
    return experts


def modules_split_over(name: str, model: nn.Module) -> list[nn.Module]:
    """Return modules with a parameter of their own that is a DTensor on a mesh with a dimension of this name."""
    return [
        module
        for module in model.modules()
        if any(
            name in (getattr(getattr(each, "device_mesh", None), "mesh_dim_names", None) or ())
            for each in module.parameters(recurse=False)
        )
    ]


def tensor_parallel_mesh(model: nn.Module, gathered: Mapping[str, frozenset[str]]) -> Any:
    """Return the one-dimensional mesh that splits a model's parameters, except exchanged experts; None: no mesh does.

    Args:
        gathered: names of the mesh dimensions that FSDP2 gathers, for each parameter that it manages.

    Raises:
        UnsupportedModelError: the model's parallelism is not supported.
    """
    _refuse_other_meshes(model)
    exchanged = expert_parallel_mesh(model)
    # With `ep_size == tp_size` both names refer to the same ranks.
    shared = "ep" in _sizes(getattr(model, "_mesh_manager", None), "_expert_mesh")
    found: tuple[str, Any] | None = None
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            continue
        names = mesh.mesh_dim_names or ("tp",) * mesh.ndim
        left = [each for each in names if each not in gathered.get(name, ())]
        if not left or (left == ["ep"] and exchanged is not None):
            continue
        if len(left) > 1 or (left[0] in _OTHERS and not (left[0] == "ep" and shared)):
            raise UnsupportedModelError(
                f"{type(model).__name__}: {name} is split over the mesh dimensions {left}, which the engine does not gather "
                f"({_OTHERS.get(left[-1], 'one of tensor parallelism is served')}): shard by a tp_plan, fully_shard, or both"
            )
        own = mesh if mesh.ndim == 1 else mesh[left[0]]
        if found is not None and own.mesh.tolist() != found[1].mesh.tolist():
            raise UnsupportedModelError(
                f"{type(model).__name__}: {name} is split over ranks {own.mesh.tolist()} and {found[0]} over "
                f"{found[1].mesh.tolist()}; one tensor-parallel group per model is served"
            )
        found = found or (name, own)
        # In a sequence-parallel model, transformers and torch replicate the norms as DTensors, and nothing else.
        placements = getattr(parameter, "placements", ())
        if parameter.ndim == 1 and name.endswith("weight") and all(each.is_replicate() for each in placements):
            raise UnsupportedModelError(
                f"{type(model).__name__}: {name} is a replicated DTensor, as sequence parallelism makes it: it splits the "
                "positions of a step between the ranks, which the engine does not serve; leave SequenceParallel out of the "
                "plan"
            )
    return None if found is None else found[1]


def _refuse_other_meshes(model: nn.Module) -> None:
    """Raise for parallelism that does not show in this rank's parameters; transformers keeps its mesh on the model."""
    sizes = _sizes(getattr(model, "_mesh_manager", None), "_dense_mesh")
    found = [
        f"{_OTHERS[name]} ({name}={size} in its device mesh)"
        for name, size in sizes.items()
        if name in _OTHERS and size > 1
    ]
    if any(type(module).__name__ == "PipelineIdentityLayer" for module in model.modules()):
        # transformers before 5.20 records no mesh.
        found.append(f"{_OTHERS['pp']} (it has layers of another stage)")
    if found:
        raise UnsupportedModelError(
            f"{type(model).__name__} is split by {found[0]}, which the engine does not serve: load it with tensor "
            "parallelism (tp_size), expert parallelism (ep_size) and FSDP alone"
        )


def _sizes(manager: Any, mesh: str) -> dict[str, int]:
    """Return the sizes of the named dimensions of transformers' mesh; {}: transformers did not split the model."""
    found = getattr(manager, mesh, None)
    return dict(zip(getattr(found, "mesh_dim_names", None) or (), getattr(found, "shape", ()), strict=False))
