"""Checks that the code of a model's parts is the code that transformers, torch and PEFT define.

Liger, Unsloth and other libraries replace the `forward` of a class, or a function in the module that defines the class.
They do so before or after a model is built. A function counts as original if its code was compiled from the file of its
class or module, and was defined under the same name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._device import DeviceContext

from rollout.engine.models.attention import TREE_PREFIX, attention_of
from rollout.engine.models.model_support import has_global_hooks

PACKAGES = ("transformers", "torch", "peft")
"""The packages whose functions and decorators count as original."""
PEFT_LORA = "peft.tuners.lora."


class Unfusable(Exception):  # noqa: N818 - not an error: the module's own forward pass runs instead
    """Raised if a model cannot run as fused kernels and must run its own `forward`; the message gives the reason."""


class Checks:
    """Checks of one model's parts. A method raises `Unfusable`, with the part's name, if the part fails the check."""

    def __init__(self) -> None:
        self._checked: set[tuple[object, str]] = set()

    def methods(self, kind: type, *names: str) -> None:
        """Check that the methods `names` of a class, and the functions that they call from the same file, are original."""
        for name in names:
            if (kind, name) in self._checked:
                continue
            self._checked.add((kind, name))
            definer = next((each for each in kind.__mro__ if name in vars(each)), kind)
            function = getattr(kind, name, None)
            module = sys.modules.get(definer.__module__)
            code = None if module is None else _own_code(function, module)
            if code is None or code.co_qualname.rpartition(".")[0] != definer.__qualname__:
                raise Unfusable(f"{kind.__name__}.{name} is not the one that {definer.__module__} defines")
            self._called(code, module)

    def function(self, module: ModuleType, name: str) -> None:
        """Check that the function `name` of a module, and the functions that it calls from the same file, are original."""
        if (module, name) in self._checked:
            return
        self._checked.add((module, name))
        function = getattr(module, name, None)
        if isinstance(function, BuiltinFunctionType):
            return
        code, home = _own_code(function, module), sys.modules.get(str(getattr(function, "__module__", None)))
        imported = code is None
        if imported and home is not None and ".models." not in home.__name__:
            # Look up the function in its own module, unless that module belongs to another model: models in transformers
            # do not share functions, so such a function was patched in.
            code = _own_code(function, home)
        if code is None or code.co_qualname != name:
            raise Unfusable(f"{name} in {module.__name__} is not the one that was defined there")
        if not imported:
            self._called(code, module)

    def plain(self, module: nn.Module, *children: str) -> None:
        """Check that the names of a module's child modules are exactly `children`, and run the checks of `unhooked`."""
        self.unhooked(module)
        name = type(module).__name__
        require(set(module._modules) == set(children), f"{name} has other parts than {', '.join(children) or 'none'}")

    def unhooked(self, module: nn.Module) -> None:
        """Check that a module has no forward hooks that change results, no parametrisation and no replaced `forward`."""
        name = type(module).__name__
        require(
            "forward" not in module.__dict__ and "__call__" not in module.__dict__,
            f"the forward of {name} was replaced",
        )
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            require(_only_gathers(hook) or only_marks(hook), f"{name} has forward hooks")
        require(not is_parametrized(module), f"{name} is parametrised")
        self.methods(_kind(module), "forward", "__call__")

    def _called(self, code: CodeType, module: ModuleType | None) -> None:
        for name in names_in(code):
            if module is not None and isinstance(vars(module).get(name), FunctionType):
                self.function(module, name)


def require(ok: bool, why: str) -> None:
    """Raise `Unfusable` with the message `why` unless `ok`."""
    if not ok:
        raise Unfusable(why)


def address(module: nn.Module, name: str, dtype: torch.dtype) -> int:
    """Return the memory address of the parameter `name`. Raise `Unfusable` unless it is contiguous and has this dtype."""
    parameter = module._parameters.get(name)
    if type(parameter) is not nn.Parameter or parameter.dtype != dtype or not parameter.is_contiguous():
        raise Unfusable(f"a parameter is not a contiguous {dtype} nn.Parameter")
    return parameter.data_ptr()


def is_of(module: Any, name: str, package: str = "transformers.models.") -> bool:
    """Return whether a module's class has this name, and was defined in a module whose name starts with `package`."""
    kind = _kind(module)
    return kind.__name__ == name and kind.__module__.startswith(package)


def only_marks(hook: Any) -> bool:
    """Return whether `gradient_checkpointing_enable` added this hook, which only sets `requires_grad` on its output."""
    home, name = str(getattr(hook, "__module__", "")), getattr(hook, "__name__", "")
    return home.startswith(("transformers.", "peft.")) and name in (
        "make_inputs_require_grads",
        "make_inputs_require_grad",
    )


def bypassed(device: torch.device) -> str | None:
    """Return a message if a global setting is active that a fused forward pass on `device` would ignore, else None."""
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if has_global_hooks():
        return "torch has hooks on every module"
    count, at = torch._C._len_torch_function_stack(), torch._C._get_function_stack_at
    # Ignore device contexts, which only choose the device of new tensors.
    modes = any(type(at(index)) is not DeviceContext for index in range(count))
    return "a torch dispatch or function mode is active" if modes or torch._C._len_torch_dispatch_stack() else None


def foreign_part(model: nn.Module, attention_layers: Iterable[nn.Module]) -> str | None:
    """Return the name of a part that affects attention but is not original code, or None if all such parts are original.

    The check covers attention functions, and the `forward` of attention layers, of modules around them, and of modules
    without parameters, such as rotary embeddings. Projections, norms and experts are not checked, because they process each
    position alone.
    """
    layers = set(attention_layers)
    for layer in layers:
        own = getattr(getattr(layer, "config", None), "_attn_implementation", None) or "eager"
        function = attention_of(layer, own.removeprefix(TREE_PREFIX))
        # Accept kernels from the Hugging Face hub, which have a slash in their names.
        if "/" not in own and not _packaged(getattr(function, "func", function)):
            return f"attention {own!r}"
    for name, module in model.named_modules():
        container = type(module).forward is nn.Module.forward
        if container or (any(True for _ in module.parameters()) and layers.isdisjoint(module.modules())):
            continue
        try:
            require(_packaged(module.forward), "")
            Checks().methods(type(module), "forward")
        except Unfusable:
            return f"{type(module).__name__} ({name or 'the model'})"
    return None


@cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a function's code, or the code of a function nested in it, may read."""

    def every(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from every(constant)

    return tuple(dict.fromkeys(every(code)))


def _kind(module: Any) -> type:
    # Return the original class: FSDP2 replaces a module's class by a derived one.
    kind = type(module)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)]


def _only_gathers(hook: Any) -> bool:
    """Return whether a hook is an FSDP2 hook that has no effect if the weights are already gathered."""
    owner = getattr(hook, "__self__", None)
    ours = type(owner).__module__.startswith("torch.distributed.fsdp.") and type(owner).__name__ == "FSDPState"
    if not ours:
        return False
    policy: Any = owner._mp_policy  # type: ignore[union-attr]
    # If output_dtype equals param_dtype (accelerate sets both), the outputs already have this dtype, so the policy
    # casts nothing.
    return policy.output_dtype in (None, policy.param_dtype)


def _packaged(function: Any) -> bool:
    """Return whether a function and its decorators come from `PACKAGES`, or from accelerate, which wraps `forward`."""
    codes = [getattr(function, "__code__", None)]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        codes.append(getattr(function, "__code__", None))
    return all(_of_a_package(code, (*PACKAGES, "accelerate")) for code in codes)


def _own_code(function: Any, module: ModuleType) -> CodeType | None:
    """Return the code of a function without its decorators.

    Return None if the function was not defined in the module's own file, or a decorator is not from one of `PACKAGES`.
    """
    while hasattr(function, "__wrapped__"):
        if not _of_a_package(getattr(function, "__code__", None)):
            return None
        function = function.__wrapped__
    code: CodeType | None = getattr(function, "__code__", None)
    return code if code is not None and code.co_filename == module.__file__ and _of_a_package(code) else None


def _of_a_package(code: CodeType | None, packages: Iterable[str] = PACKAGES) -> bool:
    folders = (_folder(name) for name in packages if name in sys.modules)
    return code is not None and any(code.co_filename.startswith(folder) for folder in folders)


@cache
def _folder(package: str) -> str:
    return f"{Path(str(sys.modules[package].__file__)).parent}/"
