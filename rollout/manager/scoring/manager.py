"""`ManagerScoring`: `generate_scored` of a `RolloutManager`: full batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from rollout.errors import ConfigError, InvalidRequestError
from rollout.manager.control import OnError, check_on_error
from rollout.manager.episodes.environment import check_call
from rollout.manager.episodes.manager import ManagerEpisodes, most_discarded, rewards_differ
from rollout.manager.pacing import StalenessPacer
from rollout.manager.scoring.batch import PromptTask, Reward, ScoredBatch, ScoredSample
from rollout.manager.scoring.goal import ScoredGoal
from rollout.manager.submission import prompts_of, submit
from rollout.requests.prompt import Prompt
from rollout.sampling_params import SamplingParams, hints_at_options, one_each


class ManagerScoring(ManagerEpisodes):
    """Batches of groups that are scored as they end."""

    _pacer: StalenessPacer
    _rewards: dict[int, list[float | None]]
    """Of groups that have ended, were kept, and are not handed out."""

    @hints_at_options
    def generate_scored(
        self,
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
    ) -> ScoredBatch:
        """Sample and score groups until `groups` of them are worth training on; blocks until then.

        A group is scored when its last sample has ended, while others are still sampled. One of which GRPO learns nothing
        (all rewards equal) is discarded, and another prompt begun in its place: DAPO's dynamic sampling. On several ranks
        every rank calls it, as `generate`, and fills a batch of its own.

        Args:
            tasks: prompts as in `generate`, or `PromptTask`s; drawn from as there is room for another group. What was not
                drawn is left in an iterator.
            reward: of a group's samples; called on this thread, which makes the steps: long computations hold them up, and
                the model that is trained must not run in it. A timeline shows it.
            sampling_params: of tasks without their own; `n` samples per prompt.
            groups: that the batch has, unless tasks end before.
            max_groups: most groups in flight, those kept included. Above `groups` the call does not wait for the slowest:
                groups in flight at its end stay there, whole, and are continued by the next call, after the weight update;
                `max_staleness` acts as in `generate`. None: `groups`; all that was begun has ended when it returns.
            keep: of a group that has ended, whether it counts; otherwise it is discarded. None: each counts. A group with a
                failed sample counts always.
            max_discarded: after so many discarded groups every one counts, so that the call ends where nothing is left
                to learn. None: four times `groups`.
            on_error, progress, timeout_s: as in `generate`.

        Returns:
            Groups in order of submission. Groups in flight count whichever call submitted them; those that are left over
            when the batch is full begin the next one.

        Raises:
            ConfigError: an option is out of its range.
            TypeError: `reward` does not take one argument.
            ValueError: `reward` did not return one finite number per sample. What it was asked about stays in flight.
            InvalidRequestError, TypeError, ConfigError: a task can never be served, and is dropped; a note of the exception
                shows it. The others that were drawn are in flight.
            EngineStateError, WeightsChangedError, EngineDeadError, DeadlineError, ConnectionLostError, JournalError,
                RolloutFailedError: as `generate`.
            KeyboardInterrupt: Ctrl-C, at the end of the step; the groups that this call has begun are given up.
        """
        self._refuse_in_group("generate_scored")
        check_on_error(on_error)
        check_call("reward", reward, 1, "it gets the list of a group's samples and returns a list of numbers, one each")
        (params,) = one_each(sampling_params, 1)
        most, bound = _most_groups(groups, max_groups), most_discarded(groups, max_discarded)
        discarded: list[float | None] = []
        begun: list[int] = []
        with self._turn("generate_scored", timeout_s):
            self._ensure_running()
            self._follow_model()
            self.engine.check_weights()
            self._pacer.begin_round(self.policy_version)
            self._rewards = {each: known for each, known in self._rewards.items() if each in self._groups}

            at_once = isinstance(tasks, str | bytes | Mapping | list | tuple) or hasattr(tasks, "ndim")
            drawn = iter(prompts_of(self.engine.controller, tasks, "tasks") if at_once else tasks)

            def begin(drawn: Sequence[Prompt | PromptTask]) -> None:
                asked = [task if isinstance(task, PromptTask) else PromptTask(task) for task in drawn]
                with self.engine.locked():
                    begun.extend(self._submit_sound(asked, params))

            def discard(rewards: list[float | None]) -> None:
                discarded.extend(rewards)
                self._metrics.add("rollout/groups_discarded")

            goal = ScoredGoal(
                self._groups, self._rewards, drawn, begin, groups, most, reward, keep, bound, discard,
                self._too_old,
            )  # fmt: skip
            try:
                self._loop.play(
                    "generate_scored", goal.reached, goal.ended, groups, progress=progress, timeout_s=timeout_s,
                    patient=False,
                )  # fmt: skip
            except (KeyboardInterrupt, SystemExit):
                self._loop.abort(begun)
                raise
            return self._hand_out_scored(groups, discarded, on_error)

    def _too_old(self) -> set[int] | None:
        if self.config.max_staleness is None:
            return set()
        ages = self._backend.staleness()
        return None if ages is None else self._pacer.too_old(self._groups, ages, self.policy_version)

    def _submit_sound(self, tasks: Sequence[PromptTask], params: SamplingParams) -> list[int]:
        """Submit the tasks that can be served; then raise for the first that cannot."""
        try:
            prompts, chosen = [each.prompt for each in tasks], [each.sampling_params or params for each in tasks]
            extras = [each.metadata for each in tasks]
            return submit(self._loop, self._backend, self.engine.controller.tokenize, prompts, chosen, extras)
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

    def _hand_out_scored(self, groups: int, discarded: list[float | None], on_error: OnError) -> ScoredBatch:
        with self.engine.locked():
            chosen = [each for each in self._groups if each in self._rewards][:groups]
            rewards = [value for each in chosen for value in self._rewards.pop(each)]
            batch = ScoredBatch.from_requests(
                self._groups.results(chosen),
                rewards=_tensor(rewards, self.engine.guard.training_device),
                discarded_rewards=_tensor(discarded, self.engine.guard.training_device),
                **self._batch_options(),
            )
            self._groups.drop(chosen)
        return self._handed_out(batch, on_error)


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
