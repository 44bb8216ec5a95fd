"""Finds the layers of a model that keep a recurrent or convolutional state."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import DynamicCache, cache_utils

from rollout.engine.memory.state_pool import StateShape

WITHOUT_STATE = ("mlp", "moe")
"""The types of layers that are stateless although their cache entry is not a `DummyLayer` (transformers 5.21 and 5.22)."""


@dataclass(frozen=True)
class RecurrentLayers:
    """The indices of a model's layers with and without a state per sequence. Falsy if no layer keeps a state."""

    stateful: frozenset[int]
    """The layers that keep a recurrent or convolutional state."""
    stateless: frozenset[int]
    """The layers that keep neither a state nor K and V (for example an MLP)."""
    cache_argument: str
    """The name of the argument of the model's `forward` that takes the cache."""

    @classmethod
    def of(cls, model: nn.Module, config: Any) -> RecurrentLayers:
        """Return the stateful and the stateless layers that a text model's configuration `config` describes.

        `stateful` is empty if the installed version of transformers has no cache protocol for stateful layers.
        """
        layers: Sequence[object] = ()
        if hasattr(DynamicCache, "get_conv_state"):
            try:
                layers = DynamicCache(config=config).layers
            except (KeyError, TypeError, ValueError, AttributeError):
                # Assume that no layer is stateful, because transformers' own cache cannot be built from `config` either.
                layers = ()
        names = getattr(config, "layer_types", None) or ()
        dummies = {index for index, layer in enumerate(layers) if type(layer).__name__ == "DummyLayer"}
        stateless = dummies | {index for index, name in enumerate(names) if name in WITHOUT_STATE}
        with_state = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
        stateful = {index for index, layer in enumerate(layers) if isinstance(layer, with_state)} - stateless
        arguments = inspect.signature(model.forward).parameters
        # Try these first: transformers 5.24 renames `past_key_values` to `cache`, and older Mambas call it `cache_params`.
        argument = next((name for name in ("cache_params", "cache") if name in arguments), "past_key_values")
        return cls(frozenset(stateful), frozenset(stateless), argument)

    def __bool__(self) -> bool:
        return bool(self.stateful)

    def missing(self, model: nn.Module, attention: Iterable[nn.Module], states: Sequence[StateShape]) -> Iterator[str]:
        """Yield a message for each layer whose attention or state the probing forward pass did not reveal.

        Args:
            attention: the attention layers that the forward pass called.
            states: the states that the forward pass created.
        """
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        kept = {each.key.layer for each in states}
        seen = {getattr(module, "layer_idx", None) for module in attention} | kept
        for index in range(config.num_hidden_layers):
            if (index in self.stateful and index not in kept) or (index not in seen and index not in self.stateless):
                kind = (getattr(config, "layer_types", None) or {index: "?"})[index]
                yield (
                    f"{type(model).__name__} layer {index} ({kind}) goes neither through transformers' attention interface "
                    "nor through its cache's conv and recurrent states, so the engine cannot keep what it remembers"
                )
