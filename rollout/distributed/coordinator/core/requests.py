"""State of open requests: the known tokens of each sample, and the rank that computes it.

Always true: the known tokens of a sample are contiguous from 0. No I/O, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from rollout.distributed.coordinator.core.routing import Claim
from rollout.distributed.protocol.frames import Sequencer
from rollout.distributed.protocol.messages import Barrier, Stretch
from rollout.distributed.protocol.stretch import PartialGroup
from rollout.errors import SerializationError
from rollout.state import EngineState

MAX_SAMPLES = 1 << 13
"""The largest group. With known tokens for each sample it takes some tens of milliseconds."""
MAX_KNOWN_BYTES = 16 << 20
"""The maximum size of known tokens, log-probs and top-n rows in one assignment, which must fit into a frame."""
NO_BARRIER = -1


@dataclass(eq=False, slots=True)
class Peer:
    """The session of one connected process."""

    identity: bytes
    name: str
    heard: float
    """The time of the last frame received from the peer."""
    spoken: float
    """The time of the last frame sent to the peer."""
    frames: Sequencer = field(default_factory=Sequencer)


@dataclass(eq=False, slots=True)
class ClientPeer(Peer):
    """The session of a client."""

    member: int | None = None
    """The rank of this client's training loop; None: not a member."""
    catching_up: bool = False
    """Whether this member has not arrived at an open barrier yet, so others may have continued without it."""
    barrier: int = NO_BARRIER
    """The highest barrier at which the member has arrived."""
    answered: int = NO_BARRIER
    """The highest barrier reported to the member as passed."""
    word: Barrier | None = None
    """The client's last `Barrier` message."""
    last_request_id: int = -1
    open_bytes: int = 0
    """The bytes charged for the client's open requests."""
    requests: dict[int, OpenRequest] = field(default_factory=dict)
    """Open requests by client-side id."""
    stretches: list[Stretch] = field(default_factory=list)
    """Stretches of the client's next `Update`."""
    stretch_bytes: int = 0
    """The approximate size of these stretches, in bytes."""


@dataclass(eq=False, slots=True)
class RankPeer(Peer):
    """The session of a rank, with the state of its engine."""

    max_requests: int = 0
    state: EngineState = EngineState.RUNNING
    policy_version: int = 0
    ready: bool = False
    """Whether the rank has reached the state of its `RegisterAck`."""
    resting: bool = False
    """Whether the rank's engine is idle: the training loop is outside `generate`."""
    waited_for_since: float = math.inf
    """The start of the grace period of a rank that is idle or behind while others compute; infinity: it is neither."""
    running: int = 0
    waiting: int = 0
    progressed: float = 0.0
    """The time of the rank's last `Progress`."""
    tokens: int = 0
    """The number of tokens that the rank has reported in this session."""
    latencies: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=512))
    """(seconds to the first token, seconds per later token) of recently finished samples."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    """Open assignments by attempt."""


@dataclass(eq=False, slots=True)
class TextJob:
    """A tokenizer job: a text to tokenise, or completions (int32 token ids) to detokenise. Neither: cancelled."""

    job_id: int
    text: str | None = None
    token_ids: list[bytes] | None = None

    def drop(self) -> None:
        """Cancel the job. Thread-safe."""
        self.text = self.token_ids = None


@dataclass(eq=False, slots=True)
class Assignment:
    """The samples of one request that one rank computes."""

    attempt: int
    request: OpenRequest
    rank: RankPeer
    samples: set[int]
    """Samples that have not ended."""
    claim: Claim
    """The router's handle of the expected hashes."""
    held: bool = False
    """Whether the assignment has not been sent yet, because the rank's weights are too old."""


@dataclass(eq=False, slots=True)
class OpenRequest:
    """An open group of n samples."""

    request_id: int
    client: ClientPeer
    client_request_id: int
    n: int
    params: bytes
    share: str | None
    """The part of the prefix cache in which the request's blocks are found, as `SamplingParams.prefix_share`."""
    seed: int
    priority: int
    arrival_time: float
    interval: int
    deadline: float
    """The time at which the request fails, in monotonic seconds; infinity: never."""
    since: float = 0.0
    """The time of acceptance, in monotonic seconds."""
    charged: int = 0
    """The bytes charged to the client until the request ends."""
    prompt: bytes | None = None
    """Token ids (int32); None until the text is tokenised."""
    images: bytes = b""
    """msgpack of its images' tensors, which the coordinator never decodes."""
    keyed: bytes = b""
    """The input of the block hashes, instead of the prompt. Empty with images: there are no hashes."""
    hashes: list[int] | None = None
    """Hashes of the prompt's complete blocks, computed on first use."""
    open: set[int] = field(default_factory=set)
    """Samples that have not ended."""
    queued: set[int] = field(default_factory=set)
    """Open samples that are not assigned."""
    in_queue: bool = False
    placed: bool = False
    """Whether the request was ever assigned to a rank."""
    closed: bool = False
    """Whether the request has ended or failed."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    tokens: PartialGroup = field(default_factory=PartialGroup)
    """Known tokens of the samples that have not ended."""
    newest_version: int = 0
    """Highest version of its tokens, or of its client's weights when it was submitted; older engines do not compute it."""
    losses: int = 0
    """The number of ranks lost while computing the request, since its last new token."""
    too_new_since: float = math.inf
    """The start of its wait for a rank of `newest_version`; infinity: it does not wait."""
    text_jobs: dict[int, TextJob] = field(default_factory=dict)
    """Pending text jobs by id: the prompt to tokenise, or completions to detokenise."""

    def absorb(self, stretch: Stretch) -> list[int]:
        """Add a stretch of new tokens; return the samples that it ended. `tokens.forget` drops them.

        Raises:
            SerializationError: a sample is not open, or the tokens do not continue its known tokens.
        """
        if not self.open.issuperset(stretch.indices):
            index = next(index for index in stretch.indices if index not in self.open)
            raise SerializationError(f"sample {index} of request {self.request_id} is not open")
        self.tokens.take(stretch)
        self.newest_version = max(self.newest_version, stretch.newest_version())
        ended = stretch.ended()
        self.open.difference_update(ended)
        return ended

    def portions(self, samples: list[int]) -> list[list[int]]:
        """Split `samples` into parts whose known tokens fit into one frame each."""
        if not self.tokens.lengths:
            return [samples]
        self.tokens.compact()
        known = self.tokens.deltas(samples)
        portions: list[list[int]] = [[]]
        room = MAX_KNOWN_BYTES
        for index in samples:
            size = known[index].buffer_bytes if index in known else 0
            room -= size
            if room < 0 and portions[-1]:
                portions.append([])
                room = MAX_KNOWN_BYTES - size
            portions[-1].append(index)
        return portions
