"""Messages of requests: submission, assignment, progress, results, failures."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.distributed.protocol import fields as wire
from rollout.distributed.protocol.fields import Message
from rollout.distributed.protocol.stretch import Stretches


@dataclass(slots=True)
class Submit(Message):
    """New group of n samples of one prompt."""

    header, way = 20, "client → coordinator"
    request_id: wire.Count
    """Client-side id; increases with every message."""
    prompt: wire.Prompt
    n: wire.Count
    params: wire.Blob
    """msgpack of `SamplingParams.serialize()`."""
    seed: wire.OptionalCount = None
    """Seed of the random streams; None: derived from the coordinator's seed and the order of arrival."""
    priority: wire.Priority = 0
    arrival_time: wire.OptionalSeconds = None
    """Wall-clock time; None: now."""
    timeout_s: wire.OptionalSeconds = None
    """Deadline in seconds after arrival. None: no deadline while any rank is connected."""
    interval: wire.Count = 0
    """Tokens per sample between two reports; 0: the coordinator's interval."""
    known: Stretches = field(default_factory=list)
    """Tokens known of a continued group (`request_id` and `attempt` are ignored)."""
    wanted: wire.Counts = field(default_factory=list)
    """Samples to compute if the others have ended; empty: all."""
    min_policy_version: wire.Count = 0
    """Lowest policy version of an engine that may compute it: that of the client's weights."""
    images: wire.Blob = b""
    """msgpack of the tensors of its images by name; empty: a prompt of text."""
    keyed: wire.Tokens = b""
    """The prompt with a key of its image in place of every placeholder, of which block hashes are made. Empty: the prompt;
    with images: it is routed by load alone."""


@dataclass(slots=True)
class Accepted(Message):
    """Token ids of a prompt that was submitted as text."""

    header, way = 21, "coordinator → client"
    request_id: wire.Count
    prompt: wire.Tokens


@dataclass(slots=True)
class Assign(Message):
    """Samples assigned to one rank."""

    header, way = 22, "coordinator → rank"
    request_id: wire.Count
    """Coordinator-side id."""
    attempt: wire.Count
    """Unique, increasing id of the assignment; reports with an older attempt are discarded."""
    indices: wire.Counts
    prompt: wire.Tokens
    params: wire.Blob
    seed: wire.Count
    priority: wire.Priority
    arrival_time: wire.Seconds
    interval: wire.Count
    known: Stretches
    """Tokens computed by earlier ranks, in order; generation continues after them."""
    images: wire.Blob = b""
    """As submitted."""


@dataclass(slots=True)
class Progress(Message):
    """Report of a rank since its previous one: tokens, prefix cache changes, load."""

    header, way = 23, "rank → coordinator"
    stretches: Stretches
    blocks_added: wire.Hashes = b""
    """int64 hashes of newly cached blocks; applied after `blocks_removed`."""
    blocks_removed: wire.Hashes = b""
    """int64 hashes of evicted blocks."""
    flushed: wire.Flag = False
    """Whether the cache was flushed before `blocks_added`."""
    running: wire.Count = 0
    waiting: wire.Count = 0
    """All samples of the engine, including those not assigned by the coordinator."""


@dataclass(slots=True)
class Update(Message):
    """New tokens and ended samples of a client's requests."""

    header, way = 24, "coordinator → client"
    stretches: Stretches


@dataclass(slots=True)
class RequestFailed(Message):
    """Failure of a whole group."""

    header, way = 25, "coordinator → client"
    request_id: wire.Count
    error: wire.Name
    """Name of an exception in `rollout.errors`."""
    text: wire.Text


@dataclass(slots=True)
class Abort(Message):
    """Abort a group; answered by `RequestFailed` unless the group has just ended."""

    header, way = 26, "client → coordinator"
    request_id: wire.Count


@dataclass(slots=True)
class Cancel(Message):
    """Cancel an assignment whose result is no longer needed."""

    header, way = 27, "coordinator → rank"
    request_id: wire.Count
    attempt: wire.Count


@dataclass(slots=True)
class Decline(Message):
    """Rejection of an assignment that the engine can never serve."""

    header, way = 28, "rank → coordinator"
    request_id: wire.Count
    attempt: wire.Count
    error: wire.Name
    text: wire.Text
