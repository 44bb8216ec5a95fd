"""Tests of the DEALER connection: order, coalescing, identities, and every way to lose a connection."""

from __future__ import annotations

import asyncio
import functools
import gc
import re
import sys
import threading
import time

import pytest

from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import LostFramesError
from rollout.distributed.protocol.frames import encode
from rollout.distributed.transport.dealer import Dealer
from rollout.errors import ConfigError, ConnectionLostError, SerializationError
from tests.distributed.fake_coordinator import DEADLINE_S, FakeCoordinator

HELLO = wire.Connect(1, "somebody")


def asynchronous(test):
    """Run an async test to its end, or to a deadline that only guards against hanging."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), DEADLINE_S))

    return run


class Connection:
    def __init__(self, address: str, name: str = "me", **options) -> None:
        self.arrived: asyncio.Queue[wire.Message] = asyncio.Queue()
        self.lost: asyncio.Queue[ConnectionLostError] = asyncio.Queue()
        options = {"on_message": self.arrived.put_nowait} | options
        self.dealer = Dealer(address, name, on_lost=self.lost.put_nowait, **options)
        self.dealer.open()


async def greeted(fake: FakeCoordinator, **options) -> tuple[Connection, bytes]:
    connection = Connection(fake.address, **options)
    connection.dealer.send(HELLO)
    if "on_message" not in options:
        assert isinstance(await connection.arrived.get(), wire.ConnectAck)
    peer, _, message = await heard(fake)
    assert message == HELLO
    return connection, peer


async def heard(fake: FakeCoordinator):
    return await asyncio.get_running_loop().run_in_executor(None, fake.heard.get, True, DEADLINE_S)


def echo(fake, peer, message):
    if isinstance(message, wire.StatusQuery):
        fake.say(peer, wire.BarrierDone(message.call_id))


@asynchronous
async def test_messages_arrive_in_order_in_both_directions():
    with FakeCoordinator(echo) as fake:
        connection, _ = await greeted(fake)
        for number in range(3000):
            connection.dealer.send(wire.StatusQuery(number))
            if number % 100 == 0:
                await asyncio.sleep(0)
        assert [(await connection.arrived.get()).index for _ in range(3000)] == list(range(3000))
        numbers = [fake.heard.get(timeout=DEADLINE_S)[1:] for _ in range(3000)]
        assert numbers == [(1 + number, wire.StatusQuery(number)) for number in range(3000)]
        connection.dealer.close("done")


@asynchronous
async def test_a_reply_is_not_missed_when_sending_has_taken_in_its_event():
    """The descriptor signals an edge that a send may consume: a dealer that only reads on the edge hangs here."""

    with FakeCoordinator(echo) as fake:
        connection, _ = await greeted(fake)
        for number in range(2000):
            connection.dealer.send(wire.StatusQuery(number))
            # Give the echo time to arrive between two sends of ours, at ever other moments.
            time.sleep(0.00002 * (number % 7))
            connection.dealer.send(wire.Abort(number))
            assert await connection.arrived.get() == wire.BarrierDone(number)
        connection.dealer.close("done")


@asynchronous
async def test_close_says_why_with_its_last_messages_and_is_harmless_when_repeated():
    with FakeCoordinator() as fake:
        connection, _ = await greeted(fake)
        connection.dealer.send(wire.Abort(3))
        connection.dealer.close("r" * 300)
        connection.dealer.close("again")
        assert not connection.dealer.is_open
        assert (await heard(fake))[2] == wire.Abort(3)
        assert (await heard(fake))[2] == wire.Disconnect("r" * 256)
        with pytest.raises(ConnectionLostError, match="was closed"):
            connection.dealer.send(wire.Abort(4))
        await asyncio.sleep(0.05)
        assert connection.lost.empty()


@asynchronous
async def test_the_last_words_are_heard_even_when_the_process_ends_at_once():
    program = """
import asyncio, sys
from rollout.distributed.transport.dealer import Dealer
from rollout.distributed.protocol.messages import Abort

async def main():
    dealer = Dealer(sys.argv[1], "brief", on_message=print, on_lost=print)
    dealer.open()
    dealer.send(Abort(1))
    dealer.close("at once")

asyncio.run(main())
"""
    with FakeCoordinator() as fake:
        await (await asyncio.create_subprocess_exec(sys.executable, "-c", program, fake.address)).wait()
        assert [(await heard(fake))[2] for _ in range(2)] == [wire.Abort(1), wire.Disconnect("at once")]


@asynchronous
async def test_an_address_that_cannot_be_is_refused_by_name():
    dealer = Dealer("nonsense", "me", on_message=print, on_lost=print)
    with pytest.raises(ConfigError, match="address='nonsense': must be tcp://host:port"):
        dealer.open()
    with pytest.raises(ConnectionLostError, match=r"await start\(\) first"):
        dealer.send(HELLO)


# --- lost -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "words", "cause"),
    [
        ([encode(1, wire.Refused("unknown_peer", "who are you", over=True))], "unknown_peer.*who are you", None),
        ([encode(1, wire.Disconnect("shutdown"))], "has disconnected .shutdown", None),
        ([encode(5, wire.BarrierDone(0))], "expected frame 1, got 5: 4 were lost", LostFramesError),
        ([b"\xc1"], "no msgpack", SerializationError),
        ([b"\xc1", encode(1, wire.Disconnect("late")), b"\xc1"], "no msgpack", SerializationError),
        ([encode(1, wire.Update([])).replace(b"\x90", b"\x03")], "Update.stretches: 3 arrived", SerializationError),
    ],
)
@asynchronous
async def test_a_connection_is_lost_once_and_by_name(frames, words, cause):
    with FakeCoordinator() as fake:
        connection, peer = await greeted(fake)
        fake.say_raw(peer, *frames)
        fake.say_raw(peer, encode(9, wire.BarrierDone(9)))
        error = await connection.lost.get()
        assert error.args[0].startswith(fake.address)
        assert re.search(words, str(error))
        assert type(error.__cause__) is (cause or type(None))
        with pytest.raises(ConnectionLostError, match=words):
            connection.dealer.send(wire.Abort(0))
        await asyncio.sleep(0.05)
        assert connection.lost.empty()
        assert connection.arrived.empty()


@asynchronous
async def test_a_repeated_frame_and_a_refusal_that_is_not_the_end_lose_nothing():
    with FakeCoordinator() as fake:
        connection, peer = await greeted(fake)
        again = encode(1, wire.Refused("malformed", "that frame", over=False))
        fake.say_raw(peer, again, again, encode(2, wire.BarrierDone(7)))
        assert await connection.arrived.get() == wire.Refused("malformed", "that frame", over=False)
        assert await connection.arrived.get() == wire.BarrierDone(7)
        connection.dealer.close("done")


@asynchronous
async def test_a_callback_that_raises_does_not_stop_what_follows():
    arrived = asyncio.Queue()

    def fragile(message):
        arrived.put_nowait(message)
        if message == wire.BarrierDone(0):
            raise KeyError("a bug of the caller's")

    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context["exception"]))
    with FakeCoordinator() as fake:
        connection, peer = await greeted(fake, on_message=fragile)
        assert isinstance(await arrived.get(), wire.ConnectAck)
        for number in range(5):
            fake.say(peer, wire.BarrierDone(number))
        assert [(await arrived.get()).index for _ in range(5)] == list(range(5))
        assert [type(each) for each in raised] == [KeyError]
        connection.dealer.close("done")


# --- heartbeats -------------------------------------------------------------------------------------------------------


@asynchronous
async def test_whoever_is_silent_for_the_interval_says_that_it_lives():
    with FakeCoordinator() as fake:
        connection, _ = await greeted(fake)
        connection.dealer.heartbeat(0.02, 1000)
        while fake.heartbeats < 3:
            await asyncio.sleep(0.01)
        connection.dealer.close("done")


@asynchronous
async def test_silence_beyond_the_timeout_is_a_loss():
    with FakeCoordinator() as fake:
        connection, _ = await greeted(fake)
        connection.dealer.heartbeat(0.05, 0.1)
        error = await connection.lost.get()
        assert "no frame from the coordinator for 0.1 s" in str(error)
        await asyncio.sleep(0.2)
        assert connection.lost.empty()


@asynchronous
async def test_a_process_that_stood_still_itself_does_not_blame_the_coordinator():
    with FakeCoordinator() as fake:
        connection, peer = await greeted(fake)
        connection.dealer.heartbeat(0.2, 0.4)
        time.sleep(1.0)
        fake.say(peer, wire.Heartbeat())
        await asyncio.sleep(0.1)
        assert connection.lost.empty()
        connection.dealer.close("done")


def test_a_connection_that_is_dropped_holds_nobody_up():
    """Unsent messages of one kept the garbage collector, and with it the whole process, for ever."""

    async def open_and_forget():
        # Port 9 discards, where anybody listens at all.
        dealer = Dealer("tcp://127.0.0.1:9", "forgotten", on_message=print, on_lost=print)
        dealer.open()
        dealer.send(wire.Heartbeat())
        await asyncio.sleep(0.05)
        asyncio.get_running_loop().remove_reader(dealer._socket.FD)

    def live():
        asyncio.run(open_and_forget())
        gc.collect()

    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    thread.join(120.0)
    assert not thread.is_alive()
