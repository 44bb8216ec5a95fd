"""`Outcome`: the final result of a sample apart from the completion itself, and its encoding as bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Annotated, Any, get_type_hints

import msgpack

from rollout.distributed.protocol.fields import is_count
from rollout.errors import SerializationError
from rollout.requests.codec import (
    FLOAT,
    FLOATS,
    SPANS,
    STR,
    STR_OR_INT,
    TOP_N,
    Codec,
    member_of,
    optional,
    refuse,
    unpack_msgpack,
)
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import TopN
from rollout.state import FinishReason


def _checked(rule: str, holds: Any) -> Codec:
    def decode(value: Any) -> Any:
        if not holds(value):
            refuse("value", value, rule)
        return value

    return Codec(lambda value: value, decode)


_COUNT = _checked("an integer in [0, 2**63)", is_count)
_GAPS = Codec(lambda gaps: struct.pack(f"<{len(gaps)}d", *gaps), FLOATS.decode)


@dataclass(slots=True)
class Outcome:
    """The final result of a sample: finish reason, policy versions, timings. Each field's annotation contains its codec."""

    finish_reason: Annotated[FinishReason, member_of(FinishReason)]
    stop_reason: Annotated[str | int | None, optional(STR_OR_INT)]
    error: Annotated[str | None, optional(STR)]
    policy_version: Annotated[int, _COUNT]
    """The policy version of the engine when the sample finished."""
    policy_spans: Annotated[VersionSpans, SPANS]
    """The policy version of each position of prompt and completion."""
    kv_spans: Annotated[VersionSpans, SPANS]
    """The policy version that computed the KV of each position. Positions without KV are not included."""
    tpot: Annotated[list[float], _GAPS]
    """The seconds between consecutive tokens. The list is incomplete for a sample that moved between ranks."""
    ttft: Annotated[float | None, optional(FLOAT)]
    """The time from arrival to the first token, in seconds; None if there is no token."""
    latency: Annotated[float | None, optional(FLOAT)]
    """The time from arrival to completion, in seconds."""
    num_cached_tokens: Annotated[int, _COUNT]
    """The number of prompt tokens found in the prefix cache."""
    prompt_log_probs: Annotated[list[float] | None, optional(FLOATS)]
    prompt_top_n: Annotated[TopN | None, optional(TOP_N)]
    max_tokens: Annotated[int, _COUNT]
    """The maximum number of completion tokens, clamped to the engine's capacity."""
    seed: Annotated[int, _COUNT]
    """The seed of the request's random streams."""
    block_size_tokens: Annotated[int | None, optional(_COUNT)] = None
    """The engine's block size in tokens, from which block hashes are computed; None if prefix caching is off."""


def outcome(record: DynamicInferenceRequestRecord) -> Outcome:
    """Return the outcome of a sample from the request record of the finished sample."""
    first, last = record[0], record[-1]
    return Outcome(
        last.finish_reason or FinishReason.ERROR,
        last.stop_reason,
        last.error,
        last.policy_version,
        last.policy_spans,
        last.kv_spans,
        first.tpot if len(record) == 1 else record.joined("tpot"),
        record.ttft,
        record.latency,
        first.num_cached_tokens,
        record.of_prompt("prompt_log_probs"),
        record.of_prompt("prompt_top_n_logprobs"),
        first.sampling_params.max_tokens,
        first.seed or 0,
        first.block_size_tokens if first.enable_prefix_caching else None,
    )


# --- encoding as bytes ------------------------------------------------------------------------------------------------


_HINTS = get_type_hints(Outcome, include_extras=True)
_NAMES = tuple(field.name for field in fields(Outcome))
_VALUES = attrgetter(*_NAMES)
_PACKED = tuple(
    (_NAMES.index(name), _HINTS[name].__metadata__[0].encode)
    for name in ("policy_spans", "kv_spans", "tpot", "prompt_log_probs", "prompt_top_n")
)


def pack(outcome: Outcome) -> bytes:
    """Encode an outcome as a msgpack list of its fields, with spans, token times and log-probs packed into buffers."""
    row = list(_VALUES(outcome))
    for position, encode in _PACKED:
        row[position] = encode(row[position])
    packed: bytes = msgpack.packb(row)
    return packed


def unpack(packed: bytes) -> Outcome:
    """Decode an outcome; a `SerializationError` names the malformed field."""
    row = unpack_msgpack("Outcome", packed)
    if type(row) is not list or len(row) != len(_NAMES):
        refuse("Outcome", row, f"a row of {len(_NAMES)} fields")
    values = []
    for name, value in zip(_NAMES, row, strict=True):
        try:
            values.append(_HINTS[name].__metadata__[0].decode(value))
        except SerializationError as exc:
            raise SerializationError(f"Outcome.{name}: {exc}") from exc
    return Outcome(*values)
