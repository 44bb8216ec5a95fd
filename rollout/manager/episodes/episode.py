"""`Episode`: the turns of one play of an environment; `EpisodeGroup`: the episodes of one task."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from rollout.errors import EngineStateError
from rollout.requests.block_hash import stream_key
from rollout.requests.images import images_of
from rollout.requests.prompt import Prompt
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason

Check = Callable[[Prompt, SamplingParams], list[int]]
"""A function that returns the token ids of a prompt, or raises if it can never be served."""
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
        check: Check,
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
        self._check = check
        self._asked = 0
        self._turns: dict[int, DynamicInferenceRequest] = {}
        self._recorded: dict[int, DynamicInferenceRequest] = {}
        """Turns from before a restart that were not requested again yet, by number."""

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

        episode = cls(task, group_id, index, SamplingParams(), 0, elsewhere, elsewhere)
        episode.reward, episode.error, episode.ended = reward, error, True
        episode._turns = dict(enumerate(turns))
        return episode

    @property
    def turns(self) -> list[DynamicInferenceRequest]:
        """See the class."""
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
        if self._recorded:
            recorded = self._recall(self._check(prompt, params), params, given=sampling_params is not None)
            if recorded is not None:
                return recorded
        number, self._asked = self._asked, self._asked + 1
        if params.seed is None or sampling_params is None:
            params = params.replace(seed=stream_key(self._seed, number))

        def keep(turn: DynamicInferenceRequest) -> None:
            if not self.ended:
                self._turns[number] = turn

        return await self._ask(prompt, params, keep)

    # --- after a restart ----------------------------------------------------------------------------------------

    @property
    def all_turns(self) -> dict[int, DynamicInferenceRequest]:
        """Finished turns by number, including turns from before a restart that were not requested again yet."""
        return dict(sorted({**self._recorded, **self._turns}.items()))

    @property
    def num_recorded(self) -> int:
        """Number of turns from before a restart that were not requested again yet."""
        return len(self._recorded)

    def recorded(self, turns: dict[int, DynamicInferenceRequest], *, ended: bool) -> None:
        """Set the turns from before a restart. `ended`: none of them will be requested again."""
        self._turns, self._recorded = (turns, {}) if ended else ({}, turns)
        self._asked = max(turns, default=-1) + 1

    def _recall(self, tokens: list[int], params: SamplingParams, *, given: bool) -> DynamicInferenceRequest | None:
        """Restore and return the first recorded turn with this prompt and these parameters; None: it has to be sampled."""
        images = images_of(tokens)
        for number, turn in sorted(self._recorded.items()):
            seeded = params if given and params.seed is not None else params.replace(seed=turn.sampling_params.seed)
            same_images = (turn.images and turn.images.digest) == (images and images.digest)
            if turn.prompt_tokens == tokens and same_images and _same_but_for_room(seeded, turn):
                return self._take_over(number)
        return None

    def _take_over(self, number: int) -> DynamicInferenceRequest:
        # The order matters, because another thread may be reading `all_turns`.
        turn = self._turns[number] = self._recorded[number]
        del self._recorded[number]
        return turn

    def __repr__(self) -> str:
        state = self.error or ("open" if self.reward is None else f"reward {self.reward:g}")
        return f"Episode(group {self.group_id}, index {self.index}, {len(self._turns)} turns, {state})"


def _same_but_for_room(asked: SamplingParams, turn: DynamicInferenceRequest) -> bool:
    """Return whether a turn was sampled with these parameters, except that the sequence length may have limited it."""
    was = turn.sampling_params
    if asked.max_tokens > was.max_tokens and turn.finish_reason is FinishReason.STOP:
        asked = asked.replace(max_tokens=was.max_tokens, min_tokens=was.min_tokens)
    return asked == was


@dataclass(eq=False)
class EpisodeGroup:
    """The episodes of one task.

    Always true: `missing` has the indices of the unfinished ones.
    """

    group_id: int
    episodes: list[Episode]
    environment: str
    """Name of its environment."""
    params: SamplingParams
    due: float
    """Playing time in seconds at which all episodes must have finished; infinity: no limit."""
    missing: set[int] = field(default_factory=set)

    @property
    def task(self) -> Any:
        """Task as given to `run`."""
        return self.episodes[0].task
