"""The books: who is connected, which requests have not ended, what is known of each sample, where each is computed.

Always true: the tokens known of a sample are contiguous from 0. No I/O, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.coordinator.routing import Claim
from rollout.errors import SerializationError
from rollout.frames import Sequencer
from rollout.protocol import Stretch
from rollout.state import EngineState

MAX_SAMPLES = 1 << 16
"""Largest group."""

NO_BARRIER = -1


@dataclass(eq=False)
class Peer:
    """One session of one process."""

    identity: bytes
    name: str
    heard: float
    """When its last frame came."""
    spoken: float
    """When the last frame went to it."""
    frames: Sequencer = field(default_factory=Sequencer)


@dataclass(eq=False)
class ClientPeer(Peer):
    """Whoever submits and controls."""

    member: bool = False
    barrier: int = NO_BARRIER
    """The furthest barrier it has come to."""
    answered: int = NO_BARRIER
    """The furthest barrier it was told of."""
    last_request_id: int = -1
    open_bytes: int = 0
    """Of the prompts of its open requests."""
    requests: dict[int, OpenRequest] = field(default_factory=dict)
    """By the client's own id."""
    stretches: list[Stretch] = field(default_factory=list)
    """For its next `Update`."""
    stretch_bytes: int = 0
    """Of their tokens and log-probs, about."""


@dataclass(eq=False)
class RankPeer(Peer):
    """One engine."""

    slots: int = 0
    state: EngineState = EngineState.RUNNING
    policy_version: int = 0
    ready: bool = False
    """It has reached the state and version it was told at registration."""
    running: int = 0
    waiting: int = 0
    assignments: dict[int, Assignment] = field(default_factory=dict)
    """By attempt."""


@dataclass(eq=False)
class Assignment:
    """Samples of one request on one rank."""

    attempt: int
    request: OpenRequest
    rank: RankPeer
    samples: set[int]
    """Those that have not ended."""
    claim: Claim
    """What the router remembers it by."""


@dataclass(eq=False)
class OpenRequest:
    """A group of n samples on its way."""

    request_id: int
    client: ClientPeer
    client_request_id: int
    n: int
    params: bytes
    seed: int
    priority: int
    arrival_time: float
    interval: int
    deadline: float
    """Monotonic seconds."""
    prompt_bytes: int
    """Of the prompt as it came."""
    prompt: bytes | None = None
    """int32; None until a text has become tokens."""
    hashes: list[int] | None = None
    """Of the prompt's complete blocks; None until somebody asked."""
    open: set[int] = field(default_factory=set)
    """Samples that have not ended."""
    queued: set[int] = field(default_factory=set)
    """Of those, the ones that no rank has."""
    in_queue: bool = False
    closed: bool = False
    """It has ended, or failed."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Completion tokens known of each sample; 0 where it is not there."""
    rows: list[Stretch] = field(default_factory=list)
    """What is known of samples that have not ended, in order."""
    restarted: dict[int, int] = field(default_factory=dict)
    """Sample → the row from which on its tokens count."""
    newest_version: int = 0
    """Of any known token: an engine of an older version cannot go on from it."""
    losses: int = 0
    """Ranks that died under it."""
    too_new_since: float | None = None
    """Since when no rank has been of `newest_version`."""
    texts_due: int = 0
    """Stretches that wait for their text."""

    def absorb(self, stretch: Stretch) -> list[int]:
        """Add new tokens to what is known.

        Returns:
            The samples that have ended with it.

        Raises:
            SerializationError: a sample does not go on where it stands, or is not open.
        """
        lengths = self.lengths
        for index, start in zip(stretch.indices, stretch.starts, strict=True):
            if index not in self.open:
                raise SerializationError(f"sample {index} of request {self.request_id} is not open")
            known = lengths.get(index, 0)
            if start != known and start:
                raise SerializationError(
                    f"sample {index} of request {self.request_id} goes on at token {start}: must be {known} or 0"
                )
        for index, start, count in zip(stretch.indices, stretch.starts, stretch.counts, strict=True):
            if start < lengths.get(index, 0):
                self.restarted[index] = len(self.rows)
            lengths[index] = start + count
        for runs in stretch.versions:
            self.newest_version = max(self.newest_version, runs[0], *runs[1::2])
        outcomes = stretch.outcomes
        if outcomes is None:
            ended = []
        else:
            ended = [each for each, outcome in zip(stretch.indices, outcomes, strict=True) if outcome is not None]
            self.open.difference_update(ended)
        if len(ended) < len(stretch.indices):
            self.rows.append(stretch)
        return ended

    def known(self, samples: set[int]) -> list[Stretch]:
        """What an engine needs to go on with `samples`."""
        rows = []
        for position, row in enumerate(self.rows):
            wanted = {each for each in row.indices if each in samples and self.restarted.get(each, 0) <= position}
            if wanted:
                rows.append(row.only(wanted))
        return rows

    def completion(self, index: int, last: Stretch) -> bytes:
        """The whole completion's token ids (int32) of a sample that has ended with the stretch absorbed last."""
        rows = self.known({index})
        if not self.rows or self.rows[-1] is not last:
            rows.append(last.only({index}))
        return b"".join(tokens for row in rows for _, _, _, tokens, _, _ in row.samples())
