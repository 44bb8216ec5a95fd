"""Decides when `run` has played enough, which groups it keeps, and when it begins others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any

from rollout.errors import ConfigError, DeadlineError, EngineStateError, InvalidRequestError
from rollout.manager.backend import LocalBackend
from rollout.manager.episodes.batch import EpisodeBatch
from rollout.manager.episodes.environment import (
    BrokenEnvironmentError,
    EnvironmentFactory,
    EnvironmentTask,
    Play,
    as_play,
    name_of,
)
from rollout.manager.episodes.episode import Episode
from rollout.manager.episodes.player import EpisodePlayer
from rollout.manager.rounds import OnError, Rounds, check_on_error
from rollout.manager.scoring import most_discarded
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, one_each, warn_of_equal_samples


class PlayGoal:
    """The goal of one `run`.

    Args:
        tasks: drawn from while fewer than `most` groups are in play.
        begin: begins a group.
        least: kept groups that must have ended; None: all that are in play.
        keep: whether a group that has ended counts; otherwise it is dropped. None: each does.
        most_discarded: so many groups are dropped, then each counts.
        discard: called for each that is dropped.
        too_old: ids of groups that must have ended too; None: not known yet.
    """

    def __init__(
        self,
        player: EpisodePlayer,
        tasks: Iterator[Any],
        begin: Callable[[Any], None],
        most: float,
        least: int | None,
        keep: Callable[[Sequence[Episode]], bool] | None,
        most_discarded: float,
        discard: Callable[[], None],
        too_old: Callable[[], set[int] | None],
    ) -> None:
        self._player = player
        self._tasks = tasks
        self._begin = begin
        self._most = most
        self._least = least
        self.number = least or len(player) + length_hint(tasks)
        self._keep = keep
        self._discards_left = most_discarded
        self._discard = discard
        self._too_old = too_old
        self._kept: set[int] = set()

    def ended(self) -> int:
        """How many groups have ended."""
        return len(self._player) - len(self._player.unfinished)

    def reached(self) -> bool:
        """Apply deadlines, drop and begin groups; then whether enough has ended.

        Raises:
            BrokenEnvironmentError: an environment cannot be played.
        """
        if (broken := self._player.take_broken()) is not None:
            raise broken
        self._player.look_at_the_clock()
        if self._keep is not None:
            self._drop(self._keep)
        self._draw()
        if not self._player.unfinished:
            return True
        if self._least is None or self.ended() < self._least:
            return False
        must = self._too_old()
        return must is not None and must.isdisjoint(self._player.unfinished)

    def _drop(self, keep: Callable[[Sequence[Episode]], bool]) -> None:
        if self.ended() == len(self._kept):
            return
        for number in self._player.ended():
            if number not in self._kept:
                if self._discards_left == 0 or keep(self._player.episodes(number)):
                    self._kept.add(number)
                else:
                    self._discards_left -= 1
                    self._player.drop([number])
                    self._discard()

    def _draw(self) -> None:
        while len(self._player) < self._most:
            try:
                task = next(self._tasks)
            except StopIteration:
                return
            self._begin(task)


DRIVE_S = 0.02
"""Longest time that the steps for `sample` keep the caller's event loop from other work."""
BUSY_S = 0.005
"""Between two looks at an engine that another thread generates with."""


class EpisodeRuns:
    """Episodes and single completions of one manager."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._pacer = rounds.new_pacer()
        self._driver: asyncio.Task[None] | None = None

    async def sample(
        self, prompt: Prompt, sampling_params: SamplingParams | None, session: Episode | None
    ) -> DynamicInferenceRequest:
        """See `RolloutManager.sample`."""
        if session is not None:
            return await session.sample(prompt, sampling_params)
        rounds = self._rounds
        rounds.refuse_in_group("sample")
        (params,) = one_each(sampling_params, 1)
        if params.n != 1:
            raise InvalidRequestError(f"n={params.n} in sample(): one completion per call; gather() several calls")
        if rounds.closed:
            raise EngineStateError("sampling after close(): build another RolloutManager")
        tokens = rounds.engine.check_request(prompt, params)
        if not rounds.player.inside:
            if not isinstance(rounds.backend, LocalBackend):
                raise EngineStateError("sample() on several ranks: call it in an environment of run()")
            if self._driver is None or self._driver.done() or self._driver.get_loop().is_closed():
                self._driver = asyncio.get_running_loop().create_task(self._drive())
        return await rounds.loop.samples.completion(tokens, params)

    async def _drive(self) -> None:
        await asyncio.sleep(0)
        rounds, engine = self._rounds, self._rounds.engine
        while rounds.loop.samples.num_unowned:
            pause_s = 0.0
            try:
                with engine.turns.taken(0):
                    rounds.ensure_running()
                    if not engine.has_unfinished:
                        engine.check_weights()
                    rounds.loop.drive(DRIVE_S)
            except DeadlineError:
                pause_s = BUSY_S
            except Exception as exc:  # noqa: BLE001 - raised to every caller that waits
                with engine.locked():
                    rounds.loop.samples.fail(exc, rounds.backend, unowned_only=True)
            await asyncio.sleep(pause_s)

    def run(
        self,
        tasks: Iterable[Any],
        environment: EnvironmentFactory | Play | None,
        sampling_params: SamplingParams | None,
        *,
        n: int,
        max_turns: int,
        min_groups: int | None,
        max_groups: int | None,
        keep: Callable[[Sequence[Episode]], bool] | None,
        max_discarded: int | None,
        episode_timeout_s: float | None,
        environments: Mapping[str, EnvironmentFactory | Play] | None,
        on_error: OnError,
        progress: bool | None,
        timeout_s: float | None,
    ) -> EpisodeBatch:
        """See `RolloutManager.run`."""
        rounds, player = self._rounds, self._rounds.player
        rounds.refuse_in_group("run")
        check_on_error(on_error)
        (params,) = one_each(sampling_params, 1)
        warn_of_equal_samples(params, n)
        most = _room(tasks, min_groups, max_groups, params, n)
        if environment is not None and environments is not None:
            raise ConfigError("environment= with environments=, which are for restored episodes of a mixture: pass one")
        drawn, begun = iter(tasks), list[int]()
        tokenizer = rounds.engine.controller.tokenizer

        def begin(task: Any) -> None:
            asked = task if environment is None else EnvironmentTask(environment, task)
            if not isinstance(asked, EnvironmentTask):
                raise TypeError(f"task {task!r:.80} without environment=: must be an EnvironmentTask; see mixture()")
            play = as_play(asked.environment, tokenizer, max_turns)
            name = name_of(asked.environment)
            begun.append(player.begin(asked.task, play, n, params, episode_timeout_s, name))

        with rounds.round("run", timeout_s):
            self._resume(environment, environments or {}, max_turns)
            self._pacer.begin_round(rounds.engine.policy_version)
            goal = PlayGoal(
                player, drawn, begin, most, min_groups, keep, most_discarded(min_groups, max_discarded),
                lambda: rounds.metrics.add("rollout/groups_discarded"), self._too_old,
            )  # fmt: skip
            player.take_broken()
            try:
                rounds.loop.run(goal, call="run", progress=progress, timeout_s=timeout_s, patient=True)
            except (KeyboardInterrupt, SystemExit, BrokenEnvironmentError):
                player.drop(begun)
                raise
            finally:
                player.stop_clock()
            return self._hand_out(on_error)

    def _resume(
        self,
        environment: EnvironmentFactory | Play | None,
        named: Mapping[str, EnvironmentFactory | Play],
        max_turns: int,
    ) -> None:
        """Let the episodes that `load_state_dict` brought go on; all of them or none."""
        player, tokenizer = self._rounds.player, self._rounds.engine.controller.tokenizer
        plays: dict[int, Play] = {}
        for number, saved in player.restored.items():
            played_by = named.get(saved.environment) if environment is None else environment
            if played_by is None:
                raise ConfigError(
                    f"{len(player.restored)} groups of episodes of before the restart go on, the first by "
                    f"{saved.environment!r}: pass environments={{{saved.environment!r}: ...}}, or environment="
                )
            plays[number] = as_play(played_by, tokenizer, max_turns)
        for number, play in plays.items():
            player.resume(number, play)

    def _too_old(self) -> set[int] | None:
        owners = self._rounds.loop.samples.owners()

        def group(number: int) -> int | None:
            owner = owners.get(number)
            return owner if isinstance(owner, int) else None

        return self._rounds.too_old(self._pacer, self._rounds.player, group)

    def _hand_out(self, on_error: OnError) -> EpisodeBatch:
        rounds, player = self._rounds, self._rounds.player
        ended = player.ended()
        episodes = [episode for number in ended for episode in player.episodes(number)]
        batch = EpisodeBatch.from_episodes(
            episodes, detokenize=rounds.engine.controller.detokenize, **rounds.batch_options()
        )
        rounds.metrics.add("rollout/episode_turns_dropped", sum(episode.num_recorded for episode in episodes))
        player.drop(ended)
        if episodes and all(episode.error is not None for episode in episodes):
            on_error = "raise"
        return rounds.handed_out(batch, on_error)


def _room(
    tasks: Iterable[Any], min_groups: int | None, max_groups: int | None, params: SamplingParams, n: int
) -> float:
    """Most groups in play at once."""
    if params.n != 1:
        raise ConfigError(f"SamplingParams.n={params.n} in run(): a turn is one completion; n= of run() is of episodes")
    for name, value in (("n", n), ("min_groups", min_groups), ("max_groups", max_groups)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}={value!r}: must be an integer of at least 1")
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
