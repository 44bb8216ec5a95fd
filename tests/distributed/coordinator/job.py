"""Coordinator core with scripted clients and ranks; frames are real, time is a number."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from rollout.distributed.coordinator.core.coordinator import CoordinatorCore
from rollout.distributed.coordinator.core.requests import TextJob
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.frames import decode, encode
from tests.configs import coordinator_config

Kind = TypeVar("Kind", bound=wire.Message)
BLOCK = 4
LONG = tuple(range(40))
"""A prompt of several blocks."""


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def stretch(
    assign: wire.Assign,
    rows: dict[int, tuple[int, Sequence[int]]],
    *,
    ended: Sequence[int] = (),
    version: int = 0,
    **columns: Any,
) -> wire.Stretch:
    """{sample: (start, tokens)} of an assignment; a token's log-prob is minus itself."""
    tokens = [token for _, made in rows.values() for token in made]
    return wire.Stretch(
        assign.request_id,
        assign.attempt,
        list(rows),
        [start for start, _ in rows.values()],
        [len(made) for _, made in rows.values()],
        int32(*tokens),
        (-np.array(tokens, "<f4")).tobytes(),
        [[version, version, len(made)] if made else [version] for _, made in rows.values()],
        columns | ({"outcome": [b"ended" if index in ended else None for index in rows]} if ended else {}),
    )


class Job:
    def __init__(self, **options: Any) -> None:
        options = {"block_size_tokens": BLOCK, "heartbeat_timeout_s": 10.0} | options
        self.config = coordinator_config(**options)
        self.core = CoordinatorCore(self.config)
        self.now = 0.0
        self.lines: dict[bytes, Line] = {}
        self._members: dict[str, int] = {}
        """Name → which rank's training loop it is."""
        self.core.tick(self.now)

    def client(self, name: str = "client", *, member: bool = False) -> Line:
        client = Line(self, name.encode())
        client.say(
            wire.Connect(
                wire.PROTOCOL_VERSION, name, self._members.setdefault(name, len(self._members)) if member else None
            )
        )
        client.told = client.hear(wire.ConnectAck)
        return client

    def rank(self, name: str = "rank", slots: int = 8, *, version: int = 0, ready: bool = True) -> Line:
        """A rank that has registered and, if `ready`, reached what it was told."""
        lives = sum(each.startswith(name.encode()) for each in self.lines)
        rank = Line(self, f"{name}-{lives}".encode())
        rank.say(wire.Register(wire.PROTOCOL_VERSION, name, slots, BLOCK, "running", version))
        rank.told = rank.hear(wire.RegisterAck)
        if ready:
            rank.say(wire.EngineMoved("running", rank.told.policy_version))
        return rank

    def carry(self) -> None:
        for identity, sequence, message in self.core.take_outbox():
            there, carried = decode(encode(sequence, message))
            if identity in self.lines:
                self.lines[identity].arrives(there, carried)

    def wait(self, seconds: float, step: float = 0.5, *, silent: Sequence[Line] = ()) -> None:
        """Time passes; everybody that is here says that it lives, except the silent."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for line in self.lines.values():
                if self.core.peers.get(line.identity) is not None and line not in silent:
                    line.say(wire.Heartbeat())
            if self.now >= self.core.next_deadline():
                self.core.tick(self.now)
            self.carry()

    def text_jobs(self) -> list[TextJob]:
        return self.core.take_text_jobs()

    def decisions(self) -> list[tuple[int, int]]:
        return [(each.request_id, each.rank_index) for each in self.core.take_decisions()]


class Line:
    """One peer: what it says is heard at once; what it has heard waits until the test asks."""

    def __init__(self, job: Job, identity: bytes) -> None:
        self.job = job
        self.identity = identity
        self.heard: deque[wire.Message] = deque()
        self.numbers: list[int] = []
        """The sequence numbers of all frames received."""
        self.said = 0
        self.told: wire.ConnectAck | wire.RegisterAck
        """The reply to the handshake."""
        self._requests = 0
        self._calls = 0
        job.lines[identity] = self

    def arrives(self, sequence: int, message: wire.Message) -> None:
        self.numbers.append(sequence)
        if not isinstance(message, wire.Heartbeat):
            self.heard.append(message)

    def say(self, *messages: wire.Message) -> None:
        for message in messages:
            there, carried = decode(encode(self.said, message))
            self.said += 1
            self.job.core.receive(self.identity, there, carried, self.job.now)
        self.job.carry()

    def hear(self, kind: type[Kind]) -> Kind:
        assert self.heard, f"nothing has come where {kind.__name__} was expected"
        message = self.heard.popleft()
        assert isinstance(message, kind), message
        return message

    def quiet(self) -> bool:
        return not self.heard

    # --- as a client ------------------------------------------------------------------------------------------------

    def submit(self, prompt: Sequence[int] | str = (1, 2, 3), n: int = 1, **fields: Any) -> int:
        number = fields.pop("request_id", self._requests)
        self._requests = number + 1
        self.say(wire.Submit(number, prompt if isinstance(prompt, str) else int32(*prompt), n, b"\x80", **fields))
        return number

    def call(self, signal: str, argument: int | str | None = None, timeout_s: float = 8.0) -> int:
        self._calls += 1
        self.say(wire.Control(self._calls, signal, argument, timeout_s))
        return self._calls

    def failed(self, error: str) -> wire.RequestFailed:
        failure = self.hear(wire.RequestFailed)
        assert failure.error == error, failure
        return failure

    def answered(self) -> wire.ControlDone:
        return self.hear(wire.ControlDone)

    def stretches(self) -> list[wire.Stretch]:
        return self.hear(wire.Update).stretches

    # --- as a rank --------------------------------------------------------------------------------------------------

    def assigned(self) -> wire.Assign:
        return self.hear(wire.Assign)

    def assigned_ids(self) -> list[int]:
        return [self.assigned().request_id for _ in range(len(self.heard))]

    def progress(self, *stretches: wire.Stretch, **fields: Any) -> None:
        self.say(wire.Progress(list(stretches), **fields))

    def finish(self, assign: wire.Assign, tokens: Sequence[int] = (7,), version: int = 0) -> None:
        """All samples of an assignment end with these tokens behind what is known."""
        known = dict.fromkeys(assign.indices, 0)
        for row in assign.known:
            known |= {each.sample_index: each.start + each.count for each in row.deltas()}
        rows = {index: (start, tokens) for index, start in known.items()}
        self.progress(stretch(assign, rows, ended=assign.indices, version=version))

    def obey(self, *, error: str | None = None, state: str = "running", version: int | None = None) -> wire.Command:
        """Do the next command, which must be there, or fail at it."""
        command = self.hear(wire.Command)
        if version is None:
            peer = self.job.core.peers.ranks[self.identity]
            version = command.argument if command.signal == "set_version" and error is None else peer.policy_version
        self.say(wire.CommandAck(command.command_id, state, version, error))
        return command

    def is_gone(self) -> bool:
        return self.job.core.peers.get(self.identity) is None


def lose(job: Job, rank: Line) -> None:
    job.core.unreachable(rank.identity, "its connection is gone", job.now)
    job.carry()
