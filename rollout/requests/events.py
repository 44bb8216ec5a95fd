"""Timestamped events of a request, their wire form and payload rules.

An event never changes once it is made. Logs of several segments of one request are joined by whoever merges them.
"""

from __future__ import annotations

import builtins
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import msgpack

from rollout import errors
from rollout.errors import RolloutError, SerializationError
from rollout.requests.codec import FLOAT, OPAQUE, STR, Codec, decode_fields, refuse


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


@dataclass(frozen=True)
class DynamicInferenceEvent:
    """One event.

    Raises:
        ValueError: the payload does not fit the type: a dict with `token_id` (and counts of KV blocks) for
            GENERATED_TOKEN, the exception for the two error types, None for every other.
    """

    timestamp: float
    """Seconds, by the clock of whoever made it."""
    type: DynamicInferenceEventType
    payload: Any = None

    def __post_init__(self) -> None:
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
            # A message may span lines; an event is one.
            what = f" {type(self.payload).__name__}: {' '.join(str(self.payload).split())}"
        else:
            what = "".join(f" {name}={value}" for name, value in (self.payload or {}).items())
        return f"[{self.timestamp:.6f}] {self.type.name}{what}"

    def serialize(self) -> dict[str, Any]:
        """Plain and msgpack-able; of an exception, its type's name and its message."""
        payload = self.payload
        if isinstance(payload, BaseException):
            payload = {"type": type(payload).__name__, "message": str(payload)}
        return {"timestamp": float(self.timestamp), "type": self.type.name, "payload": payload}

    @classmethod
    def deserialize(cls, plain: Any) -> DynamicInferenceEvent:
        """The inverse of `serialize`.

        Raises:
            SerializationError: the event is malformed.
        """
        decoded = decode_fields("DynamicInferenceEvent", plain, {"timestamp": FLOAT, "type": STR, "payload": OPAQUE})
        if decoded["type"] not in DynamicInferenceEventType.__members__:
            refuse(
                "DynamicInferenceEvent.type",
                decoded["type"],
                f"one of {', '.join(DynamicInferenceEventType.__members__)}",
            )
        kind = DynamicInferenceEventType[decoded["type"]]
        payload = _exception(decoded["payload"]) if kind in _ERRORS else decoded["payload"]
        try:
            return cls(decoded["timestamp"], kind, payload)
        except ValueError as exc:
            raise SerializationError(f"DynamicInferenceEvent.payload: {exc}") from exc


def _exception(plain: Any) -> Exception:
    """An exception with the type's name and the message of the one that was sent.

    It is of the very type where that is Python's or ours and takes a message alone; otherwise a `RolloutError` of that
    name, because nothing is imported on the say-so of a payload.
    """
    decoded = decode_fields("DynamicInferenceEvent.payload", plain, {"type": STR, "message": STR})
    name, message = decoded["type"], decoded["message"]
    if not name.isidentifier():
        refuse("DynamicInferenceEvent.payload.type", name, "the name of an exception")
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
    # KeyError, for one, prints the repr of what it is given.
    return type(name, (known,), {"__str__": lambda _: message})(message)  # type: ignore[no-any-return]


EVENT = Codec(DynamicInferenceEvent.serialize, DynamicInferenceEvent.deserialize)

MAX_MESSAGE = 2000
"""Characters of an exception's message that travel with progress."""


def pack_events(events: Iterable[DynamicInferenceEvent]) -> bytes:
    """Events as they travel with progress: 11 bytes each without a payload. Packed rows may follow each other."""
    return b"".join([msgpack.packb(_row(event)) for event in events])


def _row(event: DynamicInferenceEvent) -> list[Any]:
    payload = event.payload
    if payload is None:
        return [int(event.type), event.timestamp]
    if isinstance(payload, BaseException):
        return [int(event.type), event.timestamp, type(payload).__name__, str(payload)[:MAX_MESSAGE]]
    return [int(event.type), event.timestamp, *(payload.get(name) for name in _TOKEN_FIELDS)]


def unpack_events(packed: bytes) -> list[DynamicInferenceEvent]:
    """The inverse of `pack_events`, of one or of several packed rows after each other.

    Raises:
        SerializationError: no such rows.
    """
    reader = msgpack.Unpacker(max_buffer_size=max(1, len(packed)))
    reader.feed(packed)
    try:
        events = [_event(row) for row in reader]
    # Every error of msgpack's that a whole buffer can cause is a ValueError.
    except (ValueError, TypeError, RecursionError) as exc:
        raise SerializationError(f"events: {exc}") from exc
    if reader.tell() != len(packed):
        refuse("events", packed, "whole rows of [type, timestamp, payload …]")
    return events


def _event(row: Any) -> DynamicInferenceEvent:
    if type(row) is not list or len(row) < 2 or type(row[0]) is not int or type(row[1]) is not float:
        refuse("event", row, "[type, timestamp, payload …]")
    kind, payload = DynamicInferenceEventType(row[0]), row[2:]
    if not payload:
        return DynamicInferenceEvent(row[1], kind)
    if kind in _ERRORS and len(payload) == 2:
        return DynamicInferenceEvent(row[1], kind, _exception({"type": payload[0], "message": payload[1]}))
    pairs = zip(_TOKEN_FIELDS, payload, strict=True)
    return DynamicInferenceEvent(row[1], kind, {name: count for name, count in pairs if count is not None})


@dataclass(kw_only=True, eq=False, repr=False)
class EventLog:
    """The events of a request, oldest first, and one helper per type; `timestamp` None is the wall clock's now."""

    events: list[DynamicInferenceEvent] = field(default_factory=list)
    event_add_engine: DynamicInferenceEvent | None = None
    """The first ADD_ENGINE event, kept across checkpoints."""

    def put_events_before(self, earlier: Sequence[DynamicInferenceEvent]) -> None:
        """Begin the log with what happened to the sample elsewhere, or in an earlier life."""
        self.events[:0] = earlier
        added = (event for event in self.events if event.type is DynamicInferenceEventType.ADD_ENGINE)
        self.event_add_engine = next(added, self.event_add_engine)

    def add_event_add_engine(self, timestamp: float | None = None) -> None:
        """It arrived at the engine."""
        event = self._add(DynamicInferenceEventType.ADD_ENGINE, None, timestamp)
        self.event_add_engine = self.event_add_engine or event

    def add_event_add_context(self, timestamp: float | None = None) -> None:
        """It was given KV blocks."""
        self._add(DynamicInferenceEventType.ADD_CONTEXT, None, timestamp)

    def add_event_generated_token(
        self,
        token_id: int,
        blocks_total: int | None = None,
        blocks_hashed_total: int | None = None,
        blocks_hashed_active: int | None = None,
        blocks_ref_count: int | None = None,
        timestamp: float | None = None,
    ) -> None:
        """A token was sampled. Of the whole KV pool: its blocks, those that a prefix hit may find, of these those that
        requests hold, and all references to blocks."""
        counts = (token_id, blocks_total, blocks_hashed_total, blocks_hashed_active, blocks_ref_count)
        payload = {name: int(count) for name, count in zip(_TOKEN_FIELDS, counts, strict=True) if count is not None}
        self._add(DynamicInferenceEventType.GENERATED_TOKEN, payload, timestamp)

    def add_event_pause(self, timestamp: float | None = None) -> None:
        """It keeps its KV and waits."""
        self._add(DynamicInferenceEventType.PAUSE, None, timestamp)

    def add_event_evict(self, timestamp: float | None = None) -> None:
        """It gave up its KV and waits."""
        self._add(DynamicInferenceEventType.EVICT, None, timestamp)

    def add_event_finish(self, timestamp: float | None = None) -> None:
        """It ended with a result."""
        self._add(DynamicInferenceEventType.FINISH, None, timestamp)

    def add_event_fail(self, timestamp: float | None = None) -> None:
        """It ended without a result."""
        self._add(DynamicInferenceEventType.FAIL, None, timestamp)

    def add_event_error_transient(self, error: BaseException, timestamp: float | None = None) -> None:
        """Something went wrong that it survives."""
        self._add(DynamicInferenceEventType.ERROR_TRANSIENT, error, timestamp)

    def add_event_error_nontransient(self, error: BaseException, timestamp: float | None = None) -> None:
        """Something went wrong that ends it."""
        self._add(DynamicInferenceEventType.ERROR_NONTRANSIENT, error, timestamp)

    def _add(self, kind: DynamicInferenceEventType, payload: Any, timestamp: float | None) -> DynamicInferenceEvent:
        event = DynamicInferenceEvent(time.time() if timestamp is None else float(timestamp), kind, payload)
        self.events.append(event)
        return event
