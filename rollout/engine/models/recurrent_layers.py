"""Which layers of a model keep a recurrent or convolutional state, by transformers' own table of layer types."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, cache_utils

from rollout.engine.memory.state_pool import StatePool, StateShape
from rollout.engine.models.attention import Installation, forward_with
from rollout.engine.models.attention_masks import PROBE
from rollout.engine.models.recurrent_states import PackedStates, StateRows, States
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


LENGTHS = (3, 2)
"""Of two packed prompts."""
TOLERANCE = {torch.float32: 1e-3}
NARROW_TOLERANCE = 5e-2


class _OwnValue:
    """`AttentionBatch` in which every position attends to itself alone, so that only recurrent layers carry anything on."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous()


def continues(model: nn.Module, device: torch.device, shapes: Sequence[StateShape], argument: str) -> bool:
    """Whether recurrent states matter to a chunk of two tokens.

    Args:
        shapes: states of the model; none: it has no recurrent layers.
        argument: of its forward, that takes the cache.
    """
    recurrent = [each.key for each in shapes if each.key.kind == "recurrent"]
    if not recurrent:
        return True
    pool = StatePool(shapes, 2, device)
    for key in recurrent:
        pool.state(key)[1] = 1
    with Installation(model, implementation=PROBE).forward():
        zeros, ones = (_logits(model, device, range(2), argument, _row(pool, slot)) for slot in range(2))
    return not torch.equal(zeros, ones)


def packs(model: nn.Module, device: torch.device, shapes: Sequence[StateShape], argument: str) -> bool:
    """Whether two prompts in one row have the logits and the states that each has alone.

    That takes kernels that know the prompts' borders (flash-linear-attention, causal-conv1d); transformers' own functions
    raise. Arguments as of `continues`.
    """
    if not shapes:
        return False
    pool, offsets = StatePool(shapes, 4, device), np.concatenate([[0], np.cumsum(LENGTHS)])
    borders = list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
    places = [position for length in LENGTHS for position in range(length)]
    with Installation(model, implementation=PROBE).forward():
        try:
            cache = PackedStates(pool, np.arange(2, dtype=np.int32), offsets)
            together = _logits(model, device, range(offsets[-1]), argument, cache, places)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, AttributeError, ValueError, RuntimeError, LookupError, AssertionError):
            return False
        alone = [
            _logits(model, device, range(start, end), argument, _row(pool, 2 + index))
            for index, (start, end) in enumerate(borders)
        ]
    pairs = [(together, torch.cat(alone))]
    pairs += [(state[:2], state[2:]) for state in (pool.state(each.key) for each in shapes)]
    return all(_close(one, other) for one, other in pairs)


def _row(pool: StatePool, slot: int) -> StateRows:
    return StateRows(pool, np.array([slot], np.int32))


def _logits(
    model: nn.Module,
    device: torch.device,
    ids: range,
    argument: str,
    cache: States,
    places: Sequence[int] | None = None,
) -> Tensor:
    """[len(ids), V] logits of a row of tokens at positions `places`; None: from 0 on."""
    tokens, at = (torch.tensor([list(each)], device=device) for each in (ids, places or range(len(ids))))
    keep = torch.arange(len(ids), device=device)
    inputs = {"input_ids": tokens, "position_ids": at, "logits_to_keep": keep, argument: cache, **cache.arguments}
    logits: Tensor = forward_with(_OwnValue(), model, **inputs).logits[0]
    return logits


def _close(one: Tensor, other: Tensor) -> bool:
    tolerance = TOLERANCE.get(other.dtype, NARROW_TOLERANCE)
    distance = (one.float() - other.float()).abs().max()
    return bool(distance <= tolerance * other.float().abs().max())
