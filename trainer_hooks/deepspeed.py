"""Integration with DeepSpeed ZeRO-1, -2 and -3: hooks on the optimizer's own `step()`.

A ZeRO optimizer updates flat copies of the parameters in several steps of an inner torch optimizer, and then gathers the
parameters. On a gradient overflow it skips the update. So the hooks are on the ZeRO optimizer's own `step()`, which the
DeepSpeed engine calls once per accumulated batch. DeepSpeed is not imported; its objects are recognised by their class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Hook = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

_GROUPS = ("bit16_groups", "bf16_groups", "fp16_groups")
"""The attributes in which DeepSpeed optimizers of different classes and ZeRO stages hold lists of lists of parameters."""


def steps_by_itself(optimizer: object) -> bool:
    """Return whether `optimizer` is a DeepSpeed optimizer, rather than a DeepSpeed engine or a plain torch optimizer."""
    package, _, rest = type(optimizer).__module__.partition(".")
    return package == "deepspeed" and rest.startswith("runtime") and not isinstance(optimizer, nn.Module)


def parameters(optimizer: Any) -> list[nn.Parameter]:
    """Return the model parameters that a DeepSpeed optimizer steps.

    Raises:
        TypeError: the optimizer's class keeps its parameters in another attribute, or applies updates asynchronously.
    """
    groups = next((getattr(optimizer, name) for name in _GROUPS if hasattr(optimizer, name)), None)
    if groups is None or "zenflow" in type(optimizer).__module__:
        raise TypeError(
            f"cannot attach to DeepSpeed's {type(optimizer).__name__}, whose steps cannot be observed (attach works with "
            "ZeRO-1, -2 and -3, BF16_Optimizer and FP16_Optimizer): call manager.weights_updated() after every "
            "engine.step() that was an update, inside `with manager.suspended():`"
        )
    return [parameter for group in groups for parameter in group]


def overflowed(optimizer: Any) -> bool:
    """Return whether a DeepSpeed optimizer has skipped its last step because of a gradient overflow."""
    return bool(getattr(optimizer, "overflow", False))


class HookedStep:
    """A replacement for a DeepSpeed optimizer's `step` that calls hooks before and after the step.

    Attributes:
        hooks: the (before, after) pairs that are called around every step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._step = optimizer.step
        self.hooks: list[tuple[Hook, Hook]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for before, _ in self.hooks:
            before(self._optimizer, args, kwargs)
        result = self._step(*args, **kwargs)
        for _, after in self.hooks:
            after(self._optimizer, args, kwargs)
        return result


class Handle:
    """A pair of hooks that run before and after every step of a DeepSpeed optimizer, until `remove()`."""

    def __init__(self, optimizer: Any, before: Hook, after: Hook) -> None:
        self._optimizer = optimizer
        self._pair = before, after
        if not isinstance(vars(optimizer).get("step"), HookedStep):
            optimizer.step = HookedStep(optimizer)
        optimizer.step.hooks.append(self._pair)

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        step = vars(self._optimizer).get("step")
        if isinstance(step, HookedStep) and self._pair in step.hooks:
            step.hooks.remove(self._pair)
            if not step.hooks:
                del self._optimizer.step


def hooked_after(optimizer: Any) -> list[Hook]:
    """Return the hooks called after each step of a DeepSpeed optimizer."""
    step = vars(optimizer).get("step")
    return [after for _, after in step.hooks] if isinstance(step, HookedStep) else []
