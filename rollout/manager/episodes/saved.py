"""Episodes in play as plain values, for a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from rollout.errors import SerializationError
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
    refuse,
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


def _decode_answer(plain: Any) -> StepResult:
    if not isinstance(plain, list | tuple) or len(plain) != 3:
        refuse("answer", plain, "[observation, reward, done]")
    told, reward, done = plain
    return StepResult(told if isinstance(told, str) else INTS.decode(told), FLOAT.decode(reward), BOOL.decode(done))


def _decode_turns(plain: Any) -> dict[int, DynamicInferenceRequest]:
    if not isinstance(plain, dict) or any(type(number) is not int or number < 0 for number in plain):
        refuse("turns", plain, "a dict of turns by their numbers")
    return {number: REQUEST.decode(turn) for number, turn in plain.items()}


def _decode_info(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict):
        refuse("info", plain, "a dict")
    return plain


_EPISODE = {
    "answers": list_of(Codec(_encode_answer, _decode_answer)),
    "turns": Codec(lambda turns: {number: turn.serialize() for number, turn in turns.items()}, _decode_turns),
    "ended": BOOL,
    "reward": optional(FLOAT),
    "error": optional(STR),
    "info": Codec(dict, _decode_info),
}


def _decode_episode(plain: Any) -> SavedEpisode:
    episode = SavedEpisode(**decode_fields("episode", plain, _EPISODE))
    if len(episode.answers) > len(episode.turns):
        refuse("episode.answers", f"{len(episode.answers)} answers", f"at most {len(episode.turns)}, one per turn,")
    if not episode.ended and (episode.reward is not None or episode.error is not None):
        refuse("episode.ended", episode.ended, "True, as it has a reward or an error,")
    return episode


_GROUP = {
    "group_id": INT,
    "environment": STR,
    "task": OPAQUE,
    "params": SAMPLING_PARAMS,
    "seconds_left": optional(FLOAT),
    "episodes": list_of(Codec(lambda episode: encode_fields(episode, _EPISODE), _decode_episode)),
}


def _decode_group(plain: Any) -> SavedGroup:
    group = SavedGroup(**decode_fields("group", plain, _GROUP))
    if group.group_id < 0 or not group.episodes:
        refuse("group", (group.group_id, len(group.episodes)), "an id of at least 0 and at least one episode")
    return group


_GROUPS = list_of(Codec(lambda group: encode_fields(group, _GROUP), _decode_group))


def _decode_groups(plain: Any) -> tuple[int, list[SavedGroup]]:
    fields = decode_fields("episodes", plain, {"next": INT, "groups": _GROUPS})
    numbers = [group.group_id for group in fields["groups"]]
    if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= fields["next"]:
        raise SerializationError(f"episodes.groups: ids {numbers[:8]} are not different, and below {fields['next']}")
    return fields["next"], fields["groups"]


def _encode_groups(saved: tuple[int, list[SavedGroup]]) -> dict[str, Any]:
    return {"next": saved[0], "groups": _GROUPS.encode(saved[1])}


SAVED_GROUPS = Codec(_encode_groups, _decode_groups)
"""Codec of the next group id and the groups, as `EpisodePlayer.save` gives them."""
