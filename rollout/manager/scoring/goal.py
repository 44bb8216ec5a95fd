"""Decides when `generate_scored` has filled its batch: scores groups that end, discards some, and begins others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import isfinite
from typing import Any

from rollout.manager.groups import GroupLedger
from rollout.manager.scoring.batch import Reward, ScoredSample
from rollout.observe.recorder import span
from rollout.requests.request import DynamicInferenceRequest


class ScoredGoal:
    """The goal of one `generate_scored`.

    Args:
        groups: in flight, of this call and of earlier ones.
        rewards: of the samples of groups that have ended and are kept, by group id; filled here.
        tasks: drawn from while fewer than `most` groups are in flight.
        begin: submits groups.
        number: of kept groups that fill the batch.
        keep: whether a group is worth training on. None: each is.
        most_discarded: so many groups are discarded, then all are kept.
        discard: told the rewards of a group that is dropped.
        too_old: ids of groups that must have ended too; None: not known yet.
    """

    def __init__(
        self,
        groups: GroupLedger,
        rewards: dict[int, list[float | None]],
        tasks: Iterator[Any],
        begin: Callable[[Sequence[Any]], None],
        number: int,
        most: int,
        reward: Reward,
        keep: Callable[[Sequence[ScoredSample]], bool] | None,
        most_discarded: float,
        discard: Callable[[list[float | None]], None],
        too_old: Callable[[], set[int] | None],
    ) -> None:
        self._groups = groups
        self._rewards = rewards
        self._tasks = tasks
        self._begin = begin
        self.number = number
        self._most = most
        self._reward = reward
        self._keep = keep
        self._discards_left = most_discarded
        self._discard = discard
        self._too_old = too_old
        self._full = False

    def ended(self) -> int:
        """How many kept groups have ended."""
        return len(self._rewards)

    def reached(self) -> bool:
        """Scores and discards what has ended, begins new groups; then whether the batch is full, or no group is left."""
        if self._full:
            # Other ranks may need more steps; what ends in them is scored by the next call.
            return True
        self._score()
        if len(self._rewards) < self.number:
            self._draw()
            self._full = not self._groups.unfinished
        else:
            must = self._too_old()
            self._full = must is not None and must.isdisjoint(self._groups.unfinished)
        return self._full

    def _score(self) -> None:
        if len(self._groups) - len(self._groups.unfinished) == len(self._rewards):
            return
        for group_id in self._groups.complete():
            if group_id in self._rewards:
                continue
            requests = self._groups.results([group_id])
            with span("reward"):
                rewards = rewards_of(requests, self._reward)
            samples = [ScoredSample(*each) for each in zip(requests, rewards, strict=True)]
            # A failed sample has to be seen, not discarded.
            failed = any(sample.error is not None for sample in samples)
            if self._keep is None or failed or self._discards_left == 0 or self._keep(samples):
                self._rewards[group_id] = rewards
            else:
                self._discards_left -= 1
                self._groups.drop([group_id])
                self._discard(rewards)

    def _draw(self) -> None:
        drawn = list(islice(self._tasks, max(0, self._most - len(self._groups))))
        if drawn:
            self._begin(drawn)


def rewards_of(requests: Sequence[DynamicInferenceRequest], reward: Reward) -> list[float | None]:
    """Rewards of a group's samples; None of those that failed.

    Raises:
        ValueError: there are not as many rewards as samples, or one is no finite number.
    """
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
