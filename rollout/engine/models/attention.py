"""Runs the trainer's model with the engine's paged attention.

Transformers' attention interface passes every layer's queries, keys and values to `rollout_attention`. The step's batch is
passed as a keyword argument and, for models that drop keyword arguments, also in a context variable. The model's
configuration names our attention only during an engine's forward pass, and only on the thread that runs this pass. Any
other forward pass uses the model's own attention and masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rollout.engine.kernels.torch_paged import CacheWrite, PagedAttention, write_slots
from rollout.engine.memory.kv_cache import KVCache
from rollout.errors import EngineStateError
from rollout.threads.interrupts import interruptible, uninterrupted

IMPLEMENTATION = "rollout_paged"
"""The name under which the engine's attention is registered with transformers."""
BATCH_ARGUMENT = "rollout_batch"
"""The keyword argument that passes the step's batch through the model to its attention layers."""
TREE_PREFIX = "rollout_tree_"
"""The prefix of the name of a model's attention implementation while tree attention is attached."""
SINKS = "s_aux"
"""The keyword argument in which layers pass their attention sinks, one per query head."""

_carried: ContextVar[AttentionBatch | None] = ContextVar("rollout_batch", default=None)
"""The batch of the engine's forward pass that the current thread runs, or None if the thread runs no such pass."""
_in_forward: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
"""The lock of each model, held during an engine's forward pass, because two engines of one model may run in two threads."""


def is_rollout_forward() -> bool:
    """Return whether the current thread is inside an engine's forward pass."""
    return _carried.get() is not None


def refuse_inside_forward() -> None:
    """Raise `EngineStateError` if this thread is inside an engine's forward pass, during which no request can run."""
    if is_rollout_forward():
        raise EngineStateError(
            "generate or score inside a forward of the model (a forward hook?), in the middle of a step: keep in the hook "
            "what you need, and call after the generate() that runs it has returned"
        )


Arguments = dict[str, Any]
"""The keyword arguments that a layer passes to its attention function."""


class AttentionBatch(Protocol):
    """The object that every attention layer receives in one forward pass, and that computes the layer's attention."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, arguments: Arguments
    ) -> Tensor:
        """Compute the attention of a layer for P positions in each of B rows.

        Args:
            query: [B, H, P, D] with H query heads of size D.
            key: [B, Hkv, P, D] with Hkv key-value heads.
            value: [B, Hkv, P, Dv].
            scaling: factor of the scores; None means 1 / √D.
            arguments: further keyword arguments that the layer passes to its attention function.

        Returns:
            [B, P, H, Dv].
        """


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
    """Compute a layer's attention with the current batch. Transformers calls this function for `IMPLEMENTATION`."""
    batch: AttentionBatch | None = kwargs.pop(BATCH_ARGUMENT, None)
    if batch is None:
        # Fall back to the context variable: the decoder layers of some models drop keyword arguments.
        batch = _carried.get()
    if batch is None:
        raise RuntimeError(
            f"{IMPLEMENTATION!r} is the engine's own attention implementation: set the model's to 'sdpa'"
        )
    if torch.is_autocast_enabled(query.device.type):
        # Cast to autocast's dtype, as the trainer's attention does, because rotary embeddings return queries and keys in
        # a wider dtype than values.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if attention_mask is not None:
        kwargs["attention_mask"] = attention_mask
    return batch.attend(module, query, key, value, scaling, kwargs), None


AttentionInterface.register(IMPLEMENTATION, rollout_attention)


def attention_of(module: nn.Module, implementation: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the attention function that an implementation's name selects in the file that defines the module's class."""
    files = [vars(sys.modules[kind.__module__]) for kind in type(module).__mro__ if kind.__module__ in sys.modules]
    interface = next((file["ALL_ATTENTION_FUNCTIONS"] for file in files if "ALL_ATTENTION_FUNCTIONS" in file), None)
    eager = next((file["eager_attention_forward"] for file in files if "eager_attention_forward" in file), None)
    function: Callable[..., tuple[Tensor, Tensor | None]] = (interface or AttentionInterface()).get_interface(
        implementation, eager
    )
    return function


def forward_with(batch: AttentionBatch, model: nn.Module, **inputs: Any) -> Any:
    """Run one forward pass of `model` in which every attention layer gets `batch`. Call it inside `Installation.forward`."""
    with carried(batch), interruptible():
        return model(use_cache=False, **inputs, **{BATCH_ARGUMENT: batch})


@contextmanager
def carried(batch: AttentionBatch) -> Iterator[None]:
    """Pass `batch` to this thread's forward passes inside the `with` block, even if layers drop keyword arguments."""
    token = _carried.set(batch)
    try:
        yield
    finally:
        _carried.reset(token)


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The `AttentionBatch` of one step over the paged KV cache."""

    cache: KVCache
    layer_of: dict[nn.Module, int]
    """The index of each attention module's layer in the cache."""
    slots: Tensor
    """The token slot (block * block_size + offset) of each of the forward pass's B * P positions, int64 [B * P]."""
    attention: PagedAttention
    """The attention function for the rows of this step."""
    windows: Mapping[nn.Module, int | None]
    """The windows that replace layers' argument `sliding_window`; None means no window. See `ModelLayout.mask_windows`."""
    write: CacheWrite = write_slots
    """The function that writes a layer's keys and values into the cache."""
    unwindowed: PagedAttention | None = None
    """The attention function for layers without a window; if None, these layers also use `attention`."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, arguments: Arguments
    ) -> Tensor:
        key_cache, value_cache = self.cache.layer(self.layer_of[module])
        keys, values = (each.transpose(1, 2).flatten(0, 1) for each in (key, value))
        self.write(keys, values, key_cache, value_cache, self.slots)
        window = self.windows.get(module, arguments.get("sliding_window"))
        attention = self.attention if window is not None or self.unwindowed is None else self.unwindowed
        out = attention(
            query.transpose(1, 2).flatten(0, 1).contiguous(),
            key_cache,
            value_cache,
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=window,
            softcap=arguments.get("softcap"),
            sinks=arguments.get(SINKS),
        )
        return out.reshape(query.shape[0], query.shape[2], *out.shape[1:])


class Installation:
    """A context manager that prepares the trainer's model for the engine's forward passes.

    A `with` block may contain many passes and may be nested. Between two passes the model is as the trainer left it. Other
    threads, and the trainer's code inside the block (such as a reward function), can use the model as usual.

    Args:
        autocast: autocast dtype of the forward passes; if None, the caller's autocast setting applies.
        implementation: name under which the attention function to use is registered with transformers.
    """

    def __init__(
        self, model: nn.Module, autocast: torch.dtype | None = None, *, implementation: str = IMPLEMENTATION
    ) -> None:
        self._model = model
        self._autocast = autocast
        self._implementation = implementation
        self._alone = _in_forward.setdefault(model, RLock())
        self._depth = 0
        self._modules: list[nn.Module] = []
        self._configs: list[Any] = []
        self.module_epoch = 0
        """A counter that is incremented whenever the trainer may have modified the model."""

    @property
    def active(self) -> bool:
        """Whether a `with` block of this installation is open."""
        return self._depth > 0

    def __enter__(self) -> None:
        with uninterrupted():
            if not self._depth:
                self._modules, self._configs = list(self._model.modules()), configs_of(self._model)
                # Discard the weight casts that autocast cached earlier, which may be outdated. Casts inside this block
                # stay valid until its end.
                torch.clear_autocast_cache()
                torch.autocast_increment_nesting()
                self.module_epoch += 1
            self._depth += 1

    def __exit__(self, *exc_info: object) -> None:
        with uninterrupted():
            self._depth -= 1
            if not self._depth:
                self.module_epoch += 1
                torch.autocast_decrement_nesting()
                torch.clear_autocast_cache()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Disable gradients and apply the engine's autocast inside the `with` block, on this thread."""
        with self, torch.no_grad():
            if self._autocast is None:
                yield
            else:
                with torch.autocast(next(self._model.parameters()).device.type, self._autocast):
                    yield

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Enter `inference`. Inside the `with` block, modules run with the engine's attention, uncompiled and in eval mode.

        At the end, even after an exception, the attention implementation of every configuration object and the `training`
        flag of every module are restored. Other threads can observe the changed `training` flags, but no other change.
        """
        with self.inference(), self._alone, ExitStack() as stack:
            try:
                with uninterrupted():
                    self._install(stack)
                yield
            finally:
                with uninterrupted():
                    stack.close()

    def _install(self, stack: ExitStack) -> None:
        for config in self._configs:
            own = getattr(config, _IMPLEMENTATION_FIELD)
            stack.callback(setattr, config, _IMPLEMENTATION_FIELD, own)
            setattr(config, _IMPLEMENTATION_FIELD, _Switched.of(own, self._implementation))
        # Look for `model.compile()`, and for torch.compile wrappers around submodules (accelerate compiles regions).
        if any(each._compiled_call_impl is not None or "_orig_mod" in each._modules for each in self._modules):
            # Run eagerly: Dynamo would break the graph in every layer and recompile for every shape.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(in_eval_mode(self._modules))


class _Switched(str):
    """The name of a model's own attention implementation, which acts as the name `ours` during an engine's forward pass.

    This affects only the thread that runs the pass. Copying or pickling the object gives the model's own name.
    """

    ours: str

    @classmethod
    def of(cls, own: str | None, ours: str) -> _Switched:
        switched = cls("eager" if own is None else own)
        switched.ours = ours
        return switched

    def _now(self) -> str:
        return self.ours if is_rollout_forward() else str(self)

    def __eq__(self, other: object) -> bool:
        return self._now() == other

    def __ne__(self, other: object) -> bool:
        return self._now() != other

    def __hash__(self) -> int:
        return hash(self._now())

    def __contains__(self, part: object) -> bool:
        return str(part) in self._now()

    def __reduce_ex__(self, protocol: Any) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


_IMPLEMENTATION_FIELD = "_attn_implementation_internal"
_TOWERS = ("vision_config", "audio_config")
"""The fields of a configuration that describe modules outside the decoder."""


@contextmanager
def in_eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode inside the `with` block, except for bitsandbytes' 4-bit layers."""
    # Leave 4-bit layers in training mode: in eval mode bitsandbytes permanently repacks their weights on some CPUs, and
    # a packed layer has no gradient.
    training = [module for module in modules if module.training and type(module).__name__ != "Linear4bit"]
    # Set the flags directly: every forward pass does this, and `nn.Module.__setattr__` takes ten times as long.
    flags = [vars(module) for module in training]
    for each in flags:
        each["training"] = False
    try:
        yield
    finally:
        for each in flags:
            each["training"] = True


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configuration objects that name an attention implementation, except the vision and audio towers' own."""
    found: dict[int, Any] = {}
    own = getattr(model, "config", None)
    towers = tuple({type(getattr(own, name)) for name in _TOWERS if getattr(own, name, None) is not None})
    for module in model.modules():
        # Read the attribute without `getattr`, which searches all wrapped modules of a PEFT module and is slow.
        config = vars(module).get("config")
        if hasattr(config, _IMPLEMENTATION_FIELD) and not isinstance(config, towers):
            found[id(config)] = config
    return list(found.values())
