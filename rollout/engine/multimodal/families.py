"""Registry of the families of vision-language models that are served images."""

from __future__ import annotations

from torch import nn

from rollout.engine.multimodal.crops import AnyResolutionFamily, CropFamily, PooledFamily, ShapedFamily, TileFamily
from rollout.engine.multimodal.family import Family
from rollout.engine.multimodal.grids import GridFamily, RotaryGridFamily

FAMILIES: tuple[type[Family], ...] = (
    RotaryGridFamily, GridFamily, CropFamily, PooledFamily, TileFamily, ShapedFamily, AnyResolutionFamily,
)  # fmt: skip


def family_of(model: nn.Module) -> Family | None:
    """The family of a model; None: the engine serves it no images."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if not hasattr(model, "get_image_features"):
        return None
    return next((family(model) for family in FAMILIES if kind in family.types), None)
