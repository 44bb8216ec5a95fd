"""The player of episode groups. Environments run on an event loop; the thread that steps the engine computes completions.

    loop thread       coroutines of the environments: await tools, await episode.sample()
    stepping thread   starts groups, runs steps, checks deadlines, returns groups

Always true: every started episode finishes once, with a reward or an error. Its failure does not affect other episodes.
After that, an environment cannot change its episode.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any
from weakref import finalize

from rollout.errors import EngineStateError
from rollout.manager.episodes.environment import BrokenEnvironmentError, Play
from rollout.manager.episodes.episode import Episode
from rollout.manager.episodes.samples import OpenSamples
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.threads.loop_thread import LoopThread

_log = logging.getLogger(__name__)

EXIT_S = 5.0
"""Longest wait, in seconds, for environments that block their event loop when the manager is closed or the process exits."""

_PLAYING: ContextVar[tuple[EpisodePlayer, ...]] = ContextVar("_PLAYING", default=())
"""The players in whose environments the current code runs. Tasks and threads (`asyncio.to_thread`) inherit the value."""


class EpisodePlayer:
    """The player of one manager's episode groups.

    Attributes:
        unfinished: the ids of groups with unfinished episodes.
        next_number: the id of the next group.
        broken: the error of an environment without the required interface, which `run` raises; otherwise None.
    """

    def __init__(
        self,
        samples: OpenSamples,
        check: Callable[[Prompt, SamplingParams], list[int]],
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.unfinished: set[int] = set()
        self.next_number = 0
        self.broken: BrokenEnvironmentError | None = None
        self._samples = samples
        self._check = check
        self._seed = seed
        self._clock = clock
        self._groups: dict[int, list[Episode]] = {}
        self._futures: dict[Episode, Future[None]] = {}
        self._played_s = 0.0
        self._due: dict[int, float] = {}
        """Group id → deadline of the group's episodes, in seconds of playing time; only for groups with a deadline."""
        self._looked_at: float | None = None
        self._loop: LoopThread | None = None
        # Guard the finishing of an episode: its coroutine and its deadline may both try to finish it.
        self._ending = threading.Lock()
        self._logged: set[type[BaseException]] = set()

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[int]:
        return iter(self._groups)

    # --- methods for the stepping thread --------------------------------------------------------------------------

    def begin(self, task: Any, play: Play, n: int, params: SamplingParams, timeout_s: float | None) -> int:
        """Start n episodes of a task; return the group id. After `timeout_s` of playing time, unfinished episodes fail."""
        number = self.next_number
        self.next_number += 1
        seed = self._seed if params.seed is None else params.seed

        async def ask(
            prompt: Prompt, asked: SamplingParams, keep: Callable[[DynamicInferenceRequest], None]
        ) -> DynamicInferenceRequest:
            return await self._samples.completion(self._check(prompt, asked), asked, keep, owner=number)

        self._groups[number] = [Episode(task, number, index, params, seed, ask) for index in range(n)]
        if timeout_s is not None:
            self._due[number] = self._played_s + timeout_s
        self.unfinished.add(number)
        if self._loop is None:
            self._loop = LoopThread("rollout-episodes")
            # Close the loop at exit: an environment that still computes during interpreter shutdown would abort the process.
            finalize(self, _close_at_exit, self._loop)
        for episode in self._groups[number]:
            self._futures[episode] = self._loop.start(self._play(episode, play))
        return number

    def look_at_the_clock(self) -> None:
        """Fail the episodes whose deadline has passed. Only time between the first call and `stop_clock` counts."""
        now = self._clock()
        if self._looked_at is not None:
            self._played_s += now - self._looked_at
        self._looked_at = now
        for number in [number for number, due in self._due.items() if due <= self._played_s]:
            del self._due[number]
            for late in self._groups[number]:
                if self._end(late, None, "RequestTimeoutError: the episode's episode_timeout_s has passed"):
                    self._cancel(late)

    def stop_clock(self) -> None:
        """Stop counting playing time until the next `look_at_the_clock`: while no steps run, episodes get no completions."""
        self._looked_at = None

    def ended(self) -> list[int]:
        """Return the ids of groups whose episodes have all finished, in the order in which the groups started."""
        return [number for number in self._groups if number not in self.unfinished]

    def episodes(self, number: int) -> list[Episode]:
        """Return the episodes of the group with the id `number`."""
        return self._groups[number]

    def drop(self, numbers: Iterable[int]) -> None:
        """Remove the groups with the ids `numbers`, and abandon their unfinished episodes."""
        for number in list(numbers):
            self._due.pop(number, None)
            for episode in self._groups.pop(number, ()):
                if self._end(episode, None, "RequestAbortedError: the episode was dropped"):
                    self._cancel(episode)
                self._futures.pop(episode, None)
            self.unfinished.discard(number)

    def oldest_versions(self) -> Iterator[tuple[int, int]]:
        """Yield (group id, its tokens' oldest policy version) for each unfinished group with a finished turn."""
        for number in list(self.unfinished):
            turns = (turn for episode in self._groups[number] for turn in episode.turns)
            versions = (turn.policy_spans.oldest(start=turn.original_prompt_length) for turn in turns)
            known = [version for version in versions if version is not None]
            if known:
                yield number, min(known)

    def close(self) -> None:
        """Abandon all episodes and stop the event loop."""
        self.drop(list(self._groups))
        if self._loop is not None:
            self._loop.close(EXIT_S)
            self._loop = None

    # --- methods for the loop thread ------------------------------------------------------------------------------

    @property
    def inside(self) -> bool:
        """Whether the caller runs on the thread of this player's event loop, which runs the environments."""
        return self._loop is not None and self._loop.inside

    def refuse_inside(self, call: str) -> None:
        """Check that the caller is not an environment, which would wait for `run` while `run` waits for it.

        Args:
            call: name of the called method, for the message.

        Raises:
            EngineStateError: the caller is an environment.
        """
        if self.inside or self in _PLAYING.get():
            raise EngineStateError(
                f"{call}() in an environment of run(): it would wait for run(), which waits for this environment; sample "
                "by `await episode.sample(prompt)`, or in an `async def step` by `await manager.sample(prompt)`, and call "
                f"manager.{call}() after run() has returned"
            )

    async def _play(self, episode: Episode, play: Play) -> None:
        _PLAYING.set((*_PLAYING.get(), self))
        try:
            reward = _number(await play(episode))
            if not math.isfinite(reward):
                raise ValueError(f"reward={reward!r}: must be finite")
        except asyncio.CancelledError:
            self._end(episode, None, "RequestAbortedError: the episode was cancelled")
            raise
        except (Exception, SystemExit) as exc:  # noqa: BLE001 - only this episode fails
            if isinstance(exc, BrokenEnvironmentError):
                # Ignore the error of an episode that was dropped: it must not fail a later call.
                self.broken = exc if episode.group_id in self._groups else self.broken
            elif type(exc) not in self._logged and not episode.ended:
                self._logged.add(type(exc))
                _log.warning(
                    "%r failed; later failures by %s are not logged", episode, type(exc).__name__, exc_info=exc
                )
            self._end(episode, None, f"{type(exc).__name__}: {exc}")
        else:
            self._end(episode, reward, None)

    def _end(self, episode: Episode, reward: float | None, error: str | None) -> bool:
        """Finish an episode with a reward or an error; return False if it had already finished."""
        with self._ending:
            if episode.ended:
                return False
            episode.reward, episode.error, episode.ended = reward, error, True
            if all(each.ended for each in self._groups.get(episode.group_id, ())):
                self.unfinished.discard(episode.group_id)
        self._samples.wake()
        return True

    def _cancel(self, episode: Episode) -> None:
        future = self._futures.get(episode)
        if future is not None:
            future.cancel()


def _number(reward: object) -> float:
    try:
        return float(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise BrokenEnvironmentError(
            f"the episode's coroutine returned {reward!r:.80} of type {type(reward).__name__}: return its reward, a number"
        ) from None


def _close_at_exit(loop: LoopThread) -> None:
    if not loop.inside:
        loop.close(EXIT_S)
