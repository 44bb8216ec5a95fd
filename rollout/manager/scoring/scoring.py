"""`generate_scored` of a manager: batches of groups that are scored as they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rollout.errors import ConfigError, InvalidRequestError
from rollout.manager.episodes.environment import check_call
from rollout.manager.generation import Generation
from rollout.manager.keeping import most_discarded
from rollout.manager.rounds import OnError, Rounds, check_on_error
from rollout.manager.scoring.batch import PromptTask, Reward, ScoredBatch, ScoredSample
from rollout.manager.scoring.goal import ScoredGoal
from rollout.manager.submission import prompts_of, submit
from rollout.requests.prompt import Prompt
from rollout.sampling_params import SamplingParams, one_each


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
                rounds.loop.run(goal, call="generate_scored", progress=progress, timeout_s=timeout_s)
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
