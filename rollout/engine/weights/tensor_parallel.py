"""Functions that find the device meshes over which a model is tensor-parallel or expert-parallel.

A parameter is tensor-parallel if it is a DTensor on a mesh dimension that FSDP2 does not gather, whether transformers'
`tp_plan` or torch's `parallelize_module` created it. For other parallelism, the functions raise `UnsupportedModelError`.
Transformers' options `ep_size` and `tp_size` determine how experts are split:

    ep_size == tp_size    each rank of the tensor-parallel group holds some experts; the group shares every batch
    ep_size > tp_size     ranks with their own batches exchange tokens inside each layer: an expert-parallel group
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from rollout.errors import UnsupportedModelError

_OTHERS = ("pp", "cp", "sp", "ep")
"""The names of the mesh dimensions for pipeline, context, sequence and (outside the expert mesh) expert parallelism."""


def expert_parallel_mesh(model: nn.Module) -> Any:
    """Return the one-dimensional mesh of the ranks that exchange tokens inside each layer, or None if no layer does so.

    Raises:
        UnsupportedModelError: tensor-parallel groups of several ranks would exchange tokens with one another.
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
    """Return the modules that directly own a DTensor parameter on a mesh with a dimension of this name."""
    return [
        module
        for module in model.modules()
        if any(
            name in (getattr(getattr(each, "device_mesh", None), "mesh_dim_names", None) or ())
            for each in module.parameters(recurse=False)
        )
    ]


def tensor_parallel_mesh(model: nn.Module, gathered: Mapping[str, frozenset[str]]) -> Any:
    """Return the one-dimensional mesh over which a model's parameters are split, or None if they are not split.

    Experts on the mesh that `expert_parallel_mesh` returns do not count as split.

    Args:
        gathered: names of the mesh dimensions that FSDP2 gathers, for each parameter that FSDP2 manages.

    Raises:
        UnsupportedModelError: the model's parallelism is not supported.
    """
    exchanged, manager = expert_parallel_mesh(model), getattr(model, "_mesh_manager", None)
    # Check whether the experts are split over the tensor-parallel ranks, which is the case when `ep_size == tp_size`.
    shared = "ep" in _sizes(manager, "_expert_mesh")
    # Check the mesh itself: pipeline or context parallelism may not show in this rank's parameters.
    if others := {name: size for name, size in _sizes(manager, "_dense_mesh").items() if name in _OTHERS and size > 1}:
        raise _unserved(model, f"its device mesh has {others}, as pipeline parallelism or context parallelism makes it")
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
            raise _unserved(model, f"{name} is split over the mesh dimensions {left}")
        own = mesh if mesh.ndim == 1 else mesh[left[0]]
        if found is not None and own.mesh.tolist() != found[1].mesh.tolist():
            ranks, others = own.mesh.tolist(), found[1].mesh.tolist()
            raise _unserved(model, f"{name} is split over ranks {ranks}, and {found[0]} over {others}")
        found = found or (name, own)
        # Detect sequence parallelism by the norm layers, whose weights transformers and torch then replicate as DTensors.
        placements = getattr(parameter, "placements", ())
        if parameter.ndim == 1 and name.endswith("weight") and all(each.is_replicate() for each in placements):
            raise _unserved(model, f"{name} is a replicated DTensor, as sequence parallelism makes it")
    return None if found is None else found[1]


def _unserved(model: nn.Module, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__}: {why}; the engine serves one tensor-parallel group (tp_size), experts split over it or "
        "exchanged without it (ep_size), and FSDP"
    )


def _sizes(manager: Any, mesh: str) -> dict[str, int]:
    """Return the dimension sizes, by name, of the mesh manager's `mesh`; empty if transformers did not split the model."""
    found = getattr(manager, mesh, None)
    return dict(zip(getattr(found, "mesh_dim_names", None) or (), getattr(found, "shape", ()), strict=False))
