"""The manager's `generate_scored`: batches of groups that are scored as they finish and are worth training on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError, InvalidRequestError
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.episodes.environment import check_call
from rollout.manager.generation import Generation, prompts_of, submit
from rollout.manager.groups import GroupLedger
from rollout.manager.rounds import OnError, Rounds, check_count, check_on_error, most_discarded
from rollout.observe.recorder import span
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, one_each, takes_options


def rewards_differ(group: Sequence[Any]) -> bool:
    """Return whether a group's rewards differ; GRPO learns nothing from equal rewards. Meant as the argument `keep`.

    Args:
        group: `ScoredSample`s or episodes of one group; failed ones are ignored.
    """
    return len({each.reward for each in group if each.error is None}) > 1


Reward = Callable[[Sequence[DynamicInferenceRequest]], Sequence[float] | Tensor]
"""A reward function: successful samples of a group → their rewards, in the same order."""


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A prompt for `generate_scored`, with its own metadata and sampling parameters."""

    prompt: Prompt
    metadata: Any = None
    """A msgpack-able object; the reward function reads it as `request.metadata`, and the batch has it in `metadata`."""
    sampling_params: SamplingParams | None = None
    """The parameters for this prompt; None means the parameters of the call."""


@dataclass(frozen=True, slots=True)
class ScoredSample:
    """A sample with its reward, as the function `keep` receives it."""

    request: DynamicInferenceRequest
    reward: float | None
    """The sample's reward; None if the sample failed."""

    @property
    def error(self) -> str | None:
        """The reason why the sample failed; None if it did not fail."""
        return self.request.error


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ScoredBatch(RolloutBatch):
    """The samples of the groups that `keep` accepted, with their rewards."""

    rewards: Tensor
    """float32 [N]: the reward of each sample; NaN if the sample failed."""

    discarded_rewards: Tensor
    """float32 [M]: rewards of the M samples in groups that this call discarded. The mean over `rewards` and
    `discarded_rewards` is the policy's reward; the mean over `rewards` alone is biased."""


@dataclass(eq=False)
class ScoredGoal:
    """The goal of one `generate_scored`, which scores finished groups, discards some, and starts others."""

    groups: GroupLedger
    """The groups in flight, from this call and earlier calls."""
    tasks: Iterator[Any]
    """The source of new tasks; tasks are submitted whenever fewer than `most` groups are in flight."""
    begin: Callable[[Sequence[Any]], None]
    """The function that submits a group for each of the given tasks."""
    number: int
    """The number of groups accepted by `keep` that fill the batch."""
    most: int
    reward: Reward
    keep: Callable[[Sequence[ScoredSample]], bool] | None
    """A function that returns whether a group is worth training on. None accepts every group."""
    discards_left: float
    """The number of groups that may still be discarded; once it is 0, every group is kept."""
    discard: Callable[[list[float | None]], None]
    """The function to call with the rewards of each discarded group."""
    too_old: Callable[[], set[int] | None]
    """A function that returns the ids of groups that must also have finished, or None if they are not known yet."""
    _full: bool = False
    _pending: dict[int, Any] = field(default_factory=dict)
    """Group id → future of the group's rewards, if `reward` is an object with a method `submit`."""

    def ended(self) -> int:
        return len(self.groups.rewards)

    def reached(self) -> bool:
        if self._full:
            # Score nothing more: this rank may still step for other ranks. Groups that finish then belong to the next call.
            return True
        self._score()
        if len(self.groups.rewards) < self.number:
            if drawn := list(islice(self.tasks, max(0, self.most - len(self.groups)))):
                self.begin(drawn)
            self._full = not (self.groups.unfinished or self._pending)
        else:
            must = self.too_old()
            self._full = must is not None and must.isdisjoint(self.groups.unfinished)
        return self._full

    def _score(self) -> None:
        if len(self.groups) - len(self.groups.unfinished) == len(self.groups.rewards):
            return
        for group_id in self.groups.complete():
            if group_id in self.groups.rewards:
                continue
            requests = self.groups.results([group_id])
            if (reward := self._ready(group_id, requests)) is None:
                continue
            with span("reward"):
                rewards = rewards_of(requests, reward)
            samples = [ScoredSample(*each) for each in zip(requests, rewards, strict=True)]
            # Keep a group with a failed sample: the failure must be reported, not discarded.
            failed = any(sample.error is not None for sample in samples)
            if self.keep is None or failed or self.discards_left == 0 or self.keep(samples):
                self.groups.rewards[group_id] = rewards
            else:
                self.discards_left -= 1
                self.groups.drop([group_id])
                self.discard(rewards)

    def _ready(self, group_id: int, requests: Sequence[DynamicInferenceRequest]) -> Reward | None:
        """Return a reward function for a finished group, or None while other processes still compute the group's rewards."""
        sound = [request for request in requests if request.error is None]
        if not hasattr(self.reward, "submit") or not sound:
            return self.reward
        if group_id not in self._pending:
            self._pending[group_id] = self.reward.submit(sound)
        if not self._pending[group_id].done():
            return None
        future = self._pending.pop(group_id)
        return lambda samples: future.result()


def rewards_of(requests: Sequence[DynamicInferenceRequest], reward: Reward) -> list[float | None]:
    """Return the rewards of a group's samples, None for failed ones; raise `ValueError` unless rewards are finite."""
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
    """The manager's `generate_scored`."""

    def __init__(self, rounds: Rounds, generation: Generation) -> None:
        self._rounds = rounds
        self._generation = generation

    @takes_options
    def generate_scored(
        self,
        /,
        tasks: Iterable[Prompt | PromptTask],
        reward: Reward,
        sampling_params: SamplingParams | None = None,
        *,
        groups: int,
        max_groups: int | None = None,
        keep: Callable[[Sequence[ScoredSample]], bool] | None = rewards_differ,
        max_discarded: int | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> ScoredBatch:
        """Sample and score groups; block until `groups` of them are worth training on (DAPO's dynamic sampling).

        A group is scored as soon as its last sample finishes, while other groups are still sampled. A group that `keep`
        rejects is discarded, and another prompt replaces it. On several ranks, every rank calls this, as with `generate`.

        Args:
            tasks: prompts as in `generate`, or `PromptTask`s. From an iterator, only the tasks that are needed are taken.
            reward: function of the list of a group's samples that returns one finite number per sample. It runs on the
                stepping thread. A `trainer_hooks.rewards.RewardPool`, or any other object with `submit(samples)` → future,
                runs it in other processes.
            sampling_params: parameters for tasks that have none; `n` samples per prompt.
            groups: number of groups in the batch, unless the tasks run out.
            max_groups: maximum number of groups in flight, including kept groups. If it is above `groups`, the call does not
                wait for the slowest groups, which continue in the next call, after the weight update. None means `groups`.
            keep: function of a finished group's `ScoredSample`s that returns whether the group counts. If None, every group
                counts. A group with a failed sample always counts.
            max_discarded: number of discarded groups after which every group counts. None means four times `groups`.
            on_error, progress, timeout_s, fields: as in `generate`.

        Returns:
            The groups in order of submission. Groups left over when the batch is full start the next batch.

        Raises:
            ConfigError: an option is out of its range.
            TypeError: `reward` does not take one argument.
            ValueError: `reward` did not return one finite number per sample; the group stays in flight.
            InvalidRequestError, TypeError, ConfigError: a task can never be served and is dropped. A note on the exception
                shows the task.
            KeyboardInterrupt: Ctrl-C was pressed. It is raised after the current step; the groups that this call started
                are aborted.
            Exception: any other exception that `generate` raises.
        """
        rounds, engine = self._rounds, self._rounds.engine
        rounds.refuse_in_group("generate_scored")
        check_on_error(on_error)
        check_call("reward", reward, 1, "it gets the list of a group's samples and returns a list of numbers, one each")
        (params,) = one_each(sampling_params, 1)
        check_count("groups", groups, optional=False)
        check_count("max_groups", max_groups, groups)
        most, bound = max_groups or groups, most_discarded(groups, max_discarded)
        discarded: list[float | None] = []
        begun: list[int] = []
        with rounds.round("generate_scored", timeout_s):
            too_old = self._generation.begin_round()
            at_once = isinstance(tasks, str | bytes | Mapping | list | tuple) or hasattr(tasks, "ndim")
            drawn = iter(prompts_of(engine.controller, tasks, "tasks") if at_once else tasks)

            def begin(drawn: Sequence[Prompt | PromptTask]) -> None:
                asked = [task if isinstance(task, PromptTask) else PromptTask(task) for task in drawn]
                with engine.locked():
                    begun.extend(self._submit_sound(asked, params))

            def discard(rewards: list[float | None]) -> None:
                discarded.extend(rewards)
                rounds.metrics.add("rollout/groups_discarded")

            goal = ScoredGoal(rounds.groups, drawn, begin, groups, most, reward, keep, bound, discard, too_old)
            try:
                # If other processes compute the rewards, wait for them even while there is nothing to sample.
                elsewhere = hasattr(reward, "submit")
                rounds.loop.run(goal, call="generate_scored", progress=progress, timeout_s=timeout_s, patient=elsewhere)
            except (KeyboardInterrupt, SystemExit):
                rounds.loop.abort(begun)
                raise
            return self._hand_out(groups, discarded, on_error)

    def _submit_sound(self, tasks: Sequence[PromptTask], params: SamplingParams) -> list[int]:
        """Submit all valid tasks; then return their group ids, or raise the exception of the first invalid task."""
        added: list[int] = []
        refused: list[Exception] = []
        for task in tasks:
            try:
                added += submit(self._rounds, [task.prompt], [task.sampling_params or params], [task.metadata])
            except (InvalidRequestError, TypeError, ConfigError) as exc:
                exc.add_note(f"{task!r:.200}")
                refused.append(exc)
        if refused:
            raise refused[0]
        return added

    def _hand_out(self, groups: int, discarded: list[float | None], on_error: OnError) -> ScoredBatch:
        rounds, device = self._rounds, self._rounds.engine.guard.training_device
        with rounds.engine.locked():
            known = rounds.groups.rewards
            chosen = [each for each in rounds.groups if each in known][:groups]
            rewards = [value for each in chosen for value in known[each]]
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
