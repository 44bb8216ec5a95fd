"""Inputs of one attention step, and installation of the paged attention into the trainer's model.

The model runs its own `forward`; transformers' attention interface passes every layer's queries, keys and values to
`rollout_attention`. The step's batch travels as a keyword argument, and in a context variable for models that drop
keyword arguments. `Installation` is a context manager that restores the trainer's attention, also after an exception.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rollout.engine.kernels.torch_paged import CacheWrite, PagedAttention, write_slots
from rollout.engine.memory.kv_cache import KVCache
from rollout.threads.interrupts import interruptible, uninterrupted

IMPLEMENTATION = "rollout_paged"
BATCH_ARGUMENT = "rollout_batch"
SINKS = "s_aux"
"""Argument by which layers pass their attention sinks, [H]."""

_carried: ContextVar[AttentionBatch | None] = ContextVar("rollout_batch", default=None)
"""Batch of the current thread's forward."""


def is_rollout_forward() -> bool:
    """Whether the current thread runs a forward of an engine, not one of the trainer's."""
    return _carried.get() is not None


class AttentionBatch(Protocol):
    """Per-step input that is passed to every attention layer."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Attention of query [B, H, P, D] with key, value [B, Hkv, P, D]; returns [B, P, H, Dv]."""


def rollout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers' `AttentionInterface` under `IMPLEMENTATION`."""
    batch: AttentionBatch | None = kwargs.pop(BATCH_ARGUMENT, None)
    if batch is None:
        # The decoder layers of some models drop keyword arguments.
        batch = _carried.get()
    if batch is None:
        raise RuntimeError(
            f"attention implementation {IMPLEMENTATION!r} ran without a rollout batch: a forward of the trainer started "
            "while the engine had its attention installed (another thread?); run them one after the other"
        )
    if torch.is_autocast_enabled(query.device.type):
        # As the trainer's attention does: rotary embeddings leave queries and keys in a wider type than values.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
    return batch.attend(module, query, key, value, scaling, kwargs), None


AttentionInterface.register(IMPLEMENTATION, rollout_attention)


def forward_with(batch: AttentionBatch, model: nn.Module, **inputs: Any) -> Any:
    """Output of one forward of `model` that passes `batch` to every attention layer; needs an active `Installation`."""
    token = _carried.set(batch)
    try:
        with interruptible():
            return model(use_cache=False, **inputs, **{BATCH_ARGUMENT: batch})
    finally:
        _carried.reset(token)


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """`AttentionBatch` of one step over the paged cache.

    Args:
        cache: holds K and V.
        layer_of: index of each attention module's layer in the cache.
        slots: of each group of layers, [B * P] int64 slot mapping: token slot (block * block_size + offset) of each of the
            forward's positions.
        attention: the kernel, for this step, of each group of layers.
        windows: sliding windows of layers that do not pass one themselves.
        chunks: of the layers whose attention is in chunks.
        write: writes K and V into their slots.
        unwindowed: like `attention`, of layers without a window, where what they see differs beside; None: the same.
    """

    cache: KVCache
    layer_of: dict[nn.Module, int]
    slots: Sequence[Tensor]
    attention: Sequence[PagedAttention]
    windows: Mapping[nn.Module, int | None]
    chunks: Mapping[nn.Module, int]
    write: CacheWrite = write_slots
    unwindowed: Sequence[PagedAttention] | None = None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        """Write K and V into their slots, then attend over the blocks."""
        layer = self.layer_of[module]
        (key_cache, value_cache), group = self.cache.layer(layer), self.cache.group_of(layer)
        keys, values = (each.transpose(1, 2).flatten(0, 1) for each in (key, value))
        self.write(keys, values, key_cache, value_cache, self.slots[group])
        window = self.windows.get(module, arguments.get("sliding_window"))
        attention = self.attention if window is not None or self.unwindowed is None else self.unwindowed
        out = attention[group](
            query.transpose(1, 2).flatten(0, 1).contiguous(),
            keys,
            values,
            key_cache,
            value_cache,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=arguments.get("softcap"),
            chunk=self.chunks.get(module),
            sinks=arguments.get(SINKS),
        )
        return out.reshape(query.shape[0], query.shape[2], *out.shape[1:])


class Installation:
    """Context manager: paged attention in `model`, with training behaviour off; may be nested.

    Args:
        autocast: dtype that forwards in the block are autocast to; None: the caller's autocast applies.
        implementation: the name that the attention is registered under.

    Modules compiled by the trainer run uncompiled in the block.

    On leaving, every flag is as before, also after an exception. Saved and restored: the attention implementation of every
    configuration object of the model, and the `training` flag of every module (a trainer may keep some in eval). Gradient
    checkpointing acts only while `training` is set, and `use_cache` is an argument of the forward: neither is touched.
    """

    def __init__(
        self, model: nn.Module, autocast: torch.dtype | None = None, *, implementation: str = IMPLEMENTATION
    ) -> None:
        self._model = model
        self._autocast = autocast
        self._implementation = implementation
        self._depth = 0
        self._restore = ExitStack()
        self.module_epoch = 0
        """Incremented whenever the trainer may have modified the module; caches keyed on it are invalidated."""

    @property
    def active(self) -> bool:
        """Whether the block was entered."""
        return self._depth > 0

    def __enter__(self) -> None:
        if self._depth:
            self._depth += 1
            return
        try:
            with uninterrupted():
                self._install()
                self._depth = 1
                self.module_epoch += 1
        except BaseException:
            self._depth = 0
            self._restore.close()
            raise

    def __exit__(self, *exc_info: object) -> None:
        with uninterrupted():
            self._depth -= 1
            if not self._depth:
                self.module_epoch += 1
                self._restore.close()

    def _install(self) -> None:
        with ExitStack() as stack:
            for config in configs_of(self._model):
                stack.callback(setattr, config, _IMPLEMENTATION_FIELD, config._attn_implementation)
                setattr(config, _IMPLEMENTATION_FIELD, self._implementation)
            modules = list(self._model.modules())
            if any(_is_compiled(module) for module in modules):
                # Dynamo would trace the attention's Python: a graph break in every layer, a compilation for every shape.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            training = [module for module in modules if module.training]
            stack.callback(_set_training, training, True)
            _set_training(training, False)
            # Autocast caches cast weights: casts made here carry no gradient, those of the trainer may be outdated.
            torch.clear_autocast_cache()
            stack.callback(torch.clear_autocast_cache)
            stack.enter_context(torch.no_grad())
            if self._autocast is not None:
                device = next(self._model.parameters()).device.type
                stack.enter_context(torch.autocast(device, self._autocast))
            self._restore = stack.pop_all()


_IMPLEMENTATION_FIELD = "_attn_implementation_internal"
_TOWERS = ("vision_config", "audio_config")
"""Fields of a configuration that describe modules beside the decoder."""


def _is_compiled(module: nn.Module) -> bool:
    """Whether `model.compile()` was called on it, or it is a wrapper of torch.compile (accelerate's regions)."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _set_training(modules: list[nn.Module], value: bool) -> None:
    for module in modules:
        module.training = value


def configs_of(model: nn.Module) -> list[Any]:
    """Every configuration object with an attention implementation, without duplicates; those of vision and audio towers,
    whose attention is not paged, are left out."""
    found: dict[int, Any] = {}
    own = getattr(model, "config", None)
    towers = tuple({type(getattr(own, name)) for name in _TOWERS if getattr(own, name, None) is not None})
    for module in model.modules():
        # A module asks its wrapped ones for an attribute that it lacks, which takes long in a model with adapters.
        config = vars(module).get("config")
        if hasattr(config, _IMPLEMENTATION_FIELD) and not isinstance(config, towers):
            found[id(config)] = config
    return list(found.values())
