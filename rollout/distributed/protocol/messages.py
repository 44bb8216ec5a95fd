"""Messages between clients, the coordinator and ranks: one dataclass per header.

    frame      msgpack [header, sequence, field, field, …], fields in the order of the dataclass
    message    one ZMQ message carries one or more frames

    header                sender       receiver     what it says
    ── connection ──────────────────────────────────────────────────────────────────────────────────────────────────
     0 Connect            client       coordinator  I am here and speak this version
     1 ConnectAck         coordinator  client       so am I; this is where everything stands
     2 Register           rank         coordinator  here is an engine with so much room
     3 RegisterAck        coordinator  rank         welcome; be in this state and of this version before any work
     4 Heartbeat          anybody      anybody      I live
     5 Refused            coordinator  anybody      that frame was no good, or I do not know you (`over`: start afresh)
    ── request ─────────────────────────────────────────────────────────────────────────────────────────────────────
    20 Submit             client       coordinator  a prompt and its group of n samples
    21 Accepted           coordinator  client       the tokens of a prompt that came as text
    22 Assign             coordinator  rank         compute these samples, from here on
    23 Progress           rank         coordinator  new tokens, ended samples, cached blocks that came and went
    24 Update             coordinator  client       new tokens, ended samples
    25 RequestFailed      coordinator  client       the whole group ended without a result
    26 Abort              client       coordinator  end this group
    27 Cancel             coordinator  rank         stop computing this request
    28 Decline            rank         coordinator  the engine refused this request
    ── control ─────────────────────────────────────────────────────────────────────────────────────────────────────
    40 Control            client       coordinator  pause, unpause, suspend, resume, stop, set_version, flush_prefix_cache
    41 Command            coordinator  rank         the same, to one engine
    42 CommandAck         rank         coordinator  done, or why not
    43 ControlDone        coordinator  client       every engine has, or which has not
    44 EngineMoved        rank         coordinator  state, version or who steps it have changed by themselves
    45 Barrier            client       coordinator  I have come this far
    46 BarrierDone        coordinator  client       so has everybody
    47 StatusQuery        client       coordinator  how do things stand
    48 Status             coordinator  client       so
    ── lifecycle ───────────────────────────────────────────────────────────────────────────────────────────────────
    60 Disconnect         anybody      anybody      I am leaving
    61 Shutdown           client       coordinator  end the coordinator

Always true: nothing is unpickled; token ids travel as raw little-endian int32, log-probs as float32, block hashes as
int64; each direction of a connection counts its frames from 0, so that a repeated frame is ignored and a lost one
noticed (`rollout.distributed.protocol.frames`, which also encodes and decodes). Knows no bytes and no sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Annotated, Any, ClassVar

from rollout.distributed.protocol.fields import (
    TOKEN_BYTES,
    Argument,
    Blob,
    CoordinatorStateName,
    Count,
    Counts,
    EngineStateName,
    Flag,
    Hashes,
    LogProbs,
    Name,
    Names,
    OptionalBlobs,
    OptionalCount,
    OptionalSeconds,
    OptionalText,
    OptionalTexts,
    OptionalTimes,
    Priority,
    Prompt,
    Seconds,
    Signal,
    Table,
    Text,
    Tokens,
    Versions,
)
from rollout.errors import ConnectionLostError
from rollout.requests.codec import refuse

PROTOCOL_VERSION = 2


class Message:
    """One row of the table above."""

    __slots__ = ()
    header: ClassVar[int]


@dataclass(slots=True)
class Stretch:
    """New tokens of some samples of one request, and which of them have ended. Lists are parallel to `indices`."""

    request_id: Count
    attempt: Count
    """Which assignment made them; a client sees 0."""
    indices: Counts
    """Samples of the group."""
    starts: Counts
    """Where in the completion the first new token stands. 0 for a sample known further: it has started afresh."""
    counts: Counts
    """New tokens."""
    token_ids: Tokens
    """int32, the samples' new tokens one after the other."""
    log_probs: LogProbs
    """float32, as many."""
    versions: Versions
    """The policy version of the prompt, then (version, count) of the new tokens."""
    ttfts: OptionalTimes = None
    """Seconds from arrival to the first token, once it is there."""
    top_n: OptionalBlobs = None
    """Packed `codec.TOP_N` of the new tokens, where asked for."""
    texts: OptionalTexts = None
    """The whole completion's text of samples that have ended, from an engine that detokenises."""
    outcomes: OptionalBlobs = None
    """Packed `outcome` row of samples that have ended; None: it goes on."""
    events: OptionalBlobs = None
    """Packed `events` since those that were sent before."""

    def check(self) -> None:
        """Refuse columns of different lengths.

        Raises:
            SerializationError: they disagree.
        """
        samples = len(self.indices)
        for name in ("starts", "counts", "versions", "ttfts", "top_n", "texts", "outcomes", "events"):
            column = getattr(self, name)
            if column is not None and len(column) != samples:
                refuse(f"Stretch.{name}", column, f"one entry for each of {samples} samples")
        total = sum(self.counts) * TOKEN_BYTES
        if len(self.token_ids) != total or len(self.log_probs) != total:
            refuse(
                "Stretch.counts",
                (self.counts, len(self.token_ids), len(self.log_probs)),
                "as many tokens and log-probs as counted",
            )
        for count, runs in zip(self.counts, self.versions, strict=True):
            if sum(runs[2::2]) != count:
                refuse("Stretch.versions", runs, f"runs that cover {count} tokens")
        if len(set(self.indices)) != samples:
            refuse("Stretch.indices", self.indices, "different samples")

    def samples(self) -> Iterator[tuple[int, int, int, bytes, bytes, int]]:
        """(sample index, start, count, its token ids, its log-probs, its column) of each sample."""
        if len(self.indices) == 1:
            yield self.indices[0], self.starts[0], self.counts[0], self.token_ids, self.log_probs, 0
            return
        bounds = pairwise(accumulate((TOKEN_BYTES * count for count in self.counts), initial=0))
        columns = zip(self.indices, self.starts, self.counts, bounds, strict=True)
        for column, (index, start, count, (low, high)) in enumerate(columns):
            yield index, start, count, self.token_ids[low:high], self.log_probs[low:high], column

    @property
    def buffer_bytes(self) -> int:
        """Of its tokens, log-probs, top-n rows, texts, outcomes and events."""
        size = len(self.token_ids) + len(self.log_probs)
        for column in (self.top_n, self.texts, self.outcomes, self.events):
            if column is not None:
                size += sum(len(each) for each in column if each is not None)
        return size

    def only(self, indices: set[int]) -> Stretch:
        """The columns of some samples."""
        if indices.issuperset(self.indices):
            return self
        rows = [row for row in self.samples() if row[0] in indices]
        picked = [row[5] for row in rows]

        def pick(column: list[Any] | None) -> list[Any] | None:
            return None if column is None else [column[each] for each in picked]

        return Stretch(
            self.request_id,
            self.attempt,
            [row[0] for row in rows],
            [row[1] for row in rows],
            [row[2] for row in rows],
            b"".join(row[3] for row in rows),
            b"".join(row[4] for row in rows),
            [self.versions[each] for each in picked],
            pick(self.ttfts),
            pick(self.top_n),
            pick(self.texts),
            pick(self.outcomes),
            pick(self.events),
        )


Stretches = Annotated[list[Stretch], Stretch]


# --- connection -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Connect(Message):
    """A client's first frame."""

    header = 0
    protocol_version: Count
    name: Name
    member: OptionalCount = None
    """Barriers wait for it: it is the training loop of this one of the `data_parallel_size` ranks. None: of none."""


@dataclass(slots=True)
class ConnectAck(Message):
    """Where everything stands."""

    header = 1
    protocol_version: Count
    instance: Name
    """Of this life of the coordinator."""
    state: CoordinatorStateName
    policy_version: Count
    heartbeat_interval_s: Seconds
    heartbeat_timeout_s: Seconds
    next_barrier: Count = 0
    """Barriers before it are passed."""


@dataclass(slots=True)
class Register(Message):
    """A rank's first frame."""

    header = 2
    protocol_version: Count
    name: Name
    slots: Count
    """Samples that may run at once."""
    block_size: Count
    state: EngineStateName
    policy_version: Count
    hashes: Hashes = b""
    """Blocks in its prefix cache under the present version."""


@dataclass(slots=True)
class RegisterAck(Message):
    """State and version to reach before any work; a `Command` follows for each step there."""

    header = 3
    protocol_version: Count
    instance: Name
    state: CoordinatorStateName
    policy_version: Count
    heartbeat_interval_s: Seconds
    heartbeat_timeout_s: Seconds
    progress_interval: Count
    """Tokens of a sample after which they are reported."""


@dataclass(slots=True)
class Heartbeat(Message):
    """Sent by whoever has been silent for the interval."""

    header = 4


@dataclass(slots=True)
class Refused(Message):
    """A frame could not be served. The sender's other requests are not affected unless `over`."""

    header = 5
    code: Name
    """`malformed`, `not_yours`; and of a session that is over: one of `TRY_AGAIN`, or `malformed`, `version`, `full`,
    `stopping`, `replaced` (another process has its name), where trying again is of no use."""
    text: Text
    over: Flag
    """The connection's session has ended: whoever still wants something connects again."""


TRY_AGAIN = frozenset({"unknown_peer", "lost_frames", "silent"})
"""Codes of `Refused` after which another session is welcome."""


# --- request ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Submit(Message):
    """A prompt and its group."""

    header = 20
    request_id: Count
    """The client's; rises from message to message."""
    prompt: Prompt
    n: Count
    params: Blob
    """msgpack of `SamplingParams.serialize()`."""
    seed: OptionalCount = None
    """Of the random streams; None: from the coordinator's seed and the order of arrival."""
    priority: Priority = 0
    arrival_time: OptionalSeconds = None
    """Wall-clock time; None: now."""
    timeout_s: OptionalSeconds = None
    """Give up so long after arrival. None: never, while some rank is there."""
    interval: Count = 0
    """Report every so many tokens of a sample; 0: the coordinator's interval."""
    known: Stretches = field(default_factory=list)
    """What is there of a group that is continued (its `request_id` and `attempt` are not looked at)."""
    wanted: Counts = field(default_factory=list)
    """Samples to compute, of a group whose others have ended; empty: all."""
    min_policy_version: Count = 0
    """Of the asker's weights: no engine of an older version computes it."""


@dataclass(slots=True)
class Accepted(Message):
    """A prompt that came as text, as tokens."""

    header = 21
    request_id: Count
    prompt: Tokens


@dataclass(slots=True)
class Assign(Message):
    """Samples for one rank."""

    header = 22
    request_id: Count
    """The coordinator's."""
    attempt: Count
    """Never used before: whatever carries an older one is refused."""
    indices: Counts
    prompt: Tokens
    params: Blob
    seed: Count
    priority: Priority
    arrival_time: Seconds
    interval: Count
    known: Stretches
    """What earlier ranks made, in order; the rank goes on from there."""


@dataclass(slots=True)
class Progress(Message):
    """What has happened at a rank since the last one."""

    header = 23
    stretches: Stretches
    blocks_added: Hashes = b""
    """int64, prefixes that have become findable; they follow `blocks_removed`."""
    blocks_removed: Hashes = b""
    """int64, prefixes that can no longer be found."""
    flushed: Flag = False
    """All earlier ones are gone, before `blocks_added`."""
    running: Count = 0
    waiting: Count = 0
    """Samples of the engine, foreign to the coordinator or not."""


@dataclass(slots=True)
class Update(Message):
    """What has happened to a client's requests."""

    header = 24
    stretches: Stretches


@dataclass(slots=True)
class RequestFailed(Message):
    """A group that ended without a result."""

    header = 25
    request_id: Count
    error: Name
    """The name of an exception of `rollout.errors`."""
    text: Text


@dataclass(slots=True)
class Abort(Message):
    """End a group; the answer is `RequestFailed`, unless it has just ended."""

    header = 26
    request_id: Count


@dataclass(slots=True)
class Cancel(Message):
    """Nobody waits for this assignment any more."""

    header = 27
    request_id: Count
    attempt: Count


@dataclass(slots=True)
class Decline(Message):
    """The engine can never serve this."""

    header = 28
    request_id: Count
    attempt: Count
    error: Name
    text: Text


# --- control ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Control(Message):
    """A call that ends with `ControlDone`."""

    header = 40
    call_id: Count
    signal: Signal
    argument: Argument
    """Of `suspend`: the KV mode, or None for each engine's own. Of `set_version`: the version."""
    timeout_s: Seconds


@dataclass(slots=True)
class Command(Message):
    """One engine's part of a call."""

    header = 41
    command_id: Count
    signal: Signal
    argument: Argument


@dataclass(slots=True)
class CommandAck(Message):
    """Done, or why not."""

    header = 42
    command_id: Count
    state: EngineStateName
    policy_version: Count
    error: OptionalText = None
    amount: Count = 0
    """Of `flush_prefix_cache`: blocks that were forgotten."""


@dataclass(slots=True)
class ControlDone(Message):
    """Every engine has done it (`error` is None), or the exception and the engines it names."""

    header = 43
    call_id: Count
    error: OptionalText = None
    text: Text = ""
    engines: Names = field(default_factory=list)
    """Those that have not done it."""
    amount: Count = 0
    """The engines' together."""


@dataclass(slots=True)
class EngineMoved(Message):
    """The training loop beside this engine has paused, suspended, resumed it, changed its weights, left it, or come back."""

    header = 44
    state: EngineStateName
    policy_version: Count
    resting: Flag = False
    """Nobody steps it: the training loop has left `generate`."""


@dataclass(slots=True)
class Barrier(Message):
    """This member has come to barrier `index`."""

    header = 45
    index: Count
    what: Name = ""
    """The call that ends there."""
    policy_version: Count = 0
    """Of its weights."""


@dataclass(slots=True)
class BarrierDone(Message):
    """Every member has come to barrier `index` or further."""

    header = 46
    index: Count
    differences: Text = ""
    """Which members came there with which call and version, where they are not the same."""


@dataclass(slots=True)
class StatusQuery(Message):
    """Asks for `Status`."""

    header = 47
    call_id: Count


@dataclass(slots=True)
class Status(Message):
    """A snapshot for people."""

    header = 48
    call_id: Count
    table: Table


# --- lifecycle --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Disconnect(Message):
    """An orderly end of the session."""

    header = 60
    reason: Name = ""


@dataclass(slots=True)
class Shutdown(Message):
    """End the coordinator's process; what is open fails by name."""

    header = 61


_KINDS: tuple[type[Message], ...] = (
    *(Connect, ConnectAck, Register, RegisterAck, Heartbeat, Refused),
    *(Submit, Accepted, Assign, Progress, Update, RequestFailed, Abort, Cancel, Decline),
    *(Control, Command, CommandAck, ControlDone, EngineMoved, Barrier, BarrierDone, StatusQuery, Status),
    *(Disconnect, Shutdown),
)
MESSAGES: dict[int, type[Message]] = {kind.header: kind for kind in _KINDS}
"""Header → message."""


def farewell(message: Message) -> ConnectionLostError | None:
    """Why the session ends with this message of the other side, whatever its number; None: it goes on."""
    if isinstance(message, Refused) and message.over:
        text = f"the coordinator has ended the session ({message.code}): {message.text}"
        return ConnectionLostError(text, final=message.code not in TRY_AGAIN)
    if isinstance(message, Disconnect):
        return ConnectionLostError(f"the other side has left ({message.reason or 'without saying why'})")
    return None
