"""A client's session of the tests, and what a coordinator says to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rollout.distributed.client.group import OpenGroup
from rollout.distributed.client.session import ClientSession
from rollout.distributed.protocol.frames import decode, encode
from rollout.distributed.protocol.messages import Message, Refused, Stretch
from rollout.distributed.protocol.outcome import Outcome, pack
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams

PROMPT = [5, 6, 7]


class Line:
    """A session, what it has sent, and a way to answer it: everything passes through real frames."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.refused: list[Refused] = []
        self.done: list[OpenGroup] = []
        self.session = ClientSession(self._send, clock=lambda: 1000.0, on_refused=self.refused.append)

    def _send(self, message: Message) -> None:
        self.sent.append(decode(encode(0, message))[1])

    def submit(self, prompt: Any = PROMPT, n: int = 1, **options: Any) -> OpenGroup:
        group = self.session.submit(prompt, SamplingParams(n=n), **options)
        group.on_done = self.done.append
        return group

    def receive(self, *messages: Message) -> None:
        for message in messages:
            self.session.receive(decode(encode(0, message))[1])


def floats(count: int, first: int = 0) -> np.ndarray:
    return -np.arange(first, first + count, dtype="<f4") / 8


def stretch(
    request_id: int, rows: dict[int, tuple[int, list[int]]], *, version: int = 0, ended: tuple[int, ...] = (), **columns
) -> Stretch:
    """{sample: (start, tokens)} in one stretch; log-probs follow from where a token stands."""
    starts, tokens = [start for start, _ in rows.values()], [made for _, made in rows.values()]
    outcomes = [pack(outcome(start + len(made))) if index in ended else None for index, (start, made) in rows.items()]
    return Stretch(
        request_id,
        0,
        list(rows),
        starts,
        [len(made) for made in tokens],
        b"".join(np.array(made, "<i4").tobytes() for made in tokens),
        b"".join(floats(len(made), start).tobytes() for start, made in rows.values()),
        [[version, version, len(made)] if made else [version] for made in tokens],
        columns | ({"outcome": outcomes} if ended else {}),
    )


def outcome(made: int, **changes: Any) -> Outcome:
    ended = Outcome(
        "length", None, None, 0, VersionSpans([(0, len(PROMPT) + made)]),
        VersionSpans([(0, len(PROMPT) + max(made - 1, 0))]), [0.5] * max(made - 1, 0), None, 2.0, 0, None, None, 256, 42,
    )  # fmt: skip
    return replace(ended, **changes)
