"""Which groups are worth training on: `rewards_differ`, and how many others a call may discard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import isfinite
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout.errors import ConfigError, InvalidRequestError
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.episodes.environment import check_call
from rollout.manager.generation import Generation, prompts_of, submit
from rollout.manager.groups import GroupLedger
from rollout.manager.rounds import OnError, Rounds, check_on_error
from rollout.observe.recorder import span
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, one_each

MOST_DISCARDED = 4
"""A call discards at most this many times the groups it returns, if `max_discarded` is None."""


class Scored(Protocol):
    """An episode, or a `ScoredSample`."""

    @property
    def reward(self) -> float | None:
        """None: it failed."""

    @property
    def error(self) -> str | None:
        """Why it failed."""


def rewards_differ(group: Sequence[Scored]) -> bool:
    """Whether a group teaches GRPO anything: what did not fail in it has different rewards. For `keep=`."""
    return len({each.reward for each in group if each.error is None}) > 1


def most_discarded(groups: int | None, asked: int | None) -> float:
    """How many groups a call may discard: `asked`, or four times the groups it returns.

    Raises:
        ConfigError: `asked` is neither None nor an integer of at least 0.
    """
    if asked is None:
        return math.inf if groups is None else MOST_DISCARDED * groups
    if type(asked) is not int or asked < 0:
        raise ConfigError(f"max_discarded={asked!r}: must be None or an integer of at least 0")
    return asked


Reward = Callable[[Sequence[DynamicInferenceRequest]], Sequence[float] | Tensor]
"""The rewards of a group: of its samples that did not fail, in their order."""


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A prompt as `generate_scored` draws it."""

    prompt: Prompt
    metadata: Any = None
    """msgpack-able; `request.metadata` where the reward is computed, and in `batch.metadata`."""
    sampling_params: SamplingParams | None = None
    """None: those of the call."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample with its reward, as `keep` judges it."""

    request: DynamicInferenceRequest
    reward: float | None
    """None: it failed."""

    @property
    def error(self) -> str | None:
        """Why it failed."""
        return self.request.error


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ScoredBatch(RolloutBatch):
    """The samples of the groups that were kept, with their rewards."""

    rewards: Tensor
    """float32 [N]; NaN: the sample failed."""

    discarded_rewards: Tensor
    """float32 [M]: of the samples of the groups that this call has discarded. The mean of both is the policy's reward; that
    of `rewards` alone is of prompts that were chosen for being neither solved nor hopeless."""


class ScoredGoal:
    """The goal of one `generate_scored`.

    Args:
        groups: in flight, of this call and of earlier ones.
        rewards: of the samples of groups that have ended and are kept, by group id; filled here.
        tasks: drawn from while fewer than `most` groups are in flight.
        begin: submits groups.
        number: of kept groups that fill the batch.
        keep: whether a group is worth training on. None: each is.
        most_discarded: so many groups are discarded, then all are kept.
        discard: told the rewards of a group that is dropped.
        too_old: ids of groups that must have ended too; None: not known yet.
    """

    def __init__(
        self,
        groups: GroupLedger,
        rewards: dict[int, list[float | None]],
        tasks: Iterator[Any],
        begin: Callable[[Sequence[Any]], None],
        number: int,
        most: int,
        reward: Reward,
        keep: Callable[[Sequence[ScoredSample]], bool] | None,
        most_discarded: float,
        discard: Callable[[list[float | None]], None],
        too_old: Callable[[], set[int] | None],
    ) -> None:
        self._groups = groups
        self._rewards = rewards
        self._tasks = tasks
        self._begin = begin
        self.number = number
        self._most = most
        self._reward = reward
        self._keep = keep
        self._discards_left = most_discarded
        self._discard = discard
        self._too_old = too_old
        self._full = False
        self._submit = getattr(reward, "submit", None)
        self._pending: dict[int, Any] = {}
        """Group id → future of its rewards."""

    def ended(self) -> int:
        """How many kept groups have ended."""
        return len(self._rewards)

    def reached(self) -> bool:
        """Scores and discards what has ended, begins new groups; then whether the batch is full, or no group is left."""
        if self._full:
            # Other ranks may need more steps; what ends in them is scored by the next call.
            return True
        self._score()
        if len(self._rewards) < self.number:
            self._draw()
            self._full = not (self._groups.unfinished or self._pending)
        else:
            must = self._too_old()
            self._full = must is not None and must.isdisjoint(self._groups.unfinished)
        return self._full

    def _score(self) -> None:
        if len(self._groups) - len(self._groups.unfinished) == len(self._rewards):
            return
        for group_id in self._groups.complete():
            if group_id in self._rewards:
                continue
            requests = self._groups.results([group_id])
            if self._submit is not None:
                if group_id not in self._pending:
                    self._pending[group_id] = self._submit([each for each in requests if each.error is None])
                if not self._pending[group_id].done():
                    continue
            with span("reward"):
                future = self._pending.pop(group_id, None)
                rewards = rewards_of(requests, self._reward if future is None else lambda _, made=future: made.result())
            samples = [ScoredSample(*each) for each in zip(requests, rewards, strict=True)]
            # A failed sample has to be seen, not discarded.
            failed = any(sample.error is not None for sample in samples)
            if self._keep is None or failed or self._discards_left == 0 or self._keep(samples):
                self._rewards[group_id] = rewards
            else:
                self._discards_left -= 1
                self._groups.drop([group_id])
                self._discard(rewards)

    def _draw(self) -> None:
        drawn = list(islice(self._tasks, max(0, self._most - len(self._groups))))
        if drawn:
            self._begin(drawn)


def rewards_of(requests: Sequence[DynamicInferenceRequest], reward: Reward) -> list[float | None]:
    """Rewards of a group's samples; None of those that failed.

    Raises:
        ValueError: there are not as many rewards as samples, or one is no finite number.
    """
    sound = [request for request in requests if request.error is None]
    try:
        told = reward(sound) if sound else []
    except (AttributeError, TypeError) as exc:
        exc.add_note(
            "reward is called with the list of a group's samples and returns a list of numbers, one each; a sample has "
            "generated_text, generated_tokens and metadata: reward=lambda samples: [score(each) for each in samples]"
        )
        raise
    try:
        given = [float(each) for each in told]
    except (TypeError, ValueError) as exc:
        raise ValueError(
            f"reward returned {told!r:.80} for the {len(sound)} samples of group {requests[0].request_id}: return a list "
            "of numbers, one each"
        ) from exc
    if len(given) != len(sound):
        raise ValueError(
            f"reward returned {len(given)} values for the {len(sound)} samples of group {requests[0].request_id}: "
            "return one each"
        )
    for value, request in zip(given, sound, strict=True):
        if not isfinite(value):
            raise ValueError(
                f"reward={value!r} of request {request.request_id} sample {request.sample_index}: must be finite"
            )
    values = iter(given)
    return [next(values) if request.error is None else None for request in requests]


class Scoring:
    """Scores the groups of one manager.

    Args:
        generation: the groups in flight.
    """

    def __init__(self, rounds: Rounds, generation: Generation) -> None:
        self._rounds = rounds
        self._generation = generation
        self._rewards: dict[int, list[float | None]] = {}
        """Group id → rewards, of groups that have ended, were kept, and are not handed out."""

    def forget(self) -> None:
        """Drop all rewards: other groups are in flight."""
        self._rewards.clear()

    def generate(
        self,
        tasks: Iterable[Prompt | PromptTask],
        reward: Reward,
        sampling_params: SamplingParams | None,
        *,
        groups: int,
        max_groups: int | None,
        keep: Callable[[Sequence[ScoredSample]], bool] | None,
        max_discarded: int | None,
        on_error: OnError,
        progress: bool | None,
        timeout_s: float | None,
    ) -> ScoredBatch:
        """See `RolloutManager.generate_scored`."""
        rounds, engine = self._rounds, self._rounds.engine
        rounds.refuse_in_group("generate_scored")
        check_on_error(on_error)
        check_call("reward", reward, 1, "it gets the list of a group's samples and returns a list of numbers, one each")
        (params,) = one_each(sampling_params, 1)
        most, bound = _most_groups(groups, max_groups), most_discarded(groups, max_discarded)
        discarded: list[float | None] = []
        begun: list[int] = []
        with rounds.round("generate_scored", timeout_s):
            self._generation.begin_round()
            self._rewards = {each: known for each, known in self._rewards.items() if each in rounds.groups}
            at_once = isinstance(tasks, str | bytes | Mapping | list | tuple) or hasattr(tasks, "ndim")
            drawn = iter(prompts_of(engine.controller, tasks, "tasks") if at_once else tasks)

            def begin(drawn: Sequence[Prompt | PromptTask]) -> None:
                asked = [task if isinstance(task, PromptTask) else PromptTask(task) for task in drawn]
                with engine.locked():
                    begun.extend(self._submit_sound(asked, params))

            def discard(rewards: list[float | None]) -> None:
                discarded.extend(rewards)
                rounds.metrics.add("rollout/groups_discarded")

            goal = ScoredGoal(
                rounds.groups, self._rewards, drawn, begin, groups, most, reward, keep, bound, discard,
                self._generation.too_old,
            )  # fmt: skip
            try:
                rounds.loop.run(
                    goal,
                    call="generate_scored",
                    progress=progress,
                    timeout_s=timeout_s,
                    patient=hasattr(reward, "submit"),
                )
            except (KeyboardInterrupt, SystemExit):
                rounds.loop.abort(begun)
                raise
            return self._hand_out(groups, discarded, on_error)

    def _submit_sound(self, tasks: Sequence[PromptTask], params: SamplingParams) -> list[int]:
        """Submit the tasks that can be served; then raise for the first that cannot."""
        try:
            prompts, chosen = [each.prompt for each in tasks], [each.sampling_params or params for each in tasks]
            extras = [each.metadata for each in tasks]
            rounds = self._rounds
            return submit(rounds.loop, rounds.backend, rounds.engine.controller.tokenize, prompts, chosen, extras)
        except (InvalidRequestError, TypeError, ConfigError) as exc:
            if len(tasks) == 1:
                exc.add_note(f"{tasks[0]!r:.200}")
                raise
            refused: list[Exception] = []
            for task in tasks:
                try:
                    self._submit_sound([task], params)
                except (InvalidRequestError, TypeError, ConfigError) as each:
                    refused.append(each)
            raise refused[0] from None

    def _hand_out(self, groups: int, discarded: list[float | None], on_error: OnError) -> ScoredBatch:
        rounds, device = self._rounds, self._rounds.engine.guard.training_device
        with rounds.engine.locked():
            chosen = [each for each in rounds.groups if each in self._rewards][:groups]
            rewards = [value for each in chosen for value in self._rewards.pop(each)]
            batch = ScoredBatch.from_requests(
                rounds.groups.results(chosen), rewards=_tensor(rewards, device),
                discarded_rewards=_tensor(discarded, device), **rounds.batch_options(),
            )  # fmt: skip
            rounds.groups.drop(chosen)
        return rounds.handed_out(batch, on_error)


def _tensor(rewards: list[float | None], device: torch.device | str | None) -> torch.Tensor:
    return torch.tensor(
        [float("nan") if each is None else each for each in rewards], dtype=torch.float32, device=device
    )


def _most_groups(groups: Any, max_groups: Any) -> int:
    if type(groups) is not int or groups < 1:
        raise ConfigError(f"groups={groups!r}: must be an integer of at least 1")
    if max_groups is not None and (type(max_groups) is not int or max_groups < groups):
        raise ConfigError(f"max_groups={max_groups!r}: must be None or an integer of at least groups={groups}")
    return max_groups or groups
