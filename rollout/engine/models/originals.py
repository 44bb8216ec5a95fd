"""Identity checks of functions as transformers, torch and PEFT define them, for the fused forward.

Liger, Unsloth and others replace the `forward` of a class, or a function of the module that defines it, before or after a
model is built. A function is original if its code was compiled from the file that defines its class or module, under the
name it is found by, whatever the import order. Once checked, it is compared by identity, which costs a microsecond for
every twenty functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import repeat
from operator import is_
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from rollout.engine.models.attention import TREE_PREFIX, attention_of

PACKAGES = ("transformers", "torch", "peft")
"""Packages whose functions and decorators count as original."""


class Replaced(Exception):  # noqa: N818 - names what was replaced; the caller decides what follows
    """A function is not the one that its package defines."""


class Originals:
    """Checked functions and values, to be compared by identity later."""

    def __init__(self) -> None:
        self._methods: set[tuple[type, str]] = set()
        self._places: set[tuple[int, str]] = set()
        self._owners: list[object] = []
        self._names: list[str] = []
        self._values: list[object] = []
        self._items: list[tuple[Mapping[str, Any], str, object]] = []

    def intact(self) -> bool:
        """Whether every recorded attribute and item is still the same object."""
        return all(map(is_, map(getattr, self._owners, self._names, repeat(None)), self._values)) and all(
            mapping.get(key) is value for mapping, key, value in self._items
        )

    def item(self, mapping: Mapping[str, Any], key: str) -> Any:
        """Record and return an item (None if missing); any other object in its place counts as a change."""
        value = mapping.get(key)
        self._items.append((mapping, key, value))
        return value

    def value(self, owner: object, name: str) -> Any:
        """Record and return an attribute (None if missing); any other object in its place counts as a change."""
        value = getattr(owner, name, None)
        if (id(owner), name) not in self._places:
            self._places.add((id(owner), name))
            self._owners.append(owner)
            self._names.append(name)
            self._values.append(value)
        return value

    def methods(self, kind: type, *names: str) -> None:
        """Check and record methods of a class, with the functions of their files that they call.

        Raises:
            Replaced: names the first that is not original.
        """
        for name in names:
            if (kind, name) in self._methods:
                continue
            self._methods.add((kind, name))
            definer = next((each for each in kind.__mro__ if name in vars(each)), kind)
            function = self.value(kind, name)
            module = sys.modules.get(definer.__module__)
            code = None if module is None else _own_code(function, module)
            if code is None or code.co_qualname.rpartition(".")[0] != definer.__qualname__:
                raise Replaced(f"{kind.__name__}.{name} is not the one that {definer.__module__} defines")
            self._called(code, module)

    def function(self, module: ModuleType, name: str) -> None:
        """Check and record a function of a module, with those of its file that it calls.

        Raises:
            Replaced: names the first that is not original.
        """
        if (id(module), name) in self._places:
            return
        function = self.value(module, name)
        if isinstance(function, BuiltinFunctionType):
            return
        code = _own_code(function, module)
        if code is None:
            # An imported function: not from another model, since models of transformers do not share functions.
            home = sys.modules.get(str(getattr(function, "__module__", None)))
            code = None if home is None or ".models." in home.__name__ else _own_code(function, home)
            if code is None or code.co_qualname != name:
                raise Replaced(f"{name} in {module.__name__} is not the one that was defined there")
            return
        if code.co_qualname != name:
            raise Replaced(f"{name} in {module.__name__} is not the one that was defined there")
        self._called(code, module)

    def _called(self, code: CodeType, module: ModuleType | None) -> None:
        for name in names_in(code):
            if module is not None and isinstance(vars(module).get(name), FunctionType):
                self.function(module, name)


def foreign_part(model: nn.Module, attention_layers: Iterable[nn.Module]) -> str | None:
    """What decides which positions attend to which, and how, and is not transformers' own; None: nothing.

    That is: an attention function, the forward of an attention layer or of a module around it, or the forward of a module
    without parameters, as a rotary embedding is. Projections, norms and experts see one position at a time.
    """
    layers = set(attention_layers)
    for layer in layers:
        own = getattr(getattr(layer, "config", None), "_attn_implementation", None) or "eager"
        function = attention_of(layer, own.removeprefix(TREE_PREFIX))
        # Kernels of a hub have a slash in their names.
        if "/" not in own and not _packaged(getattr(function, "func", function)):
            return f"attention {own!r}"
    for name, module in model.named_modules():
        container = type(module).forward is nn.Module.forward
        if container or (any(True for _ in module.parameters()) and layers.isdisjoint(module.modules())):
            continue
        try:
            if not _packaged(module.forward):
                raise Replaced
            Originals().methods(type(module), "forward")
        except Replaced:
            return f"{type(module).__name__} ({name or 'the model'})"
    return None


def _packaged(function: Any) -> bool:
    """Whether a function and its decorators come from a package; accelerate wraps the forward of a whole model."""
    codes = [getattr(function, "__code__", None)]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        codes.append(getattr(function, "__code__", None))
    return all(_of_a_package(code, (*PACKAGES, "accelerate")) for code in codes)


def _own_code(function: Any, module: ModuleType) -> CodeType | None:
    """Code of a function under its decorators; None if it, or a decorator, comes from an unexpected file."""
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


@cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """Global names that a function, or a function nested in it, may read."""

    def every(code: CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from every(constant)

    return tuple(dict.fromkeys(every(code)))
