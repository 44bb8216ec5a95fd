"""Episodes in flight as plain values, for a checkpoint: attributes of `EpisodeGroup` and `Episode`, and their codecs."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import msgpack

from rollout.requests.codec import (
    BOOL,
    FLOAT,
    INT,
    OPAQUE,
    SAMPLING_PARAMS,
    STR,
    Codec,
    decode_fields,
    encode_fields,
    list_of,
    optional,
)
from rollout.requests.request import REQUEST

_log = logging.getLogger(__name__)


def portable(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the saved groups whose task and `info` a checkpoint can store; a warning names the first other group."""
    kept, left_out = [], []
    for group in groups:
        try:
            msgpack.packb([group["task"], [episode["info"] for episode in group["episodes"]]])
            kept.append(group)
        except (TypeError, ValueError, OverflowError) as exc:
            left_out.append((group, exc))
    if left_out:
        group, why = left_out[0]
        _log.warning(
            "%d of %d groups of episodes are not in this checkpoint, so that their tasks begin again after a restart: "
            "task %.80r or an Episode.info is not made of None, bool, int, float, str, bytes, list and dict (%s)",
            len(left_out), len(groups), group["task"], why,
        )  # fmt: skip
    return kept


_EPISODE = {
    "all_turns": Codec(
        lambda turns: {number: turn.serialize() for number, turn in turns.items()},
        lambda plain: {number: REQUEST.decode(turn) for number, turn in plain.items()},
    ),
    "ended": BOOL,
    "reward": optional(FLOAT),
    "error": optional(STR),
    "info": OPAQUE,
}
GROUP = {
    "group_id": INT,
    "environment": STR,
    "task": OPAQUE,
    "params": SAMPLING_PARAMS,
    "due": FLOAT,
    "episodes": list_of(
        Codec(partial(encode_fields, codecs=_EPISODE), partial(decode_fields, "episode", codecs=_EPISODE))
    ),
}
_PLAYED = {
    "next": INT,
    "played_s": FLOAT,
    "groups": list_of(Codec(OPAQUE.encode, partial(decode_fields, "group", codecs=GROUP))),
}
PLAYED = Codec(OPAQUE.encode, partial(decode_fields, "episodes", codecs=_PLAYED))
"""Codec of the result of `EpisodePlayer.save`, which is plain, into the argument of its `load`."""
