"""Simulation of a whole job in one thread: real core and sessions, fake engine, faulty network.

One seed decides everything: who acts next, which frames are delayed, repeated or lost with their connection, which rank
dies, hangs, wakes or arrives late, which client dies, when to pause, suspend, raise the version, abort or stop.
After every event the invariants of `World.check` hold; at the end the faults stop, and everything must settle.

    python -m tests.distributed.coordinator.simulation SEED       replays one schedule and prints what happened
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from rollout.distributed.client.group import OpenGroup
from rollout.distributed.client.session import Call, ClientSession
from rollout.distributed.coordinator.core.coordinator import CoordinatorCore
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import FLUSH_PREFIX_CACHE, SET_VERSION, LostFramesError
from rollout.distributed.protocol.frames import Sequencer, decode, encode
from rollout.distributed.worker.session import RankSession
from rollout.errors import ConnectionLostError, RolloutError
from rollout.sampling_params import SamplingParams
from rollout.state import CoordinatorState, EngineState, PrefixCachingCoordinatorPolicy
from tests.configs import coordinator_config
from tests.distributed.coordinator.core.routers import check, held
from tests.distributed.coordinator.fake_engine import BLOCK, CACHE_BLOCKS, FakeEngine, length_of, token_at

PROMPTS = [
    tuple(range(100, 100 + shared)) + tuple(range(own * 10, own * 10 + 5)) for shared in (0, 8) for own in (1, 2, 3)
]
TEXTS = {f"prompt {number}": tokens for number, tokens in enumerate(PROMPTS)}


@cache
def params_of(n: int, seed: int | None) -> SamplingParams:
    return SamplingParams(n=n, seed=seed, max_tokens=64)


@dataclass(eq=False)
class Peer:
    """One process: what it has sent and not yet delivered, and what is on its way to it."""

    name: str
    identity: bytes = b""
    frames: Sequencer = field(default_factory=Sequencer)
    inbox: deque[tuple[int, wire.Message]] = field(default_factory=deque)
    outbox: deque[tuple[int, wire.Message]] = field(default_factory=deque)
    alive: bool = True
    hung: bool = False
    connected: bool = False
    """The coordinator can reach it."""
    spoken: float = 0.0
    gap: bool = False
    """Frames were lost, and nobody has noticed yet."""

    def send(self, message: wire.Message) -> None:
        self.outbox.append((self.frames.next(), message))


@dataclass(eq=False)
class SimRank(Peer):
    engine: FakeEngine = None  # type: ignore[assignment]
    session: RankSession = None  # type: ignore[assignment]
    told: wire.RegisterAck | None = None


@dataclass(eq=False)
class Wanted:
    group: OpenGroup
    prompt: tuple[int, ...]
    params: SamplingParams
    timeout_s: float | None
    min_version: int = 0
    """The policy version of the asker's weights."""
    ends: int = 0
    seed: int | None = None
    aborted: bool = False


@dataclass(eq=False)
class SimClient(Peer):
    session: ClientSession = None  # type: ignore[assignment]
    member: int | None = None
    barrier: int = -1
    ready: bool = False
    open: list[Wanted] = field(default_factory=list)


class World:
    def __init__(self, seed: int, *, trace: bool = False, encoded: bool | None = None) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.trace = trace
        self.encoded = seed % 32 == 0 if encoded is None else encoded
        self.now = 0.0
        self.config = coordinator_config(
            data_parallel_size=rng.choice([1, 2, 2, 3, 4]),
            block_size_tokens=BLOCK,
            heartbeat_timeout_s=10.0,
            no_rank_timeout_s=rng.choice([20.0, 1e6]),
            progress_interval=rng.choice([1, 3, 8]),
            deterministic_mode=rng.random() < 0.1,
            prefix_caching_coordinator_policy=rng.choice(list(PrefixCachingCoordinatorPolicy)),
            tokenizer="made up" if rng.random() < 0.2 else None,
        )
        self.core = CoordinatorCore(self.config)
        self.core.sessions.max_rank_losses = rng.choice([1, 3, 1000])
        router = self.core.dispatcher.router
        router._alpha, router._max_hashes = rng.choice([0.5, 0.5, 0.1, 1.0]), rng.choice([1 << 10, 1 << 10, 6])
        self.peers: dict[bytes, Peer] = {}
        self.text_jobs: list[Any] = []
        self.version = 0
        self.faults = True
        self.last_fresh = -1
        self.assigned: set[int] = set()
        self.newest_own: Counter[str] = Counter()
        """Highest version that a rank of this name has had."""
        self.behind: set[int] = set()
        """Requests that have waited for a rank with a suitable version."""
        self.joined: set[str] = set()
        """Clients that have connected at least once."""
        self.events = 0
        self.touched = False
        self.all_wanted: list[Wanted] = []
        self.all_calls: dict[Call, Callable[[], None] | None] = {}
        """Calls, and what must hold when each has succeeded; None: it did."""
        self.ranks: list[SimRank] = []
        self.clients: list[SimClient] = []
        self.loads_weights = rng.random() < 0.5
        for number in range(self.config.data_parallel_size):
            self.start_rank(f"rank-{number}")
        members = rng.random() < 0.4
        for number in range(self.config.data_parallel_size if members else rng.choice([1, 1, 2, 3])):
            # A member has the name of its rank.
            self.start_client(f"{'rank' if members else 'client'}-{number}", member=number if members else None)

    def say(self, *words: object) -> None:
        if self.trace:
            print(f"{self.events:4d} {self.now:7.2f}", *words)

    # --- processes --------------------------------------------------------------------------------------------------

    def start_rank(self, name: str) -> None:
        rank = SimRank(name)
        rank.engine = FakeEngine(self.rng.choice([1, 2, 4]), self.rng, self.version if self.loads_weights else 0)
        self.ranks.append(rank)
        self.register(rank)

    def register(self, rank: SimRank) -> None:
        self.connect(rank)
        rank.told = None
        rank.session = RankSession(rank.engine, rank.send, idle=lambda: rank.engine.resting)
        hashes = np.asarray(rank.engine.track_prefix_cache(rank.session.changes), "<i8").tobytes()
        state, version = rank.engine.state.value, rank.engine.policy_version
        rank.send(wire.Register(wire.PROTOCOL_VERSION, rank.name, rank.engine._slots, BLOCK, state, version, hashes))

    def start_client(self, name: str, *, member: int | None) -> None:
        client = SimClient(name, member=member)
        self.clients.append(client)
        self.join(client)

    def join(self, client: SimClient) -> None:
        self.connect(client)
        client.ready = False
        client.session = ClientSession(client.send, clock=lambda: 1.0)
        client.send(wire.Connect(wire.PROTOCOL_VERSION, client.name, client.member))

    def connect(self, peer: Peer) -> None:
        self.peers.pop(peer.identity, None)
        peer.identity = f"{peer.name}-{self.rng.getrandbits(64):x}".encode()
        peer.frames = Sequencer()
        peer.inbox.clear()
        peer.outbox.clear()
        peer.connected = True
        peer.gap = False
        peer.spoken = self.now
        self.peers[peer.identity] = peer
        self.say(peer.name, "connects")

    # --- the network ------------------------------------------------------------------------------------------------

    def flush_core(self) -> None:
        """Put what the core says on its way; whom it cannot reach it is told."""
        self.touched = True
        self.text_jobs += self.core.take_text_jobs()
        self.check_order()
        for _ in range(100):
            outbox = self.core.take_outbox()
            if not outbox:
                return
            for identity, sequence, message in outbox:
                assert not isinstance(message, wire.Refused) or message.code not in ("malformed", "not_yours"), message
                peer = self.peers.get(identity)
                if peer is None or not peer.alive or not peer.connected:
                    self.core.unreachable(identity, "unreachable", self.now)
                else:
                    peer.inbox.append((sequence, self.carry(sequence, message)))
        raise AssertionError("the core never stops talking")

    def carry(self, sequence: int, message: wire.Message) -> wire.Message:
        if not self.encoded:
            return message
        there, carried = decode(encode(sequence, message))
        assert there == sequence
        return carried

    def deliver_to_core(self, peer: Peer) -> None:
        sequence, message = peer.outbox.popleft()
        self.say(peer.name, "→", message)
        for _ in range(2 if self.faults and self.rng.random() < 0.1 else 1):
            self.core.receive(peer.identity, sequence, self.carry(sequence, message), self.now)
        if isinstance(message, wire.Connect) and peer.identity in self.core.peers.clients:
            # A job that is stopping lets nobody in.
            self.joined.add(peer.name)
        self.flush_core()

    def deliver(self, peer: Peer) -> None:
        sequence, message = peer.inbox.popleft()
        self.say(peer.name, "←", message)
        for _ in range(2 if self.faults and self.rng.random() < 0.1 else 1):
            if wire.session_end(message) is not None:
                final = isinstance(message, wire.Refused) and message.code not in wire.TRY_AGAIN
                self.lose(peer, wire.session_end(message) or "", again=not final)
                return
            try:
                if not peer.frames.accept(sequence):
                    continue
            except LostFramesError as exc:
                self.lose(peer, str(exc))
                return
            if isinstance(peer, SimRank):
                if isinstance(message, wire.RegisterAck):
                    peer.told = message
                if isinstance(message, wire.Assign):
                    assert peer.told is not None
                    assert peer.engine.policy_version >= peer.told.policy_version, "work before the version was told"
                peer.session.receive(message)
                assert sum(peer.engine.load) == peer.session.num_open, "a sample without an assignment"
            elif isinstance(peer, SimClient):
                if isinstance(message, wire.ConnectAck):
                    peer.ready = True
                    peer.barrier = message.next_barrier - 1
                peer.session.receive(message)
                self.look_at_calls()

    def lose(self, peer: Peer, why: str, *, again: bool = True) -> None:
        """The peer notices that its session is over, and starts another."""
        self.say(peer.name, "loses its session:", why)
        if isinstance(peer, SimRank):
            peer.session.lost()
            assert peer.engine.load == (0, 0), "a lost session's samples go on"
            if again:
                self.register(peer)
            else:
                self.kill(peer)
        elif not again:
            self.kill(peer)
        elif isinstance(peer, SimClient):
            before = [each for each in peer.open if not each.group.done]
            peer.session.lost(ConnectionLostError(why))
            peer.open.clear()
            self.join(peer)
            if self.rng.random() < 0.5:
                for each in before:
                    # Without a seed of its own it gets another one, and what is known belongs to the first.
                    known = each.group.known() if each.params.seed is not None else []
                    if any(each.group.open_samples()):
                        self.submit(peer, each.prompt, each.params, known=known, seed=each.seed)

    # --- what clients do --------------------------------------------------------------------------------------------

    def submit(
        self,
        client: SimClient,
        prompt: tuple[int, ...],
        params: SamplingParams,
        known: Sequence[wire.Stretch] = (),
        seed: int | None = None,
    ) -> None:
        text = next((text for text, tokens in TEXTS.items() if tokens == prompt), "")
        as_text = self.config.tokenizer is not None and not known and self.rng.random() < 0.5
        timeout_s = self.rng.choice([None, None, None, 3.0, 15.0])
        # Its own weights are as new as anybody's, are newer than everybody's, or nobody knows of them.
        min_version = self.rng.choice([0, 0, self.version, self.version, max(0, self.version - 1)])
        group = client.session.submit(
            text if as_text else list(prompt),
            params,
            known=known,
            timeout_s=timeout_s,
            interval=self.rng.choice([0, 0, 1]),
            min_policy_version=min_version,
        )
        wanted = Wanted(group, prompt, params, timeout_s, min_version, seed=params.seed)
        group.on_done = lambda group: self.ended(wanted)
        group.on_update = lambda group, stretch: self.check_stretch(wanted, stretch)
        client.open.append(wanted)
        self.all_wanted.append(wanted)

    def ended(self, wanted: Wanted) -> None:
        wanted.ends += 1
        assert wanted.ends == 1, "a group has ended twice"

    def call(self, client: SimClient, signal: str, argument: int | str | None = None) -> None:
        call = client.session.control(signal, argument, 8.0)
        before = list(client.open)

        def done() -> None:
            stopped = signal != "stop" or all(each.group.done for each in before)
            assert stopped, "stopped, and a request is open"

        self.all_calls[call] = done
        self.say(client.name, "calls", signal, argument)

    def come_to_barrier(self, client: SimClient) -> None:
        client.barrier += 1
        index = client.barrier

        def done() -> None:
            late = [each.name for each in self.clients if each.member is not None and each.alive and each.ready
                    and each.connected and each.barrier < index]  # fmt: skip
            known = {client.name for client in self.core.peers.clients.values()}
            assert not set(late) & known, f"barrier {index} passed without {late}"
            members = {each.name for each in self.clients if each.member is not None}
            assert members <= self.joined, f"barrier {index} passed before {members - self.joined} came"

        self.all_calls[client.session.barrier(index)] = done

    def look_at_calls(self) -> None:
        """Check what must hold when a call has succeeded, once."""
        for call, done in self.all_calls.items():
            if done is not None and call.done():
                self.all_calls[call] = None
                if call.exception() is None:
                    done()

    # --- one event --------------------------------------------------------------------------------------------------

    def event(self) -> None:
        self.events += 1
        rng = self.rng
        choice = rng.random()
        if choice < 0.62:
            self.move_a_frame()
        elif choice < 0.82:
            self.step_a_rank()
        elif choice < 0.90:
            self.use_a_client()
        elif choice < 0.955:
            self.pass_time(rng.choice([0.1, 0.5, 1.0]))
        elif self.faults:
            self.fault()
        if self.text_jobs:
            self.answer_texts()
            self.flush_core()
        self.check()

    def movable(self) -> list[tuple[Peer, bool]]:
        found = []
        for peer in self.peers.values():
            if peer.connected and peer.outbox:
                found.append((peer, True))
            if peer.alive and not peer.hung and peer.inbox:
                found.append((peer, False))
        return found

    def move_a_frame(self) -> None:
        movable = self.movable()
        if movable:
            peer, outwards = self.rng.choice(movable)
            (self.deliver_to_core if outwards else self.deliver)(peer)

    def step_a_rank(self) -> None:
        ready = [rank for rank in self.ranks if rank.alive and not rank.hung and rank.engine.busy]
        if ready:
            rank = self.rng.choice(ready)
            rank.session.report(rank.engine.step())

    def use_a_client(self) -> None:
        rng = self.rng
        ready = [client for client in self.clients if client.alive and not client.hung and client.ready]
        if not ready:
            return
        client = rng.choice(ready)
        choice = rng.random()
        if choice < 0.55 and len(self.all_wanted) < 14:
            seed = rng.choice([None, rng.randrange(1000)])
            self.submit(client, rng.choice(PROMPTS), params_of(rng.choice([1, 1, 2, 4, 8]), seed))
        elif choice < 0.65 and client.open:
            wanted = rng.choice(client.open)
            wanted.aborted = True
            client.session.abort(wanted.group.request_id)
        elif choice < 0.80:
            self.call(client, rng.choice(["pause", "unpause", "suspend", "resume", FLUSH_PREFIX_CACHE]))
        elif choice < 0.90:
            self.version += 1
            self.call(client, SET_VERSION, self.version)
        elif choice < 0.905:
            self.call(client, "stop")
        elif client.member is not None:
            self.come_to_barrier(client)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for peer in list(self.peers.values()):
            # A process that is neither dead nor hung says that it lives.
            if peer.alive and not peer.hung and peer.connected and self.now - peer.spoken >= 1.0:
                peer.spoken = self.now
                peer.send(wire.Heartbeat())
        if self.core.next_deadline() <= self.now:
            self.core.tick(self.now)
            for peer in self.core.peers:
                assert self.now - peer.heard <= self.config.advanced.heartbeat_timeout_s, (
                    f"{peer.name} is dead, and still here"
                )
            assert self.core.control.next_deadline() > self.now
        self.flush_core()

    def fault(self) -> None:
        rng = self.rng
        choice = rng.random()
        peers = [peer for peer in (*self.ranks, *self.clients) if peer.alive]
        if not peers:
            return
        peer = rng.choice(peers)
        if choice < 0.25:
            self.say(peer.name, "dies")
            self.kill(peer)
        elif choice < 0.40:
            self.say(peer.name, "hangs")
            peer.hung = True
        elif choice < 0.55:
            peer.hung = False
        elif choice < 0.65:
            self.say(peer.name, "is cut off")
            peer.connected = False
        elif choice < 0.75:
            peer.connected = True
        elif choice < 0.85:
            self.say(peer.name, "loses frames")
            peer.gap = True
            (peer.inbox if rng.random() < 0.5 else peer.outbox).clear()
        elif choice < 0.95:
            number = rng.randrange(self.config.data_parallel_size + 1)
            self.say(f"rank-{number} arrives")
            self.start_rank(f"rank-{number}")
        elif isinstance(peer, SimRank) and rng.random() < 0.5:
            self.version += 1
            self.say(peer.name, "updates its weights")
            peer.engine.weights_updated(self.version)
            peer.session.moved()
        elif isinstance(peer, SimRank):
            self.let(peer, rest=not peer.engine.resting)
        if rng.random() < 0.1:
            peer.send(wire.Disconnect("going"))

    def let(self, rank: SimRank, *, rest: bool) -> None:
        """Its training loop leaves `generate`, or comes back."""
        self.say(rank.name, "rests" if rest else "attends")
        rank.engine.resting = rest
        rank.session.report([], everything=True)

    def kill(self, peer: Peer) -> None:
        peer.alive = peer.connected = False
        peer.inbox.clear()
        if isinstance(peer, SimClient):
            peer.session.lost(ConnectionLostError("dead"))

    def answer_texts(self) -> None:
        while self.text_jobs and self.rng.random() < 0.5:
            job = self.text_jobs.pop(self.rng.randrange(len(self.text_jobs)))
            if job.text is not None:
                self.core.tokenized(job.job_id, list(TEXTS[job.text]), self.now)
            else:
                completions = job.token_ids or []
                self.core.detokenized(job.job_id, [f"{len(each) // 4} tokens" for each in completions], self.now)

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        core = self.core
        if not self.touched:
            return
        self.touched = False
        open_requests = [request for client in core.peers.clients.values() for request in client.requests.values()]
        for client in core.peers.clients.values():
            held_bytes = sum(each.charged for each in client.requests.values())
            assert client.open_bytes == held_bytes, "what is charged is not what is held"
        for request in open_requests:
            parts = [request.queued, *(each.samples for each in request.assignments.values())]
            assert sum(map(len, parts)) == len(request.open), "a sample is lost, or twice somewhere"
            assert set().union(*parts) == request.open
        for rank in core.peers.ranks.values():
            self.newest_own[rank.name] = max(self.newest_own[rank.name], rank.policy_version)
        for rank in core.peers.ranks.values():
            assigned = sum(len(each.samples) for each in rank.assignments.values())
            load = core.dispatcher.router._ranks[rank.name].load
            assert self.config.deterministic_mode or load == assigned, f"load of {rank.name}"
            assert all(not each.request.closed for each in rank.assignments.values())
            assert all(each.request.client.identity in core.peers.clients for each in rank.assignments.values())
            for request in (each.request for each in rank.assignments.values() if each.request.client.catching_up):
                newest = max(self.newest_own[request.client.name], request.newest_version)
                assert rank.policy_version <= newest, f"{rank.name} is ahead of {request.client.name}"
        for call in core.control._calls.values():
            assert call.awaited.keys() <= core.peers.ranks.keys(), "a call waits for a rank that is gone"
        if self.events % 16 == 0:
            check(core.dispatcher.router)

    def check_agreement(self) -> None:
        """When nothing is on its way, coordinator and ranks have the same idea of who computes what."""
        if any(peer.gap or peer.hung or not peer.connected for peer in self.peers.values() if peer.alive):
            return
        for rank in self.core.peers.ranks.values():
            sim = self.peers.get(rank.identity)
            if isinstance(sim, SimRank) and sim.alive:
                theirs = set(sim.session._assignments.of_sample)
                ours = {
                    (each.request.request_id, index)
                    for each in rank.assignments.values()
                    for index in each.samples
                    if not each.held
                }
                assert theirs == ours, f"{sim.name} computes {theirs}, and should {ours}"

    def check_order(self) -> None:
        """Requests get their ranks in the order in which they arrived, but for those that come back, or were text.

        Those for which no rank has a suitable version are overtaken.
        """
        open_requests = {
            request.request_id: request
            for client in self.core.peers.clients.values()
            for request in client.requests.values()
        }
        self.behind.update(request.request_id for request in self.core.dispatcher.too_new)
        overtakes = self.config.tokenizer is not None and not self.config.deterministic_mode
        for number in [record.request_id for record in self.core.take_decisions()]:
            request = open_requests.get(number)
            first_time = number not in self.assigned
            self.assigned.add(number)
            if (
                request is not None
                and first_time
                and not (request.tokens.lengths or overtakes or number in self.behind)
            ):
                assert number > self.last_fresh, f"request {number} after {self.last_fresh}"
                self.last_fresh = number

    def check_stretch(self, wanted: Wanted, stretch: wire.Stretch) -> None:
        """Every token that reaches a client is the right one, under the version that sampled it."""
        for delta in stretch.deltas():
            labels, sampled = delta.policy_versions(), list(map(int, delta.log_prob_list()))
            assert labels == sampled, f"tokens of {sampled} are labelled {labels}"
            assert min(labels, default=wanted.min_version) >= wanted.min_version, (
                f"an asker of version {wanted.min_version} gets tokens of {labels}"
            )
            assert len(labels) == delta.count

    def check_error(self, wanted: Wanted, error: RolloutError) -> None:
        stopped = self.core.control.state is CoordinatorState.STOPPING
        reasons = {
            "RequestAbortedError": wanted.aborted or stopped,
            "EngineStateError": stopped,
            "RequestTimeoutError": wanted.timeout_s is not None or self.config.advanced.no_rank_timeout_s < 1e6,
            "RankLostError": self.core.sessions.max_rank_losses < 1000,
            "ConnectionLostError": True,
        }
        assert reasons.get(type(error).__name__), f"{type(error).__name__}: {error}"

    def check_result(self, wanted: Wanted) -> None:
        for sample in wanted.group.result():
            seed = sample.seed or 0
            length = length_of(seed, sample.sample_index)
            expected = [token_at(seed, sample.sample_index, position) for position in range(length)]
            assert sample.prompt_tokens == list(wanted.prompt)
            if sample.error is None:
                assert sample.generated_tokens == expected
            else:
                assert sample.generated_tokens == expected[: len(sample.generated_tokens)]
            labels = sample.policy_versions[len(wanted.prompt) :].tolist()
            assert labels == [int(each) for each in sample.generated_log_probs]
            if wanted.params.seed is not None:
                assert seed == wanted.params.seed
            if self.config.tokenizer is not None:
                assert sample.generated_text == f"{len(sample.generated_tokens)} tokens"

    # --- the end ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        self.faults = False
        self.say("the faults stop")
        for peer in (*self.ranks, *self.clients):
            peer.hung = False
            if peer.alive and not peer.connected:
                peer.connected = True
        if not any(rank.alive and rank.engine.state is not EngineState.STOPPED for rank in self.ranks):
            self.start_rank("rank-0")
        needed = range(self.config.data_parallel_size if self.config.deterministic_mode else 0)
        names = {f"rank-{number}" for number in needed}
        # Only a member's own rank may be as far behind as it is.
        names |= {client.name for client in self.clients if client.member is not None and client.alive}
        for name in sorted(names - {rank.name for rank in self.ranks if rank.alive}):
            self.start_rank(name)
        self.start_client("operator", member=None)
        operator = self.clients[-1]
        quiet = 0
        for turn in range(600):
            self.wake_one_if_all_rest()
            self.drain()
            # Whoever has lost frames is found out by the next one, a heartbeat at the latest.
            quiet = quiet + 1 if self.settled() else 0
            # Members whose session was lost are waited for at their barriers, for as long as a peer may be silent.
            if quiet == (14 if self.clients[0].member is not None else 3):
                break
            if turn == 50 and not self.core.peers.ranks:
                self.start_rank("rank-0")
            if operator.ready and turn % 4 == 1 and not quiet:
                self.go_on(operator)
            self.pass_time(1.0)
        else:
            raise AssertionError(f"not settled: {self.core.status()}")
        self.check_the_end()

    def wake_one_if_all_rest(self) -> None:
        """Wake a rank if all are idle: while one computes, nothing depends on those that never return."""
        here = [self.peers.get(identity) for identity in self.core.peers.ranks]
        ranks = [each for each in here if isinstance(each, SimRank) and each.alive]
        if ranks and all(rank.engine.resting for rank in ranks):
            self.let(self.rng.choice(ranks), rest=False)

    def drain(self) -> None:
        for _ in range(100_000):
            movable = self.movable()
            if movable:
                peer, outwards = movable[0]
                (self.deliver_to_core if outwards else self.deliver)(peer)
                continue
            while self.text_jobs:
                self.answer_texts()
            self.flush_core()
            if not self.movable():
                self.check_agreement()
            busy = [rank for rank in self.ranks if rank.alive and rank.engine.busy]
            for rank in busy:
                rank.session.report(rank.engine.step())
            self.check()
            if not busy and not self.movable():
                return
        raise AssertionError("it never comes to rest")

    def go_on(self, operator: SimClient) -> None:
        if self.core.control.state is CoordinatorState.SUSPENDED:
            self.call(operator, "resume")
        if self.core.control.state is CoordinatorState.PAUSED:
            self.call(operator, "unpause")
        waits = any(each.held for rank in self.core.peers.ranks.values() for each in rank.assignments.values())
        if self.core.dispatcher.too_new or waits:
            self.version += 1
            self.call(operator, SET_VERSION, self.version)

    def settled(self) -> bool:
        waiting = [each for each in self.all_wanted if not each.ends]
        dead = {peer.identity for peer in (*self.clients, *self.ranks) if not peer.alive}
        return (
            not waiting
            and not any(peer.identity in dead for peer in self.core.peers)
            and self.core.control.state in (CoordinatorState.RUNNING, CoordinatorState.STOPPING)
            and all(call.done() for call in self.all_calls if call not in self.barrier_calls())
        )

    def barrier_calls(self) -> list[Call]:
        return [call for client in self.clients for calls in client.session._barriers.values() for call in calls]

    def check_the_end(self) -> None:
        for wanted in self.all_wanted:
            assert wanted.ends == 1
            if wanted.group.error is None:
                self.check_result(wanted)
            else:
                self.check_error(wanted, wanted.group.error)
        self.drain()
        assert not any(client.requests for client in self.core.peers.clients.values())
        assert self.core.status()["queued_samples"] == 0
        for rank in self.core.peers.ranks.values():
            assert not rank.assignments
            sim = self.peers[rank.identity]
            assert isinstance(sim, SimRank)
            assert sim.session.num_open == 0, f"{sim.name} still computes {sim.session._assignments.of_sample.keys()}"
            if self.core.dispatcher.router.hashes_wanted() and not self.config.deterministic_mode:
                cached = held(self.core.dispatcher.router, rank.name)
                if self.core.dispatcher.router._max_hashes >= CACHE_BLOCKS:
                    assert cached == set(sim.engine.cache), f"{rank.name} holds {set(sim.engine.cache)}, not {cached}"
                else:
                    assert cached <= set(sim.engine.cache)
        check(self.core.dispatcher.router)
        members = [each for each in self.clients if each.member is not None and each.alive and each.ready]
        everybody_came = {each.name for each in self.clients if each.member is not None} <= self.joined
        for client in members if everybody_came else []:
            for index in client.session._barriers:
                assert any(each.barrier < index for each in members), f"barrier {index} should have been passed"


def run(seed: int, *, trace: bool = False) -> World:
    """One schedule.

    Raises:
        AssertionError: something that must hold does not.
    """
    world = World(seed, trace=trace)
    for _ in range(world.rng.choice([40, 80, 160])):
        world.event()
    world.settle()
    return world


def run_many(first: int, count: int) -> list[str]:
    """Schedules `first`, `first` + 1, …; prints and returns each seed that fails, with what broke, up to twenty."""
    failed: list[str] = []
    for seed in range(first, first + count):
        try:
            run(seed)
        except Exception as exc:  # noqa: BLE001 - whatever it is, the seed is what matters
            where = traceback.extract_tb(exc.__traceback__)[-1]
            failed.append(f"seed {seed}: {type(exc).__name__}: {exc} ({Path(where.filename).name}:{where.lineno})")
            print(failed[-1], flush=True)
            if len(failed) >= 20:
                print("many more may fail; stopped here", flush=True)
                break
    return failed


def run_many_for(pipe: Connection, first: int, count: int) -> None:
    pipe.send(run_many(first, count))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.distributed.coordinator.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="*", type=int, help="replay these, telling every event")
    parser.add_argument(
        "--many", nargs=2, type=int, metavar=("FIRST", "COUNT"), help="run so many, telling failures only"
    )
    options = parser.parse_args()
    if options.many:
        return int(bool(run_many(*options.many)))
    for seed in options.seeds:
        run(seed, trace=True)
        print(f"seed {seed}: everything holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
