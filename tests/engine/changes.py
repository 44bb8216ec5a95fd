"""Changes of a Qwen3 that the trainer's forward follows, each until the end of a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn

Change = Callable[[Any, Any], AbstractContextManager[Any]]
"""A function of a model and one of its layers."""


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def larger(own: Callable[..., Any]) -> Callable[..., Any]:
    """A forward in the place of `own`."""
    return lambda *args: 1.5 * own(*args)


def scaled(module: nn.Module, args: Any, out: Any) -> Any:
    """A hook."""
    return 1.5 * out if type(module).__name__ == "Qwen3MLP" else None


FOREIGN: dict[str, Change] = {
    "a hook": lambda model, layer: layer.mlp.register_forward_hook(scaled),
    "a pre-hook": lambda model, layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:])),
    "a hook on every module": lambda model, layer: nn.modules.module.register_module_forward_hook(scaled),
    "a replaced forward": lambda model, layer: patch.object(layer.mlp, "forward", larger(layer.mlp.forward)),
    "a forward replaced on its class": lambda model, layer: changed(
        type(layer.mlp), "forward", larger(type(layer.mlp).forward)
    ),
}
"""Code of others takes part."""
