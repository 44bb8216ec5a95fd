"""Environments of `RolloutManager.run`: the interface that users implement, and the loop over an episode's turns."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, cast

from rollout.errors import ConfigError
from rollout.manager.episodes.episode import Episode
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to a completion."""

    observation: str | Sequence[int] = ()
    """The text or token ids appended to the history after the completion, as context that is never trained on. Text is
    tokenised without special tokens."""
    reward: float = 0.0
    """The number that is added to the episode's reward."""
    done: bool = False
    """Whether the episode is over."""


class Environment(Protocol):
    """The environment of one episode. Its methods may be coroutines.

    A method that is not a coroutine runs on a pool thread, so it may block without delaying other episodes. If there is a
    method `close()`, it is always called when the episode finishes.
    """

    def reset(self, task: Any) -> Prompt | Awaitable[Prompt]:
        """Start the episode; return the first prompt."""

    def step(self, turn: DynamicInferenceRequest) -> StepResult | Awaitable[StepResult]:
        """Answer a completion, which is in `turn.generated_tokens` and `turn.generated_text`."""


Play = Callable[[Episode], Awaitable[float]]
"""A coroutine function that plays a whole episode: it calls `episode.sample` as often as needed and returns the reward."""
EnvironmentFactory = Callable[[], Environment]


class BrokenEnvironmentError(TypeError):
    """The error that `run` raises for an environment without the required interface."""


@dataclass(frozen=True, slots=True)
class EnvironmentTask:
    """A task for `run`, together with the environment in which its episodes are played."""

    environment: EnvironmentFactory | Play
    task: Any


def as_play(environment: EnvironmentFactory | Play, tokenizer: Any, max_turns: int) -> Play:
    """Return a coroutine function that plays an episode in `environment`; raise `TypeError` if it is not an environment."""
    name = getattr(environment, "__qualname__", type(environment).__qualname__)
    if _is_play(environment):
        check_call(f"environment={name}", environment, 1, "write `async def play(episode): ... return reward`")
        return environment
    factory = cast("Any", environment)
    if not callable(factory):
        its_class = "; pass its class, since each episode makes its own" if hasattr(factory, "step") else ""
        raise TypeError(
            f"environment of type {type(factory).__name__}: pass a coroutine function of an Episode, or a callable that "
            f"makes an object with reset() and step(){its_class}"
        )
    check_call(
        f"environment={name}", environment, 0,
        "pass a class or function without required arguments that makes an environment, or for a whole episode "
        "`async def play(episode): ... return reward`",
    )  # fmt: skip
    if isinstance(environment, type):
        _check_methods(environment, name)

    async def play(episode: Episode) -> float:
        made: Any = factory()
        _check_methods(made, name)
        try:
            return await _turns(episode, made, tokenizer, max_turns)
        finally:
            if (close := getattr(made, "close", None)) is not None:
                await called(close)

    return play


def check_call(what: str, function: Any, arguments: int, cure: str) -> None:
    """Raise a `TypeError` that names `what` and suggests `cure` if `function` cannot take this many `arguments`."""
    with suppress(ValueError):
        signature = inspect.signature(function)
        try:
            signature.bind(*[None] * arguments)
        except TypeError as exc:
            raise TypeError(
                f"{what}: signature {signature}, called with {arguments} arguments ({exc}): {cure}"
            ) from None


def _check_methods(made: Any, name: str) -> None:
    missing = [f"{method}()" for method in ("reset", "step") if not callable(getattr(made, method, None))]
    if missing:
        kind = "" if isinstance(made, type) else f" made an object of type {type(made).__name__}, which"
        raise BrokenEnvironmentError(
            f"environment={name}{kind} has no {' and no '.join(missing)}: an environment has reset(task), which returns "
            "the first prompt, and step(turn), which returns a StepResult(observation, reward, done)"
        )


def _is_play(environment: Any) -> TypeGuard[Play]:
    # Also accept an object with `async def __call__`, but not a class: calling a class only creates an environment.
    call = None if isinstance(environment, type) else getattr(type(environment), "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(environment) or inspect.iscoroutinefunction(call)


async def _turns(episode: Episode, environment: Environment, tokenizer: Any, max_turns: int) -> float:
    prompt, reward = await called(environment.reset, episode.task), 0.0
    for number in range(max_turns):
        try:
            turn = await episode.sample(prompt)
        except TypeError as exc:
            source = "StepResult.observation" if number else "reset()"
            raise BrokenEnvironmentError(f"{source} of {type(environment).__name__} gave no prompt: {exc}") from exc
        step = await called(environment.step, turn)
        if not isinstance(step, StepResult):
            raise BrokenEnvironmentError(
                f"{type(environment).__name__}.step() returned {step!r:.80} of type {type(step).__name__}: return "
                "StepResult(observation, reward, done)"
            )
        reward += step.reward
        if step.done:
            break
        prompt = [*episode.tokens, *_tokens(step.observation, tokenizer)]
    return reward


def _tokens(observation: str | Sequence[int], tokenizer: Any) -> Sequence[int]:
    if not isinstance(observation, str):
        return observation
    if tokenizer is None:
        raise ConfigError("a text observation needs a tokenizer and there is none; pass tokenizer= or use token ids")
    ids: list[int] = tokenizer(observation, add_special_tokens=False)["input_ids"]
    return ids


async def called(method: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `method(*args)`: await it if it is a coroutine function, otherwise run it on a pool thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    result = await asyncio.to_thread(method, *args)
    return await result if inspect.isawaitable(result) else result
