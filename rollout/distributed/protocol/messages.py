"""The messages between clients, the coordinator and ranks: one dataclass per header, with validated fields.

A frame is msgpack [header, sequence, field, field, …], with the fields in the order of the dataclass. A ZMQ message contains
one or more frames.

- Nothing is unpickled.
- Token ids are sent as raw little-endian int32, log-probs as float32, block hashes as int64.
- Each direction of a connection numbers its frames from 0, so that duplicates are dropped and gaps are detected.
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
    """A request for a new group: n samples of one prompt."""

    request_id: wire.Count
    """The request id that the client chose. Each request of a client has a higher id than the client's previous request."""
    prompt: wire.Prompt
    """The prompt's text or token ids."""
    n: wire.Count
    """The number of samples in the group."""
    params: wire.Blob
    """The sampling parameters: `SamplingParams.serialize()` as msgpack."""
    seed: wire.OptionalCount = None
    """The seed of the random streams. If None, it is derived from the coordinator's seed and the order of arrival."""
    priority: wire.Priority = 0
    """The priority of the group. Groups with a higher priority run first."""
    arrival_time: wire.OptionalSeconds = None
    """The time of arrival, in wall-clock seconds. If None, it is the time at which an engine receives the group."""
    timeout_s: wire.OptionalSeconds = None
    """The number of seconds after which the group fails. If None, it has no deadline while any rank is connected."""
    interval: wire.Count = 0
    """The number of tokens per sample between two reports. If 0, it is the coordinator's configured interval."""
    known: Stretches = field(default_factory=list)
    """The tokens known so far, after which generation continues. Their `request_id` and `attempt` are ignored."""
    wanted: wire.Counts = field(default_factory=list)
    """The indices of the samples to compute. If empty, all samples are computed."""
    min_policy_version: wire.Count = 0
    """The lowest policy version with which an engine may compute the group: the version of the client's weights."""
    share: wire.OptionalText = None
    """The group's `SamplingParams.prefix_share`: only requests with the same value share cached blocks."""
    images: wire.Blob = b""
    """The tensors of the prompt's images by name, as msgpack. It is empty if the prompt has no images."""
    keyed: wire.Tokens = b""
    """The prompt's tokens, with each image placeholder replaced by a key of its image. Block hashes are computed from
    these tokens. If this is empty, they are computed from `prompt`, or not at all if the prompt has images."""


@message(21, "coordinator → client")
class Accepted(Message):
    """The reply to a `Submit` with a text prompt, sent once the prompt is tokenised. It contains the token ids."""

    request_id: wire.Count
    prompt: wire.Tokens


@message(22, "coordinator → rank")
class Assign(Message):
    """The assignment of some samples of a request to a rank, which must compute them."""

    request_id: wire.Count
    """The request id that the coordinator chose."""
    attempt: wire.Count
    """The id of the assignment, which rises with every assignment. Reports about an older attempt are discarded."""
    indices: wire.Counts
    """The indices of the samples within the group."""
    prompt: wire.Tokens
    """The prompt's token ids."""
    params: wire.Blob
    """The sampling parameters, encoded as in `Submit`."""
    seed: wire.Count
    """The seed of the samples' random streams."""
    priority: wire.Priority
    arrival_time: wire.Seconds
    """The time of arrival, in wall-clock seconds. If 0, it is the time at which the rank receives the assignment."""
    interval: wire.Count
    """The number of tokens per sample between two reports."""
    known: Stretches
    """The samples' tokens that other ranks or earlier sessions have generated. Generation continues after them."""
    images: wire.Blob = b""
    """The tensors of the prompt's images, encoded as in `Submit`."""


@message(23, "rank → coordinator")
class Progress(Message):
    """A rank's report of new tokens and prefix cache changes since its previous report, and of its current load."""

    stretches: Stretches
    """The new tokens and finished samples."""
    blocks_added: wire.Hashes = b""
    """The hashes (int64) of newly cached blocks, which the receiver applies after `blocks_removed`."""
    blocks_removed: wire.Hashes = b""
    """The hashes (int64) of evicted blocks."""
    flushed: wire.Flag = False
    """Whether the prefix cache was flushed before `blocks_added` were cached."""
    running: wire.Count = 0
    """The number of running samples in the engine, including samples that the coordinator has not assigned."""
    waiting: wire.Count = 0
    """The number of waiting samples in the engine, including samples that the coordinator has not assigned."""
    latencies: wire.SecondsPairs = b""
    """Two numbers per finished sample: seconds from arrival to the first token, and seconds per later token."""


@message(24, "coordinator → client")
class Update(Message):
    """A report to a client of new tokens and finished samples of its requests."""

    stretches: Stretches


@message(25, "coordinator → client")
class RequestFailed(Message):
    """A report to a client that a whole group has failed."""

    request_id: wire.Count
    error: wire.Name
    """The name of an exception in `rollout.errors`."""
    text: wire.Text
    """The message of the exception."""


@message(26, "client → coordinator")
class Abort(Message):
    """A request to abort a group. The reply is `RequestFailed`, unless the group has already finished."""

    request_id: wire.Count


@message(27, "coordinator → rank")
class Cancel(Message):
    """The cancellation of an assignment whose result is no longer needed."""

    request_id: wire.Count
    attempt: wire.Count


@message(28, "rank → coordinator")
class Decline(Message):
    """The rejection of an assignment that the engine can never serve."""

    request_id: wire.Count
    attempt: wire.Count
    error: wire.Name
    """The name of the exception that the engine raised."""
    text: wire.Text
    """The message of the exception."""


PROTOCOL_VERSION = 7


# --- messages of a session --------------------------------------------------------------------------------------------


@message(0, "client → coordinator")
class Connect(Message):
    """The first frame of a client, which begins the handshake."""

    protocol_version: wire.Count
    """The protocol version of the client, which must be the same as the coordinator's."""
    name: wire.Name
    """The name of the client in logs and in `rollout top`."""
    member: wire.OptionalCount = None
    """The rank in [0, data_parallel_size) whose training loop uses this client, so that barriers wait for the client. If
    None, barriers do not wait for it."""


@message(1, "coordinator → client")
class ConnectAck(Message):
    """The handshake reply to a client, with the job's state and the heartbeat interval and timeout."""

    state: wire.CoordinatorStateName
    policy_version: wire.Count
    heartbeat_interval_s: wire.Seconds
    """The number of seconds without a sent message after which a heartbeat must be sent."""
    heartbeat_timeout_s: wire.Seconds
    """The number of seconds without a received message after which the session counts as lost."""
    next_barrier: wire.Count = 0
    """The number of the first barrier that not all members have passed."""


@message(2, "rank → coordinator")
class Register(Message):
    """The first frame of a rank, which begins the handshake, with the engine's capacity and state."""

    protocol_version: wire.Count
    """The protocol version of the rank, which must be the same as the coordinator's."""
    name: wire.Name
    """The name of the rank. A later process with the same name replaces the rank."""
    max_requests: wire.Count
    """The maximum number of samples that the engine runs at a time."""
    block_size: wire.Count
    """The number of tokens per KV block, which must be the coordinator's `block_size_tokens`."""
    state: wire.EngineStateName
    policy_version: wire.Count
    hashes: wire.Hashes = b""
    """The hashes (int64) of the blocks in the engine's prefix cache under the current policy version."""


@message(3, "coordinator → rank")
class RegisterAck(Message):
    """The handshake reply to a rank, with the state and policy version that the engine must reach before it gets work."""

    state: wire.CoordinatorStateName
    policy_version: wire.Count
    heartbeat_interval_s: wire.Seconds
    heartbeat_timeout_s: wire.Seconds


@message(4, "any → any")
class Heartbeat(Message):
    """A sign of life, sent if nothing else was sent during the heartbeat interval."""


@message(5, "coordinator → any")
class Refused(Message):
    """The rejection of a received frame. Other requests of the peer are unaffected, unless `over` is True."""

    code: wire.Name
    """The reason: `malformed` or `not_yours`. If `over` is True, it is a code in `TRY_AGAIN` or a final code: `malformed`,
    `version`, `too_long`, `stopping`, or `replaced` (another process has connected in this peer's place)."""
    text: wire.Text
    """The reason in words."""
    over: wire.Flag
    """Whether the session has ended. A new session needs a new handshake."""


TRY_AGAIN = frozenset({"unknown_peer", "lost_frames", "silent"})
"""The `Refused` codes after which the peer may open another session."""


@message(60, "any → any")
class Disconnect(Message):
    """The orderly end of a session, which either side may send."""

    reason: wire.Name = ""
    """The reason in words; it may be empty."""


# --- control messages -------------------------------------------------------------------------------------------------


@message(40, "client → coordinator")
class Control(Message):
    """A control call to all engines. The reply is `ControlDone`."""

    call_id: wire.Count
    signal: wire.Signal
    """The name of the call: a lifecycle signal such as `pause`, `set_version`, or a call in `UPKEEP`."""
    argument: wire.Argument
    """The argument of the call: for `suspend` the KV mode or None for each engine's configured mode, for `set_version` the
    policy version. For the other calls see `rollout.distributed.protocol.fields`."""
    timeout_s: wire.Seconds
    """The number of seconds within which every engine must answer."""


@message(41, "coordinator → rank")
class Command(Message):
    """A control call that the coordinator forwards to each engine. The reply is `CommandAck`."""

    command_id: wire.Count
    signal: wire.Signal
    argument: wire.Argument


@message(42, "rank → coordinator")
class CommandAck(Message):
    """A rank's reply to a `Command`, with the state of its engine after the call."""

    command_id: wire.Count
    state: wire.EngineStateName
    policy_version: wire.Count
    error: wire.OptionalText = None
    """The reason why the call failed on this rank; None if it succeeded."""
    amount: wire.Count = 0
    """The number of blocks evicted by `flush_prefix_cache`, tensors loaded by `load_weights`, layers changed by
    `load_adapter`, or samples that failed because of `unload_adapter`; 0 for other calls."""


@message(43, "coordinator → client")
class ControlDone(Message):
    """The reply to a control call, sent when every engine has answered or the call's deadline has passed."""

    call_id: wire.Count
    error: wire.OptionalText = None
    """The name of an exception in `rollout.errors`; None if the call succeeded on every engine."""
    text: wire.Text = ""
    """The message of the exception."""
    engines: wire.Names = field(default_factory=list)
    """The names of the engines that failed or did not answer in time."""
    amount: wire.Count = 0
    """The sum of the engines' `CommandAck.amount`."""


@message(44, "rank → coordinator")
class EngineMoved(Message):
    """A change of the engine's state, policy version or idleness that did not come from the coordinator."""

    state: wire.EngineStateName
    policy_version: wire.Count
    resting: wire.Flag = False
    """Whether the engine is idle, because the training loop is outside `generate`."""


@message(45, "client → coordinator")
class Barrier(Message):
    """The arrival of a member (the client of a rank's training loop) at barrier `index`. The reply is `BarrierDone`."""

    index: wire.BarrierNumber
    what: wire.Name = ""
    """The name of the collective call in which the member waits at the barrier."""
    policy_version: wire.Count = 0
    """The policy version of the member's weights."""


@message(46, "coordinator → client")
class BarrierDone(Message):
    """The reply to `Barrier`, sent once every member has arrived at barrier `index` or at a later barrier."""

    index: wire.BarrierNumber
    differences: wire.Text = ""
    """The members with their calls and policy versions, if these differ; empty if all members agree."""


@message(47, "client → coordinator")
class StatusQuery(Message):
    """A request for a snapshot of the job. The reply is `Status`."""

    call_id: wire.Count


@message(48, "coordinator → client")
class Status(Message):
    """The reply to a `StatusQuery`, with a snapshot of the job in the form that `CoordinatorCore.status` returns."""

    call_id: wire.Count
    table: wire.Table


def session_end(message: Message) -> ConnectionLostError | None:
    """Return the error to report if a message ends the session, or None if the session continues after the message."""
    if isinstance(message, Refused) and message.over:
        text = f"the coordinator has ended the session ({message.code}): {message.text}"
        return ConnectionLostError(text, final=message.code not in TRY_AGAIN)
    if isinstance(message, Disconnect):
        return ConnectionLostError(f"the peer has disconnected ({message.reason or 'no reason given'})")
    return None
