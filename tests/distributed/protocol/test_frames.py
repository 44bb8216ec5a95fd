"""Tests of frames: every message round-trips, with a malformed frame beside each."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import SET_VERSION
from rollout.distributed.protocol.frames import (
    MAX_FRAME_BYTES,
    LostFramesError,
    Sequencer,
    decode,
    encode,
)
from rollout.distributed.protocol.stretch import ROWS
from rollout.errors import SerializationError
from rollout.state import ControlSignal, CoordinatorState, EngineState

counts = st.integers(0, 2**63 - 1)
seconds = st.floats(allow_nan=False, allow_infinity=False)
names = st.text(max_size=256)


def optional(values):
    return st.none() | values


def buffers(width):
    return st.binary(max_size=8).map(lambda unit: unit * width)


VALUES = {
    "an integer in [0, 2**63)": counts,
    "None or an integer in [0, 2**63)": optional(counts),
    "a finite number of seconds": seconds,
    "None or a finite number of seconds": optional(seconds),
    "a bool": st.booleans(),
    "a string of at most 256 characters": names,
    "a list of strings of at most 256 characters": st.lists(names, max_size=3),
    "a string": st.text(),
    "None or a string": optional(st.text()),
    "bytes": st.binary(),
    "little-endian int32 in bytes": buffers(4),
    "little-endian int64 in bytes": buffers(8),
    "pairs of little-endian float32 in bytes": buffers(8),
    "a string, or little-endian int32 in bytes": st.text() | buffers(4),
    "an integer in [0, 2**62)": st.integers(0, 2**62 - 1),
    "a list of integers in [0, 2**63)": st.lists(counts, max_size=4),
    "a control signal": st.sampled_from([*map(str, ControlSignal), SET_VERSION]),
    "None, a string of at most 4,096 characters or an integer": st.none() | names | counts,
    "the name of an engine state": st.sampled_from([str(state) for state in EngineState]),
    "the name of a coordinator state": st.sampled_from([str(state) for state in CoordinatorState]),
    "a table": st.dictionaries(names, counts | names, max_size=3),
    "an integer in [-2**31, 2**31]": st.integers(-(2**31), 2**31),
}


OPTIONAL = {"ttft": seconds, "top_n": st.binary(), "kept": st.binary(), "values": st.binary(),
            "routes": st.binary(), "text": st.text(),
            "outcome": st.binary(), "events": st.binary()}  # fmt: skip


@st.composite
def stretches(draw: st.DrawFn) -> wire.Stretch:
    """Columns of one length, tokens as many as counted."""
    indices = draw(st.lists(counts, unique=True, max_size=3))
    runs = [draw(st.lists(st.tuples(counts, st.integers(1, 4)), max_size=3)) for _ in indices]
    made = [sum(count for _, count in row) for row in runs]

    def column(values):
        return draw(optional(st.lists(optional(values), min_size=len(indices), max_size=len(indices))))

    columns = {name: column(values) for name, values in OPTIONAL.items()}
    return wire.Stretch(
        draw(counts),
        draw(counts),
        indices,
        [draw(counts) for _ in indices],
        made,
        draw(st.binary(min_size=4 * sum(made), max_size=4 * sum(made))),
        draw(st.binary(min_size=4 * sum(made), max_size=4 * sum(made))),
        [[draw(counts), *(number for run in row for number in run)] for row in runs],
        {name: values for name, values in columns.items() if values is not None},
    )


def values_of(kind: type[wire.Message]) -> dict[str, st.SearchStrategy[Any]]:
    hints = get_type_hints(kind, include_extras=True)
    rules = {each.name: hints[each.name].__metadata__[0] for each in fields(kind)}
    return {
        name: VALUES[rule.text] if rule is not ROWS else st.lists(stretches(), max_size=2)
        for name, rule in rules.items()
    }


KINDS = list(wire.MESSAGES.values())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_decode_is_the_inverse_of_encode(kind, data):
    message = kind(**{name: data.draw(values) for name, values in values_of(kind).items()})
    sequence = data.draw(st.integers(0, 2**62))
    assert decode(encode(sequence, message)) == (sequence, message)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if fields(kind)], ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_a_frame_with_a_wrong_field_is_refused_by_the_name_of_the_field(kind, data):
    drawn = {name: data.draw(values) for name, values in values_of(kind).items()}
    name = data.draw(st.sampled_from([name for name in drawn if kind.__name__ != "Status" or name != "table"]))
    row = msgpack.unpackb(encode(0, kind(**drawn)))
    row[2 + list(drawn).index(name)] = {"no": "such value"}
    with pytest.raises(SerializationError, match=rf"^{kind.__name__}\.{name}: "):
        decode(msgpack.packb(row))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_frame_with_a_field_too_many_is_refused(kind):
    with pytest.raises(SerializationError, match=f"{kind.__name__}: .* fields"):
        decode(msgpack.packb([kind.header, 0, *[0] * (1 + len(fields(kind)))]))


@settings(max_examples=200)
@given(st.binary(max_size=64))
def test_bytes_that_are_no_frame_are_a_serialization_error_and_nothing_else(frame):
    try:
        decode(frame)
    except SerializationError:
        return
    assert msgpack.unpackb(frame)[0] in wire.MESSAGES


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "no msgpack"),
        (msgpack.packb({"header": 4}), "[header, sequence, fields …]"),
        (msgpack.packb([4]), "[header, sequence, fields …]"),
        (msgpack.packb([True, 0]), "[header, sequence, fields …]"),
        (msgpack.packb([4, -1]), "[header, sequence, fields …]"),
        (msgpack.packb([4, True]), "[header, sequence, fields …]"),
        (msgpack.packb([99, 0]), "header 99: unknown to protocol version"),
        (msgpack.packb([24, 0, [[]]]), "Stretch: '0 fields' arrived where 8 to 9 fields must be"),
        (msgpack.packb([24, 0, [3]]), "Update.stretches"),
        (b"\x00" * (MAX_FRAME_BYTES + 1), "at most"),
    ],
)
def test_a_malformed_frame_is_refused_with_the_reason(frame, words):
    with pytest.raises(SerializationError) as caught:
        decode(frame)
    assert words in str(caught.value)


def one(**changes: Any) -> wire.Stretch:
    values = {
        "request_id": 0, "attempt": 0, "indices": [0, 1], "starts": [0, 0], "counts": [1, 2],
        "token_ids": bytes(12), "log_probs": bytes(12), "versions": [[0, 0, 1], [0, 0, 1, 1, 1]],
    }  # fmt: skip
    return wire.Stretch(**(values | changes))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("starts", {"starts": [0]}),
        ("outcome", {"columns": {"outcome": [None]}}),
        ("events", {"columns": {"text": [None, "ab"], "events": [None]}}),
        ("ttft", {"columns": {"ttft": [float("nan"), None]}}),
        ("top_n", {"columns": {"top_n": ["text", None]}}),
        ("text", {"columns": {"text": {"no": "list"}}}),
        ("ttfts", {"columns": {"ttfts": [None, 0.5]}}),
        ("counts", {"token_ids": bytes(8)}),
        ("counts", {"log_probs": bytes(16)}),
        ("versions", {"versions": [[0, 0, 2], [0, 0, 1, 1, 1]]}),
        ("indices", {"indices": [1, 1]}),
    ],
)
def test_a_stretch_whose_columns_disagree_is_refused(field, changes):
    with pytest.raises(SerializationError, match=rf"^Stretch\.{field}: "):
        decode(encode(0, wire.Update([one(**changes)])))


def test_a_sequencer_counts_ignores_repetitions_and_names_a_gap():
    numbers = Sequencer()
    assert [numbers.next() for _ in range(3)] == [0, 1, 2]
    assert numbers.accept(0)
    assert numbers.accept(1)
    assert not numbers.accept(0)
    assert not numbers.accept(1)
    with pytest.raises(LostFramesError, match="expected frame 2, got 4: 2 were lost"):
        numbers.accept(4)
    assert numbers.accept(2)


def test_a_session_ends_with_a_farewell_and_with_nothing_else():
    assert "unknown_peer" in str(wire.session_end(wire.Refused("unknown_peer", "who are you", over=True)))
    assert not wire.session_end(wire.Refused("unknown_peer", "who are you", over=True)).final
    assert wire.session_end(wire.Refused("replaced", "another one", over=True)).final
    assert "tea" in str(wire.session_end(wire.Disconnect("tea")))
    assert wire.session_end(wire.Refused("malformed", "that frame", over=False)) is None
    assert wire.session_end(wire.Heartbeat()) is None


@pytest.mark.parametrize("item", [b"\x90", b"\x80", b"\x00"], ids=["lists", "maps", "numbers"])
def test_a_frame_of_countless_small_things_is_refused_before_it_fills_the_memory(item):
    """A megabyte of empty lists once became seventy megabytes of objects and a third of a second, and so on upwards."""
    frame = b"\x93\x04\x00\xdd" + (8 << 20).to_bytes(4, "big") + item * (8 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(SerializationError, match="no msgpack"):
            decode(frame)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
