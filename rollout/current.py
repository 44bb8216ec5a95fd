"""The current manager of this process: `init` creates it, and the functions of the package act on it.

manager = rollout.init(model, tokenizer, optimizer)
batch = rollout.generate(prompts, n=8, max_tokens=256)
with rollout.suspended():
    loss(batch).backward(); optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, overload

from torch import nn

from rollout.config import CoordinatorConfig, InferenceConfig
from rollout.engine.sampling.token_values import ValueFunction
from rollout.errors import ConfigError, EngineStateError
from rollout.journal import Journal
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.scores import Sequences, TokenScores
from rollout.manager.batch.scores import score as score_under
from rollout.manager.manager import RolloutManager
from rollout.state import EngineState
from trainer_hooks.optimizer import attach

P = ParamSpec("P")
R = TypeVar("R")

_managers: list[RolloutManager] = []
"""A list that contains this process's manager, even after it is closed. The list is empty before `init`."""


def _current() -> RolloutManager | None:
    return next((each for each in _managers if each.engine.state is not EngineState.STOPPED), None)


def init(
    model: nn.Module,
    tokenizer: Any = None,
    optimizer: object = None,
    config: InferenceConfig | None = None,
    *,
    token_values: ValueFunction | None = None,
    coordinator: CoordinatorConfig | bool = True,
    journal: Journal | None = None,
    **options: Any,
) -> RolloutManager:
    """Build a `RolloutManager` and make it the manager of this process, until `rollout.close()`.

    Args:
        model, tokenizer, token_values, coordinator, journal: as in `RolloutManager`.
        optimizer: the optimizer (or a wrapper of it) whose steps raise the policy version; see
            `trainer_hooks.optimizer.attach`. If None, attach an optimizer later, or call `rollout.weights_updated()` after
            each update.
        config: engine options. If None, the defaults.
        options: `InferenceConfig` fields, given in place of `config`: `init(model, tokenizer, kv_cache_memory_gb=2)`.

    Raises:
        EngineStateError: this process already has a manager.
        ConfigError: both `config` and options are given, or an option is unknown or out of range.
        TypeError, ValueError: `optimizer` does not step the model.
        UnsupportedModelError: see `RolloutManager`.
    """
    if _current() is not None:
        raise EngineStateError(
            "init(): this process has a manager already; call rollout.close() first, or build further ones by "
            "rollout.RolloutManager(model, tokenizer)"
        )
    if config is not None and options:
        shown = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(f"init() got config and {shown}: pass config=config.replace({shown})")
    manager = RolloutManager(
        model,
        tokenizer,
        config or InferenceConfig(**options),
        token_values=token_values,
        coordinator=coordinator,
        journal=journal,
    )
    if optimizer is not None:
        try:
            attach(optimizer, manager)
        except BaseException:
            manager.close()
            raise
    _managers[:] = [manager]
    return manager


def _acting(method: Callable[Concatenate[RolloutManager, P], R]) -> Callable[P, R]:
    """Return a function that calls `method` on this process's manager."""

    @wraps(method)
    def function(*args: P.args, **named: P.kwargs) -> R:
        manager = _current()
        if manager is None:
            raise EngineStateError(
                f"{method.__name__}(): this process has no manager; call rollout.init(model, tokenizer, optimizer) first"
            )
        return method(manager, *args, **named)

    return function


generate = _acting(RolloutManager.generate)
submit = _acting(RolloutManager.submit)
suspended = _acting(RolloutManager.suspended)
suspend = _acting(RolloutManager.suspend)
resume = _acting(RolloutManager.resume)
weights_updated = _acting(RolloutManager.weights_updated)
metrics = _acting(RolloutManager.metrics)


def close() -> None:
    """Close the manager of this process (`RolloutManager.close`). Further calls do nothing."""
    for manager in _managers:
        manager.close()


@overload
def score(rollouts: RolloutBatch | Sequences, /, **options: Any) -> TokenScores: ...
@overload
def score(model: nn.Module, rollouts: RolloutBatch | Sequences, /, **options: Any) -> TokenScores: ...
def score(*given: Any, **options: Any) -> TokenScores:
    """Return log-probs of sequences under the policy, or under another model, for which the call builds a temporary engine.

        rollout.score(batch, entropy=True)         `RolloutManager.score` on this process's manager
        rollout.score(reference_model, batch)      another model, such as a reference or a teacher

    Args:
        given: the sequences, or a causal language model in transformers followed by the sequences.
        options: as in `RolloutManager.score`. If a model is given, `config` (an `InferenceConfig`) is also accepted, and
            `adapter` is not.
    """
    if given and isinstance(given[0], nn.Module):
        return score_under(*given, **options)
    return _acting(RolloutManager.score)(*given, **options)
