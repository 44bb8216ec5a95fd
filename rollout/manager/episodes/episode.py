"""`Episode`: the turns that one environment plays for one task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

from rollout.errors import EngineStateError
from rollout.requests.block_hash import stream_key
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams

Ask = Callable[[Prompt, SamplingParams, Callable[[DynamicInferenceRequest], None]], Awaitable[DynamicInferenceRequest]]
"""A function (prompt, parameters, callback) → finished request. The stepping thread first calls the callback with it."""


class Episode:
    """One play of an environment: its sampled turns and its reward.

    Attributes:
        task: the task, as given to `run`.
        group_id: the id that all episodes of a task share.
        index: index among the episodes of the task.
        turns: finished completions in the order of their requests, each with its whole prompt.
        reward: reward of the whole episode; None if it is not known yet or the episode failed.
        error: "Type: message" of the failure; None if the episode has not failed.
        ended: whether the episode has finished, after which it cannot sample.
        info: a dict for the environment's own data, which this package never changes.
    """

    def __init__(
        self,
        task: Any,
        group_id: int,
        index: int,
        params: SamplingParams,
        seed: int,
        ask: Ask,
    ) -> None:
        self.task = task
        self.group_id = group_id
        self.index = index
        self.reward: float | None = None
        self.error: str | None = None
        self.ended = False
        self.info: dict[str, Any] = {}
        self._params = params
        self._seed = stream_key(stream_key(seed, group_id), index)
        self._ask = ask
        self._asked = 0
        self._turns: dict[int, DynamicInferenceRequest] = {}

    @classmethod
    def from_turns(
        cls,
        task: Any,
        group_id: int,
        index: int,
        turns: Iterable[DynamicInferenceRequest],
        reward: float | None,
        error: str | None = None,
    ) -> Episode:
        """Build a finished episode from turns that another engine sampled, for `EpisodeBatch.from_episodes`."""

        def elsewhere(*_: Any) -> NoReturn:
            raise EngineStateError("this episode was sampled elsewhere")

        episode = cls(task, group_id, index, SamplingParams(), 0, elsewhere)
        episode.reward, episode.error, episode.ended = reward, error, True
        episode._turns = dict(enumerate(turns))
        return episode

    @property
    def turns(self) -> list[DynamicInferenceRequest]:
        """The finished completions, in the order of their requests."""
        return [turn for _, turn in sorted(self._turns.items())]

    @property
    def tokens(self) -> list[int]:
        """The token ids of the last turn's prompt and completion, with which the next prompt usually starts."""
        last = self._turns[max(self._turns)] if self._turns else None
        return [] if last is None else [*last.prompt_tokens, *last.generated_tokens]

    async def sample(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> DynamicInferenceRequest:
        """Sample the next completion of this episode, as `RolloutManager.sample` does.

        Concurrent calls are branches of the episode. A prompt that starts with the whole last turn continues that turn and
        can reuse its KV from the prefix cache. Any other prompt (an edited history) starts another row of the batch.

        Args:
            prompt: a prompt as in `RolloutManager.generate`, often `[*episode.tokens, *observation]`.
            sampling_params: parameters of this completion; None means the parameters of `run`. If they have no seed, the
                seed is derived from the episode and the turn, so that completions do not depend on how fast tools answer.

        Raises:
            InvalidRequestError: the prompt can never be served, for example because it is too long.
            RequestError: the completion failed. The episode may continue.
            EngineStateError: the episode has already finished, for instance because its deadline has passed.
        """
        if self.ended:
            raise EngineStateError(
                f"{self!r} samples after its end: let the coroutine that plays it end when it is cancelled"
            )
        params = sampling_params or self._params
        number, self._asked = self._asked, self._asked + 1
        if params.seed is None or sampling_params is None:
            params = params.replace(seed=stream_key(self._seed, number))

        def keep(turn: DynamicInferenceRequest) -> None:
            if not self.ended:
                self._turns[number] = turn

        return await self._ask(prompt, params, keep)

    def __repr__(self) -> str:
        state = self.error or ("open" if self.reward is None else f"reward {self.reward:g}")
        return f"Episode(group {self.group_id}, index {self.index}, {len(self._turns)} turns, {state})"
