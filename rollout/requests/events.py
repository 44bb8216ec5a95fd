"""Timestamped events of a request, with their payload rules and their msgpack encoding.

Events are immutable. The event logs of a request's segments are joined when the segments are merged.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partialmethod
from typing import Any

import msgpack

from rollout import errors
from rollout.errors import RolloutError, SerializationError
from rollout.requests.codec import Codec, refuse, unpack_joined


class DynamicInferenceEventType(IntEnum):
    """The kinds of event."""

    ADD_ENGINE = 1
    ADD_CONTEXT = 2
    GENERATED_TOKEN = 3
    PAUSE = 4
    EVICT = 5
    FINISH = 6
    FAIL = 7
    ERROR_TRANSIENT = 8
    ERROR_NONTRANSIENT = 9


_ERRORS = frozenset({DynamicInferenceEventType.ERROR_TRANSIENT, DynamicInferenceEventType.ERROR_NONTRANSIENT})
_COUNTS = ("blocks_total", "blocks_hashed_total", "blocks_hashed_active", "blocks_ref_count")
_TOKEN_FIELDS = ("token_id", *_COUNTS)
MAX_MESSAGE = 2000
"""The maximum number of characters in an encoded exception's message."""


@dataclass(frozen=True, init=False)
class DynamicInferenceEvent:
    """One timestamped event with its payload.

    Raises:
        ValueError: the type is unknown, or the payload does not fit the type. The payload is a dict with `token_id` (and
            counts of KV blocks) for GENERATED_TOKEN, the exception for the two error types, None for all other types.
    """

    timestamp: float
    """Seconds since the epoch, from the clock of the process that recorded the event."""
    type: DynamicInferenceEventType
    payload: Any

    def __init__(
        self, timestamp: float | None = None, type: DynamicInferenceEventType | None = None, payload: Any = None
    ) -> None:
        """Create an event and check its payload. `timestamp` is in seconds since the epoch and defaults to now."""
        if not isinstance(type, DynamicInferenceEventType):
            raise ValueError(f"type={type!r} of an event: must be a DynamicInferenceEventType")
        object.__setattr__(self, "timestamp", time.time() if timestamp is None else float(timestamp))
        object.__setattr__(self, "type", type)
        object.__setattr__(self, "payload", payload)
        self._check_payload()

    def _check_payload(self) -> None:
        if self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            fits = isinstance(self.payload, dict) and "token_id" in self.payload
            fits = fits and all(name in _TOKEN_FIELDS and type(count) is int for name, count in self.payload.items())
            rule = f"a dict of integers with token_id and, optionally, {', '.join(_COUNTS)}"
        elif self.type in _ERRORS:
            fits, rule = isinstance(self.payload, BaseException), "the exception"
        else:
            fits, rule = self.payload is None, "None"
        if not fits:
            raise ValueError(f"payload={self.payload!r} of a {self.type.name} event: must be {rule}")

    def __str__(self) -> str:
        if isinstance(self.payload, BaseException):
            # Join the message into one line.
            what = f" {type(self.payload).__name__}: {' '.join(str(self.payload).split())}"
        else:
            what = "".join(f" {name}={value}" for name, value in (self.payload or {}).items())
        return f"[{self.timestamp:.6f}] {self.type.name}{what}"

    def serialize(self) -> list[Any]:
        """Encode as [type, timestamp] or [type, timestamp, payload], for msgpack; 11 bytes without a payload.

        An exception becomes its type's name and the first `MAX_MESSAGE` characters of its message.
        """
        payload = self.payload
        if isinstance(payload, BaseException):
            payload = [type(payload).__name__, str(payload)[:MAX_MESSAGE]]
        return [int(self.type), self.timestamp] + ([] if payload is None else [payload])

    @classmethod
    def deserialize(cls, row: Any) -> DynamicInferenceEvent:
        """Decode the result of `serialize`; raise `SerializationError` if the event is malformed."""
        if type(row) is not list or len(row) not in (2, 3) or type(row[0]) is not int or type(row[1]) is not float:
            refuse("event", row, "[type, timestamp, payload]")
        payload = row[2] if len(row) == 3 else None
        try:
            kind = DynamicInferenceEventType(row[0])
            return cls(row[1], kind, _exception(payload) if kind in _ERRORS else payload)
        except ValueError as exc:
            raise SerializationError(f"event: {exc}") from exc


def _exception(plain: Any) -> Exception:
    """Rebuild an exception from its type's name and its message; a payload never causes an import.

    If the name is a builtin or an exception in `rollout.errors` that takes a single message, that type is used. Otherwise
    the type is a new subclass of `RolloutError` with this name.
    """
    if type(plain) is not list or [type(each) for each in plain] != [str, str] or not plain[0].isidentifier():
        refuse("payload", plain, "[the name of an exception, its message]")
    name, message = plain
    known = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        try:
            rebuilt = known(message)
        except TypeError:
            known = RolloutError
        else:
            if str(rebuilt) == message:
                return rebuilt
    else:
        known = RolloutError
    # Define __str__: some exceptions, such as KeyError, print the repr of their argument.
    return type(name, (known,), {"__str__": lambda _: message})(message)  # type: ignore[no-any-return]


EVENT = Codec(DynamicInferenceEvent.serialize, DynamicInferenceEvent.deserialize)


def pack_events(events: Iterable[DynamicInferenceEvent]) -> bytes:
    """Pack events as msgpack. Results may be concatenated and unpacked together."""
    return b"".join([msgpack.packb(event.serialize()) for event in events])


def unpack_events(packed: bytes) -> list[DynamicInferenceEvent]:
    """Unpack one or more concatenated results of `pack_events`; raise `SerializationError` if they are malformed."""
    return [DynamicInferenceEvent.deserialize(row) for row in unpack_joined("events", packed)] if packed else []


@dataclass(kw_only=True, eq=False, repr=False)
class EventLog:
    """The event list of a request, oldest first, with one method per event type. A `timestamp` of None means now."""

    events: list[DynamicInferenceEvent] = field(default_factory=list)
    event_add_engine: DynamicInferenceEvent | None = None
    """The first ADD_ENGINE event, which a checkpoint copies to the new segment."""

    def put_events_before(self, earlier: Sequence[DynamicInferenceEvent]) -> None:
        """Prepend events recorded on another rank or before a restart."""
        self.events[:0] = earlier
        added = (event for event in self.events if event.type is DynamicInferenceEventType.ADD_ENGINE)
        self.event_add_engine = next(added, self.event_add_engine)

    def add_event_add_engine(self, timestamp: float | None = None) -> None:
        """Record that the request has arrived at the engine."""
        event = self._add(DynamicInferenceEventType.ADD_ENGINE, None, timestamp)
        self.event_add_engine = self.event_add_engine or event

    def add_event_generated_token(
        self,
        token_id: int,
        blocks_total: int | None = None,
        blocks_hashed_total: int | None = None,
        blocks_hashed_active: int | None = None,
        blocks_ref_count: int | None = None,
        timestamp: float | None = None,
    ) -> None:
        """Record a sampled token.

        The counts cover the whole KV pool: blocks, blocks in the prefix cache, prefix cache blocks in use, and references.
        """
        counts = (token_id, blocks_total, blocks_hashed_total, blocks_hashed_active, blocks_ref_count)
        payload = {name: int(count) for name, count in zip(_TOKEN_FIELDS, counts, strict=True) if count is not None}
        self._add(DynamicInferenceEventType.GENERATED_TOKEN, payload, timestamp)

    def _bare(self, kind: DynamicInferenceEventType, timestamp: float | None = None) -> None:
        self._add(kind, None, timestamp)

    def _add(
        self, kind: DynamicInferenceEventType, payload: Any, timestamp: float | None = None
    ) -> DynamicInferenceEvent:
        event = DynamicInferenceEvent(timestamp, kind, payload)
        self.events.append(event)
        return event

    add_event_add_context = partialmethod(_bare, DynamicInferenceEventType.ADD_CONTEXT)
    """Record that KV blocks were assigned to the request."""
    add_event_pause = partialmethod(_bare, DynamicInferenceEventType.PAUSE)
    """Record that the request was paused and keeps its KV."""
    add_event_evict = partialmethod(_bare, DynamicInferenceEventType.EVICT)
    """Record that the request was evicted: its KV was dropped, and it is in the queue again."""
    add_event_finish = partialmethod(_bare, DynamicInferenceEventType.FINISH)
    """Record that the request finished with a result."""
    add_event_fail = partialmethod(_bare, DynamicInferenceEventType.FAIL)
    """Record that the request finished without a result."""
    add_event_error_transient = partialmethod(_add, DynamicInferenceEventType.ERROR_TRANSIENT)
    """Record an error that the request survives. The arguments are (error, timestamp)."""
    add_event_error_nontransient = partialmethod(_add, DynamicInferenceEventType.ERROR_NONTRANSIENT)
    """Record an error that fails the request. The arguments are (error, timestamp)."""
