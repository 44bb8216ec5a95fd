"""Encoding and decoding of messages as msgpack frames, and the frames' sequence numbers.

Decoding checks every field. A malformed field raises a `SerializationError` that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter, call
from typing import Any, get_type_hints

import msgpack

from rollout.distributed.protocol.fields import LostFramesError, Rule, is_count
from rollout.distributed.protocol.messages import MESSAGES, PROTOCOL_VERSION, Message, Stretch
from rollout.distributed.protocol.stretch import ROWS
from rollout.errors import SerializationError
from rollout.requests.codec import refuse, unpack_msgpack

MAX_FRAME_BYTES = 64 << 20
"""The maximum size of a frame, in bytes. A longer frame is rejected without being decoded."""
MAX_REQUEST_BYTES = MAX_FRAME_BYTES // 2
"""The maximum size of a prompt plus its images and its samples' earlier tokens, in bytes. All must fit into one frame."""
MAX_STRETCHES = 1 << 11
"""The maximum number of token batches (`Stretch`) per frame. Decoding one takes as long as decoding 50 numbers."""
MAX_ITEMS = 1 << 19
"""The maximum length of a list or map in a frame. Decoding one of this length takes some tens of milliseconds, so long
columns of numbers are sent as buffers."""


class _Row:
    """A converter between a dataclass and the list of its field values. It checks every field that it reads."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        hints = get_type_hints(kind, include_extras=True)
        self.names = [each.name for each in fields(kind)]
        self.rules: list[Rule] = [hints[name].__metadata__[0] for name in self.names]
        self.least = sum(1 for each in fields(kind) if each.default is each.default_factory)
        self._values = attrgetter(*self.names) if self.names else None
        self._holds = [rule.holds for rule in self.rules]
        self._nested = [position for position, rule in enumerate(self.rules) if rule is ROWS]

    def plain(self, value: Any) -> list[Any]:
        if self._values is None:
            return []
        row = [self._values(value)] if len(self.names) == 1 else list(self._values(value))
        for position in self._nested:
            row[position] = [_STRETCH.plain(each) for each in row[position]]
        return row

    def read(self, row: Sequence[Any]) -> Any:
        if not self.least <= len(row) <= len(self.rules):
            refuse(self.kind.__name__, f"{len(row)} fields", f"{self.least} to {len(self.rules)} fields")
        values = list(row)
        # Check all fields in one C-level pass. Only if that fails, check each field again to find the malformed field.
        if not all(map(call, self._holds, values)):
            for name, rule, value in zip(self.names, self.rules, values, strict=False):
                if not rule.holds(value):
                    refuse(f"{self.kind.__name__}.{name}", value, rule.text)
        for position in self._nested:
            if position < len(values):
                values[position] = _read_stretches(f"{self.kind.__name__}.{self.names[position]}", values[position])
        return self.kind(*values)


_STRETCH = _Row(Stretch)


def _read_stretches(name: str, rows: list[list[Any]]) -> list[Stretch]:
    if len(rows) > MAX_STRETCHES:
        raise SerializationError(
            f"{name}: {len(rows)} stretches: at most {MAX_STRETCHES} are accepted; send several frames"
        )
    stretches = [_STRETCH.read(row) for row in rows]
    for stretch in stretches:
        stretch.check()
    return stretches


_ROWS = {header: _Row(kind) for header, kind in MESSAGES.items()}


def encode(sequence: int, message: Message) -> bytes:
    """Encode a message as one frame.

    Args:
        sequence: number of the frame, counted from 0 in each direction of a connection.
    """
    packed: bytes = msgpack.packb([message.header, sequence, *_ROWS[message.header].plain(message)])
    return packed


def decode(frame: bytes | memoryview) -> tuple[int, Message]:
    """Decode a frame to (sequence number, message).

    Raises:
        SerializationError: the frame exceeds `MAX_FRAME_BYTES`, is not msgpack, or has an unknown header or malformed field.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise SerializationError(
            f"frame of {len(frame)} bytes: at most {MAX_FRAME_BYTES} are accepted; split the request"
        )
    row = unpack_msgpack("frame", frame, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS)
    if type(row) is not list or len(row) < 2 or type(row[0]) is not int or not is_count(row[1]):
        refuse("frame", row, "[header, sequence, fields …]")
    known = _ROWS.get(row[0])
    if known is None:
        raise SerializationError(
            f"header {row[0]}: unknown to protocol version {PROTOCOL_VERSION}; upgrade whichever side is older"
        )
    message: Message = known.read(row[2:])
    return row[1], message


class Sequencer:
    """The counters of one connection's sent and received frames, which give the frames' sequence numbers."""

    __slots__ = ("_received", "_sent")

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0

    def next(self) -> int:
        """Return the number of the next frame to send."""
        self._sent += 1
        return self._sent - 1

    def skip(self) -> None:
        """Count a received frame that could not be decoded, so that the next frame is not out of sequence."""
        self._received += 1

    def accept(self, sequence: int) -> bool:
        """Return True if a received frame is new, and False if it is a duplicate.

        Raises:
            LostFramesError: frames before this frame are missing.
        """
        if sequence < self._received:
            return False
        if sequence > self._received:
            raise LostFramesError(
                f"expected frame {self._received}, got {sequence}: {sequence - self._received} were lost with a "
                "connection; start a new session"
            )
        self._received += 1
        return True
