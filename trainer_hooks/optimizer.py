"""Optimizer hooks that suspend the rollout before `step()` and raise the policy version after it.

    optimizer.step()
     ├ before    manager.before_optimizer_step(mode)    suspends: no forward pass is running, KV memory is released
     ├ the optimizer changes the weights
     └ after     manager.weights_updated()              only if the weights were updated: version + 1

An attachment depends only on the optimizer and the protocol `Rollout`. Gradient accumulation, learning rate schedules and
closures need no handling, because torch calls the hooks only when the optimizer actually steps.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from rollout.state import KVCacheManagementMode, Mode
from trainer_hooks import deepspeed


class Rollout(Protocol):
    """The interface of a rollout that the optimizer hooks require; `RolloutManager` and `LLM` implement it."""

    @property
    def model(self) -> torch.nn.Module:
        """The module that samples; the optimizer steps its parameters."""

    def before_optimizer_step(self, mode: KVCacheManagementMode | None) -> object:
        """Suspend the rollout before the weights change. `mode` is the KV cache mode, or None for the configured mode."""

    def weights_updated(self) -> object:
        """Raise the policy version after the weights have changed."""


class Attachment:
    """An optimizer's step hooks for a rollout, active until `detach()` or the end of the `with` block. Created by `attach`.

    Attributes:
        optimizer: the torch or DeepSpeed optimizer with the hooks.
        manager: the manager that the hooks notify.
        mode: the KV cache mode that is passed to `manager.before_optimizer_step`, or None for the configured mode.
        steps: number of optimizer steps since `attach` that changed the weights.
    """

    def __init__(self, optimizer: Any, manager: Rollout, mode: KVCacheManagementMode | None) -> None:
        self.optimizer = optimizer
        self.manager = manager
        self.mode = mode
        self.steps = 0
        self._idle = False
        self._handles: list[Any]
        if deepspeed.steps_by_itself(optimizer):
            self._handles = [deepspeed.Handle(optimizer, self._before_step, self._after_step)]
        else:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def detach(self) -> None:
        """Remove the hooks from the optimizer. Idempotent."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_no_update(optimizer):
            return
        # Never treat a step with a closure as idle, because the closure computes gradients inside the step. `args`
        # contains the optimizer and perhaps a closure.
        self._idle = len(args) < 2 and not kwargs and _without_gradients(optimizer)
        if not self._idle:
            self.manager.before_optimizer_step(self.mode)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_no_update(optimizer) or self._idle or _skipped_for_inf(optimizer):
            return
        self.manager.weights_updated()
        self.steps += 1


def attach(optimizer: object, manager: Rollout, *, mode: Mode = None) -> Attachment:
    """Hook `optimizer` to suspend `manager` before every step, and to raise its policy version after the step.

    Requires a torch optimizer that holds parameters of `manager.model`, or a wrapper with such an optimizer as `.optimizer`
    (accelerate's `AcceleratedOptimizer`). Attach after `accelerator.prepare` or sharding, when the optimizer holds its final
    parameters. With DeepSpeed, pass its engine or its optimizer (`deepspeed.initialize` returns both).

    Some steps do not raise the version: a torch optimizer's step without any gradient, a step that `GradScaler` skips, a
    step that raises, and the empty step by which `torch.distributed.checkpoint` initialises optimizer state. If a step
    that raised may have changed weights, call `manager.weights_updated()`. A step with learning rate 0 raises the version.
    If two optimizers step one model, every step of both raises it.

    Args:
        optimizer: the optimizer, wrapper or DeepSpeed engine whose steps raise the policy version.
        manager: the `RolloutManager`, `LLM` or `AsyncLLM` that samples with the weights that the optimizer steps.
        mode: handling of the KV cache at each step. If None, the manager's configured mode.

    Returns:
        The attachment; `detach()` removes the hooks.

    Raises:
        TypeError: `optimizer` neither is nor wraps a torch optimizer, or is a DeepSpeed optimizer whose updates cannot be
            observed.
        ConfigError: `mode` is not a `KVCacheManagementMode`.
        ValueError: `optimizer` steps no parameter of `manager.model`, or is already attached to this rollout.
    """
    inner = _innermost(optimizer)
    chosen = KVCacheManagementMode.parse(mode)
    # Use the blocking methods of an AsyncLLM: a hook cannot await coroutines.
    manager = getattr(manager, "blocking", manager)
    _check_steps_the_model(inner, manager)
    _check_not_attached(inner, manager)
    return Attachment(inner, manager, chosen)


def stepped_parameters(optimizer: object) -> set[int]:
    """Return the `id()`s of the model parameters that `optimizer`, or the optimizer that it wraps, steps."""
    return _stepped(_innermost(optimizer))


def _stepped(inner: Any) -> set[int]:
    if deepspeed.steps_by_itself(inner):
        return set(map(id, deepspeed.parameters(inner)))
    return {id(parameter) for group in inner.param_groups for parameter in group["params"]}


def _innermost(optimizer: object) -> Any:
    inner = optimizer
    # Unwrap completely: a wrapper may subclass Optimizer without having hooks, as accelerate's does. Stop at a
    # DeepSpeed optimizer, because one of its steps consists of several steps of its inner optimizer.
    while not deepspeed.steps_by_itself(inner) and (wrapped := getattr(inner, "optimizer", None)) is not None:
        inner = wrapped
    if not (isinstance(inner, Optimizer) or deepspeed.steps_by_itself(inner)):
        swapped = "; swap the arguments: attach(optimizer, manager)" if hasattr(optimizer, "weights_updated") else ""
        raise TypeError(
            f"cannot attach to {type(optimizer).__module__}.{type(optimizer).__qualname__}: it must be a "
            f"torch.optim.Optimizer or keep one as `.optimizer`; pass the torch optimizer that steps the policy{swapped}"
        )
    return inner


def _check_steps_the_model(optimizer: Any, manager: Rollout) -> None:
    stepped = _stepped(optimizer)
    if stepped.isdisjoint(id(parameter) for parameter in manager.model.parameters()):
        raise ValueError(
            f"this {type(optimizer).__name__} steps {len(stepped)} parameters, and none of them belongs to the "
            f"{type(manager.model).__name__} that samples. Pass the policy's optimizer (not a critic's), made of the "
            "parameters of the rollout's own module, after accelerator.prepare or sharding; with DeepSpeed, pass its "
            "engine. Without an attachment, call manager.weights_updated() after each real step"
        )


def _check_not_attached(optimizer: Any, manager: Rollout) -> None:
    by_deepspeed = deepspeed.steps_by_itself(optimizer)
    hooks = deepspeed.hooked_after(optimizer) if by_deepspeed else optimizer._optimizer_step_post_hooks.values()
    for hook in hooks:
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Attachment) and owner.manager is manager:
            raise ValueError(
                f"this {type(optimizer).__name__} is attached to this rollout already; its steps would count twice: "
                "keep the first attachment, or detach() it before attaching again"
            )


_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
_HOOKED_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _is_no_update(optimizer: Any) -> bool:
    # Detect an inner step on the stack: if a subclass's step() calls super().step(), both call the hooks. A counter
    # would go wrong, because a step that raises never reaches its post-hook. The stack also shows the step with
    # learning rate 0 by which torch initialises optimizer state before saving or loading it (accelerate, FSDP2).
    depth = 0
    frame = inspect.currentframe()
    while frame is not None and depth < 2:
        depth += frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer
        if frame.f_code.co_name == "_init_optim_state" and frame.f_globals.get("__name__") == _STATE_DICT_MODULE:
            return True
        frame = frame.f_back
    return depth == 2


def _without_gradients(optimizer: Any) -> bool:
    # Check gradients only for torch's own optimizers: others may change parameters that have no gradient.
    if not type(optimizer).__module__.startswith("torch.optim."):
        return False
    return all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"])


def _skipped_for_inf(optimizer: Any) -> bool:
    if deepspeed.steps_by_itself(optimizer):
        return deepspeed.overflowed(optimizer)
    # On an overflow, GradScaler does not call step(), except for optimizers with this attribute, on which it first sets
    # `found_inf`.
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and float(found_inf) > 0
