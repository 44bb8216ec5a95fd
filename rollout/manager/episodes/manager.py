"""`ManagerEpisodes`: `sample` and `run` of a `RolloutManager`, one completion at a time and whole episodes.

Environments run on a thread of their own, so that tools overlap with the steps of the engine, which the thread that
called `run` makes. Between two calls of `run` tools go on, and completions wait: no step is made while the trainer has the
weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any, Protocol

from rollout.errors import ConfigError, DeadlineError, EngineStateError, InvalidRequestError
from rollout.manager.backend import LocalBackend
from rollout.manager.control import ManagerControl, OnError, check_on_error
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
from rollout.manager.episodes.goal import PlayGoal
from rollout.manager.pacing import StalenessPacer
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams, hints_at_options, one_each, warn_of_equal_samples

DRIVE_S = 0.02
"""Longest time that the steps for `sample` keep the caller's event loop from other work."""
BUSY_S = 0.005
"""Between two looks at an engine that another thread generates with."""
MOST_DISCARDED = 4
"""Times the groups asked for: so many are discarded where `max_discarded` is None."""


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


class ManagerEpisodes(ManagerControl):
    """Episodes of many turns."""

    _driver: asyncio.Task[None] | None = None
    _run_pacer: StalenessPacer | None = None

    # --- one completion -------------------------------------------------------------------------------------------

    async def sample(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, session: Episode | None = None
    ) -> DynamicInferenceRequest:
        """Sample one completion; those of all callers are computed together. Cancelling ends the request.

        While `run` or `generate` is going on in another thread, that computes it. Otherwise the steps are made here, in the
        caller's event loop, between its other work; then, as in `generate`, the KV cache comes back after an update.

        Args:
            sampling_params: with n = 1.
            session: an episode of `run` that it becomes a turn of; None: it is in no batch.

        Returns:
            The ended request: `generated_tokens`, `generated_log_probs`, `policy_versions` (of prompt and completion),
            `finish_reason`.

        Raises:
            InvalidRequestError: the prompt can never be served, or n > 1.
            RequestError: it failed, or was aborted.
            EngineStateError: an explicit `pause` or `suspend` was not undone, or the manager is closed; or it is called
                outside of `run` on several ranks.
        """
        if session is not None:
            return await session.sample(prompt, sampling_params)
        self._refuse_in_group("sample")
        (params,) = one_each(sampling_params, 1)
        if params.n != 1:
            raise InvalidRequestError(f"n={params.n} in sample(): one completion per call; gather() several calls")
        if self._closed:
            raise EngineStateError("sampling after close(): build another RolloutManager")
        tokens = self.engine.check_request(prompt, params)
        if not self._player.inside:
            if not isinstance(self._backend, LocalBackend):
                raise EngineStateError("sample() on several ranks: call it in an environment of run()")
            if self._driver is None or self._driver.done() or self._driver.get_loop().is_closed():
                self._driver = asyncio.get_running_loop().create_task(self._drive())
        return await self._loop.samples.completion(tokens, params)

    async def _drive(self) -> None:
        await asyncio.sleep(0)
        while self._loop.samples.num_unowned:
            pause_s = 0.0
            try:
                with self.engine.turns.taken(0):
                    self._ensure_running()
                    if not self.engine.has_unfinished:
                        self.engine.check_weights()
                    self._loop.drive(DRIVE_S)
            except DeadlineError:
                pause_s = BUSY_S
            except Exception as exc:  # noqa: BLE001 - raised to every caller that waits
                with self.engine.locked():
                    self._loop.samples.fail(exc, self._backend, unowned_only=True)
            await asyncio.sleep(pause_s)

    # --- episodes -------------------------------------------------------------------------------------------------

    @hints_at_options
    def run(
        self,
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
        environments: Mapping[str, EnvironmentFactory | Play] | None = None,
        on_error: OnError = "mask",
        progress: bool | None = None,
        timeout_s: float | None = None,
    ) -> EpisodeBatch:
        """Play episodes of many turns; blocks until they are done. Tools of one overlap with the tokens of others.

        What is in play when it returns, or raises, stays in play: tools go on, completions wait for the next call, and go on
        under the weights of that time. On several ranks every rank calls it, as `generate`.

        Args:
            tasks: one group of n episodes each. An iterator is drawn from as groups end, and what was not drawn is left in
                it; all of anything else is begun.
            environment: a callable that makes an `Environment` (a class with `reset` and `step`, say), one per episode; or a
                coroutine function of an `Episode` that plays all of it, returning the reward. None: tasks are
                `EnvironmentTask`, as `mixture` makes them.
            sampling_params: of a turn, with n = 1.
            max_turns: of an environment with `reset` and `step`.
            min_groups: None: until all has ended, what earlier calls left in play included. A number: until so many groups
                have ended; with `max_staleness` set, groups that the coming updates would make too old are waited for.
            max_groups: most groups in play at once, drawn from an iterator; None: `min_groups`.
            keep: of a group that has ended, whether it is returned; otherwise it is dropped, and does not count.
                `rewards_differ` drops groups of which GRPO learns nothing.
            max_discarded: after so many dropped groups every one is kept, so that the call ends where nothing is left to
                learn. None: four times `min_groups`, or all.
            episode_timeout_s: after so many seconds within `run` an episode fails with what it has.
            environments: without `environment`, those of episodes that `load_state_dict` brought, by `__qualname__`.
            on_error: `mask`: rows of a failed episode are masked out and named in `errors`; `RolloutFailedError` if every
                episode failed. `raise`: `RolloutFailedError` if one failed.
            progress, timeout_s: as in `generate`.

        Returns:
            Groups in the order in which they were begun, episodes of a group side by side.

        Raises:
            ConfigError: options that do not fit each other.
            EngineStateError, WeightsChangedError, EngineDeadError, DeadlineError, ConnectionLostError: as `generate`.
            RolloutFailedError: see `on_error`.
            TypeError: the environment lacks `reset` or `step`, or one of its methods returned a value of another type. The
                episodes that this call has begun are given up, as they are after:
            KeyboardInterrupt: Ctrl-C, at the end of the step.
        """
        self._refuse_in_group("run")
        check_on_error(on_error)
        (params,) = one_each(sampling_params, 1)
        warn_of_equal_samples(params, n)
        most = _room(tasks, min_groups, max_groups, params, n)
        if environment is not None and environments is not None:
            raise ConfigError("environment= with environments=, which are for restored episodes of a mixture: pass one")
        drawn = iter(tasks)
        with self._turn("run", timeout_s):
            self._ensure_running()
            self._follow_model()
            self.engine.check_weights()
            player, begun = self._player, []
            self._resume_episodes(environment, environments or {}, max_turns)
            pacer = self._begin_round()
            number = min_groups or len(player) + length_hint(drawn)

            def begin(task: Any) -> None:
                asked = task if environment is None else EnvironmentTask(environment, task)
                if not isinstance(asked, EnvironmentTask):
                    raise TypeError(
                        f"task {task!r:.80} without environment=: must be an EnvironmentTask; see mixture()"
                    )
                play = as_play(asked.environment, self.tokenizer, max_turns)
                name = name_of(asked.environment)
                begun.append(player.begin(asked.task, play, n, params, episode_timeout_s, name))

            goal = PlayGoal(
                player, drawn, begin, most, min_groups, keep, most_discarded(min_groups, max_discarded),
                lambda: self._metrics.add("rollout/groups_discarded"), lambda: self._too_old_in_play(pacer),
            )  # fmt: skip

            def reached() -> bool:
                if (broken := player.take_broken()) is not None:
                    raise broken
                return goal.reached()

            player.take_broken()
            try:
                self._loop.play("run", reached, goal.ended, number, progress=progress, timeout_s=timeout_s)
            except (KeyboardInterrupt, SystemExit, BrokenEnvironmentError):
                player.drop(begun)
                raise
            finally:
                player.stop_clock()
            return self._hand_out_episodes(on_error)

    @property
    def episode_groups_in_play(self) -> int:
        """Groups of episodes that were begun and not yet handed out."""
        return len(self._player)

    def _resume_episodes(
        self,
        environment: EnvironmentFactory | Play | None,
        named: Mapping[str, EnvironmentFactory | Play],
        max_turns: int,
    ) -> None:
        """Let the episodes that `load_state_dict` brought go on; all of them or none."""
        plays: dict[int, Play] = {}
        for number, saved in self._player.restored.items():
            played_by = named.get(saved.environment) if environment is None else environment
            if played_by is None:
                raise ConfigError(
                    f"{len(self._player.restored)} groups of episodes of before the restart go on, the first by "
                    f"{saved.environment!r}: pass environments={{{saved.environment!r}: ...}}, or environment="
                )
            plays[number] = as_play(played_by, self.tokenizer, max_turns)
        for number, play in plays.items():
            self._player.resume(number, play)

    def _begin_round(self) -> StalenessPacer:
        if self._run_pacer is None:
            self._run_pacer = StalenessPacer(self.config.max_staleness)
        self._run_pacer.begin_round(self.policy_version)
        return self._run_pacer

    def _too_old_in_play(self, pacer: StalenessPacer) -> set[int] | None:
        if self.config.max_staleness is None:
            return set()
        known = self._backend.staleness()
        if known is None:
            return None
        owners = self._loop.samples.owners()
        in_flight = ((owners[number], age) for number, age in known if number in owners)
        ages = [(owner, age) for owner, age in in_flight if isinstance(owner, int)]
        return pacer.too_old(self._player, ages, self.policy_version)

    def _hand_out_episodes(self, on_error: OnError) -> EpisodeBatch:
        ended = self._player.ended()
        episodes = [episode for number in ended for episode in self._player.episodes(number)]
        batch = EpisodeBatch.from_episodes(
            episodes, detokenize=self.engine.controller.detokenize, **self._batch_options()
        )
        self._metrics.add("rollout/episode_turns_dropped", sum(episode.num_recorded for episode in episodes))
        self._player.drop(ended)
        if episodes and all(episode.error is not None for episode in episodes):
            on_error = "raise"
        return self._handed_out(batch, on_error)


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
