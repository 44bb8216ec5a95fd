"""Checks that modules are what transformers defines and nothing more: no hooks, replaced forwards, unknown parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from rollout.engine.models.model_support import has_global_hooks
from rollout.engine.models.originals import Originals

PEFT_LORA = "peft.tuners.lora."


class Unfusable(Exception):  # noqa: N818 - not an error: the module's own forward runs
    """The reason why a model runs its own forward."""


class Checks:
    """Checked modules of one model: what was found, and whether it still holds.

    Attributes:
        originals: functions and numbers that were read.
    """

    def __init__(self) -> None:
        self.originals = Originals()
        self._dicts: list[dict[str, Any]] = []
        self._hooks_ever = RemovableHandle.next_id
        self._attributes: list[int] = []

    def seal(self) -> None:
        """End of the checks: attributes that are added to a module from now on are changes."""
        self._attributes = list(map(len, self._dicts))

    def hold(self) -> bool:
        """Whether a quick check finds no change."""
        return (
            RemovableHandle.next_id == self._hooks_ever
            and self.originals.intact()
            and list(map(len, self._dicts)) == self._attributes
        )

    def plain(self, module: nn.Module, *children: str) -> None:
        """Refuse a module with hooks, a replaced forward or unexpected children.

        Raises:
            Unfusable, Replaced: names the module.
        """
        self.unhooked(module)
        name = type(module).__name__
        require(set(module._modules) == set(children), f"{name} has other parts than {', '.join(children) or 'none'}")

    def unhooked(self, module: nn.Module) -> None:
        """Refuse a module with hooks, a parametrisation or a replaced forward.

        Raises:
            Unfusable, Replaced: names the module.
        """
        name = type(module).__name__
        require(
            "forward" not in module.__dict__ and "__call__" not in module.__dict__,
            f"the forward of {name} was replaced",
        )
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            require(_only_gathers(hook) or only_marks(hook), f"{name} has forward hooks")
        require(not is_parametrized(module), f"{name} is parametrised")
        self.originals.methods(_kind(module), "forward", "__call__")
        self._dicts.append(module.__dict__)


def require(ok: bool, why: str) -> None:
    """Raise `Unfusable` unless `ok`."""
    if not ok:
        raise Unfusable(why)


def address(module: nn.Module, name: str, dtype: torch.dtype) -> int:
    """Address of a parameter.

    Raises:
        Unfusable: it is not a contiguous parameter of that dtype.
    """
    parameter = module._parameters.get(name)
    if type(parameter) is not nn.Parameter or parameter.dtype != dtype or not parameter.is_contiguous():
        raise Unfusable(f"a parameter is not a contiguous {dtype} nn.Parameter")
    return parameter.data_ptr()


def is_of(module: Any, name: str, package: str = "transformers.models.") -> bool:
    """Whether a module is of the class of that name in a package."""
    kind = _kind(module)
    return kind.__name__ == name and kind.__module__.startswith(package)


def _kind(module: Any) -> type:
    # FSDP2 derives its own class from the wrapped one.
    kind = type(module)
    return kind.__mro__[getattr(kind, "_orig_cls_mro_index", 0)]


def _only_gathers(hook: Any) -> bool:
    """Whether a hook is FSDP2's, which has nothing to do while the weights are whole."""
    owner = getattr(hook, "__self__", None)
    owner = getattr(owner, "fsdp_state", owner)  # `MappedWeights` puts its own hook in the place of FSDP2's.
    ours = type(owner).__module__.startswith("torch.distributed.fsdp.") and type(owner).__name__ == "FSDPState"
    if not ours:
        return False
    policy: Any = owner._mp_policy  # type: ignore[union-attr]
    # What is computed with parameters of that dtype has it already (accelerate sets both).
    return policy.output_dtype in (None, policy.param_dtype)


def only_marks(hook: Any) -> bool:
    """Whether a hook is the one of `gradient_checkpointing_enable`, which sets `requires_grad` of the embedding's output."""
    home, name = str(getattr(hook, "__module__", "")), getattr(hook, "__name__", "")
    return home.startswith(("transformers.", "peft.")) and name in (
        "make_inputs_require_grads",
        "make_inputs_require_grad",
    )


def bypassed(device: torch.device) -> str | None:
    """What acts on every module on `device` now and a fused forward would bypass; None: nothing."""
    if torch.is_autocast_enabled(device.type):
        return "autocast is on"
    if has_global_hooks():
        return "torch has hooks on every module"
    return "a torch dispatch or function mode is active" if _torch_mode_active() else None


def _torch_mode_active() -> bool:
    """Whether a torch dispatch or function mode is active (device contexts excepted), which the C++ forward would bypass."""
    return bool(torch._C._len_torch_dispatch_stack()) or any(
        type(torch._C._get_function_stack_at(index)) is not DeviceContext
        for index in range(torch._C._len_torch_function_stack())
    )
