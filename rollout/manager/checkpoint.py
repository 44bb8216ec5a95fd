"""The checkpoint of a manager: its groups in flight and their samples, serialised into one buffer without pickle.

The state is one buffer because `torch.load(weights_only=True)` rejects some plain values, such as empty bytes.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgpack

from rollout.errors import ConfigError, EngineStateError
from rollout.manager.groups import GroupJournal, GroupLedger
from rollout.manager.rounds import Rounds
from rollout.requests.codec import INT, OPAQUE, STR, Codec, decode_fields, list_of, refuse, unpack_msgpack
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import REQUEST, DynamicInferenceRequest

FORMAT = 8


class Checkpoints:
    """The manager's `state_dict` and `load_state_dict`."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def state_dict(self) -> dict[str, Any]:
        """Return all groups in flight, with policy versions and random streams, for `torch.save` or msgpack.

        `torch.load` can read the result with `weights_only=True`. Episodes in flight are not included.
        """
        rounds = self._rounds
        with rounds.engine.locked():
            rounds.loop.take_ended()
            return save(rounds, rounds.pacer.updates_per_round)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`. The model must have the weights that it had when the state was saved.

        If this raises, nothing is in flight.

        Raises:
            EngineStateError: this manager already has requests in flight.
            ConfigError: this manager's policy version is later, the model is another, or the journal has no such checkpoint.
            SerializationError: `state` is not a saved state, has another format, or is damaged; the message names the field.
            InvalidRequestError: a request does not fit this engine, for example because the KV pool is smaller.
        """
        rounds, loop, player = self._rounds, self._rounds.loop, self._rounds.player
        with rounds.turn("load_state_dict"):
            loop.take_ended()
            if loop.groups or rounds.backend.snapshot() or len(player):
                raise EngineStateError(
                    f"load_state_dict() with {len(loop.groups)} groups in flight and {len(player)} groups of episodes in "
                    "play: use a fresh manager"
                )
            rounds.pacer = rounds.new_pacer(load(state, rounds))
            loop.sync_metrics()


def save(rounds: Rounds, updates_per_round: int) -> dict[str, Any]:
    """Serialise the state of a rollout: versions, groups, finished samples, records of unfinished samples."""
    engine, groups, unfinished = rounds.engine, rounds.groups, rounds.backend.snapshot()
    fields = {
        "model": engine.controller.layout.described,
        "policy_version": engine.policy_version,
        "next_request_id": rounds.backend.next_group_id,
        "updates_per_round": updates_per_round,
        "groups": [[group_id, groups[group_id].size] for group_id in groups],
        "finished": [result.serialize() for result in groups.results(groups)],
        "unfinished": [record.serialize() for record in unfinished if record.request_id in groups],
        "next_episode_group": rounds.player.next_number,
    }
    # Write the journal's checkpoint last: the journal must not keep files for a failed checkpoint.
    fields["journal"] = rounds.loop.journal.checkpoint(engine.policy_version)
    data = msgpack.packb(fields, use_bin_type=True)
    return {"format": FORMAT, "checksum": zlib.crc32(data), "data": data}


def load(state: Any, rounds: Rounds) -> int:
    """Restore a state that `save` returned. No group may be in flight before the call, and none is if it raises.

    Returns:
        The saved number of weight updates per round, see `StalenessPacer`.

    Raises:
        SerializationError: `state` is not a saved state, or it has another format. The message names the field.
        ConfigError: the engine's policy version is later, the model is another, or the journal has no such checkpoint.
        InvalidRequestError: a request does not fit this engine, for example because the KV pool is smaller.
    """
    loaded, engine, backend, journal = _decode(state), rounds.engine, rounds.backend, rounds.loop.journal
    if loaded["model"] != (here := engine.controller.layout.described):
        raise ConfigError(
            f"the state is of a {loaded['model']}, and this rollout of a {here}: load it with its own model"
        )
    journal.restore(loaded["journal"], loaded["policy_version"])
    try:
        finished, records = _finish(loaded["finished"], loaded["unfinished"], journal)
        groups = GroupLedger()
        for group_id, size in loaded["groups"]:
            groups.add(group_id, size)
        for result in finished:
            groups.take(result)
        # Announce an update, even to the same version: the cached KV may have been computed with other weights.
        engine.weights_updated(loaded["policy_version"])
        backend.continue_from(records)
        backend.reserve_group_ids(max(loaded["next_request_id"], *(group_id + 1 for group_id in groups), 0))
    except BaseException:
        # Forget the groups that the journal restored: they must not be returned after a failed load.
        journal.restore("", 0)
        raise
    rounds.loop.groups = groups
    rounds.player.next_number = loaded["next_episode_group"]
    return int(loaded["updates_per_round"])


def _finish(
    finished: list[DynamicInferenceRequest], unfinished: list[DynamicInferenceRequestRecord], journal: GroupJournal
) -> tuple[list[DynamicInferenceRequest], list[DynamicInferenceRequestRecord]]:
    """Return (finished samples, records of unfinished samples). A group that the journal on disk contains is finished."""
    ended: dict[int, list[DynamicInferenceRequest]] = {}
    for group_id, first in {record[0].request_id: record[0] for record in unfinished}.items():
        tokens = first.prompt_tokens[: first.original_prompt_length]
        samples = journal.in_flight(group_id, tokens, first.sampling_params)
        if samples is not None:
            ended[group_id] = samples
    others = [result for result in finished if result.request_id not in ended]
    open_still = [record for record in unfinished if record[0].request_id not in ended]
    return others + [sample for samples in ended.values() for sample in samples], open_still


def _decode(state: Any) -> dict[str, Any]:
    """Return the fields that `save` packed into `state`, after checking the checksum and the fields' types."""
    if isinstance(state, dict) and state.get("format") != FORMAT:
        refuse("state.format", state.get("format"), f"{FORMAT}, the format that this version reads,")
    envelope = decode_fields("state", state, {"format": INT, "checksum": INT, "data": OPAQUE})
    data = envelope["data"]
    if not isinstance(data, bytes) or zlib.crc32(data) != envelope["checksum"]:
        refuse("state.checksum", envelope["checksum"], "that of its data, of which a byte was damaged,")
    return decode_fields("state.data", unpack_msgpack("state.data", data, strict_map_key=False), _FIELDS)


_RECORD = Codec(DynamicInferenceRequestRecord.serialize, DynamicInferenceRequestRecord.deserialize)
_FIELDS = {
    "model": STR,
    "policy_version": INT,
    "next_request_id": INT,
    "updates_per_round": INT,
    "journal": STR,
    "groups": OPAQUE,
    "next_episode_group": INT,
    "finished": list_of(REQUEST),
    "unfinished": list_of(_RECORD),
}
