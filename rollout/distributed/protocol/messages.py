"""Messages between clients, the coordinator and ranks: one dataclass per header, each field with its check.

A frame is msgpack [header, sequence, field, field, …], fields in the order of the dataclass; a ZMQ message carries one
or more frames.

Always true: nothing is unpickled; token ids travel as raw little-endian int32, log-probs as float32, block hashes as
int64; each direction of a connection numbers its frames from 0, so that duplicates are dropped and gaps are detected.
"""

from __future__ import annotations

from dataclasses import field

from rollout.distributed.protocol import fields as wire
from rollout.distributed.protocol.fields import MESSAGES as MESSAGES
from rollout.distributed.protocol.fields import Message as Message
from rollout.distributed.protocol.fields import message
from rollout.distributed.protocol.stretch import Stretch as Stretch
from rollout.distributed.protocol.stretch import Stretches
from rollout.errors import ConnectionLostError


@message(20, "client → coordinator")
class Submit(Message):
    """A new group of n samples of one prompt."""

    request_id: wire.Count
    """The client's id of the request, which rises with every message."""
    prompt: wire.Prompt
    n: wire.Count
    params: wire.Blob
    """msgpack of `SamplingParams.serialize()`."""
    seed: wire.OptionalCount = None
    """The seed of the random streams; None: derived from the coordinator's seed and the order of arrival."""
    priority: wire.Priority = 0
    arrival_time: wire.OptionalSeconds = None
    """The time of arrival, in wall-clock seconds; None: now."""
    timeout_s: wire.OptionalSeconds = None
    """The deadline in seconds after arrival. None: no deadline while any rank is connected."""
    interval: wire.Count = 0
    """Tokens per sample between two reports; 0: the coordinator's interval."""
    known: Stretches = field(default_factory=list)
    """Known tokens of a continued group (`request_id` and `attempt` are ignored)."""
    wanted: wire.Counts = field(default_factory=list)
    """Samples to compute if the others have finished. Empty: all."""
    min_policy_version: wire.Count = 0
    """The lowest policy version that an engine must have to compute it: the version of the client's weights."""
    share: wire.OptionalText = None
    """The part of the prefix cache in which the group's blocks are found, as `SamplingParams.prefix_share`."""
    images: wire.Blob = b""
    """msgpack of the tensors of its images by name; empty: a prompt of text."""
    keyed: wire.Tokens = b""
    """The prompt with its image's key in place of every placeholder, from which block hashes are computed. Empty: the prompt
    itself or, with images, no hashes."""


@message(21, "coordinator → client")
class Accepted(Message):
    """The token ids of a prompt that was submitted as text."""

    request_id: wire.Count
    prompt: wire.Tokens


@message(22, "coordinator → rank")
class Assign(Message):
    """The samples that one rank has to compute."""

    request_id: wire.Count
    """The id that the coordinator gave the request."""
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
    """Images in the form of `Submit`."""


@message(23, "rank → coordinator")
class Progress(Message):
    """A rank's report since its previous report: tokens, prefix cache changes, load."""

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
    latencies: wire.SecondsPairs = b""
    """Seconds from arrival to the first token, and per token after it, for each finished sample."""


@message(24, "coordinator → client")
class Update(Message):
    """The new tokens and finished samples of a client's requests."""

    stretches: Stretches


@message(25, "coordinator → client")
class RequestFailed(Message):
    """The failure of a whole group."""

    request_id: wire.Count
    error: wire.Name
    """The name of an exception in `rollout.errors`."""
    text: wire.Text


@message(26, "client → coordinator")
class Abort(Message):
    """A request to abort a group. The answer is `RequestFailed`, unless the group has just finished."""

    request_id: wire.Count


@message(27, "coordinator → rank")
class Cancel(Message):
    """The end of an assignment whose result is no longer needed."""

    request_id: wire.Count
    attempt: wire.Count


@message(28, "rank → coordinator")
class Decline(Message):
    """The rejection of an assignment that the engine can never serve."""

    request_id: wire.Count
    attempt: wire.Count
    error: wire.Name
    text: wire.Text


PROTOCOL_VERSION = 7


# --- messages of a session --------------------------------------------------------------------------------------------


@message(0, "client → coordinator")
class Connect(Message):
    """The handshake and first frame of a client."""

    protocol_version: wire.Count
    name: wire.Name
    member: wire.OptionalCount = None
    """The rank in [0, data_parallel_size) whose training loop this client is; barriers wait for it. None: not a member."""


@message(1, "coordinator → client")
class ConnectAck(Message):
    """The handshake reply to a client: state of the job and heartbeat intervals."""

    state: wire.CoordinatorStateName
    policy_version: wire.Count
    heartbeat_interval_s: wire.Seconds
    heartbeat_timeout_s: wire.Seconds
    next_barrier: wire.Count = 0
    """The first barrier that has not been passed."""


@message(2, "rank → coordinator")
class Register(Message):
    """The handshake and first frame of a rank, with the engine's capacity and state."""

    protocol_version: wire.Count
    name: wire.Name
    max_requests: wire.Count
    """The maximum number of concurrently running samples."""
    block_size: wire.Count
    state: wire.EngineStateName
    policy_version: wire.Count
    hashes: wire.Hashes = b""
    """Hashes of the blocks in its prefix cache under the current version."""


@message(3, "coordinator → rank")
class RegisterAck(Message):
    """The handshake reply to a rank: state and version to reach before any work. A `Command` follows for each step."""

    state: wire.CoordinatorStateName
    policy_version: wire.Count
    heartbeat_interval_s: wire.Seconds
    heartbeat_timeout_s: wire.Seconds


@message(4, "any → any")
class Heartbeat(Message):
    """A liveness signal, sent when nothing else was sent for the heartbeat interval."""


@message(5, "coordinator → any")
class Refused(Message):
    """The rejection of a frame. The sender's other requests are unaffected unless `over`."""

    code: wire.Name
    """`malformed` or `not_yours`. With `over`: one of `TRY_AGAIN`, or final: `malformed`, `version`, `too_long`,
    `stopping`, `replaced` (another process registered under the same name)."""
    text: wire.Text
    over: wire.Flag
    """Whether the session has ended; a new one needs a new handshake."""


TRY_AGAIN = frozenset({"unknown_peer", "lost_frames", "silent"})
"""`Refused` codes after which the peer may open another session."""


@message(60, "any → any")
class Disconnect(Message):
    """The orderly end of a session."""

    reason: wire.Name = ""


# --- control messages -------------------------------------------------------------------------------------------------


@message(40, "client → coordinator")
class Control(Message):
    """A control call, answered by `ControlDone`."""

    call_id: wire.Count
    signal: wire.Signal
    argument: wire.Argument
    """The argument of the call: for `suspend` the KV mode, or None for each engine's own; for `set_version` the version."""
    timeout_s: wire.Seconds


@message(41, "coordinator → rank")
class Command(Message):
    """One engine's part of a control call."""

    command_id: wire.Count
    signal: wire.Signal
    argument: wire.Argument


@message(42, "rank → coordinator")
class CommandAck(Message):
    """A rank's reply with the result of a `Command`."""

    command_id: wire.Count
    state: wire.EngineStateName
    policy_version: wire.Count
    error: wire.OptionalText = None
    amount: wire.Count = 0
    """The number of blocks dropped, tensors loaded, layers changed or samples ended, by `flush_prefix_cache`,
    `load_weights`, `load_adapter` or `unload_adapter`."""


@message(43, "coordinator → client")
class ControlDone(Message):
    """The result of a control call: `error` is None, or an exception name with the engines concerned."""

    call_id: wire.Count
    error: wire.OptionalText = None
    text: wire.Text = ""
    engines: wire.Names = field(default_factory=list)
    """Engines that failed or did not answer in time."""
    amount: wire.Count = 0
    """The sum of the engines' amounts."""


@message(44, "rank → coordinator")
class EngineMoved(Message):
    """A change of state, policy version or idleness that the rank's own training loop made."""

    state: wire.EngineStateName
    policy_version: wire.Count
    resting: wire.Flag = False
    """Whether the engine is idle: the training loop is outside `generate`."""


@message(45, "client → coordinator")
class Barrier(Message):
    """The arrival of this member at barrier `index`."""

    index: wire.Count
    what: wire.Name = ""
    """The name of the collective call that waits at the barrier."""
    policy_version: wire.Count = 0
    """The policy version of the member's weights."""


@message(46, "coordinator → client")
class BarrierDone(Message):
    """The news that barrier `index` was passed: every member has arrived there or at a later barrier."""

    index: wire.Count
    differences: wire.Text = ""
    """Members with their call and version, if these differ. Empty: all agree."""


@message(47, "client → coordinator")
class StatusQuery(Message):
    """A request for a `Status`."""

    call_id: wire.Count


@message(48, "coordinator → client")
class Status(Message):
    """A snapshot of the coordinator, as `CoordinatorCore.status` makes it."""

    call_id: wire.Count
    table: wire.Table


def session_end(message: Message) -> ConnectionLostError | None:
    """Return the error with which a message ends the session, whatever its sequence number; None: it continues."""
    if isinstance(message, Refused) and message.over:
        text = f"the coordinator has ended the session ({message.code}): {message.text}"
        return ConnectionLostError(text, final=message.code not in TRY_AGAIN)
    if isinstance(message, Disconnect):
        return ConnectionLostError(f"the peer has disconnected ({message.reason or 'no reason given'})")
    return None
