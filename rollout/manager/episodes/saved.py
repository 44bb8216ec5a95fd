"""Episodes in play as plain values, for a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from rollout.manager.episodes.episode import StepResult
from rollout.requests.codec import (
    BOOL,
    FLOAT,
    INT,
    INTS,
    OPAQUE,
    SAMPLING_PARAMS,
    STR,
    Codec,
    decode_fields,
    encode_fields,
    list_of,
    optional,
)
from rollout.requests.request import REQUEST, DynamicInferenceRequest
from rollout.sampling_params import SamplingParams

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedEpisode:
    """One episode of a group."""

    answers: list[StepResult]
    """To the first of its turns."""
    turns: dict[int, DynamicInferenceRequest]
    """Turns by number; their seeds are derived from it."""
    ended: bool
    reward: float | None
    error: str | None
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A group that was in play, or had ended and was not handed out."""

    group_id: int
    environment: str
    """Its name."""
    task: Any
    params: SamplingParams
    seconds_left: float | None
    """Seconds left of `episode_timeout_s`; None: no limit."""
    episodes: list[SavedEpisode]


def portable(groups: Sequence[SavedGroup]) -> list[SavedGroup]:
    """Those whose task and `info` a checkpoint can hold; a warning names the first of the others."""
    kept, left_out = [], []
    for group in groups:
        try:
            msgpack.packb([group.task, [episode.info for episode in group.episodes]])
            kept.append(group)
        except (TypeError, ValueError, OverflowError) as exc:
            left_out.append((group, exc))
    if left_out:
        group, why = left_out[0]
        _log.warning(
            "%d of %d groups of episodes are not in this checkpoint, so that their tasks begin again after a restart: "
            "task %.80r or an Episode.info is not made of None, bool, int, float, str, bytes, list and dict (%s)",
            len(left_out), len(groups), group.task, why,
        )  # fmt: skip
    return kept


# --- codecs -------------------------------------------------------------------------------------------------------------


def _encode_answer(answer: StepResult) -> list[Any]:
    told = answer.observation
    return [told if isinstance(told, str) else INTS.encode(told), float(answer.reward), bool(answer.done)]


def _decode_answer(plain: list[Any]) -> StepResult:
    told, reward, done = plain
    return StepResult(told if isinstance(told, str) else INTS.decode(told), reward, done)


_EPISODE = {
    "answers": list_of(Codec(_encode_answer, _decode_answer)),
    "turns": Codec(
        lambda turns: {number: turn.serialize() for number, turn in turns.items()},
        lambda plain: {number: REQUEST.decode(turn) for number, turn in plain.items()},
    ),
    "ended": BOOL,
    "reward": optional(FLOAT),
    "error": optional(STR),
    "info": OPAQUE,
}
_GROUP = {
    "group_id": INT,
    "environment": STR,
    "task": OPAQUE,
    "params": SAMPLING_PARAMS,
    "seconds_left": optional(FLOAT),
    "episodes": list_of(
        Codec(
            lambda episode: encode_fields(episode, _EPISODE),
            lambda plain: SavedEpisode(**decode_fields("episode", plain, _EPISODE)),
        )
    ),
}
SAVED_GROUPS = list_of(
    Codec(
        lambda group: encode_fields(group, _GROUP),
        lambda plain: SavedGroup(**decode_fields("group", plain, _GROUP)),
    )
)
"""Codec of the groups that `EpisodePlayer.save` returns."""
