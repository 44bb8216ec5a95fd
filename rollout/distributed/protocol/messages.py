"""Messages between clients, the coordinator and ranks: one dataclass per header.

    frame      msgpack [header, sequence, field, field, …], fields in the order of the dataclass
    message    one ZMQ message carries one or more frames

Always true: nothing is unpickled; token ids travel as raw little-endian int32, log-probs as float32, block hashes as
int64; each direction of a connection numbers its frames from 0, so that duplicates are dropped and gaps are detected
(`rollout.distributed.protocol.frames`, which also encodes and decodes). Independent of encoding and sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.distributed.protocol import fields as wire
from rollout.distributed.protocol.fields import Message as Message
from rollout.distributed.protocol.request import Abort as Abort
from rollout.distributed.protocol.request import Accepted as Accepted
from rollout.distributed.protocol.request import Assign as Assign
from rollout.distributed.protocol.request import Cancel as Cancel
from rollout.distributed.protocol.request import Decline as Decline
from rollout.distributed.protocol.request import Progress as Progress
from rollout.distributed.protocol.request import RequestFailed as RequestFailed
from rollout.distributed.protocol.request import Submit as Submit
from rollout.distributed.protocol.request import Update as Update
from rollout.distributed.protocol.stretch import Stretch as Stretch
from rollout.errors import ConnectionLostError

PROTOCOL_VERSION = 4


# --- session ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Connect(Message):
    """Handshake: a client's first frame."""

    header, way = 0, "client → coordinator"
    protocol_version: wire.Count
    name: wire.Name
    member: wire.OptionalCount = None
    """Rank in [0, data_parallel_size) whose training loop this client is; barriers wait for it. None: not a member."""


@dataclass(slots=True)
class ConnectAck(Message):
    """Handshake reply to a client: state of the job and heartbeat intervals."""

    header, way = 1, "coordinator → client"
    protocol_version: wire.Count
    instance: wire.Name
    """Unique id of this run of the coordinator."""
    state: wire.CoordinatorStateName
    policy_version: wire.Count
    heartbeat_interval_s: wire.Seconds
    heartbeat_timeout_s: wire.Seconds
    next_barrier: wire.Count = 0
    """First barrier that has not been passed."""


@dataclass(slots=True)
class Register(Message):
    """Handshake: a rank's first frame, with the engine's capacity and state."""

    header, way = 2, "rank → coordinator"
    protocol_version: wire.Count
    name: wire.Name
    max_requests: wire.Count
    """Maximum number of concurrently running samples."""
    block_size: wire.Count
    state: wire.EngineStateName
    policy_version: wire.Count
    hashes: wire.Hashes = b""
    """Hashes of the blocks in its prefix cache under the current version."""


@dataclass(slots=True)
class RegisterAck(Message):
    """Handshake reply to a rank: state and version to reach before any work; a `Command` follows for each step."""

    header, way = 3, "coordinator → rank"
    protocol_version: wire.Count
    instance: wire.Name
    state: wire.CoordinatorStateName
    policy_version: wire.Count
    heartbeat_interval_s: wire.Seconds
    heartbeat_timeout_s: wire.Seconds
    progress_interval: wire.Count
    """Tokens per sample between two progress reports."""


@dataclass(slots=True)
class Heartbeat(Message):
    """Liveness signal, sent when nothing else was sent for the heartbeat interval."""

    header, way = 4, "any → any"


@dataclass(slots=True)
class Refused(Message):
    """Rejection of a frame. The sender's other requests are unaffected unless `over`."""

    header, way = 5, "coordinator → any"
    code: wire.Name
    """`malformed` or `not_yours`. With `over`: one of `TRY_AGAIN`, or a final code: `malformed`, `version`, `full`,
    `stopping`, `replaced` (another process registered under the same name)."""
    text: wire.Text
    over: wire.Flag
    """Whether the session has ended; a new one needs a new handshake."""


TRY_AGAIN = frozenset({"unknown_peer", "lost_frames", "silent"})
"""`Refused` codes after which the peer may open another session."""


@dataclass(slots=True)
class Disconnect(Message):
    """Orderly end of the session."""

    header, way = 60, "any → any"
    reason: wire.Name = ""


@dataclass(slots=True)
class Shutdown(Message):
    """Request to end the coordinator's process; open requests fail with a named error."""

    header, way = 61, "client → coordinator"


# --- control ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Control(Message):
    """A call that ends with `ControlDone`."""

    header, way = 40, "client → coordinator"
    call_id: wire.Count
    signal: wire.Signal
    argument: wire.Argument
    """Of `suspend`: the KV mode, or None for each engine's own. Of `set_version`: the version."""
    timeout_s: wire.Seconds


@dataclass(slots=True)
class Command(Message):
    """A control call's part for one engine."""

    header, way = 41, "coordinator → rank"
    command_id: wire.Count
    signal: wire.Signal
    argument: wire.Argument


@dataclass(slots=True)
class CommandAck(Message):
    """Result of a `Command`."""

    header, way = 42, "rank → coordinator"
    command_id: wire.Count
    state: wire.EngineStateName
    policy_version: wire.Count
    error: wire.OptionalText = None
    amount: wire.Count = 0
    """Number of blocks dropped by `flush_prefix_cache`, of tensors loaded by `load_weights`, of layers changed
    by `load_adapter`, of samples ended by `unload_adapter`."""


@dataclass(slots=True)
class ControlDone(Message):
    """Result of a control call: `error` is None, or an exception name with the engines concerned."""

    header, way = 43, "coordinator → client"
    call_id: wire.Count
    error: wire.OptionalText = None
    text: wire.Text = ""
    engines: wire.Names = field(default_factory=list)
    """Engines that failed or did not answer in time."""
    amount: wire.Count = 0
    """Sum of the engines' amounts."""


@dataclass(slots=True)
class EngineMoved(Message):
    """Change of state, policy version or idleness made by the rank's own training loop."""

    header, way = 44, "rank → coordinator"
    state: wire.EngineStateName
    policy_version: wire.Count
    resting: wire.Flag = False
    """Whether the engine is idle: the training loop is outside `generate`."""


@dataclass(slots=True)
class Barrier(Message):
    """Arrival of this member at barrier `index`."""

    header, way = 45, "client → coordinator"
    index: wire.Count
    what: wire.Name = ""
    """Name of the collective call that ends at the barrier."""
    policy_version: wire.Count = 0
    """Policy version of the member's weights."""


@dataclass(slots=True)
class BarrierDone(Message):
    """Barrier `index` passed: every member has arrived there or at a later one."""

    header, way = 46, "coordinator → client"
    index: wire.Count
    differences: wire.Text = ""
    """Members with their call and version, where these differ; empty: all agree."""


@dataclass(slots=True)
class StatusQuery(Message):
    """Request for a `Status`."""

    header, way = 47, "client → coordinator"
    call_id: wire.Count


@dataclass(slots=True)
class Status(Message):
    """Snapshot of the coordinator; `JobStatus` reads the fields that decisions depend on."""

    header, way = 48, "coordinator → client"
    call_id: wire.Count
    table: wire.Table


# --- all messages -----------------------------------------------------------------------------------------------------


_KINDS: tuple[type[Message], ...] = (
    *(Connect, ConnectAck, Register, RegisterAck, Heartbeat, Refused),
    *(Submit, Accepted, Assign, Progress, Update, RequestFailed, Abort, Cancel, Decline),
    *(Control, Command, CommandAck, ControlDone, EngineMoved, Barrier, BarrierDone, StatusQuery, Status),
    *(Disconnect, Shutdown),
)
MESSAGES: dict[int, type[Message]] = {kind.header: kind for kind in _KINDS}
"""Header → message."""


def session_end(message: Message) -> ConnectionLostError | None:
    """Return the error a message ends the session with, regardless of its sequence number; None: it continues."""
    if isinstance(message, Refused) and message.over:
        text = f"the coordinator has ended the session ({message.code}): {message.text}"
        return ConnectionLostError(text, final=message.code not in TRY_AGAIN)
    if isinstance(message, Disconnect):
        return ConnectionLostError(f"the peer has disconnected ({message.reason or 'no reason given'})")
    return None


def version_mismatch(coordinator: int, peer: int) -> str | None:
    """Return why a peer of another protocol version than the coordinator's is refused, for the peer; None: it is not."""
    if coordinator == peer:
        return None
    older = "the coordinator" if coordinator < peer else "this side"
    return f"the coordinator speaks protocol version {coordinator} and this side {peer}; upgrade {older}"
