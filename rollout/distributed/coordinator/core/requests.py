"""State of open requests: tokens known of each sample, and the rank that computes it.

Always true: the tokens known of a sample are contiguous from 0. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from operator import add

from rollout.distributed.coordinator.core.prefixes import Claim
from rollout.distributed.protocol.fields import TOKEN_BYTES
from rollout.distributed.protocol.frames import Sequencer
from rollout.distributed.protocol.messages import Stretch
from rollout.errors import SerializationError
from rollout.state import EngineState

MAX_SAMPLES = 1 << 16
"""Largest group."""

MAX_KNOWN_BYTES = 16 << 20
"""Of known tokens, log-probs and top-n rows in one assignment: with the prompt they must fit into a frame."""

ROWS_TOGETHER = 64
"""So many rows of known tokens become one: a stream brings one per token, and objects are what memory goes to."""

NO_BARRIER = -1

_Part = tuple[bytes, bytes, list[int], float | None]
"""A sample's tokens, log-probs, versions and time to the first token, of one stretch."""


@dataclass(eq=False, slots=True)
class Peer:
    """One session of one process."""

    identity: bytes
    name: str
    heard: float
    """When its last frame came."""
    spoken: float
    """When the last frame went to it."""
    frames: Sequencer = field(default_factory=Sequencer)


@dataclass(eq=False, slots=True)
class ClientPeer(Peer):
    """Whoever submits and controls."""

    member: int | None = None
    """Which rank's training loop it is."""
    barrier: int = NO_BARRIER
    """The furthest barrier it has come to."""
    answered: int = NO_BARRIER
    """The furthest barrier it was told of."""
    last_request_id: int = -1
    open_bytes: int = 0
    """What its open requests hold, as `Admission` counts."""
    policy_version: int = 0
    """Of its weights, as a member has told."""
    requests: dict[int, OpenRequest] = field(default_factory=dict)
    """By the client's own id."""
    stretches: list[Stretch] = field(default_factory=list)
    """For its next `Update`."""
    stretch_bytes: int = 0
    """Theirs, about."""


@dataclass(eq=False, slots=True)
class RankPeer(Peer):
    """One engine."""

    slots: int = 0
    state: EngineState = EngineState.RUNNING
    policy_version: int = 0
    ready: bool = False
    """It has answered its registration: it is in the state it was told."""
    resting: bool = False
    """Nobody steps its engine: its training loop has left `generate`."""
    waited_for_since: float | None = None
    """Since when others compute while it rests, or has older weights; None: it does not."""
    running: int = 0
    waiting: int = 0
    progressed: float = 0.0
    """When it last said what it had computed."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    """By attempt."""


@dataclass(eq=False, slots=True)
class TextJob:
    """Work for a tokenizer: a text to be tokens, or completions (int32 token ids) to be texts; neither: nobody waits."""

    job_id: int
    text: str | None = None
    token_ids: list[bytes] | None = None

    def drop(self) -> None:
        """Nobody waits for it any more; from any thread."""
        self.text = self.token_ids = None


@dataclass(eq=False, slots=True)
class Assignment:
    """Samples of one request on one rank."""

    attempt: int
    request: OpenRequest
    rank: RankPeer
    samples: set[int]
    """Those that have not ended."""
    claim: Claim
    """What the router remembers it by."""
    held: bool = False
    """The rank has not been told: its weights are older than they must be."""


@dataclass(eq=False, slots=True)
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
    charged: int = 0
    """Bytes its client pays for until it ends."""
    prompt: bytes | None = None
    """int32; None until a text has become tokens."""
    hashes: list[int] | None = None
    """Of the prompt's complete blocks; None until somebody asked."""
    open: set[int] = field(default_factory=set)
    """Samples that have not ended."""
    queued: set[int] = field(default_factory=set)
    """Of those, the ones that no rank has."""
    in_queue: bool = False
    placed: bool = False
    """Some rank was chosen for it once."""
    closed: bool = False
    """It has ended, or failed."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    """Completion tokens known of each sample; 0 where it is not there."""
    rows: list[Stretch] = field(default_factory=list)
    """What is known of samples that have not ended, in order."""
    newest_version: int = 0
    """Of any known token and of its asker: no engine of an older version computes it."""
    losses: int = 0
    """Ranks that died under it since its last new token."""
    too_new_since: float | None = None
    """Since when it waits for a rank of `newest_version`; None: it does not."""
    text_jobs: dict[int, TextJob] = field(default_factory=dict)
    """By their ids: its prompt, or completions that wait for their text."""

    def absorb(self, stretch: Stretch) -> list[int]:
        """Add new tokens to what is known.

        Returns:
            The samples that have ended with it.

        Raises:
            SerializationError: a sample does not go on where it stands, or is not open.
        """
        if len(self.rows) >= ROWS_TOGETHER and self.rows[-1].top_n is None:
            self.rows = self.known(self.open)
        lengths, indices, starts = self.lengths, stretch.indices, stretch.starts
        known = [lengths.get(index, 0) for index in indices]
        if known != starts or not self.open.issuperset(indices):
            self._refuse_what_does_not_follow(indices, starts, known)
        lengths.update(zip(indices, map(add, starts, stretch.counts), strict=True))
        for runs in stretch.versions:
            # The prompt's is no newer than its tokens', and those only rise.
            self.newest_version = max(self.newest_version, runs[-2] if len(runs) > 1 else runs[0])
        outcomes = stretch.outcomes
        if outcomes is None:
            ended = []
        else:
            ended = [each for each, outcome in zip(stretch.indices, outcomes, strict=True) if outcome is not None]
            self.open.difference_update(ended)
        if len(ended) < len(stretch.indices):
            self.rows.append(stretch)
        return ended

    def _refuse_what_does_not_follow(self, indices: list[int], starts: list[int], known: list[int]) -> None:
        for index, start, length in zip(indices, starts, known, strict=True):
            if index not in self.open:
                raise SerializationError(f"sample {index} of request {self.request_id} is not open")
            if start not in (length, 0):
                raise SerializationError(
                    f"sample {index} of request {self.request_id} goes on at token {start}: must be {length} or 0"
                )

    def known(self, samples: Collection[int]) -> list[Stretch]:
        """What an engine needs to go on with `samples`, in as few stretches as there can be."""
        if any(row.top_n is not None for row in self.rows):
            # Their top-n rows are packed, and nobody here reads them.
            wanted = ({each for each in row.indices if each in samples} for row in self.rows)
            return [row.only(indices) for row, indices in zip(self.rows, wanted, strict=True) if indices]
        parts: dict[int, list[_Part]] = {}
        for row in self.rows:
            for index, start, _, tokens, log_probs, column in row.samples():
                if index in samples:
                    if not start:
                        parts[index] = []
                    ttft = None if row.ttfts is None else row.ttfts[column]
                    parts[index].append((tokens, log_probs, row.versions[column], ttft))
        return [_joined(parts)] if parts else []

    def portions(self, samples: list[int]) -> list[list[int]]:
        """`samples` in parts whose known tokens fit into one frame each."""
        if not self.rows:
            return [samples]
        sizes = {index: 2 * TOKEN_BYTES * self.lengths.get(index, 0) for index in samples}
        for row in self.rows:
            for index, packed in zip(row.indices, row.top_n or (), strict=False):
                if index in sizes:
                    sizes[index] += len(packed or b"")
        portions: list[list[int]] = [[]]
        room = MAX_KNOWN_BYTES
        for index in samples:
            room -= sizes[index]
            if room < 0 and portions[-1]:
                portions.append([])
                room = MAX_KNOWN_BYTES - sizes[index]
            portions[-1].append(index)
        return portions

    def completion(self, index: int, last: Stretch) -> bytes:
        """The whole completion's token ids (int32) of a sample that has ended with the stretch absorbed last."""
        parts: list[bytes] = []
        for row in self.rows if self.rows and self.rows[-1] is last else [*self.rows, last]:
            if index in row.indices:
                column = row.indices.index(index)
                if not row.starts[column]:
                    parts.clear()
                first = TOKEN_BYTES * sum(row.counts[:column])
                parts.append(row.token_ids[first : first + TOKEN_BYTES * row.counts[column]])
        return b"".join(parts)


def _joined(parts: dict[int, list[_Part]]) -> Stretch:
    ttfts = [next((ttft for _, _, _, ttft in rows if ttft is not None), None) for rows in parts.values()]
    token_ids = [b"".join(tokens for tokens, _, _, _ in rows) for rows in parts.values()]
    return Stretch(
        0,
        0,
        [*parts],
        [0] * len(parts),
        [len(tokens) // TOKEN_BYTES for tokens in token_ids],
        b"".join(token_ids),
        b"".join(log_probs for rows in parts.values() for _, log_probs, _, _ in rows),
        [_joined_runs([versions for _, _, versions, _ in rows]) for rows in parts.values()],
        None if ttfts.count(None) == len(ttfts) else ttfts,
    )


def _joined_runs(versions: list[list[int]]) -> list[int]:
    """[version of the prompt, version, count, …] of pieces that follow each other."""
    joined = versions[0][:1]
    for row in versions:
        for version, count in zip(row[1::2], row[2::2], strict=True):
            if len(joined) > 1 and joined[-2] == version:
                joined[-1] += count
            else:
                joined += (version, count)
    return joined
