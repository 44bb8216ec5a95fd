"""Tests of a client's session without a socket: what it submits, its calls, and the reason for its end."""

from __future__ import annotations

import math
import re
from array import array

import msgpack
import numpy as np
import pytest
import torch

from rollout.distributed.client.session import exception_named
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.messages import Status as StatusAnswer
from rollout.errors import (
    ConnectionLostError,
    ControlError,
    DeadlineError,
    InvalidRequestError,
    QueueFullError,
    RankLostError,
    RequestAbortedError,
    RequestError,
)
from rollout.sampling_params import SamplingParams
from tests.distributed.client.lines import PROMPT, Line, stretch

# --- submitting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        tuple(PROMPT),
        array("q", PROMPT),
        np.array(PROMPT),
        np.array(PROMPT, np.uint16),
        torch.tensor(PROMPT),
        np.array(PROMPT, "<i4").tobytes(),
    ],
)
def test_token_ids_may_come_as_any_row_of_integers(prompt):
    line = Line()
    line.submit(prompt)
    assert line.sent[0].prompt == np.array(PROMPT, "<i4").tobytes()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, -1], "prompt token -1: must be in [0, 2**31)"),
        ([1, 2**31], "prompt of type list: must be text, or token ids in [0, 2**31)"),
        ([1, -(2**40)], "prompt of type list"),
        (np.array([2**31]), "prompt token 2147483648"),
        (np.array([-3]), "prompt token -3"),
        (np.array([-3], "<i4").tobytes(), "prompt token -3"),
        ([1, 2.0], "prompt of type list"),
        ([1, "a"], "must be text, or token ids"),
        ([{"role": "user"}], "prompt of type list"),
        ([[1], [2, 3]], "prompt of type list"),
        (None, "shape ()"),
        (np.zeros(2), "dtype float64: must be text, or token ids in"),
        (np.zeros((2, 2), int), "shape (2, 2)"),
        ([], "prompt of shape (0,)"),
        (b"abc", "prompt of type bytes"),
        (bytes(33 << 20), "fit in one request"),
    ],
)
def test_a_prompt_that_no_engine_takes_is_refused_by_name_and_nothing_is_sent(prompt, words):
    line = Line()
    with pytest.raises(InvalidRequestError) as caught:
        line.submit(prompt)
    assert words in str(caught.value)
    assert line.sent == []
    assert line.submit().request_id == 0


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 2**31 + 1}, {"priority": True}, {"priority": 1.0}, {"timeout_s": 0}, {"timeout_s": math.nan},
        {"timeout_s": "1"}, {"interval": -1}, {"interval": None}, {"arrival_time": math.inf},
    ],
)  # fmt: skip
def test_an_option_out_of_range_is_refused_by_name(options):
    line = Line()
    (name,) = options
    with pytest.raises(InvalidRequestError, match=f"^{name}="):
        line.submit(**options)
    assert line.sent == []


def test_a_submit_says_everything_that_was_asked():
    line = Line()
    params = SamplingParams(n=3, seed=9, stop=("a",), logit_bias={4: 1.0})
    line.session.submit("text", params, priority=-2, timeout_s=5.0, interval=7, arrival_time=12.0)
    line.session.submit(PROMPT, SamplingParams())
    first, second = line.sent
    blob = msgpack.packb(params.serialize())
    assert first == wire.Submit(0, "text", 3, blob, 9, -2, 12.0, 5.0, 7)
    assert (second.request_id, second.seed, second.arrival_time, second.n) == (1, None, 1000.0, 1)
    assert SamplingParams.deserialize(msgpack.unpackb(first.params)) == params


# --- the end, by name -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("RankLostError", RankLostError, "^why$"),
        ("RequestAbortedError", RequestAbortedError, "^why$"),
        ("QueueFullError", QueueFullError, "^why$"),
        ("DeadlineError", DeadlineError, "^why$"),
        ("RolloutFailedError", RequestError, "^RolloutFailedError: why$"),
        ("KeyError", RequestError, "^KeyError: why$"),
        ("annotations", RequestError, "^annotations: why$"),
        ("__doc__", RequestError, "^__doc__: why$"),
    ],
)
def test_a_failed_group_ends_with_the_exception_that_was_named(name, kind, words):
    line = Line()
    group = line.submit()
    line.receive(wire.RequestFailed(0, name, "why"))
    assert line.done == [group]
    with pytest.raises(kind) as caught:
        group.result()
    assert type(caught.value) is kind
    # Not `match`, which also reads the note with the state that a DeadlineError carries.
    assert re.search(words, str(caught.value))
    if isinstance(caught.value, RequestError):
        assert caught.value.request_id == 0


def test_a_control_call_ends_with_the_exception_that_was_named_and_its_engines():
    error = exception_named("ControlError", "late", engines=("rank0", "rank3"))
    assert isinstance(error, ControlError)
    assert error.engines == ("rank0", "rank3")
    unknown = exception_named("ZeroDivisionError", "odd")
    assert type(unknown) is ControlError
    assert str(unknown) == "ZeroDivisionError: odd"


def test_a_lost_connection_ends_everything_once_and_leaves_the_records_readable():
    line = Line()
    groups = [line.submit(n=2) for _ in range(3)]
    line.receive(wire.Update([stretch(1, {0: (0, [4, 5])})]), wire.RequestFailed(2, "RankLostError", "why"))
    calls = [line.session.status(), line.session.control("pause", None, 1.0), line.session.barrier(3)]
    line.session.lost(ConnectionLostError("cut"))
    line.session.lost(ConnectionLostError("cut again"))
    assert line.done == [groups[2], groups[0], groups[1]]
    assert [type(group.error) for group in groups] == [ConnectionLostError, ConnectionLostError, RankLostError]
    assert all(isinstance(call.exception(0), ConnectionLostError) for call in calls)
    assert groups[1].known()[0].counts == [2]
    for ask in (line.submit, lambda: line.session.abort(0), line.session.status, lambda: line.session.barrier(4)):
        with pytest.raises(ConnectionLostError, match=r"^cut$"):
            ask()


# --- calls ------------------------------------------------------------------------------------------------------------


def test_calls_are_answered_by_their_number():
    line = Line()
    status, pause, fail = (
        line.session.status(),
        line.session.control("pause", None, 2.0),
        line.session.control("stop", None, 1),
    )
    answered = []
    for call in (status, pause, fail):
        call.add_done_callback(answered.append)
    assert line.sent == [wire.StatusQuery(0), wire.Control(1, "pause", None, 2.0), wire.Control(2, "stop", None, 1)]
    line.receive(
        wire.ControlDone(2, "ControlError", "no", ["rank1"]), wire.ControlDone(1), StatusAnswer(0, {"ranks": 2})
    )
    assert answered == [fail, pause, status]
    assert status.result() == {"ranks": 2}
    assert pause.result() == 0
    assert fail.exception().engines == ("rank1",)


def test_a_barrier_is_done_when_everybody_has_come_that_far_or_further():
    line = Line()
    calls = [line.session.barrier(index) for index in (1, 2, 2, 3)]
    assert line.sent == [wire.Barrier(1), wire.Barrier(2), wire.Barrier(2), wire.Barrier(3)]
    line.session.forget(calls[1])
    line.receive(wire.BarrierDone(2))
    assert [call.done() for call in calls] == [True, False, True, False]
    line.session.forget(calls[3])
    line.receive(wire.BarrierDone(3))
    assert not calls[3].done()
