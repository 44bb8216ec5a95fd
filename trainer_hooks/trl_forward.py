"""A context in which a model that TRL has patched for training runs the original `forward` of its class."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Remove TRL's replacement of `model.forward`, which only training needs, until the `with` block ends.

    The replacement does not change generation. But it prevents the engine from using its CPU kernels, which require the
    original `forward` of the model's class.
    """
    replaced = vars(model).get("forward")
    if not _hides_only_the_class(replaced, type(model)):
        yield
        return
    del model.forward
    try:
        yield
    finally:
        model.__dict__["forward"] = replaced


def _hides_only_the_class(forward: Any, model_class: type[nn.Module]) -> bool:
    function = getattr(forward, "__func__", None)
    code = getattr(function, "__code__", None)
    if function is None or code is None or not code.co_qualname.startswith("add_fused_lm_head."):
        return False
    hidden = inspect.getclosurevars(function).nonlocals.get("original_forward")
    return getattr(hidden, "__func__", None) is model_class.forward
