"""Which layers of a model keep a recurrent or convolutional state, by transformers' own table of layer types."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import DynamicCache, cache_utils

from rollout.engine.memory.state_pool import StateShape
from rollout.errors import UnsupportedModelError

WITHOUT_STATE = ("mlp", "moe")
"""Types of layers to which the cache of transformers 5.21 and 5.22 gives a place for a state; later it is a `DummyLayer`."""


@dataclass(frozen=True)
class RecurrentLayers:
    """Layers of one model, by index.

    Attributes:
        stateful: keep a recurrent or convolutional state; true if there are any.
        stateless: keep neither a state nor K and V (a layer that is an MLP).
        cache_argument: argument of the model's forward that takes the cache.
    """

    stateful: frozenset[int]
    stateless: frozenset[int]
    cache_argument: str

    @classmethod
    def of(cls, model: nn.Module, config: Any) -> RecurrentLayers:
        """Those of a text model's configuration; none where this version of transformers has no cache protocol for them."""
        layers: Sequence[object] = ()
        if hasattr(DynamicCache, "get_conv_state"):
            try:
                layers = DynamicCache(config=config).layers
            except (KeyError, TypeError, ValueError, AttributeError):
                # A type of layer that transformers' own cache does not know either.
                layers = ()
        names = getattr(config, "layer_types", None) or ()
        dummies = {index for index, layer in enumerate(layers) if type(layer).__name__ == "DummyLayer"}
        stateless = dummies | {index for index, name in enumerate(names) if name in WITHOUT_STATE}
        with_state = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
        stateful = {index for index, layer in enumerate(layers) if isinstance(layer, with_state)} - stateless
        arguments = inspect.signature(model.forward).parameters
        argument = "cache_params" if "cache_params" in arguments else "past_key_values"
        return cls(frozenset(stateful), frozenset(stateless), argument)

    def __bool__(self) -> bool:
        return bool(self.stateful)

    def refuse_missing(self, model: nn.Module, attention: Iterable[nn.Module], states: Sequence[StateShape]) -> None:
        """Refuse a model with a layer that no attention and no state was seen of.

        Args:
            attention: the attention layers that were seen.
            states: the states that were seen.

        Raises:
            UnsupportedModelError: names the layer.
        """
        config = model.config.get_text_config()  # type: ignore[union-attr, operator]
        seen = {getattr(module, "layer_idx", None) for module in attention} | {each.key.layer for each in states}
        kept = {each.key.layer for each in states}
        for index in range(config.num_hidden_layers):
            if (index in self.stateful and index not in kept) or (index not in seen and index not in self.stateless):
                kind = (getattr(config, "layer_types", None) or {index: "?"})[index]
                raise UnsupportedModelError(
                    f"{type(model).__name__} layer {index} ({kind}) goes neither through transformers' attention interface "
                    "nor through its cache's conv and recurrent states, so the engine cannot keep what it remembers"
                )
