"""The *variant* of a model: its active adapters, part of the prefix key. Equal variants of one model compute the same
results.

It decides which KV may be shared and which requests may run. It is read from the two switches of PEFT's layers, so no way of
switching adapters is missed; PEFT and torch are not imported.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from rollout.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn

Variant = tuple[Any, ...]
"""Hashable: the active adapters, once for all layers, or one entry per layer if they differ."""

NO_ADAPTER: Variant = ()
"""Variant of a model without adapters, or with all of them disabled."""


class AdapterSwitches:
    """Reads the active adapters of one model in every step; hundreds of layers may have some."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[Any] = []
        self._module_epoch = -1
        self._seen: list[tuple[dict[str, Any], Any, Any, Any]] | None = None
        """`_read` of each layer when the variant was read last; None: read it again."""
        self._variant: Variant = NO_ADAPTER

    def look(self, module_epoch: int) -> Variant:
        """Current variant, after rescanning the modules if `module_epoch` has changed.

        Args:
            module_epoch: changes whenever the trainer may have modified the module.

        Raises:
            UnsupportedModelError: an activated LoRA is active.
        """
        if module_epoch != self._module_epoch:
            self._module_epoch = module_epoch
            self._layers = [module for module in self._model.modules() if _has_switches(module)]
            self._seen = None
        return self.variant

    def present(self, module_epoch: int) -> bool:
        """Whether the model has layers with adapters, active or not."""
        self.look(module_epoch)
        return bool(self._layers)

    @property
    def variant(self) -> Variant:
        """Current variant of the layers found by the last scan; raises as `look` does."""
        seen = self._seen
        if seen is None or not all(
            own.get("_disable_adapters") is disabled
            and own.get("_active_adapter") == active
            and own.get("scaling") == scaling
            for own, disabled, active, scaling in seen
        ):
            each = [_acting(layer) for layer in self._layers]
            distinct = set(each)
            self._variant = tuple(each) if len(distinct) > 1 else distinct.pop() if distinct else NO_ADAPTER
            self._seen = [_read(layer) for layer in self._layers] if all(map(_is_pefts, self._layers)) else None
        return self._variant


def described(variant: Variant) -> str:
    """Adapter names of a variant, for messages."""
    layers = (variant,) if variant and _is_pair(variant[0]) else variant
    names = dict.fromkeys(name for layer in layers for name, _ in layer)
    return ", ".join(map(repr, names)) or "none"


def _is_pair(entry: Variant) -> bool:
    return bool(entry) and isinstance(entry[0], str)


def _has_switches(module: nn.Module) -> bool:
    # Models of transformers have methods of these names.
    return all(
        isinstance(getattr(type(module), name, None), property) for name in ("active_adapters", "disable_adapters")
    )


def _is_pefts(layer: Any) -> bool:
    """Whether its switches are PEFT's properties, which return what `_read` does."""
    switches = (getattr(type(layer), name).fget for name in ("active_adapters", "disable_adapters"))
    return all(str(getattr(each, "__module__", "")).startswith("peft.") for each in switches)


def _read(layer: Any) -> tuple[dict[str, Any], Any, Any, Any]:
    """A layer's attributes, and copies of the attributes that its variant depends on."""
    own = vars(layer)
    return own, own.get("_disable_adapters"), copy(own.get("_active_adapter")), copy(own.get("scaling"))


def _acting(layer: Any) -> Variant:
    """(name, scaling) of each active adapter of a layer."""
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
