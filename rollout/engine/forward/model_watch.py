"""Detection of changes to the model's forward pass, apart from weight changes.

Cached KV is shared only under an equal *forward key*. Whenever the caller may have changed the module, the module epoch
rises and the key is computed again. It contains:

- autocast and its dtype, the precision of float32 matrix products, and torch's global module hooks;
- the class of each module, its hooks, plain attributes, functions, and tensors that are not weights;
- the plain values in the model's configurations;
- the forward method of each class, and the functions in the same file that the method calls;
- the module epoch, if any of this code is foreign (see `FAMILIAR`), because foreign code may read anything.

Always true: under equal keys and equal weights, a forward pass computes the same KV, unless functions of torch are patched.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedConfig

from rollout.engine.models.attention import Installation
from rollout.engine.models.model_support import ModelLayout, inspect_model
from rollout.engine.models.originals import PACKAGES, names_in, only_marks
from rollout.engine.scheduling.adapters import Variant, layers_with_adapters, variant_of
from rollout.errors import UnsupportedModelError

FAMILIAR = frozenset({*PACKAGES, "accelerate", "deepspeed", "liger_kernel", "trl", "rollout", "trainer_hooks"})
"""The packages whose code depends only on the weights and on values that the forward key contains. All other code is
foreign, except for the standard library."""

_KNOWN = FAMILIAR | sys.stdlib_module_names
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_ARGUMENTS = frozenset({"use_cache", "_attn_implementation_internal", "rope_deltas"})
"""The attributes of modules and configurations that the engine's forward passes override with their own values."""
_UNREAD = frozenset(vars(nn.Module())) | _ARGUMENTS | {
    "config", "generation_config", "gradient_checkpointing", "_gradient_checkpointing_func", "_require_grads_hook",
    "_require_grads_hooks", "_compiled_call_impl",
}  # fmt: skip
"""The module attributes that the engine's forward passes do not read, or that other code adds to the forward key."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({list, tuple, dict, set})
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, partial)
_MOST_ITEMS = 1024
_SMALL_BYTES = 1 << 16
"""The maximum size in bytes of tensors compared by content; larger ones are compared by identity and version counter."""


class ModelWatch:
    """The reader of one model's active adapters, forward key and masks, which detects whether they have changed.

    Args:
        layout: the model's layout when the engine was built.
        installation: the object that counts the module epoch, which rises whenever the caller may have changed the module.
        autocast: the autocast dtype of the engine's forward passes. If None, the caller's autocast applies.
    """

    def __init__(
        self, model: nn.Module, layout: ModelLayout, installation: Installation, autocast: torch.dtype | None = None
    ) -> None:
        self._model = model
        self._adapted: tuple[int, list[Any]] = -1, []
        """The module epoch of the last scan for layers with adapters, and these layers."""
        self._layout = layout
        self._installation = installation
        self._autocast = autocast
        self._module_epoch = -1
        self._contents = _Contents()
        self._modules: Hashable = ()
        self._settings = self._mask_settings()

    def variant(self) -> Variant:
        """Return the key of the active adapters; raise `UnsupportedModelError` if one is an activated LoRA (aLoRA)."""
        return variant_of(self.adapted_layers())

    def adapted_layers(self) -> list[Any]:
        """Return the layers that have adapters, active or not."""
        if (epoch := self._installation.module_epoch) != self._adapted[0]:
            self._adapted = epoch, layers_with_adapters(self._model)
        return self._adapted[1]

    def forward_key(self) -> Hashable:
        """Return a key that changes with everything, except weights and adapters, that affects a forward pass."""
        return self._precision(), self.modules()

    def modules(self) -> Hashable:
        """Return the part of the forward key that describes the modules. Rescan them if a caller may have changed them."""
        if (epoch := self._installation.module_epoch) != self._module_epoch:
            self._module_epoch = epoch
            scan = _Scan(self._contents)
            found = scan.model(self._model), epoch if scan.foreign else None
            # Keep the previous object if the new key equals it: each step compares keys, and identical objects compare fast.
            self._modules = self._modules if found == self._modules else found
        return self._modules

    def changed_settings(self) -> str:
        """Return the names, joined by commas, of the settings that have changed and may affect masks.

        Settings are attributes of the model's config and of its attention layers.
        """
        before, now = self._settings, self._mask_settings()
        return ", ".join(sorted({key[1] for key in before | now if before.get(key) != now.get(key)}))

    def masks_changed(self, max_sequence_length: int | None) -> bool:
        """Return whether the model's masks differ from those in `layout`. The model is inspected only if settings changed.

        Raises:
            UnsupportedModelError: the changed attention layers need a feature that the engine does not support.
        """
        if not (names := self.changed_settings()):
            return False
        try:
            masks = inspect_model(self._model, max_sequence_length).masks
        except UnsupportedModelError as exc:
            raise UnsupportedModelError(f"{names} changed after the rollout was built; undo it: {exc}") from exc
        if masks == self._layout.masks:
            self._settings = self._mask_settings()
        return masks != self._layout.masks

    def _mask_settings(self) -> dict[tuple[int, str], Hashable]:
        scan = _Scan(_Contents())
        return {
            (place, name): scan.frozen(value)
            for place, owner in enumerate([self._model.config, *self._layout.layer_of])
            for name, value in vars(owner).items()
            if name not in _UNREAD and not name.startswith("_") and not name.endswith("_token_id")
        }

    def _precision(self) -> Hashable:
        dtype = self._autocast
        device = self._layout.device.type
        if dtype is None and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        backend = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
        hooks = *torch_module._global_forward_pre_hooks, *torch_module._global_forward_hooks
        return dtype, backend.matmul.fp32_precision, hooks


class _Scan:
    """One scan of a model's modules. `foreign` is True if the scan has found foreign code (see `FAMILIAR`)."""

    def __init__(self, contents: _Contents) -> None:
        self.foreign = False
        self._contents = contents
        self._functions: dict[Hashable, None] = {}
        self._classes: dict[type, None] = {}
        self._configs: dict[int, PreTrainedConfig] = {}

    def model(self, model: nn.Module) -> Hashable:
        """Return the part of the forward key that describes the modules of `model`, their code and their configurations."""
        modules = tuple(map(self._module, _modules_of(model)))
        configs = tuple(map(self._config, list(self._configs.values())))
        for hooks in (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks):
            for hook in hooks.values():
                self._take(hook)
        kinds = [kind for kind in self._classes if issubclass(kind, nn.Module)]
        forwards = tuple(self._take(each) for kind in kinds for each in (kind.forward, kind.__call__))
        self.foreign |= not all(map(_is_familiar, self._classes))
        return modules, configs, forwards, tuple(self._functions)

    def _module(self, module: nn.Module) -> Hashable:
        own, kind = vars(module), type(module)
        self._classes[kind] = None
        if isinstance(config := own.get("config"), PreTrainedConfig):
            self._configs[id(config)] = config
        found: list[Any] = [
            (name, value if type(value) in _PLAIN else self.frozen(value))
            for name, value in own.items()
            if name not in _UNREAD
        ]
        for name in _HOOKS:
            if hooks := own[name]:
                taken = {handle: self._take(hook) for handle, hook in hooks.items() if not only_marks(hook)}
                # Identify a hook by its handle number: torch never reuses these numbers.
                found += [(name, handle) for handle in taken]
        if names := own["_non_persistent_buffers_set"]:
            found += [(name, self.frozen(own["_buffers"].get(name))) for name in names]
        return kind, *found

    def _config(self, config: PreTrainedConfig) -> Hashable:
        return tuple((name, self.frozen(value)) for name, value in vars(config).items() if name not in _ARGUMENTS)

    def frozen(self, value: Any) -> Hashable:
        """Return a hashable form of `value` for the forward key, or None for an object that the key leaves out."""
        kind = type(value)
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]
        if kind in _CONTAINERS and len(value) <= _MOST_ITEMS:
            each = tuple([one if type(one) in _PLAIN else self.frozen(one) for one in value])
            if kind is not dict:
                return frozenset(each) if kind is set else each
            return each, tuple([one if type(one) in _PLAIN else self.frozen(one) for one in value.values()])
        if isinstance(value, Tensor):
            return self._contents.of(value)
        if isinstance(value, PreTrainedConfig):
            return self._config(value)
        return self._take(value) if callable(value) else None

    def _take(self, function: Any) -> Hashable:
        """Record a function and the functions in its file that it calls. Return the function's form for the forward key."""
        same = function if isinstance(function, _FUNCTIONS) else _Same(function)
        while isinstance(function, MethodType | partial):
            function = function.func if isinstance(function, partial) else function.__func__
        if isinstance(function, FunctionType):
            self._follow(function)
        elif not isinstance(function, BuiltinFunctionType):
            self._classes.setdefault(type(function))
            self._follow(type(function).__call__)
        return same

    def _follow(self, function: Any) -> None:
        if not isinstance(function, FunctionType) or function in self._functions:
            return
        self._functions[function] = None
        home = function.__globals__
        self.foreign |= _root(home.get("__name__")) not in _KNOWN
        self._follow(getattr(function, "__wrapped__", None))
        for name in names_in(function.__code__):
            called = home.get(name)
            if isinstance(called, FunctionType):
                if called.__globals__ is home:
                    self._follow(called)
                elif called not in self._functions:
                    self._functions[called] = None
                    self.foreign |= _root(called.__globals__.get("__name__")) not in _KNOWN


class _Contents:
    """A cache of tensor contents, which reads a tensor again only if the tensor may have changed."""

    def __init__(self) -> None:
        self._known: Any = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> Hashable:
        """Return a tensor's form for the forward key: its content if small, else an object that every write replaces."""
        plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
        version = None if tensor.is_inference() else tensor._version
        state = version, tensor.data_ptr() if plain else None
        content: Hashable
        before, content = self._known.get(tensor, (None, None))
        if before != state or version is None:
            content = object()
            if plain and tensor.numel() * tensor.itemsize <= _SMALL_BYTES:
                raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                content = tensor.shape, tensor.dtype, raw.numpy().tobytes()
            self._known[tensor] = state, content
        return content


class _Same:
    """A key that compares an object by identity. It keeps the object alive, so that the object's address is not reused."""

    __slots__ = ("_it",)

    def __init__(self, it: Any) -> None:
        self._it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._it is other._it

    def __hash__(self) -> int:
        return id(self._it)


def _modules_of(model: nn.Module) -> list[nn.Module]:
    found = {model: None}
    for module in (order := [model]):
        for each in module._modules.values():
            if each is not None and each not in found:
                found[each] = None
                order.append(each)
    return order


@cache
def _is_familiar(kind: type) -> bool:
    return all(_root(each.__module__) in _KNOWN for each in kind.__mro__)


def _root(module: Any) -> str:
    return str(module).partition(".")[0]
