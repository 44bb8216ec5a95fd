"""Integration with PEFT: the rollout samples with the active adapters, without merging them into the weights.

    model = get_peft_model(model, LoraConfig(...))
    manager = RolloutManager(model, tokenizer, config)      the PeftModel itself, or a model with injected adapters
    attach(optimizer, manager)                              trainer_hooks.optimizer; it may step adapters only
    with adapter(manager, None):                            reference policy: all adapters disabled
        reference = batch.logprobs_of(model)

The engine reads the active adapters from the model, however they were switched, and separates the prefix cache by adapter.
PEFT's own switches change `requires_grad`, so that a parameter may silently get no gradient. `adapter` never changes it,
and also synchronises the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

if TYPE_CHECKING:
    from rollout import DynamicInferenceEngine, RolloutManager


@contextmanager
def adapter(manager: RolloutManager | DynamicInferenceEngine, name: str | None) -> Iterator[None]:
    """Activate the adapter `name` inside the `with` block, for the trainer's forward pass and for `manager.generate`.

    The adapters must be inside the model's layers (LoRA, DoRA, IA3, `modules_to_save` and the like) and not merged. The
    active adapter and the disabled flag of every adapted layer are set, and restored on exit, even after an exception. No
    parameter and no `requires_grad` flag changes. Contexts may be nested.

    Requests in flight belong to the adapter under which they were accepted: they wait during the block and continue after
    it in their order. A `generate` inside the block frees their KV cache, except for blocks in the prefix cache. Generate
    whole batches inside the block (without `min_groups`), because a `generate` that waits for requests accepted outside it
    raises `EngineStateError`. Requests left in flight inside the block wait until the same adapter is active again.

    On several ranks, every rank must enter and leave the block, as with `manager.pause()`. A rank whose block raises an
    exception leaves without waiting for the other ranks.

    Args:
        manager: the manager that samples with the model. For an `LLM`, pass its `engine`.
        name: name of one of the model's adapters. If None, all adapters are disabled.

    Raises:
        ValueError: the model has no such adapter or no adapters at all, or an adapter is merged.
        TypeError: adapters of this type cannot be switched by setting flags.
        DeadlineError, EngineStateError: other ranks have not entered or left the same block.
    """
    model = manager.model
    switches = _switches(model)
    _check(model, switches, name)
    label = "no adapter" if name is None else f"adapter {name!r}"
    before = [(owner, key, vars(owner).get(key, _ABSENT)) for owner in switches for key in _FLAGS]
    others_leave = None
    try:
        with manager.adapter_switch(f"entering {label}: adapter"):
            for owner in switches:
                _set(owner, name)
        yield
        others_leave = f"leaving {label}: adapter"
    finally:
        with manager.adapter_switch(others_leave):
            _put_back(before)


_FLAGS = ("_active_adapter", "_disable_adapters", "active_adapter", "_adapters_disabled")
"""The attributes that name active adapters or disable adapters; layers have the first two, PEFT models the others."""
_ABSENT = object()
"""A marker for a flag that is not set on the instance itself. `adapter` deletes such a flag from the instance on exit."""


def _switches(model: nn.Module) -> list[Any]:
    """Return all modules whose active adapters can be switched: adapted layers, wrapped modules and PEFT models."""
    return [
        module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper | BaseTuner | PeftModel)
    ]


def _set(owner: Any, name: str | None) -> None:
    if isinstance(owner, BaseTunerLayer | AuxiliaryTrainingWrapper):
        owner._disable_adapters = name is None
        if name is not None:
            # Activate no adapter if the wrapper has no module copy for adapter `name`, so that its original module runs.
            has = isinstance(owner, BaseTunerLayer) or name in owner._get_available_adapters()
            owner._active_adapter = [name] if has else []
        return
    if isinstance(owner, PeftModel):
        owner._adapters_disabled = name is None
    if name is not None:
        owner.active_adapter = name


def _put_back(before: list[tuple[Any, str, Any]]) -> None:
    for owner, key, value in before:
        if value is _ABSENT:
            vars(owner).pop(key, None)
        else:
            setattr(owner, key, value)


def _check(model: nn.Module, switches: list[Any], name: str | None) -> None:
    layers = [each for each in switches if isinstance(each, BaseTunerLayer)]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no layer with an adapter that can be switched: wrap it with "
            "peft.get_peft_model(model, LoraConfig(...)), and build the rollout of the result"
        )
    for layer in layers:
        kind = type(layer)
        if (
            kind.set_adapter is not BaseTunerLayer.set_adapter
            or kind.enable_adapters is not BaseTunerLayer.enable_adapters
        ):
            raise TypeError(f"{kind.__name__} switches adapters by more than a flag: adapter() cannot; use LoRA")
    if any(layer.merged for layer in layers):
        raise ValueError("an adapter is merged into the weights: call unmerge_adapter() first")
    names = sorted({each for layer in layers for each in layer._get_available_adapters()})
    if name is not None and name not in names:
        raise ValueError(
            f"adapter {name!r}: {type(model).__name__} has {', '.join(map(repr, names))}; None disables them"
        )
