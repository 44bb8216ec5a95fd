"""Integration with PEFT adapters: the rollout samples with them active, nothing is merged.

    model = get_peft_model(model, LoraConfig(...))
    rollout = RolloutManager(model, tokenizer, config)      the PeftModel itself, or a model with injected adapters
    attach(optimizer, rollout)                              trainer_hooks.optimizer: an optimizer of adapters only will do
    with adapter(rollout, None):                            the reference policy: no adapter acts, here or in the rollout
        reference = token_logprobs(model, batch)

The engine reads off the model which adapters act, whoever switched them, and keeps prompts cached under one apart from
those of another. What `adapter` adds to PEFT's own switches: it acts between two steps of the engine, it waits for the
other ranks, and it puts back exactly what was there, while the parameters' `requires_grad` is never touched (PEFT's
`set_adapter` and `disable_adapter` change it, and an optimizer then misses gradients without a word).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn


class AdaptedRollout(Protocol):
    """What the door needs to know of a rollout (`RolloutManager` and `DynamicInferenceEngine` are such)."""

    @property
    def model(self) -> nn.Module:
        """The module that samples, with its adapters."""

    def adapter_switch(self, what: str | None) -> AbstractContextManager[None]:
        """A block that changes which adapters act; its end waits for the ranks whose block has the same name."""


@contextmanager
def adapter(rollout: AdaptedRollout, name: str | None) -> Iterator[None]:
    """A block in which the adapter `name` acts, in the trainer's forward and in `rollout.generate` alike.

    Needs a model whose adapters act inside its layers (LoRA, DoRA, IA3, `modules_to_save` and the like), none of them
    merged. Changes, until the block ends, however it ends: which adapter is active and whether adapters are disabled,
    in every layer that has the switch. No parameter and no `requires_grad` flag changes. Blocks may be nested.

    Requests in flight belong to the adapter they were accepted under: inside the block they wait, and go on after it in
    their old order. As soon as something is generated inside, those that were running give up their KV cache; what of
    it is still in the prefix cache afterwards is not computed again. So inside the block ask for whole batches
    (`generate` without `min_groups`): what is in flight from outside cannot end there, and a call that waits for it
    raises `EngineStateError`. What is left in flight inside waits for the same adapter again.

    On several ranks every rank enters and leaves the block, as with `rollout.pause()`; one that leaves it by an
    exception waits for nobody.

    Args:
        rollout: what samples with the model. Of an `LLM`, its `engine`.
        name: of an adapter of the model; None: none acts.

    Raises:
        ValueError: the model has no such adapter, or none at all, or one is merged.
        TypeError: an adapter is of a kind whose switch is more than a flag.
        DeadlineError, EngineStateError: other ranks have not entered, or left, the same block.
    """
    model = rollout.model
    switches = _switches(model)
    _check(model, switches, name)
    label = "no adapter" if name is None else f"adapter {name!r}"
    before = [(owner, key, vars(owner).get(key, _ABSENT)) for owner in switches for key in _FLAGS]
    others_leave = None
    try:
        with rollout.adapter_switch(f"entering {label}: adapter"):
            for owner in switches:
                _set(owner, name)
        yield
        others_leave = f"leaving {label}: adapter"
    finally:
        with rollout.adapter_switch(others_leave):
            _put_back(before)


_FLAGS = ("_active_adapter", "_disable_adapters", "active_adapter", "_adapters_disabled")
"""Of layers the first two, of PEFT's models the others."""
_ABSENT = object()
"""A default of the class, which must not become a flag of the instance's own."""


def _switches(model: nn.Module) -> list[Any]:
    """Everything in the model that knows which adapter is active."""
    return [
        module
        for module in model.modules()
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper | BaseTuner | PeftModel)
    ]


def _set(owner: Any, name: str | None) -> None:
    if isinstance(owner, BaseTunerLayer | AuxiliaryTrainingWrapper):
        owner._disable_adapters = name is None
        if name is not None:
            # A wrapped module that the adapter has no copy of is the original one.
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
