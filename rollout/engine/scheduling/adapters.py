"""The *variant* of a model: its active adapters and their scaling. Equal variants of one model give equal results.

Requests share KV, and run together, only if their variants are equal. The variant is read from the PEFT layers themselves
(active adapters, their scaling, and whether adapters are disabled), so any way of switching adapters is detected. This
module imports neither PEFT nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollout.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn

Variant = tuple[Any, ...]
"""A hashable key of the active adapters: (name, scaling) pairs if all layers agree, otherwise a tuple of pairs per layer."""

NO_ADAPTER: Variant = ()
"""The variant of a model without adapters, or with all adapters disabled."""


def layers_with_adapters(model: nn.Module) -> list[Any]:
    """Return the model's PEFT adapter layers, active or not."""
    return [module for module in model.modules() if _has_switches(module)]


def variant_of(layers: list[Any]) -> Variant:
    """Return the variant of a model, given the layers that `layers_with_adapters` found in it.

    Raises:
        UnsupportedModelError: an active adapter is an activated LoRA (aLoRA).
    """
    each = [_acting(layer) for layer in layers]
    distinct = set(each)
    return tuple(each) if len(distinct) > 1 else distinct.pop() if distinct else NO_ADAPTER


def described(variant: Variant) -> str:
    """Return the quoted names of a variant's adapters, joined by commas, for use in messages; "none" if it has none."""
    # Wrap the variant if all layers use the same adapters: it is then a tuple of pairs, not one such tuple per layer.
    layers = (variant,) if variant and variant[0] and isinstance(variant[0][0], str) else variant
    names = dict.fromkeys(name for layer in layers for name, _ in layer)
    return ", ".join(map(repr, names)) or "none"


def _has_switches(module: nn.Module) -> bool:
    # Require properties, because transformers models have methods of these names, and only PEFT layers have properties.
    return all(
        isinstance(getattr(type(module), name, None), property) for name in ("active_adapters", "disable_adapters")
    )


def _acting(layer: Any) -> Variant:
    """Return the variant of a single layer: a (name, scaling) pair for each of its active adapters."""
    if layer.disable_adapters:
        return NO_ADAPTER
    scaling, kinds = (layer.__dict__.get(name) or {} for name in ("scaling", "lora_variant"))
    for name in layer.active_adapters:
        if type(kinds.get(name)).__name__ == "ALoraLinearVariant":
            raise UnsupportedModelError(
                f"adapter {name!r} is an activated LoRA (alora_invocation_tokens), which acts from certain tokens of its "
                "input on, and a step computes parts of prompts: set another adapter (model.set_adapter(name)), or train "
                "one without alora_invocation_tokens"
            )
    return tuple((name, scaling.get(name)) for name in layer.active_adapters)
