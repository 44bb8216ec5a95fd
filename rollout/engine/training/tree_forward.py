"""Prefix-tree attention in the trainer's own forward and backward passes, through transformers' attention interface.

While tree attention is attached, the model's attention implementation is our wrapper around the model's own. A tree is
passed as the `attention_mask`, int32 [1, 1, 2 or 3, L] (see `rollout.manager.batch.tree`). Transformers passes a
four-dimensional mask unchanged to every layer. So do gradient checkpointing (even when it recomputes in the backward pass),
DDP, FSDP and PEFT. For any other mask, the model's own implementation runs. No hook is added, and no module is changed.

Inside `paths_of(model)`, the tokens of a forward pass continue a path of earlier tokens, whose keys and values are stored.
The gradients of these keys and values are summed, and the backward pass of the earlier tokens uses the sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rollout.engine.kernels.tree_attention import Scores, tree_attention
from rollout.engine.models.attention import TREE_PREFIX, attention_of, configs_of
from rollout.engine.models.model_support import inspect_model
from rollout.engine.multimodal.families import family_of
from rollout.errors import UnsupportedModelError

_FIELD = "_attn_implementation_internal"
_layers: WeakKeyDictionary[nn.Module, _Layer] = WeakKeyDictionary()
"""The attention rules of each attention module in models with tree attention."""


class _Layer(NamedTuple):
    """The rules that determine which tokens a token attends to in one attention layer; see `Scores`."""

    window: int | None
    causal: bool
    """Whether attention is causal even within an image."""


class _Path:
    """The keys and values of a path's tokens in one layer, and the sums of their gradients from later forward passes."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def extended(self, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Append keys and values to the path, and return the keys and values of the whole path.

        Args:
            key: keys of S new tokens, [1, H, S, D].
            value: values of the new tokens, [1, H, S, Dv].
            start: index of the first new token in the path.
        """
        if not self._kept:
            self._kept = [each.new_zeros(*each.shape[:2], self._capacity, each.shape[3]) for each in (key, value)]
            # Sum the gradients in at least float32: many branches add to them, so rounding errors would accumulate.
            self._gradients = [
                each.to(torch.promote_types(each.dtype, torch.float32), copy=True) for each in self._kept
            ]
        found: tuple[Tensor, Tensor] = _Extend.apply(key, value, self, start)  # type: ignore[no-untyped-call]
        return found

    def write(self, parts: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, ...]:
        """Store `parts`, the keys and values from token `start` on. Return the keys and values of all tokens so far."""
        end = start + parts[0].shape[2]
        for kept, part in zip(self._kept, parts, strict=True):
            kept[:, :, start:end] = part
        # Hide later writes from autograd (`.data`): later forward passes write only after `end`, so the values that
        # autograd saved stay valid.
        return tuple(kept.data[:, :, :end] for kept in self._kept)

    def take(self, gradients: tuple[Tensor, Tensor], start: int) -> tuple[Tensor, ...]:
        """Add gradients for all tokens so far. Return and clear the sums from token `start` on, which are now complete."""
        taken = []
        for kept, gradient in zip(self._gradients, gradients, strict=True):
            end = gradient.shape[2]
            kept[:, :, :end] += gradient
            taken.append(kept[:, :, start:end].to(gradient.dtype, copy=True))
            kept[:, :, start:end] = 0
        return tuple(taken)


class _Extend(torch.autograd.Function):
    """The autograd function that appends keys and values to a path. Its backward pass sums the gradients of the path."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, path: _Path, start: int) -> tuple[Tensor, ...]:
        ctx.path, ctx.start = path, start
        return path.write((key, value), start)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return *ctx.path.take(gradients, ctx.start), None, None


_paths: WeakKeyDictionary[nn.Module, _Path] = WeakKeyDictionary()
"""The path of each attention module of a model for which a `paths_of` block is open."""


@contextmanager
def paths_of(model: nn.Module, capacity: int) -> Iterator[None]:
    """Make the forward passes of trees inside the `with` block continue one path of at most `capacity` tokens."""
    own = [module for module in model.modules() if module in _layers]
    _paths.update({module: _Path(capacity) for module in own})
    try:
        yield
    finally:
        for module in own:
            del _paths[module]


class TreeAttachment:
    """Attaches tree attention to a model until `detach()`, or until the end of the `with` block.

    Args:
        model: a transformers decoder without a wrapper such as DDP. It may be wrapped, sharded or given adapters afterwards.

    Raises:
        UnsupportedModelError: a layer is recurrent or needs more than causal attention (with or without a sliding window),
            or `model` is a wrapper.
        ValueError: tree attention is already attached.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(module in _layers for module in model.modules()):
            raise ValueError(
                "tree attention is attached to this model already: keep that attachment, or detach() it first"
            )
        layout = inspect_model(model)
        if any(call.sinks for call in layout.calls):
            raise UnsupportedModelError(
                f"{type(model).__name__} has attention sinks, which tree attention does not compute; train it on padded rows"
            )
        if layout.states:
            raise UnsupportedModelError(
                f"{type(model).__name__} has recurrent layers, whose state would pass from a branch of a tree to the next; "
                "train it on padded rows"
            )
        # Store the original names: a configuration copied from an attached model already has one of ours.
        self._before = [(config, _own_of(config)) for config in configs_of(model)]
        self._modules = list(layout.layer_of)
        family = family_of(model)
        for module, index in layout.layer_of.items():
            window = layout.calls[index].window
            _layers[module] = _Layer(window, window is None and family is not None and family.bidirectional_in_windows)
        for config, own in self._before:
            setattr(config, _FIELD, _registered(own or "eager"))

    def detach(self) -> None:
        """Restore the model's own attention implementation. Call it after the last backward pass, once or more."""
        for config, own in self._before:
            setattr(config, _FIELD, own)
        for module in self._modules:
            _layers.pop(module, None)
        self._before, self._modules = [], []

    def __enter__(self) -> TreeAttachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def is_attached() -> bool:
    """Return whether tree attention is attached to any model in this process."""
    return bool(_layers)


def _own_of(config: Any) -> str | None:
    name: str | None = getattr(config, _FIELD)
    return None if name is None else name.removeprefix(TREE_PREFIX)


def _registered(own: str) -> str:
    """Register an attention implementation that wraps `own`, and `own`'s mask function, and return the new name."""
    name = TREE_PREFIX + own
    AttentionInterface.register(name, partial(_attention, own))
    masks = AttentionMaskInterface()
    if own in masks.valid_keys():
        AttentionMaskInterface.register(name, masks[own])
    return name


def _attention(
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute tree attention if the mask is a tree. Otherwise call the model's own implementation, whose name is `own`."""
    if not _is_tree(attention_mask):
        return attention_of(module, own)(module, query, key, value, attention_mask, **arguments)
    assert attention_mask is not None
    if module not in _layers:
        raise UnsupportedModelError(
            f"{type(module).__name__} got a prefix tree and belongs to no model that tree attention is attached to "
            "(a copy of one?): call attach_tree(model) of the one that runs"
        )
    if arguments.get("dropout"):
        raise UnsupportedModelError(
            f"{type(module).__name__} has an attention dropout of {arguments['dropout']}: tree attention has none; set the "
            "model's attention_dropout to 0"
        )
    if arguments.get("output_router_logits"):
        raise UnsupportedModelError(
            f"{type(module).__name__} ran with output_router_logits=True: the load-balancing loss of a tree would count a "
            "shared token once, not once per row; set output_router_logits to False"
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if module in _paths and query.shape[2] == key.shape[2]:
        key, value = _paths[module].extended(key, value, attention_mask.shape[3] - key.shape[2])
    elif query.shape[0] != 1 or not query.shape[2] == key.shape[2] == attention_mask.shape[3]:
        raise ValueError(
            f"queries {tuple(query.shape)} and keys {tuple(key.shape)} do not fit a tree of {attention_mask.shape[3]} "
            "tokens: pass all of packed.inputs, with use_cache=False"
        )
    scaling = arguments.get("scaling")
    scores = Scores(
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=_layers[module].window,
        softcap=arguments.get("softcap"),
        causal=_layers[module].causal,
    )
    return tree_attention(query, key, value, attention_mask, scores), None


def _is_tree(mask: Tensor | None) -> bool:
    return (
        isinstance(mask, Tensor)
        and mask.dtype == torch.int32
        and mask.ndim == 4
        and mask.shape[:3] in ((1, 1, 2), (1, 1, 3))
    )
