"""The manager's `sample` and `run`: one completion at a time, and whole episodes.

Environments run on their own thread, so that tools run while the thread that called `run` runs engine steps. Between two
calls to `run`, tools continue and completions wait, because no steps run while the trainer uses the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any

from rollout.errors import ConfigError, EngineStateError, InvalidRequestError
from rollout.manager.episodes.batch import EpisodeBatch
from rollout.manager.episodes.environment import (
    BrokenEnvironmentError,
    EnvironmentFactory,
    EnvironmentTask,
    Play,
    as_play,
)
from rollout.manager.episodes.episode import Episode
from rollout.manager.episodes.player import EpisodePlayer
from rollout.manager.rounds import OnError, Rounds, check_count, check_on_error, most_discarded
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, one_each, takes_options, warn_of_equal_samples


@dataclass(eq=False)
class PlayGoal:
    """The goal of one `run`. It decides when enough groups have finished, which of them count, and when new groups start."""

    player: EpisodePlayer
    tasks: Iterator[Any]
    """The source of new tasks; the next task starts whenever fewer than `most` groups are in flight."""
    begin: Callable[[Any], None]
    """The function that starts a group for a task."""
    most: float
    least: int | None
    """The number of groups accepted by `keep` that must have finished; None means all groups in flight."""
    number: int
    keep: Callable[[Sequence[Episode]], bool] | None
    """A function that returns whether a finished group counts; other groups are dropped. If None, every group counts."""
    discards_left: float
    """The number of groups that may still be dropped; once it is 0, every group counts."""
    discard: Callable[[], None]
    """The function to call for each dropped group."""
    too_old: Callable[[], set[int] | None]
    """A function that returns the ids of groups that must also have finished, or None if they are not known yet."""
    _kept: set[int] = field(default_factory=set)

    def ended(self) -> int:
        return len(self.player) - len(self.player.unfinished)

    def reached(self) -> bool:
        if self.player.broken:
            raise self.player.broken
        self.player.look_at_the_clock()
        if self.keep is not None:
            self._drop(self.keep)
        self._draw()
        if not self.player.unfinished:
            return True
        if self.least is None or self.ended() < self.least:
            return False
        must = self.too_old()
        return must is not None and must.isdisjoint(self.player.unfinished)

    def _drop(self, keep: Callable[[Sequence[Episode]], bool]) -> None:
        for number in self.player.ended():
            if number not in self._kept:
                if self.discards_left == 0 or keep(self.player.episodes(number)):
                    self._kept.add(number)
                else:
                    self.discards_left -= 1
                    self.player.drop([number])
                    self.discard()

    def _draw(self) -> None:
        while len(self.player) < self.most:
            try:
                task = next(self.tasks)
            except StopIteration:
                return
            self.begin(task)


class EpisodeRuns:
    """The episodes and single completions of one manager."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._pacer = rounds.new_pacer()

    async def sample(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> DynamicInferenceRequest:
        """Sample one completion in an environment of `run`, outside of the episode's turns. Cancelling aborts the request.

        Args:
            prompt: a prompt as in `generate`.
            sampling_params: parameters with n = 1. None means the defaults.

        Raises:
            InvalidRequestError: the prompt can never be served, or n > 1.
            RequestError: the completion failed or was aborted.
            EngineStateError: the caller is not an environment of `run`.
        """
        (params,) = one_each(sampling_params, 1)
        if params.n != 1:
            raise InvalidRequestError(f"n={params.n} in sample(): one completion per call; gather() several calls")
        tokens = self._rounds.engine.check_request(prompt, params)
        if not self._rounds.player.inside:
            raise EngineStateError("sample(): call it in an environment of run(); elsewhere use generate()")
        return await self._rounds.loop.samples.completion(tokens, params)

    @takes_options
    def run(
        self,
        /,
        tasks: Iterable[Any],
        environment: EnvironmentFactory | Play | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        n: int = 1,
        max_turns: int = 16,
        min_groups: int | None = None,
        max_groups: int | None = None,
        keep: Callable[[Sequence[Episode]], bool] | None = None,
        max_discarded: int | None = None,
        episode_timeout_s: float | None = None,
        on_error: OnError = "raise",
        progress: bool | None = None,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> EpisodeBatch:
        """Play multi-turn episodes; block until they finish. While an episode waits for a tool, other episodes are sampled.

        Episodes that are unfinished when `run` returns or raises stay in flight: tools keep running, and completions
        continue in the next call, under that call's weights. On several ranks, every rank calls `run`, as with `generate`.

        Args:
            tasks: the tasks; each becomes a group of n episodes. A list's tasks all start at once, an iterator's tasks as
                earlier groups finish.
            environment: a class or function that makes an object with `reset` and `step` for each episode; or a coroutine
                function that plays a whole `Episode` and returns the reward. If None, each task is an `EnvironmentTask`.
            sampling_params: parameters of one turn, with n = 1.
            max_turns: upper bound on the turns of an episode, for environments with `reset` and `step`.
            min_groups: number of groups after which `run` returns. It also waits for all groups that would be too old
                (`max_staleness`) after the next updates. If None, it waits for all groups, including those of earlier calls.
            max_groups: maximum number of groups in flight, if `tasks` is an iterator. None means `min_groups`.
            keep: function of a finished group's episodes; if it returns False, the group is dropped and does not count. See
                `rewards_differ`.
            max_discarded: number of dropped groups after which every group is kept. None means four times `min_groups`, or
                no limit if `min_groups` is not given.
            episode_timeout_s: seconds of `run` after which an episode fails and keeps its turns so far. None means no limit.
            on_error: with `raise`, a failed episode raises `RolloutFailedError`. With `mask`, rows of failed episodes are
                masked, and the error is raised only if every episode failed.
            progress, timeout_s, fields: as in `generate`.

        Returns:
            The groups in the order in which they started, with the episodes of a group next to each other.

        Raises:
            ConfigError: options contradict each other.
            TypeError: the environment lacks `reset` or `step`, or one of its methods returned a value of the wrong type.
            KeyboardInterrupt: Ctrl-C was pressed. It is raised after the current step. This call's episodes are dropped, as
                after TypeError.
            RolloutFailedError: see `on_error`.
            Exception: any other exception that `generate` raises.
        """
        rounds, player = self._rounds, self._rounds.player
        rounds.refuse_in_group("run")
        check_on_error(on_error)
        (params,) = one_each(sampling_params, 1)
        warn_of_equal_samples(params, n)
        most = _room(tasks, min_groups, max_groups, params, n)
        drawn, begun = iter(tasks), list[int]()
        tokenizer = rounds.engine.controller.tokenizer

        def begin(task: Any) -> None:
            asked = task if environment is None else EnvironmentTask(environment, task)
            if not isinstance(asked, EnvironmentTask):
                raise TypeError(
                    f"task {task!r:.80} without environment=: must be an EnvironmentTask(environment, task)"
                )
            play = as_play(asked.environment, tokenizer, max_turns)
            begun.append(player.begin(asked.task, play, n, params, episode_timeout_s))

        with rounds.round("run", timeout_s):
            self._pacer.begin_round(rounds.engine.policy_version)
            waited_for = min_groups or len(player) + length_hint(drawn)
            goal = PlayGoal(
                player, drawn, begin, most, min_groups, waited_for, keep, most_discarded(min_groups, max_discarded),
                lambda: rounds.metrics.add("rollout/groups_discarded"),
                lambda: rounds.too_old(self._pacer, player, rounds.loop.samples.owners().get),
            )  # fmt: skip
            player.broken = None
            try:
                rounds.loop.run(goal, call="run", progress=progress, timeout_s=timeout_s, patient=True)
                ended = player.ended()
                # Read after `ended`: an environment that breaks while the goal decides sets it before its episode ends.
                if player.broken:
                    raise player.broken
            except (KeyboardInterrupt, SystemExit, BrokenEnvironmentError):
                player.drop(begun)
                raise
            finally:
                player.stop_clock()
            return self._hand_out(ended, on_error)

    def _hand_out(self, ended: list[int], on_error: OnError) -> EpisodeBatch:
        rounds, player = self._rounds, self._rounds.player
        episodes = [episode for number in ended for episode in player.episodes(number)]
        batch = EpisodeBatch.from_episodes(
            episodes, detokenize=rounds.engine.controller.detokenize, **rounds.batch_options()
        )
        player.drop(ended)
        if episodes and all(episode.error is not None for episode in episodes):
            on_error = "raise"
        return rounds.handed_out(batch, on_error)


def _room(
    tasks: Iterable[Any], min_groups: int | None, max_groups: int | None, params: SamplingParams, n: int
) -> float:
    if params.n != 1:
        raise ConfigError(f"SamplingParams.n={params.n} in run(): a turn is one completion; n= of run() is of episodes")
    check_count("n", n, optional=False)
    check_count("min_groups", min_groups)
    check_count("max_groups", max_groups)
    if not isinstance(tasks, Iterator):
        if max_groups is not None:
            raise ConfigError(
                f"max_groups={max_groups} with tasks that are no iterator, all of which are begun: pass iter(tasks)"
            )
        return float("inf")
    if min_groups is None:
        raise ConfigError("tasks is an iterator, which may have no end: pass min_groups=, or list(tasks)")
    if max_groups is not None and max_groups < min_groups:
        raise ConfigError(f"max_groups={max_groups}: must be at least min_groups={min_groups}")
    return max_groups or min_groups
