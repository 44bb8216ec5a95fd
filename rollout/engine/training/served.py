"""What exact mode serves: models of the fused forward without adapters, on a device with kernels."""

from __future__ import annotations

from torch import nn

from rollout.engine.fused.fused_binding import Bound
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.model_support import ModelLayout
from rollout.engine.models.originals import Unfusable, bypassed
from rollout.engine.training.kernels import kernels_on
from rollout.errors import UnsupportedModelError


def bound_exactly(model: nn.Module, layout: ModelLayout, cache: KVCache) -> Bound:
    """A model in its present state, verified as the fused forward verifies it.

    Raises:
        Unfusable, AttributeError: why exact mode does not compute what it does.
    """
    bound = Bound(model, layout, cache, exact=True)
    if any(type(module).__module__.startswith("peft.") for module in model.modules()):
        raise Unfusable("it holds PEFT adapters")
    return bound


def why_not_exact(model: nn.Module, layout: ModelLayout, cache: KVCache) -> str | None:
    """Why exact mode refuses a model in its present state, on its device; None: it serves it."""
    try:
        kernels_on(layout.device).require(layout.device, layout.vocab_size)
        bound_exactly(model, layout, cache)
    except (UnsupportedModelError, Unfusable, AttributeError) as exc:
        return str(exc)
    return bypassed(layout.device)
