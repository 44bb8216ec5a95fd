"""The state of sessions and open requests: the known tokens of each sample, and the rank that computes the sample.

The known tokens of a sample are contiguous from token 0. This module does no I/O and does not read the clock.
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
"""The maximum number of samples in a group. Handling a group of this size takes some tens of milliseconds."""
MAX_KNOWN_BYTES = 16 << 20
"""The maximum size, in bytes, of the known tokens and log-probs in one assignment, which must fit into a frame."""
NO_BARRIER = -1


@dataclass(eq=False, slots=True)
class Peer:
    """The session of one connected process. Times are in monotonic seconds."""

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
    """The rank whose training loop uses this client. None if no training loop uses it, so barriers do not wait for it."""
    catching_up: bool = False
    """Whether this member has connected or reconnected and has not arrived at an open barrier since. The other members may
    have continued without it."""
    barrier: int = NO_BARRIER
    """The highest barrier at which the member has arrived."""
    answered: int = NO_BARRIER
    """The highest barrier reported to the member as passed."""
    word: Barrier | None = None
    """The client's last `Barrier` message."""
    last_request_id: int = -1
    open_bytes: int = 0
    """The number of bytes charged to the client's memory budget for its open requests."""
    requests: dict[int, OpenRequest] = field(default_factory=dict)
    """The client's open requests, indexed by the client's request id."""
    stretches: list[Stretch] = field(default_factory=list)
    """The stretches (batches of new tokens) to send in the client's next `Update`."""
    stretch_bytes: int = 0
    """The approximate size of `stretches`, in bytes."""


@dataclass(eq=False, slots=True)
class RankPeer(Peer):
    """The session of a rank, with the state of its engine."""

    max_requests: int = 0
    state: EngineState = EngineState.RUNNING
    policy_version: int = 0
    ready: bool = False
    """Whether the rank's engine has reached the state and policy version that the `RegisterAck` message required."""
    resting: bool = False
    """Whether the rank's engine is idle, because its training loop is outside `generate`."""
    waited_for_since: float = math.inf
    """The time since which other ranks compute while this rank is idle or has older weights; otherwise infinity."""
    running: int = 0
    waiting: int = 0
    progressed: float = 0.0
    """The time of the rank's last `Progress` message, which reports new tokens."""
    tokens: int = 0
    """The number of tokens that the rank has reported since its session began."""
    latencies: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=512))
    """One pair (seconds to the first token, seconds per later token) per recently finished sample."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    """The rank's open assignments, indexed by attempt."""


@dataclass(eq=False, slots=True)
class TextJob:
    """A tokenizer job: a string to tokenise, or completions (int32 token ids) to detokenise. A cancelled job has neither."""

    job_id: int
    text: str | None = None
    token_ids: list[bytes] | None = None

    def drop(self) -> None:
        """Cancel this tokenizer job. Thread-safe."""
        self.text = self.token_ids = None


@dataclass(eq=False, slots=True)
class Assignment:
    """The samples of one request that one rank computes."""

    attempt: int
    request: OpenRequest
    rank: RankPeer
    samples: set[int]
    """The indices of the samples that have not finished."""
    claim: Claim
    """The router's record of the block hashes that the rank is expected to cache because of this assignment."""
    held: bool = False
    """Whether the assignment has not been sent yet, because the rank's weights are too old."""


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request for a group of n samples, from its submission until all samples have finished."""

    request_id: int
    client: ClientPeer
    client_request_id: int
    n: int
    params: bytes
    share: str | None
    """The request's `SamplingParams.prefix_share`: only requests with the same value share cached blocks."""
    seed: int
    priority: int
    arrival_time: float
    interval: int
    deadline: float
    """The time at which the request fails, in monotonic seconds; infinity if there is no deadline."""
    since: float = 0.0
    """The time at which the request was accepted, in monotonic seconds."""
    charged: int = 0
    """The number of bytes charged to the client's memory budget until the request finishes."""
    prompt: bytes | None = None
    """The prompt's token ids (int32); None until a text prompt is tokenised."""
    images: bytes = b""
    """The tensors of the prompt's images, as msgpack that the coordinator never decodes."""
    keyed: bytes = b""
    """The tokens (int32) from which block hashes are computed, in place of `prompt`; see `Submit.keyed`. If this is
    empty and the prompt has images, no hashes are computed."""
    hashes: list[int] | None = None
    """The hashes of the prompt's complete blocks; None until they are first used."""
    open: set[int] = field(default_factory=set)
    """The indices of the samples that have not finished."""
    queued: set[int] = field(default_factory=set)
    """The indices of the open samples that are not assigned to a rank."""
    in_queue: bool = False
    placed: bool = False
    """Whether the request was ever assigned to a rank."""
    closed: bool = False
    """Whether the request has finished or failed."""
    assignments: dict[int, Assignment] = field(default_factory=dict)
    tokens: PartialGroup = field(default_factory=PartialGroup)
    """The known tokens of the samples that have not finished."""
    newest_version: int = 0
    """The highest of the policy versions of the request's tokens and of its client's weights at submission. An engine with
    older weights does not compute the request."""
    losses: int = 0
    """The number of ranks that were lost while computing the request, counted since the request's last new token."""
    too_new_since: float = math.inf
    """The time since which no rank has had suitable weights for the request; infinity if a rank has them."""
    text_jobs: dict[int, TextJob] = field(default_factory=dict)
    """The pending tokenizer jobs, by id: the prompt to tokenise, or completions to detokenise."""

    def absorb(self, stretch: Stretch) -> list[int]:
        """Add a batch of new tokens; return the indices of the samples that have finished with it.

        The tokens of finished samples are stored until `tokens.forget` is called.

        Raises:
            SerializationError: a sample is not open, or the new tokens do not continue the sample's known tokens.
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
        """Split the sample indices `samples` into lists, so that the known tokens of each list fit into one frame."""
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
