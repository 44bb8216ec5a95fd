"""`Episode`: the turns of one play of an environment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NoReturn

from rollout.errors import EngineStateError
from rollout.requests.block_hash import stream_key
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams

Ask = Callable[[Prompt, SamplingParams, Callable[[DynamicInferenceRequest], None]], Awaitable[DynamicInferenceRequest]]
"""(prompt, parameters, callback on the stepping thread with the result) → the finished request."""


class Episode:
    """One play of an environment: its sampled turns and their result.

    Attributes:
        task: as given to `run`.
        group_id: id that the episodes of a task share.
        index: index among the episodes of its task.
        turns: finished completions in the order of their requests, each with the prompt that the model saw.
        reward: reward of the whole episode; None: not known yet, or it failed.
        error: "Type: message" of its failure; None: it has not failed.
        ended: whether sampling has ended.
        info: data of the environment, never changed here.
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
        """Build a finished episode whose turns were sampled elsewhere, for `EpisodeBatch.from_episodes`."""

        def elsewhere(*_: Any) -> NoReturn:
            raise EngineStateError("this episode was sampled elsewhere")

        episode = cls(task, group_id, index, SamplingParams(), 0, elsewhere)
        episode.reward, episode.error, episode.ended = reward, error, True
        episode._turns = dict(enumerate(turns))
        return episode

    @property
    def turns(self) -> list[DynamicInferenceRequest]:
        """Finished completions in the order of their requests."""
        return [turn for _, turn in sorted(self._turns.items())]

    @property
    def tokens(self) -> list[int]:
        """Token ids of the last turn's prompt and completion, with which the next prompt usually begins."""
        last = self._turns[max(self._turns)] if self._turns else None
        return [] if last is None else [*last.prompt_tokens, *last.generated_tokens]

    async def sample(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> DynamicInferenceRequest:
        """Sample the next completion of this episode, as `RolloutManager.sample` does.

        Several at once are branches. A prompt that begins with the whole last turn continues it, and its KV is in the prefix
        cache; any other prompt (an edited history) starts another row of the batch.

        Args:
            sampling_params: None: those of `run`. Without a seed it is derived from the episode and the turn, so that
                completions do not depend on how fast tools answer.

        Raises:
            InvalidRequestError: the prompt can never be served, for example because it is too long.
            RequestError: the completion failed. The episode may continue.
            EngineStateError: the episode has ended, by its deadline for instance.
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
