"""The client side of the protocol as a state machine: checked requests, open groups and pending calls. No I/O.

- An open group finishes exactly once, complete or with an error. Its samples stay readable.
- A message for a finished group is dropped.
- A message that contradicts the tokens received so far raises a `SerializationError`, which closes the connection.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, TypedDict, get_type_hints

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollout import errors
from rollout.distributed.client.group import OpenGroup, noop
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import GIVEN_UP
from rollout.distributed.protocol.frames import MAX_REQUEST_BYTES
from rollout.errors import (
    ConnectionLostError,
    ControlError,
    EngineStateError,
    InvalidRequestError,
    RequestError,
    RolloutError,
    RolloutFailedError,
    SerializationError,
)
from rollout.requests.codec import refuse
from rollout.requests.images import ImagePrompt, processed_prompt
from rollout.sampling_params import SamplingParams

TokenIds = bytes | Sequence[int] | NDArray[Any]
"""Token ids: a sequence, an array, or little-endian int32 in bytes."""
Prompt = str | TokenIds | Mapping[str, Any]
"""A prompt: text, token ids, or the processor's result for one prompt with images."""


class RequestOptions(TypedDict, total=False):
    """The optional keyword arguments for submitting a group, in addition to its prompt and its sampling parameters."""

    priority: int
    """The group's priority. Groups with a higher priority run first. Default: 0."""
    timeout_s: float | None
    """The number of seconds after which the group fails. Default: None, for no deadline while any rank is connected."""
    interval: int
    """The number of tokens per sample between two reports. If 0, the coordinator's configured interval applies.
    Default: 0, but 1 for streams."""
    arrival_time: float | None
    """The time of arrival, in wall-clock seconds. Default: None, which means the current time."""
    known: Iterable[wire.Stretch]
    """Tokens from an earlier session (`OpenGroup.known`); generation continues after them. Default: no tokens."""
    min_policy_version: int
    """The lowest policy version with which an engine may compute the group; until then, the group waits. Default: 0."""


_HINTS = get_type_hints(wire.Submit, include_extras=True)


def _check(**options: Any) -> None:
    for name, value in options.items():
        rule = _HINTS[name].__metadata__[0]
        if not rule.holds(value):
            raise InvalidRequestError(f"{name}={value!r}: must be {rule.text}")


@lru_cache(maxsize=256)
def packed_params(params: SamplingParams) -> bytes:
    """Encode sampling parameters as a single msgpack value."""
    packed: bytes = msgpack.packb(params.serialize())
    return packed


def int32_tokens(prompt: TokenIds) -> bytes:
    """Pack token ids as little-endian int32.

    Raises:
        InvalidRequestError: `prompt` is empty, or is not a row of integers in [0, 2**31).
    """
    try:
        # Pack lists with array(), because numpy takes ten times as long for a list.
        row = array("i", prompt) if isinstance(prompt, list | tuple) else prompt
        tokens = np.frombuffer(row, "<i4") if isinstance(row, bytes) else np.asarray(row)
    except (TypeError, ValueError, OverflowError) as exc:
        raise InvalidRequestError(f"prompt of type {type(prompt).__name__}: {_TOKEN_IDS} ({exc})") from exc
    if not tokens.size or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidRequestError(f"prompt of shape {tokens.shape} and dtype {tokens.dtype}: {_TOKEN_IDS}")
    for bound in (tokens.min(), tokens.max()):
        if not 0 <= bound < 2**31:
            raise InvalidRequestError(f"prompt token {bound}: must be in [0, 2**31)")
    return tokens.astype("<i4", copy=False).tobytes()


_TOKEN_IDS = "must be text, or token ids in [0, 2**31), at least one, in a row"
SMALLER = "let the processor make smaller images, or have every rank compute its own prompts (coordinator=False)"


Call = Future[Any]
"""A pending call. Its result is a number such as that of evicted blocks (control), a dict (status) or None (barrier)."""


class ClientSession:
    """The client's state in one session, from the handshake to the loss of the connection.

    Once the session has ended, every method that sends a message raises `ConnectionLostError`.

    Args:
        send: a function that sends a message to the coordinator.
        clock: a function that returns the wall-clock time in seconds, for arrival times.
        on_refused: called when the coordinator rejects a frame without ending the session.
    """

    def waits_for(self) -> str:
        """Describe the open requests and unanswered calls in words."""
        some = list(self._open)[:4]
        barriers = f", barriers {sorted(self._barriers)}" if self._barriers else ""
        return f"{len(self._open)} open requests {some}, {len(self._calls)} unanswered calls{barriers}"

    def __init__(
        self,
        send: Callable[[wire.Message], None],
        *,
        clock: Callable[[], float] = time.time,
        on_refused: Callable[[wire.Refused], object] = noop,
    ) -> None:
        self.error: ConnectionLostError | None = None
        """The error with which the session has ended; None while the session is open."""
        self._send = send
        self._clock = clock
        self._on_refused = on_refused
        self._open: dict[int, OpenGroup] = {}
        self._calls: dict[int, Call] = {}
        self._barriers: dict[int, list[Call]] = {}
        self._next_request_id = 0
        self._next_call_id = 0

    # --- requests and calls -------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        wanted: Collection[int] | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        interval: int = 0,
        arrival_time: float | None = None,
        known: Iterable[wire.Stretch] = (),
        min_policy_version: int = 0,
    ) -> OpenGroup:
        """Submit a group and return the `OpenGroup`, which has received no new tokens yet.

        Args:
            prompt: text, token ids in [0, 2**31), or the processor's result for one prompt with images.
            params: the sampling parameters of the group.
            wanted: indices of the samples to compute; if None, all samples that `known` does not report as finished.
            priority, timeout_s, interval, arrival_time, known, min_policy_version: see `RequestOptions`.

        Raises:
            InvalidRequestError: a value is out of range, or `known` does not fit the request; nothing was sent.
        """
        self._refuse_when_lost()
        _check(
            priority=priority, timeout_s=timeout_s, interval=interval, arrival_time=arrival_time,
            min_policy_version=min_policy_version,
        )  # fmt: skip
        if timeout_s is not None and timeout_s <= 0:
            raise InvalidRequestError(f"timeout_s={timeout_s!r}: must be None or a number above 0")
        if isinstance(prompt, Mapping):
            prompt = processed_prompt(prompt)
        packed = prompt if isinstance(prompt, str) else int32_tokens(prompt)
        arrived = self._clock() if arrival_time is None else float(arrival_time)
        group = OpenGroup(self._next_request_id, packed, params, priority, arrived)
        message = wire.Submit(
            group.request_id, packed, params.n, packed_params(params), params.seed, priority, arrived, timeout_s, interval,
            min_policy_version=min_policy_version, share=params.prefix_share,
        )  # fmt: skip
        if isinstance(prompt, ImagePrompt):
            group.images, group.keyed = prompt.images, prompt.keyed
            message.images, message.keyed = prompt.images.pack(), prompt.keyed
        for stretch in known:
            try:
                stretch.check()
                group.take(stretch)
            except SerializationError as exc:
                raise InvalidRequestError(f"known does not fit the request: {exc}") from exc
        if wanted is not None:
            group.want_only(wanted)
        if group.complete:
            raise InvalidRequestError(f"all wanted samples of n={params.n} are in known: nothing is left to compute")
        still = group.open_samples()
        message.known = group.known(still)
        message.wanted = still if len(still) < params.n else []
        known_bytes = sum(stretch.buffer_bytes for stretch in message.known)
        if len(packed) + len(message.images) + len(message.keyed) + known_bytes > MAX_REQUEST_BYTES:
            pictured = f", {len(message.images)} bytes of images" if message.images else ""
            raise InvalidRequestError(
                f"a prompt of {len(packed)} bytes{pictured} with {known_bytes} known: at most {MAX_REQUEST_BYTES} fit in "
                f"one request; {SMALLER if pictured else 'shorten it'}"
            )
        self._send(message)
        self._next_request_id += 1
        self._open[group.request_id] = group
        return group

    def abort(self, request_id: int) -> bool:
        """Request the abort of a group; return False if the group was not open.

        The group then fails with `RequestAbortedError`, unless its result arrives first."""
        self._refuse_when_lost()
        if request_id not in self._open:
            return False
        self._send(wire.Abort(request_id))
        return True

    def control(self, signal: str, argument: int | str | None, timeout_s: float) -> Call:
        """Send a control call. It completes when all engines have answered, and fails after `timeout_s` seconds."""
        return self._call(lambda call_id: wire.Control(call_id, signal, argument, timeout_s))

    def status(self) -> Call:
        """Request the job's status, which becomes the result of the returned call."""
        return self._call(wire.StatusQuery)

    def barrier(self, index: int, what: str = "", policy_version: int = 0) -> Call:
        """Report this member's arrival at barrier `index`.

        The returned call completes when every member has arrived at this barrier or at a later barrier."""
        self._refuse_when_lost()
        self._send(wire.Barrier(index, what, policy_version))
        call = Call()
        self._barriers.setdefault(index, []).append(call)
        return call

    def give_up_barrier(self, index: int) -> None:
        """Report that this member's collective call at barrier `index` failed. Its arrival there stays registered."""
        self._refuse_when_lost()
        self._send(wire.Barrier(index, GIVEN_UP, 0))

    def forget(self, call: Call) -> None:
        """Drop a pending call, so that its reply is ignored."""
        self._calls = {number: each for number, each in self._calls.items() if each is not call}
        barriers = {index: [each for each in calls if each is not call] for index, calls in self._barriers.items()}
        self._barriers = {index: calls for index, calls in barriers.items() if calls}

    def _call(self, message: Callable[[int], wire.Message]) -> Call:
        self._refuse_when_lost()
        self._send(message(self._next_call_id))
        call = self._calls[self._next_call_id] = Call()
        self._next_call_id += 1
        return call

    def _refuse_when_lost(self) -> None:
        if self.error is not None:
            raise ConnectionLostError(str(self.error))

    # --- answers ------------------------------------------------------------------------------------------------

    def receive(self, message: wire.Message) -> None:
        """Handle a message from the coordinator. After a `SerializationError` the caller must close the connection."""
        handler = self._HANDLERS.get(type(message))
        if handler is None:
            raise SerializationError(f"{type(message).__name__}: no message for a client")
        handler(self, message)

    def lost(self, error: ConnectionLostError) -> None:
        """Fail all open groups and calls with `error`, because the connection was lost. Idempotent."""
        if self.error is not None:
            return
        self.error = error
        groups, self._open = self._open, {}
        calls = [*self._calls.values(), *chain.from_iterable(self._barriers.values())]
        self._calls, self._barriers = {}, {}
        for group in groups.values():
            group.error = ConnectionLostError(f"request {group.request_id}: {error}")
            self._tell_the_end(group)
        for call in calls:
            _finish(call, ConnectionLostError(str(error)))

    def _accepted(self, message: wire.Accepted) -> None:
        group = self._open.get(message.request_id)
        if group is not None:
            group.prompt_tokens = message.prompt

    def _update(self, message: wire.Update) -> None:
        for stretch in message.stretches:
            group = self._open.get(stretch.request_id)
            if group is None:
                continue
            group.take(stretch)
            if group.on_update is not noop:
                group.on_update(group, stretch)
            if group.complete:
                if group.prompt_tokens is None:
                    refuse("Update", group.request_id, "the tokens of its prompt, before its result,")
                self._end(group)

    def _failed(self, message: wire.RequestFailed) -> None:
        group = self._open.get(message.request_id)
        if group is not None:
            group.error = exception_named(message.error, message.text, message.request_id)
            self._end(group)

    def _end(self, group: OpenGroup) -> None:
        del self._open[group.request_id]
        self._tell_the_end(group)

    def _tell_the_end(self, group: OpenGroup) -> None:
        on_done = group.on_done
        # Drop the callbacks. They often refer to the group, and the reference cycle would keep both alive.
        group.on_done = group.on_update = noop
        on_done(group)

    def _control_done(self, message: wire.ControlDone) -> None:
        error = None
        if message.error is not None:
            error = exception_named(message.error, message.text, engines=tuple(message.engines))
        if (call := self._calls.pop(message.call_id, None)) is not None:
            _finish(call, error, message.amount)

    def _status(self, message: wire.Status) -> None:
        if (call := self._calls.pop(message.call_id, None)) is not None:
            _finish(call, None, message.table)

    def _barrier_done(self, message: wire.BarrierDone) -> None:
        error = None
        if message.differences:
            error = EngineStateError(
                f"the ranks made different calls: {message.differences}; every rank must make the same calls in the same "
                "order, and count the same weight updates (is the optimizer hook attached on all of them?)"
            )
        for index in [index for index in self._barriers if index <= message.index]:
            for call in self._barriers.pop(index):
                _finish(call, error)

    def _refused(self, message: wire.Refused | wire.Disconnect) -> None:
        error = wire.session_end(message)
        if error is not None:
            self.lost(error)
        elif isinstance(message, wire.Refused):
            self._on_refused(message)

    _HANDLERS: ClassVar[dict[type[wire.Message], Callable[[ClientSession, Any], None]]] = {
        wire.Update: _update,
        wire.Accepted: _accepted,
        wire.RequestFailed: _failed,
        wire.ControlDone: _control_done,
        wire.Status: _status,
        wire.BarrierDone: _barrier_done,
        wire.Refused: _refused,
        wire.Disconnect: _refused,
        wire.Heartbeat: lambda session, message: None,
        wire.ConnectAck: lambda session, message: None,
    }


def _finish(call: Call, error: RolloutError | None, value: Any = None) -> None:
    if error is not None:
        call.set_exception(error)
    else:
        call.set_result(value)


def exception_named(name: str, text: str, request_id: int | None = None, engines: tuple[str, ...] = ()) -> RolloutError:
    """Build the exception that the coordinator reports. An unknown `name` becomes a `RequestError` or a `ControlError`.

    Args:
        name: name of a class in `rollout.errors`.
        text: the exception's message.
        request_id: id of the failed request; None for a control call.
        engines: names of the engines at which a control call failed.
    """
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, RolloutError) or kind is RolloutFailedError:
        kind, text = RequestError if request_id is not None else ControlError, f"{name}: {text}"
    if issubclass(kind, RequestError):
        return kind(text, request_id)
    return kind(text, engines) if issubclass(kind, ControlError) else kind(text)
