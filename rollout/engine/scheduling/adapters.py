"""Which adapters of a model are active: its *variant*, part of the prefix key.

A forward depends on the weights and on the variant, so that both say whose KV may be shared and which requests may go on.
It is read off the model itself, never told, so that no way of switching is missed. Always true: equal variants of one
model compute the same. Knows the two switches that PEFT's layers have, and imports neither it nor torch: the scheduler
compares variants too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

Variant = tuple[Any, ...]
"""Hashable. Of all layers together what acts in them; where they differ, one entry per layer."""

NO_ADAPTER: Variant = ()
"""Of a model without adapters, or with all of them disabled."""


class AdapterSwitches:
    """The switches of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[Any] = []
        self._handover = -1

    def look(self, handover: int) -> Variant:
        """The present variant; layers that came or went are found.

        Args:
            handover: changes whenever the trainer may have had the model in hands.
        """
        if handover != self._handover:
            self._handover = handover
            self._layers = [module for module in self._model.modules() if _has_switches(module)]
        return self.variant

    @property
    def variant(self) -> Variant:
        """The present variant, by the layers known; a microsecond for every few of them."""
        each = [_acting(layer) for layer in self._layers]
        distinct = set(each)
        if len(distinct) > 1:
            return tuple(each)
        return distinct.pop() if distinct else NO_ADAPTER


def described(variant: Variant) -> str:
    """For messages: the names in a variant."""
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


def _acting(layer: Any) -> Variant:
    """(name, scaling) of each adapter that acts in a layer."""
    if layer.disable_adapters:
        return NO_ADAPTER
    scaling = layer.__dict__.get("scaling") or {}
    return tuple((name, scaling.get(name)) for name in layer.active_adapters)
