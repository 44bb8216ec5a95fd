"""Tests of the asyncio client against a coordinator made of a ROUTER socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from typing import Any

import numpy as np
import pytest

from rollout.distributed.client import client as client_module
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.protocol import messages as wire
from rollout.errors import (
    ConfigError,
    ConnectionLostError,
    ControlError,
    DeadlineError,
    RequestAbortedError,
)
from rollout.sampling_params import SamplingParams
from tests.distributed.client.lines import stretch
from tests.distributed.fake_coordinator import FakeCoordinator, welcome
from tests.distributed.transport.test_dealer import asynchronous, heard

PROMPT = [3, 1, 4]


def part(request_id: int, samples: int, start: int, tokens: list[int], *, last: bool) -> wire.Update:
    rows = dict.fromkeys(range(samples), (start, tokens))
    return wire.Update([stretch(request_id, rows, ended=tuple(rows) if last else ())])


def generous(fake: FakeCoordinator, peer: bytes, message: wire.Message) -> None:
    """Grants everything, in one word or, to those who want to see it grow, in several."""
    if isinstance(message, wire.Submit):
        if isinstance(message.prompt, str):
            fake.say(peer, wire.Accepted(message.request_id, np.array(PROMPT, "<i4").tobytes()))
        tokens = [10, 11, 12, 13]
        step = message.interval or len(tokens)
        for start in range(0, len(tokens), step):
            new = tokens[start : start + step]
            fake.say(peer, part(message.request_id, message.n, start, new, last=start + step >= len(tokens)))
    elif isinstance(message, wire.Abort):
        fake.say(peer, wire.RequestFailed(message.request_id, "RequestAbortedError", "somebody aborted it"))
    elif isinstance(message, wire.Control):
        fake.say(peer, wire.ControlDone(message.call_id))
    elif isinstance(message, wire.StatusQuery):
        fake.say(peer, wire.Status(message.call_id, {"ranks": 2}))
    elif isinstance(message, wire.Barrier):
        fake.say(peer, wire.BarrierDone(message.index))


def only(*kinds: type[wire.Message]):
    """Like `generous`, but deaf to anything else."""

    def answer(fake: FakeCoordinator, peer: bytes, message: wire.Message) -> None:
        if isinstance(message, kinds):
            generous(fake, peer, message)

    return answer


@contextlib.asynccontextmanager
async def connected(answer: Any = generous, **options: Any):
    with FakeCoordinator(answer) as fake:
        async with InferenceClient(fake.address, **options) as client:
            assert isinstance((await heard(fake))[2], wire.Connect)
            yield client, fake


# --- the handshake ----------------------------------------------------------------------------------------------------


@asynchronous
async def test_start_shakes_hands_once_and_knows_how_things_stand():
    with FakeCoordinator(greet=False, answer=lambda fake, peer, _: fake.say(
        peer, welcome(policy_version=5)
    )) as fake:  # fmt: skip
        client = InferenceClient(fake.address, name="trainer", member=3)
        assert (client.connected, client.policy_version) == (False, None)
        await client.start()
        await client.start()
        assert client.connected
        assert client.lost is None
        assert client.policy_version == 5
        await client.stop()
        assert (await heard(fake))[2] == wire.Connect(wire.PROTOCOL_VERSION, "trainer", 3)
        assert isinstance((await heard(fake))[2], wire.Disconnect)
        assert len(fake.peers) == 1


@asynchronous
async def test_nobody_at_the_address_is_a_deadline_that_names_it_and_may_be_tried_again():
    with FakeCoordinator(greet=False) as fake:
        client = InferenceClient(fake.address)
        with pytest.raises(DeadlineError, match=f"no coordinator answered at {fake.address} within timeout_s=0.05"):
            await client.start(timeout_s=0.05)
        fake._greet = True
        await client.start()
        assert client.connected
        await client.stop()


@asynchronous
async def test_a_cancelled_start_leaves_the_client_as_it_was():
    with FakeCoordinator(greet=False) as fake:
        client = InferenceClient(fake.address)
        starting = asyncio.create_task(client.start())
        await heard(fake)
        with pytest.raises(RuntimeError, match="while another"):
            await client.start()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert isinstance((await heard(fake))[2], wire.Disconnect)
        assert not client.connected


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (wire.Status(0, {}), "Status arrived instead of ConnectAck"),
        (wire.Refused("version", "upgrade whatever", over=True), "upgrade whatever"),
    ],
)
@asynchronous
async def test_any_other_reply_to_the_handshake_is_rejected_by_name(reply, words):
    with FakeCoordinator(lambda fake, peer, message: fake.say(peer, reply), greet=False) as fake:
        client = InferenceClient(fake.address)
        with pytest.raises(ConnectionLostError, match=words):
            await client.start()
        assert not client.connected
        with pytest.raises(ConnectionLostError, match="build another client"):
            await client.start()


@asynchronous
async def test_calls_before_start_say_so():
    client = InferenceClient("tcp://127.0.0.1:1")
    with pytest.raises(ConnectionLostError, match=r"await start\(\) first"):
        client.add_request(PROMPT)
    with pytest.raises(ConfigError, match="must be tcp://host:port"):
        await InferenceClient("here").start()
    with pytest.raises(ConfigError, match="at most 256 characters"):
        InferenceClient("tcp://127.0.0.1:1", name="n" * 257)


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unknown", ["intervals", "wanted"])
@asynchronous
async def test_an_option_that_no_request_has_is_named(unknown):
    async with connected() as (client, _):
        for ask in (client.add_request, client.add_request_streaming):
            with pytest.raises(TypeError, match=f"'{unknown}'"):
                ask(PROMPT, **{unknown: 1})
        with pytest.raises(TypeError, match="'intervals'"):
            client.open_group(PROMPT, intervals=1)


@asynchronous
async def test_an_aborted_request_fails_by_name_whether_given_as_future_stream_or_id():
    async with connected(only(wire.Abort)) as (client, _):
        future, other, stream = (
            client.add_request(PROMPT),
            client.add_request(PROMPT),
            client.add_request_streaming(PROMPT),
        )
        assert client.abort_request(future)
        assert client.abort_request(other.group.request_id)
        assert client.abort_request(stream)
        assert not client.abort_request(99)
        for each in (future, other):
            with pytest.raises(RequestAbortedError, match="somebody aborted it"):
                await each
        with pytest.raises(RequestAbortedError):
            [delta async for delta in stream]
        with pytest.raises(RequestAbortedError):
            _ = stream.result


@asynchronous
async def test_cancelling_a_future_aborts_its_request_and_the_late_reply_is_dropped():
    async with connected(only(wire.Abort)) as (client, fake):
        future = client.add_request(PROMPT)
        assert future.cancel()
        assert not future.cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.add_request(PROMPT), 0.01)
        messages = [(await heard(fake))[2] for _ in range(4)]
        assert messages[1::2] == [wire.Abort(0), wire.Abort(1)]
        fake._answer = generous
        assert await client.add_request(PROMPT)
        assert not client._session._open


# --- streams ----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_a_streams_deltas_joined_are_its_result():
    async with connected() as (client, fake):
        stream = client.add_request_streaming(PROMPT, SamplingParams(n=2))
        with pytest.raises(RuntimeError, match="has not ended: read the stream"):
            _ = stream.result
        deltas = [delta async for delta in stream]
        assert (await heard(fake))[2].interval == 1
        for request in stream.result:
            mine = [delta for delta in deltas if delta.sample_index == request.sample_index]
            assert len(mine) == 4
            assert [token for delta in mine for token in delta.token_ids] == request.generated_tokens
            assert [value for delta in mine for value in delta.log_probs] == request.generated_log_probs
            assert [value for delta in mine for value in delta.policy_versions] == [0, 0, 0, 0]
            assert not any(delta.restarted for delta in mine)
        assert [delta async for delta in stream] == []


@pytest.mark.parametrize("leave", ["break", "raise", "cancel"])
@asynchronous
async def test_leaving_the_loop_over_a_stream_aborts(leave):
    async with connected(only()) as (client, fake):
        stream = client.add_request_streaming(PROMPT)
        await heard(fake)
        fake.say(fake.peers[0], part(0, 1, 0, [1], last=False))

        async def read():
            async for _ in stream:
                if leave == "break":
                    break
                if leave == "raise":
                    raise KeyError

        reading = asyncio.create_task(read())
        if leave == "cancel":
            await asyncio.sleep(0.05)
            reading.cancel()
        await asyncio.wait((reading,))
        assert reading.cancelled() == (leave == "cancel")
        assert leave == "cancel" or (reading.exception() is not None) == (leave == "raise")
        # The exception's traceback holds the iterator.
        del reading
        gc.collect()
        assert (await heard(fake))[2] == wire.Abort(0)


# --- control ----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_control_calls_are_done_when_the_coordinator_says_so():
    async with connected() as (client, fake):
        await client.pause_engines()
        await client.suspend_engines("offload", timeout_s=3.0)
        await client.pause_engines()
        await client.set_policy_version(4)
        assert client.policy_version == 4
        await client.resume_engines()
        await client.unpause_engines()
        await client.barrier(2)
        assert await client.status() == {"ranks": 2}
        await client.stop_engines()
        calls = [(await heard(fake))[2] for _ in range(9)]
        assert [(c.signal, c.argument) for c in calls if isinstance(c, wire.Control)] == [
            ("pause", None), ("suspend", "offload"), ("pause", None), ("set_version", 4), ("resume", None),
            ("unpause", None), ("stop", None),
        ]  # fmt: skip
        assert calls[0].timeout_s == client_module.CONTROL_TIMEOUT_S
        assert calls[1].timeout_s == 3.0


@asynchronous
async def test_a_control_call_that_fails_raises_what_was_named():
    def refuse(fake, peer, message):
        if isinstance(message, wire.Control):
            fake.say(peer, wire.ControlDone(message.call_id, "ControlError", "rank3 has not paused", ["rank3"]))

    async with connected(refuse) as (client, _):
        with pytest.raises(ControlError, match="rank3 has not paused") as caught:
            await client.pause_engines()
        assert caught.value.engines == ("rank3",)
        with pytest.raises(ControlError):
            await client.set_policy_version(9)
        assert client.policy_version == 0


@asynchronous
async def test_a_coordinator_that_does_not_answer_a_call_is_a_deadline(monkeypatch):
    monkeypatch.setattr(client_module, "ANSWER_MARGIN_S", 0.05)
    async with connected(only(wire.Submit)) as (client, fake):
        for call in (client.pause_engines(timeout_s=0.01), client.status(0.01), client.barrier(1, timeout_s=0.01)):
            with pytest.raises(DeadlineError, match=f"no answer from the coordinator at {fake.address}"):
                await call
        assert (client._session._calls, client._session._barriers) == ({}, {})
        assert await client.add_request(PROMPT)


# --- the end ----------------------------------------------------------------------------------------------------------


@asynchronous
async def test_stop_fails_what_is_open_by_name_and_is_harmless_when_repeated():
    async with connected(only()) as (client, fake):
        future, stream = client.add_request(PROMPT), client.add_request_streaming(PROMPT)
        waiting = asyncio.create_task(client.status())
        await asyncio.sleep(0)
        await client.stop()
        await client.stop()
        assert not future.cancelled()
        for ending in (future, waiting):
            with pytest.raises(ConnectionLostError, match="'client' was stopped"):
                await ending
        with pytest.raises(ConnectionLostError, match="'client' was stopped"):
            [delta async for delta in stream]
        assert not client.connected
        assert "was stopped" in str(client.lost)
        with pytest.raises(ConnectionLostError):
            client.add_request_streaming(PROMPT)
        for call in (client.pause_engines, client.start):
            with pytest.raises(ConnectionLostError):
                await call()
        while not isinstance((await heard(fake))[2], wire.Disconnect):
            pass


@asynchronous
async def test_a_frame_that_the_coordinator_cannot_take_ends_the_session_and_nothing_waits_for_ever():
    async with connected() as (client, fake):
        future = client.add_request(PROMPT)
        fake.say(fake.peers[0], wire.Refused("malformed", "that frame was odd", over=False))
        with pytest.raises(ConnectionLostError, match="that frame was odd"):
            await future
        assert client.lost is not None
        assert client.lost.final


@asynchronous
async def test_an_idle_client_does_not_wake():
    """A client of another system polls its socket every 5 ms."""
    async with connected() as (client, _):
        await client.status()
        turns = []
        settle = client._dealer._settle
        client._dealer._settle = lambda: turns.append(time.monotonic()) or settle()
        await asyncio.sleep(0.2)
        assert turns == []
        del client._dealer._settle
