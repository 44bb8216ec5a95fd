"""`SampleDelta`, the new completion tokens of one sample, which the engine sends to a stream's reader. `growth` builds it.

An optional field is declared with `_column`. The declaration determines how the field's values are joined, packed
(`rollout.distributed.protocol.stretch`) and checked on arrival.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import isfinite
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.errors import SerializationError
from rollout.requests.codec import refuse
from rollout.requests.events import pack_events, unpack_events
from rollout.requests.record import DynamicInferenceRequestRecord, joined_values, route_rows
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import (
    KeptTokens,
    Routes,
    TopN,
    check_routes,
    first_unread,
    pack_kept,
    pack_routes,
    pack_top_n,
    unpack_kept,
    unpack_routes,
    unpack_top_n,
)
from rollout.sampling_params import SamplingParams

TOKEN_BYTES = 4
"""The size of a packed token id or log-prob, in bytes."""


@dataclass(frozen=True, slots=True)
class Column:
    """The rules for checking an optional field of `SampleDelta` and joining its values; None is a missing value."""

    types: frozenset[type]
    """The allowed types of a value. msgpack encodes the value as it is."""
    rule: str
    """The allowed types in words, for error messages."""
    join: Callable[[list[Any]], Any]
    """A function that joins the field's values from consecutive deltas. Missing values are left out of the list."""
    outlives_restart: bool = False
    """Whether joining keeps the values from before a restart of the sample (see `SampleDelta.start`)."""

    def holds(self, values: list[Any]) -> bool:
        """Return whether every value is None or has an allowed type. Floats must also be finite."""
        # Use C-level operations on the whole list: a Python call per entry would dominate decoding.
        return self.types.issuperset(map(type, values)) and (
            float not in self.types or all(map(isfinite, filter(None, values)))
        )


def _column(rule: str, *types: type, join: Any, outlives_restart: bool = False) -> Any:
    column = Column(frozenset({*types, NoneType}), rule, join, outlives_restart)
    return field(default=None, metadata={"column": column})


def _first(values: list[Any]) -> Any:
    return values[0]


def _last(values: list[Any]) -> Any:
    return values[-1]


@dataclass(slots=True)
class SampleDelta:
    """The new completion tokens of one sample and the data that belongs to them. Read-only after delivery."""

    request_id: int
    sample_index: int
    start: int = 0
    """The index of this delta's first token in the completion. If it is 0 although the reader has tokens, the sample was
    restarted, and the new tokens replace the old ones."""
    token_ids: bytes = b""
    """The token ids, int32 [count], in the host's byte order (little-endian on every platform that torch supports)."""
    log_probs: bytes = b""
    """The tokens' log-probs, float32 [count], encoded like the token ids."""
    versions: VersionSpans = field(default_factory=VersionSpans)
    """The policy versions of the tokens."""
    prompt_version: int = 0
    """The policy version under which the prompt was admitted."""
    ttft: float | None = _column("seconds", float, int, join=_first)
    """The seconds from arrival to the first token. None unless this delta has the first token."""
    top_n: bytes | None = _column("bytes", bytes, join=b"".join)
    """The top log-probs of each token, packed by `pack_top_n`. None unless requested."""
    kept: bytes | None = _column("bytes", bytes, join=b"".join)
    """The set of token ids that each token was drawn from, packed by `pack_kept`. None unless requested."""
    values: bytes | None = _column("bytes", bytes, join=b"".join)
    """The k numbers per token that the engine's `token_values=…` function returned, float32 [count, k], encoded like the
    log-probs. None without such a function."""
    text: str | None = _column("a string", str, join=_last)
    """The text of the whole completion. None unless the sample has finished and the engine detokenises."""
    routes: bytes | None = _column("bytes", bytes, join=b"".join)
    """The experts chosen at the positions that the tokens were sampled from, packed by `pack_routes`. None unless recorded.
    The first token after KV was computed, or computed again, comes with the experts of all positions before it."""
    outcome: bytes | None = _column("bytes", bytes, join=_last)
    """The packed `rollout.distributed.protocol.outcome.Outcome`. None unless the sample has finished."""
    events: bytes | None = _column("bytes", bytes, join=b"".join, outlives_restart=True)
    """The events since the previous delta, packed by `pack_events`."""
    num_events: int = 0
    """The number of the sample's events so far, including the events in `events`."""

    @property
    def count(self) -> int:
        """The number of completion tokens in this delta."""
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def buffer_bytes(self) -> int:
        """The total size of the tokens, log-probs and optional fields, in bytes. A character of text counts as one byte."""
        optional = (getattr(self, name) for name in COLUMNS)
        return len(self.token_ids) + len(self.log_probs) + sum(len(v) for v in optional if isinstance(v, bytes | str))

    # --- decoded columns --------------------------------------------------------------------------------------------

    def token_list(self) -> list[int]:
        """Return the token ids as a list."""
        return memoryview(self.token_ids).cast("i").tolist()

    def log_prob_list(self) -> list[float]:
        """Return the log-probs as a list."""
        log_probs: list[Any] = memoryview(self.log_probs).cast("f").tolist()
        return log_probs

    def policy_versions(self) -> list[int]:
        """Return the policy version of each token."""
        return self.versions.tolist()

    def top_n_rows(self) -> TopN:
        """Return the top log-probs of each token; empty if not requested. Raise `SerializationError` if malformed."""
        return [] if self.top_n is None else unpack_top_n(self.top_n)

    def route_rows(self, positions: int) -> Routes | None:
        """Return the expert routes [positions, layers, k]; None if not recorded. Raise `SerializationError` if malformed."""
        if self.routes is None:
            return None
        first, routes = unpack_routes(self.routes)
        if first:
            refuse("routes", f"positions from {first} on", "positions from 0 on")
        check_routes("routes", routes, positions)
        return routes

    def kept_tokens(self) -> KeptTokens | None:
        """Return the set that each token was drawn from; None unless requested. Raise `SerializationError` if malformed."""
        if self.kept is None:
            return None
        sets = unpack_kept(self.kept)
        if wrong := sets.wrong_for(self.token_list()):
            raise SerializationError(f"kept: {wrong}")
        return sets

    def value_rows(self) -> NDArray[np.float32] | None:
        """Return the field `values` as float32 [count, k]; None without values. Raise `SerializationError` if malformed."""
        if self.values is None:
            return None
        if not self.count or not self.values or len(self.values) % (TOKEN_BYTES * self.count):
            refuse("values", f"{len(self.values)} bytes", f"k floats for each of {self.count} tokens")
        return np.frombuffer(bytearray(self.values), np.float32).reshape(self.count, -1)

    def to_request(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float | None = None,
    ) -> DynamicInferenceRequest:
        """Build the request that continues the sample after the tokens of this delta, which must start at token 0.

        Raises:
            SerializationError: an optional field is malformed, or a requested field has no entry for some token.
        """
        count, top_n = self.count, self.top_n_rows()
        if params.logprobs and len(top_n) != count:
            refuse("known.top_n", f"{len(top_n)} rows", f"one for each of {count} tokens")
        kept = self.kept_tokens()
        if params.return_kept_tokens and len(kept or ()) != count:
            refuse("known.kept", f"{len(kept or ())} sets", f"one for each of {count} tokens")
        spans = VersionSpans.of_run(self.prompt_version, len(prompt) if count else 0)
        spans.append(self.versions)
        request = DynamicInferenceRequest(
            request_id=request_id,
            sample_index=self.sample_index,
            prompt_tokens=prompt,
            sampling_params=params,
            priority=priority,
            seed=params.seed,
            generated_tokens=self.token_list(),
            generated_log_probs=self.log_prob_list(),
            generated_top_n_logprobs=top_n if params.logprobs else [],
            generated_kept_tokens=kept if params.return_kept_tokens else None,
            generated_values=self.value_rows(),
            policy_spans=spans,
            policy_version=spans.newest() or 0,
            ttft=self.ttft,
            routing_indices=self.route_rows(len(prompt) + count - 1) if count else None,
        )
        request.put_events_before(unpack_events(self.events or b""))
        if arrival_time is not None:
            request.arrival_time = arrival_time
        return request


COLUMNS: dict[str, Column] = {
    each.name: each.metadata["column"] for each in fields(SampleDelta) if "column" in each.metadata
}
"""The optional fields of `SampleDelta`, by name."""


class DeltaJoin:
    """A builder that joins consecutive deltas of one sample, added whole (`add_delta`) or field by field (`add`, `put`).

    If an added part starts at token 0, earlier parts are dropped, except for optional fields with `outlives_restart`.
    """

    __slots__ = ("_columns", "_log_probs", "_num_events", "_prompt_version", "_start", "_token_ids", "_versions", "key")

    def __init__(self, request_id: int, sample_index: int) -> None:
        self.key = (request_id, sample_index)
        self._columns: dict[str, list[Any]] = {}
        self._num_events = 0
        self._begin(0, 0)

    def _begin(self, start: int, prompt_version: int) -> None:
        self._start, self._prompt_version = start, prompt_version
        self._token_ids: list[bytes] = []
        self._log_probs: list[bytes] = []
        self._versions = VersionSpans()
        self._columns = {name: values for name, values in self._columns.items() if COLUMNS[name].outlives_restart}

    def add(self, start: int, prompt_version: int, token_ids: bytes, log_probs: bytes) -> VersionSpans:
        """Add tokens, packed as in `SampleDelta`; return the spans to which the caller must append their versions."""
        if not start or not self._token_ids:
            self._begin(start, prompt_version)
        self._token_ids.append(token_ids)
        self._log_probs.append(log_probs)
        return self._versions

    def put(self, name: str, value: Any) -> None:
        """Add the value of the optional field `name` for the tokens that were added last; None has no effect."""
        if value is not None:
            self._columns.setdefault(name, []).append(value)

    def add_delta(self, delta: SampleDelta) -> None:
        """Add the tokens and the optional fields of a delta."""
        self.add(delta.start, delta.prompt_version, delta.token_ids, delta.log_probs).append(delta.versions)
        for name in COLUMNS:
            self.put(name, getattr(delta, name))
        self._num_events = delta.num_events

    def delta(self) -> SampleDelta:
        """Return the joined parts as one delta."""
        tokens, log_probs = b"".join(self._token_ids), b"".join(self._log_probs)
        delta = SampleDelta(*self.key, self._start, tokens, log_probs, self._versions, self._prompt_version)
        for name, values in self._columns.items():
            setattr(delta, name, COLUMNS[name].join(values))
        delta.num_events = self._num_events
        return delta


# --- new output of a record -----------------------------------------------------------------------------------------------

MAX_EVENTS_SENT = 1 << 18
"""The maximum number of events sent per sample; later events are dropped."""


def growth(
    record: DynamicInferenceRequestRecord, known: int, prompt_version: int, events_known: int = 0
) -> SampleDelta:
    """Return the output of a waiting or finished sample that the stream's reader does not have yet.

    Args:
        known: number of completion tokens that the reader has.
        prompt_version: the `prompt_version` that came with these tokens; a restart of the sample changes it.
        events_known: number of events that the reader has.
    """
    live = record[-1]
    made = completion_length(live)
    start = first_unknown(live, made, known, prompt_version)
    tokens = (*live.prompt_tokens[live.original_prompt_length + start :], *live.generated_tokens)
    tokens = tokens[len(tokens) - (made - start) :]
    log_probs = joined(record, "generated_log_probs", start)
    delta = SampleDelta(
        record.request_id,
        record.sample_index,
        start,
        struct.pack(f"<{made - start}i", *tokens),
        struct.pack(f"<{made - start}f", *log_probs),
        versions(live, start, made),
        version_of_prompt(live),
        ttft=None if start else record.ttft,
    )
    if live.sampling_params.logprobs:
        delta.top_n = pack_top_n(joined(record, "generated_top_n_logprobs", start))
    last = live.original_prompt_length + made - 1
    # Also send the expert routes of a sample without tokens: if it failed in prefill, it has routes for part of its prompt.
    if (made > start or not made) and 0 < last <= route_rows(record):
        first = first_unread(computed_length(record), live.original_prompt_length + start)
        routes = [each.routing_indices for each in record if each.routing_indices is not None]
        delta.routes = pack_routes(first, np.concatenate(routes)[first:last])
    if live.sampling_params.return_kept_tokens:
        delta.kept = kept_since(record, start, made)
    delta.values = values_since(record, start, made) or None
    delta.events, delta.num_events = new_events(record, events_known)
    return delta


def completion_length(live: DynamicInferenceRequest) -> int:
    """Return the number of completion tokens in all segments of a sample up to and including the segment `live`."""
    return live.total_length - live.original_prompt_length


def computed_length(record: DynamicInferenceRequestRecord) -> int:
    """Return the prompt length of the segment that sampled the last token, or of the first segment if there is no token."""
    sampled = (each for each in reversed(record.segments) if each.generated_tokens)
    return len(next(sampled, record[0]).prompt_tokens)


def first_unknown(live: DynamicInferenceRequest, made: int, known: int, prompt_version: int) -> int:
    """Return the index of the first completion token to send: `known`, or 0 if the sample was restarted meanwhile.

    A restart changes the version of the prompt: a restarted prompt has a later version than the tokens before the restart.
    `made` is the `completion_length`; `known` and `prompt_version` are as in `growth`.
    """
    same_life = made >= known and (not known or version_of_prompt(live) == prompt_version)
    return known if same_life else 0


def version_of_prompt(live: DynamicInferenceRequest) -> int:
    """Return the policy version under which the prompt was admitted or, before its admission, the current version."""
    return live.policy_spans.version_at(0) if live.policy_spans else live.policy_version


def versions(live: DynamicInferenceRequest, start: int, stop: int) -> VersionSpans:
    """Return the policy versions of tokens `start` … `stop` - 1; those without a version get `live.policy_version`."""
    first, last = live.original_prompt_length + start, live.original_prompt_length + stop
    spans = VersionSpans(live.policy_spans.window(first, last))
    spans.extend_to(last - first, live.policy_version)
    return spans


def joined(record: DynamicInferenceRequestRecord, name: str, start: int) -> list[Any]:
    """Return the entries of the per-token field `name` from completion token `start` on, joined over all segments."""
    live = record[-1]
    if start >= live.rng_offset:
        rows: list[Any] = getattr(live, name)[start - live.rng_offset :]
        return rows
    return record.joined(name)[start:]


def kept_since(record: DynamicInferenceRequestRecord, start: int, stop: int) -> bytes:
    """Return the sets of ids that completion tokens `start` … `stop` - 1 were drawn from, packed by `pack_kept`."""
    packed = b""
    for segment in record.segments if start < stop else ():
        low, sets = segment.rng_offset, segment.generated_kept_tokens
        if sets is not None and low < stop and start < low + len(sets):
            packed += pack_kept(sets[max(0, start - low) : stop - low])
    return packed


def values_since(record: DynamicInferenceRequestRecord, start: int, stop: int) -> bytes:
    """Return the packed `generated_values` of completion tokens `start` … `stop` - 1, or b"" if there are none."""
    values, before = joined_values(record.segments), record[0].rng_offset
    return b"" if values is None else values[max(0, start - before) : max(0, stop - before)].tobytes()


def new_events(record: DynamicInferenceRequestRecord, known: int) -> tuple[bytes | None, int]:
    """Return the packed events after the first `known` ones (None if none), and the number of events sent in total."""
    events = record.joined("events") if len(record.segments) > 1 else record.segments[0].events
    count = min(len(events), MAX_EVENTS_SENT)
    return (pack_events(events[known:count]) if count > known else None), count
