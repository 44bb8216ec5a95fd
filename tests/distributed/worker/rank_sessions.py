"""A rank's session of the tests, without a socket: what it receives and what it sends."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from rollout.distributed.protocol.frames import decode, encode
from rollout.distributed.protocol.messages import Assign, Message, Progress, RegisterAck, Stretch
from rollout.distributed.protocol.outcome import Outcome, unpack
from rollout.distributed.worker.session import RankSession
from rollout.engine.engine import DynamicInferenceEngine
from rollout.requests.delta import SampleDelta
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from tests.engines import finish, make_engine


def packed(params: SamplingParams) -> bytes:
    blob: bytes = msgpack.packb(params.serialize())
    return blob


def assign(prompt: list[int], params: SamplingParams, *, attempt: int = 1, **changes: Any) -> Assign:
    values: dict[str, Any] = {
        "request_id": 0,
        "attempt": attempt,
        "indices": list(range(params.n)),
        "prompt": np.asarray(prompt, "<i4").tobytes(),
        "params": packed(params),
        "seed": 11,
        "priority": 0,
        "arrival_time": 0.0,
        "interval": 4,
        "known": [],
    }
    return Assign(**(values | changes))


def welcome(state: str = "running", version: int = 0) -> RegisterAck:
    return RegisterAck(state, version, 1.0, 30.0)


class Rank:
    """An engine with a session, and all that was said; messages pass through their frames."""

    def __init__(self, engine: DynamicInferenceEngine, *, enter: bool = True, **options: Any) -> None:
        self.engine = engine
        self.idle = False
        self.said: list[Message] = []
        self.session = RankSession(engine, self._hear, idle=lambda: self.idle, **options)
        self.cached = set(engine.track_prefix_cache(self.session.changes))
        if enter:
            self.hears(welcome())
            self.said.clear()

    def _hear(self, message: Message) -> None:
        message = decode(encode(0, message))[1]
        if isinstance(message, Progress):
            if message.flushed:
                self.cached.clear()
            self.cached -= set(np.frombuffer(message.blocks_removed, "<i8").tolist())
            self.cached |= set(np.frombuffer(message.blocks_added, "<i8").tolist())
        self.said.append(message)

    def hears(self, *messages: Message) -> None:
        for message in messages:
            self.session.receive(decode(encode(0, message))[1])

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            if self.engine.has_unfinished and self.engine.state is EngineState.RUNNING:
                self.session.report(self.engine.step())

    def finish(self) -> None:
        self.step(500)
        assert not self.engine.has_unfinished
        assert self.session.num_open == 0
        assert self.engine.context.allocator.num_used == 0
        assert self.cached == set(self.engine.context.allocator.index.current)

    def stretches(self) -> list[Stretch]:
        return [stretch for message in self.said if isinstance(message, Progress) for stretch in message.stretches]

    def take(self, kind: type[Message]) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]


class Told:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.prompt_version = -1
        self.top_n: list[Any] = []
        self.ttft: float | None = None
        self.text: str | None = None
        self.outcome: Outcome | None = None
        self.restarts = 0

    def hear(self, delta: SampleDelta) -> None:
        assert self.outcome is None, "an ended sample goes on"
        if delta.start == 0:
            self.restarts += bool(self.tokens)
            self.__dict__ |= {"tokens": [], "log_probs": [], "versions": [], "top_n": [], "ttft": None}
            self.prompt_version = delta.prompt_version
        assert delta.start == len(self.tokens)
        assert delta.prompt_version == self.prompt_version
        self.tokens += delta.token_list()
        self.log_probs += delta.log_prob_list()
        self.versions += delta.policy_versions()
        self.top_n += delta.top_n_rows()
        if delta.ttft is not None:
            self.ttft = delta.ttft
        if delta.text is not None:
            self.text = delta.text
        if delta.outcome is not None:
            self.outcome = unpack(delta.outcome)


def put_together(stretches: list[Stretch], told: dict[int, Told] | None = None) -> dict[int, Told]:
    told = {} if told is None else told
    for stretch in stretches:
        stretch.check()
        for delta in stretch.deltas():
            told.setdefault(delta.sample_index, Told()).hear(delta)
    return told


def undisturbed(prompt: list[int], params: SamplingParams, **options: Any) -> dict[int, Any]:
    engine = make_engine("qwen3", **options)
    engine.add_request(prompt, params.replace(seed=11), request_id=0)
    return {index: request for (_, index), request in finish(engine).items()}
