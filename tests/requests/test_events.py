"""Tests of events: payload types, one readable line each, serialisation of exceptions."""

from __future__ import annotations

import msgpack
import pytest

from rollout.errors import RequestFailedError, RolloutError, SerializationError
from rollout.requests.events import MAX_MESSAGE, DynamicInferenceEvent, EventLog, pack_events, unpack_events
from rollout.requests.events import DynamicInferenceEventType as Kind

BARE = [Kind.ADD_ENGINE, Kind.ADD_CONTEXT, Kind.PAUSE, Kind.EVICT, Kind.FINISH, Kind.FAIL]
ERRORS = [Kind.ERROR_TRANSIENT, Kind.ERROR_NONTRANSIENT]
TOKEN = {"token_id": 5, "blocks_total": 3}


class HomeMadeError(Exception):
    """A type the receiver does not know."""


def sent(event: DynamicInferenceEvent) -> DynamicInferenceEvent:
    return DynamicInferenceEvent.deserialize(msgpack.unpackb(msgpack.packb(event.serialize(), use_bin_type=True)))


@pytest.mark.parametrize("kind", BARE)
def test_a_bare_event_refuses_a_payload(kind):
    assert DynamicInferenceEvent(1.0, kind).payload is None
    with pytest.raises(ValueError, match=f"{kind.name} event: must be None"):
        DynamicInferenceEvent(1.0, kind, TOKEN)


@pytest.mark.parametrize(
    "payload", [None, 5, {}, {"blocks_total": 1}, {"token_id": None}, {"token_id": True}, TOKEN | {"colour": 1}]
)
def test_a_token_event_requires_a_token_id_and_known_counts(payload):
    with pytest.raises(ValueError, match="token_id"):
        DynamicInferenceEvent(1.0, Kind.GENERATED_TOKEN, payload)


def test_each_helper_adds_the_event_of_its_name():
    log = EventLog()
    for kind in BARE:
        getattr(log, f"add_event_{kind.name.lower()}")(timestamp=float(kind))
    for kind in ERRORS:
        getattr(log, f"add_event_{kind.name.lower()}")(OSError("gone"), timestamp=float(kind))
    log.add_event_generated_token(1, 2, 3, 4, 5, timestamp=3.0)
    assert [event.type for event in log.events] == [*BARE, *ERRORS, Kind.GENERATED_TOKEN]
    assert all(event.timestamp == event.type.value for event in log.events)
    counts = {"blocks_total": 2, "blocks_hashed_total": 3, "blocks_hashed_active": 4, "blocks_ref_count": 5}
    assert log.events[-1].payload == {"token_id": 1, **counts}


def test_the_line_shows_the_token_or_the_error():
    assert str(DynamicInferenceEvent(0.0, Kind.GENERATED_TOKEN, TOKEN)).endswith("token_id=5 blocks_total=3")
    assert str(DynamicInferenceEvent(0.0, Kind.ERROR_TRANSIENT, OSError("a\nb"))).endswith("OSError: a b")


def test_packed_events_come_back_also_several_rows_of_them_after_each_other():
    first = [DynamicInferenceEvent(1.25, kind) for kind in BARE]
    second = [
        DynamicInferenceEvent(2.5, Kind.GENERATED_TOKEN, TOKEN),
        DynamicInferenceEvent(2.5, Kind.GENERATED_TOKEN, {"token_id": 1, "blocks_ref_count": 0}),
    ]
    assert len(pack_events(first)) == 11 * len(first)
    assert unpack_events(pack_events(first) + pack_events(second) + pack_events([])) == first + second


@pytest.mark.parametrize("kind", ERRORS)
def test_a_packed_exception_keeps_its_name_and_the_beginning_of_its_message(kind):
    (event,) = unpack_events(pack_events([DynamicInferenceEvent(0.5, kind, HomeMadeError("x" * 10**6))]))
    assert (event.type, type(event.payload).__name__) == (kind, "HomeMadeError")
    assert str(event.payload) == "x" * MAX_MESSAGE


@pytest.mark.parametrize(
    "packed",
    [
        pack_events([DynamicInferenceEvent(1.0, Kind.FINISH)])[:-1],
        b"\xff",
        *(msgpack.packb(row) for row in (
            7, [], [1], [True, 1.0], [1, 1], ["FAIL", 1.0], [1, "now"], [99, 1.0], [1, 1.0, TOKEN], [7, 1.0, None, 1],
            [3, 1.0], [3, 1.0, "x"], [3, 1.0, {"colour": 1}], [9, 1.0], [9, 1.0, "ValueError"], [9, 1.0, ["ValueError"]],
            [9, 1.0, ["os.system", "x"]], [9, 1.0, [3, "x"]],
        )),
    ],
)  # fmt: skip
def test_bytes_that_are_no_events_are_refused(packed):
    with pytest.raises(SerializationError, match="event"):
        unpack_events(packed)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        RequestFailedError("it failed", 7),
        KeyError("missing"),
        HomeMadeError("what now"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        KeyboardInterrupt("stop"),
        ExceptionGroup("several", [ValueError("one")]),
        OSError(2, "No such file"),
        RuntimeError(""),
    ],
    ids=lambda error: type(error).__name__,
)
def test_type_and_message_of_an_error_survive_the_wire_twice(error):
    event = DynamicInferenceEvent(1.0, Kind.ERROR_NONTRANSIENT, error)
    back = sent(event)
    assert isinstance(back.payload, Exception)
    assert type(back.payload).__name__ == type(error).__name__
    assert str(back.payload) == str(error)
    assert sent(back).serialize() == back.serialize() == event.serialize()


def test_known_errors_come_back_as_themselves_and_unknown_ones_as_ours():
    def back(error: Exception) -> BaseException:
        return sent(DynamicInferenceEvent(1.0, Kind.ERROR_TRANSIENT, error)).payload

    assert type(back(ValueError("x"))) is ValueError
    assert type(back(RequestFailedError("x"))) is RequestFailedError
    assert isinstance(back(KeyError("x")), KeyError)
    assert isinstance(back(HomeMadeError("x")), RolloutError)
