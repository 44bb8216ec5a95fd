"""Optimizer hooks that suspend the rollout before `step()` and raise the policy version after it.

    optimizer.step()
     ├ before    rollout.before_optimizer_step(mode)    no forward of ours is running, the KV is out of the way
     ├ the optimizer changes the weights
     └ after     rollout.weights_updated()              only if it really stepped: version + 1

An attachment knows the optimizer and three names of the rollout, nothing of engines or trainers. Gradient accumulation,
learning rate schedules and closures need nothing from it: torch calls the hooks of the optimizer that really steps.
"""

from __future__ import annotations

import inspect
from types import TracebackType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from rollout.state import KVCacheManagementMode, Mode
from trainer_hooks import deepspeed


class Rollout(Protocol):
    """What the hook needs to know of a rollout (`RolloutManager` is one)."""

    @property
    def model(self) -> torch.nn.Module:
        """The module that samples: the one whose parameters the optimizer steps."""

    def before_optimizer_step(self, mode: KVCacheManagementMode | None) -> object:
        """Stop before the weights change, and suspend the KV cache as `mode` says. None: the rollout's configured mode."""

    def weights_updated(self) -> object:
        """The weights have changed."""


class Attachment:
    """An optimizer tied to a rollout, until `detach()` or the end of the `with` block. Built by `attach`.

    Attributes:
        optimizer: the torch optimizer, or the one of DeepSpeed's, that carries the hooks.
        rollout: what it tells.
        mode: passed to `rollout.before_optimizer_step`.
        steps: how many steps changed the weights since the attachment.
    """

    def __init__(self, optimizer: Any, rollout: Rollout, mode: KVCacheManagementMode | None) -> None:
        self.optimizer = optimizer
        self.rollout = rollout
        self.mode = mode
        self.steps = 0
        self._handles: list[Any]
        if deepspeed.steps_by_itself(optimizer):
            self._handles = [deepspeed.Handle(optimizer, self._before_step, self._after_step)]
        else:
            self._handles = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def detach(self) -> None:
        """Take the hooks off the optimizer. Harmless when repeated."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_no_update(optimizer):
            return
        self.rollout.before_optimizer_step(self.mode)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_no_update(optimizer) or _skipped_for_inf(optimizer):
            return
        self.rollout.weights_updated()
        self.steps += 1


def attach(optimizer: object, rollout: Rollout, *, mode: Mode = None) -> Attachment:
    """Let every real step of `optimizer` suspend `rollout` before, and raise its policy version after.

    Needs a torch optimizer, or a wrapper that keeps one as `.optimizer` (accelerate's `AcceleratedOptimizer`), which
    holds parameters of `rollout.model`. Adds one step pre-hook and one post-hook to the innermost torch optimizer, and
    changes nothing else of it. Attach after `accelerator.prepare` or sharding, when the optimizer holds the parameters
    it will step. Of DeepSpeed, its engine or its optimizer (`deepspeed.initialize` returns both): the `step` of the
    latter is replaced then, and counts where `engine.step()` really steps.

    A step that `GradScaler` skips does not count, also where a fused optimizer is called and skips by itself
    (`found_inf`; reading it waits for the device). A `step()` that raises does not count either: where it may have
    changed some weights before it raised, call `rollout.weights_updated()`. Nor does the empty step by which
    `torch.distributed.checkpoint` fills the state of an optimizer that has not stepped yet. Two optimizers on one model
    count two versions per round.

    Args:
        optimizer: whose steps count.
        rollout: what samples with the weights it steps.
        mode: what becomes of the KV cache at each step. None: the rollout's `kv_cache_management_mode`, for a
            `RolloutManager` as for an `LLM`.

    Returns:
        The attachment, which counts the steps; `detach()` undoes it.

    Raises:
        TypeError: `optimizer` is no torch optimizer and wraps none; or is one of DeepSpeed's whose steps cannot be told.
        ConfigError: `mode` is no `KVCacheManagementMode`.
        ValueError: it steps no parameter of `rollout.model`, or is attached to this rollout already.
    """
    inner = _innermost(optimizer)
    chosen = KVCacheManagementMode.parse(mode)
    _check_steps_the_model(inner, rollout)
    _check_not_attached(inner, rollout)
    return Attachment(inner, rollout, chosen)


def stepped_parameters(optimizer: object) -> set[int]:
    """The ids of the model's parameters that `optimizer`, or what it wraps, steps."""
    return _stepped(_innermost(optimizer))


def _stepped(inner: Any) -> set[int]:
    if deepspeed.steps_by_itself(inner):
        return set(map(id, deepspeed.parameters(inner)))
    return {id(parameter) for group in inner.param_groups for parameter in group["params"]}


def _innermost(optimizer: object) -> Any:
    inner = optimizer
    # A wrapper may call itself an Optimizer (accelerate's does) without having hooks, so unwrap as far as it goes; what
    # an optimizer of DeepSpeed's holds does the work of its steps in parts.
    while not deepspeed.steps_by_itself(inner) and (wrapped := getattr(inner, "optimizer", None)) is not None:
        inner = wrapped
    if not (isinstance(inner, Optimizer) or deepspeed.steps_by_itself(inner)):
        raise TypeError(
            f"cannot attach to {type(optimizer).__module__}.{type(optimizer).__qualname__}: it must be a "
            "torch.optim.Optimizer or keep one as `.optimizer`; pass the torch optimizer that steps the policy"
        )
    return inner


def _check_steps_the_model(optimizer: Any, rollout: Rollout) -> None:
    stepped = _stepped(optimizer)
    if stepped.isdisjoint(id(parameter) for parameter in rollout.model.parameters()):
        raise ValueError(
            f"this {type(optimizer).__name__} steps {len(stepped)} parameters and none of them belongs to the "
            f"{type(rollout.model).__name__} that samples: pass the policy's optimizer (a critic's does not count), "
            "made of the parameters of the rollout's own module, and attach after accelerator.prepare or sharding; of "
            "DeepSpeed, pass the engine (without an attachment: rollout.weights_updated() after each real step)"
        )


def _check_not_attached(optimizer: Any, rollout: Rollout) -> None:
    by_deepspeed = deepspeed.steps_by_itself(optimizer)
    hooks = deepspeed.hooked_after(optimizer) if by_deepspeed else optimizer._optimizer_step_post_hooks.values()
    for hook in hooks:
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, Attachment) and owner.rollout is rollout:
            raise ValueError(
                f"this {type(optimizer).__name__} is attached to this rollout already; its steps would count twice: "
                "keep the first attachment, or detach() it before attaching again"
            )


_STATE_DICT_MODULE = "torch.distributed.checkpoint.state_dict"
_HOOKED_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def _is_no_update(optimizer: Any) -> bool:
    # A subclass whose step() calls super().step() has its hooks called by both. The stack tells the outer one apart: a
    # counter could not, because a step that raises never comes to its post-hook. It also tells of the step with a
    # learning rate of 0 by which torch gives an optimizer its state before that is saved or loaded (accelerate, FSDP2).
    depth = 0
    frame = inspect.currentframe()
    while frame is not None and depth < 2:
        depth += frame.f_code is _HOOKED_STEP and frame.f_locals.get("self") is optimizer
        if frame.f_code.co_name == "_init_optim_state" and frame.f_globals.get("__name__") == _STATE_DICT_MODULE:
            return True
        frame = frame.f_back
    return depth == 2


def _skipped_for_inf(optimizer: Any) -> bool:
    if deepspeed.steps_by_itself(optimizer):
        return deepspeed.overflowed(optimizer)
    # GradScaler does not call other optimizers at all when gradients overflow; these it calls, with `found_inf` set.
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    found_inf = getattr(optimizer, "found_inf", None)
    return found_inf is not None and float(found_inf) > 0
