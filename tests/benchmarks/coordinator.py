"""Coordinator beside the same hops in plain ZMQ: a round trip, samples per second, and the cost of a routing decision.

    python -m tests.benchmarks.coordinator

    ours     InferenceClient ──▶ coordinator ──▶ echo rank         frames, sessions, routing
    plain    DEALER ──▶ ROUTER ──▶ DEALER, and back                byte strings as long as our frames, never read

Every box is a process. A client keeps one request going (the round trip) or `--in-flight` (the rate). A routing decision is
`place`, `assigned`, `ended` and `released` of the real router, on prompts of 62 blocks of which every rank holds 16. Medians
of alternating rounds. Quote ratios: a busy neighbour costs round trips far more than half.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgpack
import zmq

from rollout.config import CoordinatorConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.coordinator.core.routing import Claim, Router
from rollout.distributed.coordinator.launch import launch_coordinator
from rollout.distributed.protocol.frames import Sequencer, decode, encode
from rollout.distributed.protocol.messages import (
    PROTOCOL_VERSION,
    Assign,
    EngineMoved,
    Heartbeat,
    Progress,
    Register,
    RegisterAck,
    Stretch,
    Submit,
    Update,
    session_end,
)
from rollout.distributed.protocol.outcome import Outcome, pack
from rollout.requests.events import DynamicInferenceEvent, DynamicInferenceEventType, pack_events
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams
from rollout.state import PrefixCachingCoordinatorPolicy
from tests.benchmarks.common import alternating, number, parse, save, show

BLOCK_SIZE, SLOTS, HEARTBEAT_S = 16, 1 << 20, 10.0
RANKS = (1, 16, 256, 1000)
BLOCKS, SHARED_BLOCKS, SLOTS_PER_RANK, OPEN = 62, 16, 256, 128
"""Of a routing decision; `OPEN` requests are at work."""


@dataclass(frozen=True)
class Load:
    """What is asked, again and again: samples of a prompt, each with so many tokens of completion."""

    prompt_tokens: int
    n: int
    completion: int = 8

    @property
    def prompt(self) -> bytes:
        """int32."""
        return bytes(4 * self.prompt_tokens)

    @property
    def params(self) -> SamplingParams:
        """Of the request."""
        return SamplingParams(n=self.n, max_tokens=self.completion)

    def answered(self) -> tuple[Assign, Stretch]:
        """What the coordinator sends to a rank, and the rank's answer: every sample, ended."""
        n, count = self.n, self.completion
        params = msgpack.packb(self.params.serialize())
        assign = Assign(1 << 20, 1 << 20, list(range(n)), self.prompt, params, 1 << 62, 0, time.time(), 16, [])
        total = self.prompt_tokens + count
        outcome = Outcome(
            "length", None, None, 0, VersionSpans([(0, total)]), VersionSpans([(0, total - 1)]), [0.01] * (count - 1),
            0.01, 0.01 * count, 0, None, None, count, assign.seed,
        )  # fmt: skip
        kinds = [DynamicInferenceEventType[name] for name in ("ADD_ENGINE", "ADD_CONTEXT", "FINISH")]
        events = pack_events([DynamicInferenceEvent(1e9, kind) for kind in kinds])
        zeros = bytes(4 * count * n)
        return assign, Stretch(
            assign.request_id, assign.attempt, assign.indices, [0] * n, [count] * n, zeros, zeros, [[0, 0, count]] * n,
            {"ttft": [0.01] * n, "outcome": [pack(outcome)] * n, "events": [events] * n},
        )  # fmt: skip

    def frames(self) -> list[bytes]:
        """`Submit`, `Assign`, `Progress` and `Update` as they travel."""
        assign, stretch = self.answered()
        submit = Submit(1 << 20, self.prompt, self.n, assign.params, None, 0, assign.arrival_time)
        return [encode(1 << 20, each) for each in (submit, assign, Progress([stretch], running=1), Update([stretch]))]


LATENCY = Load(64, 1)
LOADS = {"1,024-token prompts": Load(1024, 1), "groups of 16": Load(64, 16)}


# --- processes --------------------------------------------------------------------------------------------------------


def _socket(kind: int, name: bytes | None = None) -> Any:
    socket = zmq.Context.instance().socket(kind)
    socket.linger = socket.sndhwm = socket.rcvhwm = 0
    if name is not None:
        socket.routing_id = name
    return socket


def echo_rank(address: str, load: Load) -> None:
    """End every sample at once, and all of one message of the coordinator in one report, until the coordinator leaves."""
    _, stretch = load.answered()
    numbers, socket = Sequencer(), _socket(zmq.DEALER, b"rank")
    socket.connect(address)

    def say(message: Any) -> None:
        socket.send(encode(numbers.next(), message))

    say(Register(PROTOCOL_VERSION, "rank-0", SLOTS, BLOCK_SIZE, "running", 0))
    while not isinstance(decode(socket.recv())[1], RegisterAck):
        pass
    say(EngineMoved("running", 0))
    while True:
        if not socket.poll(1000 * HEARTBEAT_S):
            say(Heartbeat())
            continue
        messages = [decode(frame)[1] for frame in socket.recv_multipart()]
        if any(map(session_end, messages)):
            return
        ended = [
            replace(stretch, request_id=each.request_id, attempt=each.attempt)
            for each in messages
            if isinstance(each, Assign)
        ]
        if ended:
            say(Progress(ended, running=1, waiting=1))


def plain_router(to_rank: int, to_client: int, where: Any) -> None:
    """Pass so many bytes to the rank for each message of the client, and back."""
    socket, client = _socket(zmq.ROUTER), b""
    where.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
    rank, _ = socket.recv_multipart()
    socket.send_multipart([rank, b"welcome"])
    while True:
        peer, _ = socket.recv_multipart()
        if peer != rank:
            client = peer
        socket.send_multipart([client, bytes(to_client)] if peer == rank else [rank, bytes(to_rank)])


def plain_rank(address: str, reply: int, ready: Any) -> None:
    """Send so many bytes back for each message."""
    socket = _socket(zmq.DEALER, b"rank")
    socket.connect(address)
    socket.send(b"")
    ready.send(socket.recv())
    while True:
        socket.recv()
        socket.send(bytes(reply))


@contextmanager
def wired(load: Load) -> Iterator[dict[str, str]]:
    """Addresses of a coordinator with an echo rank (`ours`) and of the same hops in plain ZMQ (`plain`)."""
    # Forked: a new interpreter would import torch, which none of them needs.
    fork = multiprocessing.get_context("fork")
    _, assign, progress, update = map(len, load.frames())
    with ExitStack() as stack:

        def start(work: Callable[..., None], *arguments: Any) -> None:
            process = fork.Process(target=work, args=arguments, daemon=True)
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)

        coordinator = launch_coordinator(CoordinatorConfig(heartbeat_timeout_s=30 * HEARTBEAT_S))
        stack.callback(coordinator.kill)
        start(echo_rank, coordinator.address, load)
        here, there = fork.Pipe()
        start(plain_router, assign, update, there)
        address = here.recv()
        start(plain_rank, address, progress, there)
        here.recv()
        yield {"ours": coordinator.address, "plain": address}


# --- clients: (median seconds of a round trip, samples per second) ----------------------------------------------------


async def _ours(address: str, load: Load, in_flight: int, lasting: float) -> tuple[float, float]:
    times: list[float] = []
    async with InferenceClient(address) as client:
        prompt, params = load.prompt, load.params
        await client.add_request(prompt, params)
        begin = time.perf_counter()

        async def keep_going() -> None:
            while (start := time.perf_counter()) < begin + lasting:
                await client.add_request(prompt, params)
                times.append(time.perf_counter() - start)

        await asyncio.gather(*(keep_going() for _ in range(in_flight)))
        return statistics.median(times), len(times) * load.n / (time.perf_counter() - begin)


def ours(address: str, load: Load, in_flight: int, lasting: float) -> tuple[float, float]:
    """Through the coordinator."""
    return asyncio.run(_ours(address, load, in_flight, lasting))


def plain(address: str, load: Load, in_flight: int, lasting: float) -> tuple[float, float]:
    """Byte strings of the same lengths."""
    socket, message = _socket(zmq.DEALER), load.frames()[0]
    socket.connect(address)
    starts, times = deque[float](), list[float]()
    begin = time.perf_counter()
    while time.perf_counter() < begin + lasting or starts:
        while len(starts) < in_flight and time.perf_counter() < begin + lasting:
            starts.append(time.perf_counter())
            socket.send(message)
        if starts:
            socket.recv()
            times.append(time.perf_counter() - starts.popleft())
    socket.close()
    return statistics.median(times), len(times) * load.n / (time.perf_counter() - begin)


def beside(load: Load, in_flight: int, lasting: float, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians over the rounds of (seconds of a round trip, samples per second), by who carries them."""
    with wired(load) as addresses:
        works = {
            "ours": partial(ours, addresses["ours"], load, in_flight, lasting),
            "plain": partial(plain, addresses["plain"], load, in_flight, lasting),
        }
        found = alternating(works, rounds)
    return {
        kind: (statistics.median(trip for trip, _ in each), statistics.median(rate for _, rate in each))
        for kind, each in found.items()
    }


# --- routing ----------------------------------------------------------------------------------------------------------


class Routing:
    """A router with ranks at work."""

    def __init__(self, ranks: int) -> None:
        self._random, self._open = random.Random(0), deque[tuple[str, Claim]]()
        self._router = Router(PrefixCachingCoordinatorPolicy.LONGEST_PREFIX)
        self._shared = list(range(1, SHARED_BLOCKS + 1))
        for index in range(ranks):
            self._router.add_rank(f"rank-{index:04}", SLOTS_PER_RANK)
            self._router.reported(f"rank-{index:04}", self._shared, (), flushed=False)
        for _ in range(OPEN):
            self._place(self._hashes())

    def _hashes(self) -> list[int]:
        return self._shared + [self._random.getrandbits(61) for _ in range(BLOCKS - SHARED_BLOCKS)]

    def _place(self, hashes: list[int]) -> None:
        (placement,) = self._router.place(hashes, 1)
        self._open.append((placement.rank, self._router.assigned(placement.rank, hashes, 1)))

    def microseconds(self, requests: int) -> float:
        """Median of a decision: a request is placed, and the oldest open one ends."""
        times = []
        for hashes in [self._hashes() for _ in range(requests)]:
            start = time.perf_counter()
            self._place(hashes)
            rank, claim = self._open.popleft()
            self._router.ended(rank)
            self._router.released(claim)
            times.append(time.perf_counter() - start)
        return 1e6 * statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, show, save. Returns the exit status."""
    options = parse(
        __doc__, arguments, rounds=5, seconds={"default": 2.0, "help": "of a round"},
        in_flight={"default": 1024, "help": "requests that a client keeps going"},
        requests={"default": 300, "help": "routing decisions of a round"},
    )  # fmt: skip
    trips = beside(LATENCY, 1, options.seconds, options.rounds)
    rates = {name: beside(load, options.in_flight, options.seconds, options.rounds) for name, load in LOADS.items()}
    routers = {str(ranks): partial(Routing(ranks).microseconds, options.requests) for ranks in RANKS}
    found = {
        "latency": {kind: trip for kind, (trip, _) in trips.items()},
        "throughput": {name: {kind: rate for kind, (_, rate) in each.items()} for name, each in rates.items()},
        "routing": {ranks: statistics.median(us) for ranks, us in alternating(routers, options.rounds).items()},
    }
    rows = [("round trip, µs", {kind: 1e6 * trip for kind, trip in found["latency"].items()})]
    rows += [(f"{name}, samples/s", each) for name, each in found["throughput"].items()]  # type: ignore[misc]
    show(
        "coordinator beside plain ZMQ", ("", "ours", "plain", "ours / plain"),
        [(name, number(each["ours"]), number(each["plain"]), number(each["ours"] / each["plain"])) for name, each in rows],
    )  # fmt: skip
    show(
        "routing decision", ("ranks", "µs"), [(f"{int(ranks):,}", number(us)) for ranks, us in found["routing"].items()]
    )
    save(options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
