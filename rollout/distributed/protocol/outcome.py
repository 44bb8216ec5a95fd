"""Final result (`Outcome`) of a sample, read from its record's segments without merging them, and its wire form."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

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
from rollout.requests.record import DynamicInferenceRequestRecord, segment_rows
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import TopN
from rollout.state import FinishReason


@dataclass(slots=True)
class Outcome:
    """Final result of a sample: finish reason, version runs, timings."""

    finish_reason: FinishReason
    stop_reason: str | int | None
    error: str | None
    policy_version: int
    """Engine's policy version when the sample ended."""
    policy_spans: VersionSpans
    """Policy versions over prompt and completion."""
    kv_spans: VersionSpans
    """Policy version that computed the KV of each position; positions without KV are not covered."""
    tpot: list[float]
    """Seconds between consecutive tokens. Incomplete for a sample that moved between ranks."""
    ttft: float | None
    """Seconds from arrival to the first token."""
    latency: float | None
    """Seconds from arrival to completion."""
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    prompt_log_probs: list[float] | None
    prompt_top_n: TopN | None
    max_tokens: int
    """Token budget, clamped to the engine's capacity."""
    seed: int
    """Seed of the request's random streams."""
    segments: list[list[int]] = field(default_factory=list)
    """`record.segment_rows`, one row per interruption; empty if never interrupted."""
    block_size_tokens: int | None = None
    """The engine's block size, from which block hashes are computed; None: prefix caching is off."""


def outcome(record: DynamicInferenceRequestRecord) -> Outcome:
    """Return the outcome of a finished record."""
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
        segment_rows(record) if len(record) > 1 else [],
        first.block_size_tokens if first.enable_prefix_caching else None,
    )


# --- as bytes ---------------------------------------------------------------------------------------------------------


def _checked(rule: str, holds: Any) -> Codec:
    def decode(value: Any) -> Any:
        if not holds(value):
            refuse("value", value, rule)
        return value

    return Codec(lambda value: value, decode)


def _is_segments(value: Any) -> bool:
    return type(value) is list and all(type(row) is list and len(row) >= 6 and all(map(is_count, row)) for row in value)


_COUNT = _checked("an integer in [0, 2**63)", is_count)
_GAPS = Codec(lambda gaps: struct.pack(f"<{len(gaps)}d", *gaps), FLOATS.decode)
_WIRE: dict[str, Codec] = {
    "finish_reason": member_of(FinishReason),
    "stop_reason": optional(STR_OR_INT),
    "error": optional(STR),
    "policy_version": _COUNT,
    "policy_spans": SPANS,
    "kv_spans": SPANS,
    "tpot": _GAPS,
    "ttft": optional(FLOAT),
    "latency": optional(FLOAT),
    "num_cached_tokens": _COUNT,
    "prompt_log_probs": optional(FLOATS),
    "prompt_top_n": optional(TOP_N),
    "max_tokens": _COUNT,
    "seed": _COUNT,
    "segments": _checked("rows of counts, one per segment", _is_segments),
    "block_size_tokens": optional(_COUNT),
}
_NAMES = tuple(field.name for field in fields(Outcome))
_VALUES = attrgetter(*_NAMES)
_PACKED = tuple(
    (_NAMES.index(name), _WIRE[name].encode)
    for name in ("policy_spans", "kv_spans", "tpot", "prompt_log_probs", "prompt_top_n")
)


def pack(outcome: Outcome) -> bytes:
    """Encode as one msgpack row, fields in order; times and log-probs as raw little-endian float64 buffers."""
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
            values.append(_WIRE[name].decode(value))
        except SerializationError as exc:
            raise SerializationError(f"Outcome.{name}: {exc}") from exc
    return Outcome(*values)
