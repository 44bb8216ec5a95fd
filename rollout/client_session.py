"""What a client knows: its open groups, token by token, and the calls it waits for. Messages in, messages out.

Always true:
- an open group ends once: complete, or with an error that says why; its record stays readable afterwards;
- a sample's stretches follow each other without gap and overlap; one that starts afresh is known only from there on;
- a message for a group that has ended already is dropped, one that contradicts the record is a `SerializationError`,
  which ends the connection.

No sockets, no event loop, no threads. A stretch is kept as it came and cut up only when somebody reads a sample, so that
a group of many samples costs little until then.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, overload

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollout import errors
from rollout.codec import refuse
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
from rollout.frames import MAX_FRAME_BYTES, LostFramesError
from rollout.outcome import Outcome, TopN, pack_top_n, unpack, unpack_top_n
from rollout.protocol import (
    Abort,
    Accepted,
    Barrier,
    BarrierDone,
    ConnectAck,
    Control,
    ControlDone,
    Disconnect,
    Heartbeat,
    Message,
    Refused,
    RequestFailed,
    Status,
    StatusQuery,
    Stretch,
    Submit,
    Update,
    farewell,
)
from rollout.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.spans import VersionSpans
from rollout.state import FinishReason
from rollout.state import Status as RequestStatus
from rollout.wire_types import TOKEN_BYTES

Prompt = str | bytes | Sequence[int] | NDArray[Any]
"""Text, token ids, or token ids as little-endian int32 in bytes."""

MAX_REQUEST_BYTES = MAX_FRAME_BYTES // 2
"""Of the prompt and what is known of its samples."""
MAX_PRIORITY = 2**31
_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


def _nobody(*_: object) -> None:
    """What is called where nobody listens."""


class OpenGroup:
    """A prompt, what was asked of it, and all that is known of its n samples.

    Attributes:
        request_id: of the client.
        text: the prompt, where it was given as text.
        prompt_tokens: little-endian int32; None until the coordinator has tokenised a text.
        params: the caller's.
        arrival_time: wall-clock seconds.
        error: why it ended without a result.
        on_update: called with (group, stretch) when tokens have come and when samples have ended.
        on_done: called with the group when it has ended, with or without a result.
    """

    __slots__ = (
        "_ended",
        "_lengths",
        "_pieces",
        "_prompt_list",
        "_unwanted",
        "arrival_time",
        "error",
        "on_done",
        "on_update",
        "params",
        "priority",
        "prompt_tokens",
        "request_id",
        "text",
    )

    def __init__(
        self, request_id: int, prompt: str | bytes, params: SamplingParams, priority: int, arrival_time: float
    ) -> None:
        self.request_id = request_id
        self.text = prompt if isinstance(prompt, str) else None
        self.prompt_tokens = None if isinstance(prompt, str) else prompt
        self.params = params
        self.priority = priority
        self.arrival_time = arrival_time
        self.error: RolloutError | None = None
        self.on_update: Callable[[OpenGroup, Stretch], object] = _nobody
        self.on_done: Callable[[OpenGroup], object] = _nobody
        # Of a sample that came in one piece, the stretch itself: a list for each would keep the garbage collector busy.
        self._pieces: dict[int, Stretch | list[Stretch]] = {}
        self._lengths: dict[int, int] = {}
        self._prompt_list: list[int] | None = None
        self._ended: set[int] = set()
        self._unwanted: frozenset[int] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every sample that was wanted has ended."""
        return len(self._ended) + len(self._unwanted) == self.params.n

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.complete or self.error is not None

    def open_samples(self) -> list[int]:
        """Indices of the wanted samples that have not ended."""
        return [index for index in range(self.params.n) if index not in self._ended and index not in self._unwanted]

    def want_only(self, wanted: Collection[int]) -> None:
        """Wait for these samples alone; of the others, those that have ended stay readable.

        Raises:
            InvalidRequestError: some of them are none of the group's.
        """
        foreign = [index for index in wanted if type(index) is not int or not 0 <= index < self.params.n]
        if foreign:
            raise InvalidRequestError(f"wanted={foreign}: must be samples in [0, n={self.params.n})")
        self._unwanted = frozenset(range(self.params.n)).difference(wanted, self._ended)

    def oldest_version(self) -> int | None:
        """The lowest policy version of a token of a wanted sample that has not ended; None: they have no token."""
        rows = (_Sample(self._pieces[index], index) for index in self.open_samples() if index in self._pieces)
        return min((version for row in rows for version in row.versions()[1::2]), default=None)

    def take(self, stretch: Stretch) -> None:
        """Add new tokens to the record.

        Raises:
            LostFramesError: they do not follow what is known.
            SerializationError: there is no such sample, or it had ended.
        """
        outcomes, starts, counts = stretch.outcomes, stretch.starts, stretch.counts
        pieces, lengths, ended = self._pieces, self._lengths, self._ended
        for column, index in enumerate(stretch.indices):
            start = starts[column]
            if index in ended or index >= self.params.n or index in self._unwanted:
                state = "has ended" if index in ended else f"is none of n={self.params.n} or was not asked for"
                raise SerializationError(f"request {self.request_id}: tokens of sample {index}, which {state}")
            if start == 0:
                pieces[index] = stretch
            elif start == lengths.get(index, 0):
                earlier = pieces[index]
                if isinstance(earlier, list):
                    earlier.append(stretch)
                else:
                    pieces[index] = [earlier, stretch]
            else:
                raise LostFramesError(
                    f"request {self.request_id} sample {index}: tokens from {start} on arrived where "
                    f"{lengths.get(index, 0)} are known"
                )
            lengths[index] = start + counts[column]
            if outcomes is not None and outcomes[column] is not None:
                ended.add(index)

    def known(self) -> list[Stretch]:
        """Everything known of its samples, for `ClientSession.submit(…, known=…)` elsewhere: at most one stretch.

        Samples that have ended are in it with their outcomes: they are not computed again.
        """
        indices = sorted(self._pieces)
        if not indices:
            return []
        rows = [_Sample(self._pieces[index], index) for index in indices]
        top_n = [row.packed_top_n() for row in rows]
        return [
            Stretch(
                self.request_id,
                0,
                indices,
                [0] * len(rows),
                [self._lengths[index] for index in indices],
                b"".join(row.token_ids() for row in rows),
                b"".join(row.log_probs() for row in rows),
                [row.versions() for row in rows],
                _unless_empty([row.first("ttfts") for row in rows]),
                _unless_empty(top_n),
                _unless_empty([row.last("texts") for row in rows]),
                _unless_empty([row.last("outcomes") for row in rows]),
            )
        ]

    def result(self) -> GroupResult:
        """The samples' requests.

        Raises:
            RolloutError: why it ended without a result.
            RuntimeError: it has not ended.
        """
        if self.error is not None:
            raise self.error
        if not self.complete:
            raise RuntimeError(
                f"request {self.request_id}: of n={self.params.n} samples {len(self.open_samples())} have not ended; wait "
                "for them"
            )
        return GroupResult(self)

    def request(self, index: int) -> DynamicInferenceRequest:
        """What a direct engine's merged request says of this sample, but for its events.

        Raises:
            RuntimeError: it has not ended.
            SerializationError: its outcome is malformed.
        """
        if index not in self._ended:
            raise RuntimeError(f"request {self.request_id} sample {index} has not ended, or was not asked for")
        sample = _Sample(self._pieces[index], index)
        if self._prompt_list is None:
            self._prompt_list = np.frombuffer(self.prompt_tokens or b"", "<i4").tolist()
        outcome = unpack(sample.last("outcomes") or b"")
        reason = FinishReason(outcome.finish_reason)
        kv_spans = VersionSpans.deserialize(outcome.kv_runs)
        request = DynamicInferenceRequest(
            request_id=self.request_id,
            sample_index=index,
            prompt=self.text,
            prompt_tokens=self._prompt_list,
            sampling_params=self._params_used(outcome),
            arrival_time=self.arrival_time,
            priority=self.priority,
            status=RequestStatus.FAILED if reason in _FAILED else RequestStatus.COMPLETED,
            finish_reason=reason,
            stop_reason=outcome.stop_reason,
            error=outcome.error,
            seed=outcome.seed,
            generated_text=sample.last("texts"),
            prompt_log_probs=outcome.prompt_log_probs,
            prompt_top_n_logprobs=outcome.prompt_top_n,
            generated_top_n_logprobs=sample.top_n(),
            tpot=outcome.tpot,
            ttft=outcome.ttft if (ttft := sample.first("ttfts")) is None else ttft,
            latency=outcome.latency,
            policy_version=outcome.policy_version,
            num_cached_tokens=outcome.num_cached_tokens,
            finished_chunk_token_count=min(len(kv_spans), len(self._prompt_list)),
            generated_tokens=np.frombuffer(sample.token_ids(), "<i4").tolist(),
            generated_log_probs=np.frombuffer(sample.log_probs(), "<f4").tolist(),
            policy_spans=VersionSpans.deserialize(outcome.policy_runs),
            kv_spans=kv_spans,
        )
        request.prompt_tokens = self._prompt_list
        return request

    def _params_used(self, outcome: Outcome) -> SamplingParams:
        most = outcome.max_tokens
        if most == self.params.max_tokens:
            return self.params
        return self.params.replace(max_tokens=most, min_tokens=min(self.params.min_tokens, most))


class GroupResult(Sequence[DynamicInferenceRequest]):
    """The n samples of a group, in order; each is built when it is first read.

    The samples' `prompt_tokens` are one and the same list.
    """

    __slots__ = ("_built", "_group")

    def __init__(self, group: OpenGroup) -> None:
        self._group = group
        self._built: dict[int, DynamicInferenceRequest] = {}

    def __len__(self) -> int:
        return self._group.params.n

    @overload
    def __getitem__(self, index: int) -> DynamicInferenceRequest: ...
    @overload
    def __getitem__(self, index: slice) -> list[DynamicInferenceRequest]: ...
    def __getitem__(self, index: int | slice) -> DynamicInferenceRequest | list[DynamicInferenceRequest]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        if position not in self._built:
            self._built[position] = self._group.request(position)
        return self._built[position]

    def __repr__(self) -> str:
        return f"GroupResult(request_id={self._group.request_id}, {len(self)} samples)"


class Call:
    """A question to the coordinator.

    Attributes:
        done: whether it was answered.
        value: the answer, where there is one to see.
        error: why it failed.
        on_done: called with the call when it was answered.
    """

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id
        self.done = False
        self.value: dict[str, Any] | None = None
        self.error: RolloutError | None = None
        self.on_done: Callable[[Call], object] = _nobody

    def finish(self, error: RolloutError | None = None, value: dict[str, Any] | None = None) -> None:
        """It was answered."""
        self.done, self.error, self.value = True, error, value
        self.on_done(self)


class ClientSession:
    """One connection's life, from its handshake to its loss.

    Args:
        send: takes the messages for the coordinator.
        clock: wall-clock seconds, for arrival times.
        on_refused: gets the words of a coordinator that refuses a frame and goes on.
    """

    def __init__(
        self,
        send: Callable[[Message], None],
        *,
        clock: Callable[[], float] = time.time,
        on_refused: Callable[[Refused], object] = _nobody,
    ) -> None:
        self.error: ConnectionLostError | None = None
        """Why the session has ended."""
        self._send = send
        self._clock = clock
        self._on_refused = on_refused
        self._open: dict[int, OpenGroup] = {}
        self._calls: dict[int, Call] = {}
        self._barriers: dict[int, list[Call]] = {}
        self._next_request_id = 0
        self._next_call_id = 0

    @property
    def open_groups(self) -> list[OpenGroup]:
        """Groups that have not ended, in order of submission."""
        return list(self._open.values())

    # --- asking -------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        interval: int = 0,
        arrival_time: float | None = None,
        known: Iterable[Stretch] = (),
        wanted: Collection[int] | None = None,
    ) -> OpenGroup:
        """Ask for a group.

        Args:
            prompt: text, or token ids in [0, 2**31).
            priority: higher runs first.
            timeout_s: fail so long after arrival. None: never, while there is some rank.
            interval: report every so many tokens of a sample; 0: as the coordinator is configured.
            arrival_time: wall-clock seconds; None: now.
            known: what another session knew of the group (`OpenGroup.known`); it goes on from there.
            wanted: samples to compute. None: all that have not ended in what is known.

        Raises:
            InvalidRequestError: a value is out of range, or what is known does not fit; nothing was sent.
            ConnectionLostError: the session has ended.
        """
        self._refuse_when_lost()
        packed = prompt if isinstance(prompt, str) else _int32(prompt)
        _check_options(priority, timeout_s, interval, arrival_time)
        arrived = self._clock() if arrival_time is None else float(arrival_time)
        group = OpenGroup(self._next_request_id, packed, params, priority, arrived)
        message = Submit(
            group.request_id, packed, params.n, _packed(params), params.seed, priority, arrived, timeout_s, interval
        )
        size = len(packed)
        for stretch in known:
            size += self._continue(group, message, stretch)
        if size > MAX_REQUEST_BYTES:
            raise InvalidRequestError(
                f"a prompt of {len(packed)} bytes with {size - len(packed)} known: at most {MAX_REQUEST_BYTES} fit in "
                "one request; shorten it"
            )
        if wanted is not None:
            group.want_only(wanted)
        if group.complete:
            raise InvalidRequestError(f"no sample of n={params.n} is wanted that has not ended: nothing is left to do")
        if message.known or wanted is not None:
            still = group.open_samples()
            message.known = [each for each in (s.only(set(still)) for s in message.known) if each.indices]
            message.wanted = still if len(still) < params.n else []
        self._send(message)
        self._next_request_id += 1
        self._open[group.request_id] = group
        return group

    def _continue(self, group: OpenGroup, message: Submit, stretch: Stretch) -> int:
        try:
            stretch.check()
            group.take(stretch)
        except SerializationError as exc:
            raise InvalidRequestError(f"what is known does not fit: {exc}") from exc
        message.known.append(stretch)
        return len(stretch.token_ids) + len(stretch.log_probs) + sum(map(len, filter(None, stretch.top_n or ())))

    def abort(self, request_id: int) -> bool:
        """Ask for a group's end, which comes as a `RequestAbortedError` or, if it was ending anyway, as its result.

        Returns:
            False where no such group is open.

        Raises:
            ConnectionLostError: the session has ended.
        """
        self._refuse_when_lost()
        if request_id not in self._open:
            return False
        self._send(Abort(request_id))
        return True

    def control(self, signal: str, argument: int | str | None, timeout_s: float) -> Call:
        """Ask every engine for something; done when all have done it, or not within `timeout_s`."""
        call = self._call()
        self._send(Control(call.call_id, signal, argument, timeout_s))
        return call

    def status(self) -> Call:
        """Ask how things stand; the answer is the call's value."""
        call = self._call()
        self._send(StatusQuery(call.call_id))
        return call

    def barrier(self, index: int, what: str = "", policy_version: int = 0) -> Call:
        """Say that this member has come to barrier `index`; done when every member has come there or further.

        It fails with an `EngineStateError` where `what` (the call that ends there) or the version are not everybody's.
        """
        self._refuse_when_lost()
        call = Call(-1)
        self._barriers.setdefault(index, []).append(call)
        self._send(Barrier(index, what, policy_version))
        return call

    def forget(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        self._calls.pop(call.call_id, None)
        for index, calls in list(self._barriers.items()):
            self._barriers[index] = [each for each in calls if each is not call]
            if not self._barriers[index]:
                del self._barriers[index]

    def _call(self) -> Call:
        self._refuse_when_lost()
        call = self._calls[self._next_call_id] = Call(self._next_call_id)
        self._next_call_id += 1
        return call

    def _refuse_when_lost(self) -> None:
        if self.error is not None:
            raise ConnectionLostError(str(self.error))

    # --- answers ------------------------------------------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Take in a message of the coordinator.

        Raises:
            SerializationError: it contradicts what is known, or is none for a client; the connection is of no use.
        """
        handler = self._HANDLERS.get(type(message))
        if handler is None:
            raise SerializationError(f"{type(message).__name__}: no message for a client")
        handler(self, message)

    def lost(self, error: ConnectionLostError) -> None:
        """The connection is gone: everything open fails with `error`. Harmless when repeated."""
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
            call.finish(ConnectionLostError(str(error)))

    def _accepted(self, message: Accepted) -> None:
        group = self._open.get(message.request_id)
        if group is not None:
            group.prompt_tokens = message.prompt

    def _update(self, message: Update) -> None:
        for stretch in message.stretches:
            group = self._open.get(stretch.request_id)
            if group is None:
                continue
            group.take(stretch)
            if group.on_update is not _nobody:
                group.on_update(group, stretch)
            if group.complete:
                if group.prompt_tokens is None:
                    refuse("Update", group.request_id, "the tokens of its prompt, before its result,")
                self._end(group)

    def _failed(self, message: RequestFailed) -> None:
        group = self._open.get(message.request_id)
        if group is not None:
            group.error = exception_named(message.error, message.text, message.request_id)
            self._end(group)

    def _end(self, group: OpenGroup) -> None:
        del self._open[group.request_id]
        self._tell_the_end(group)

    def _tell_the_end(self, group: OpenGroup) -> None:
        on_done = group.on_done
        # Whoever listens often holds the group: a circle that only the garbage collector would find.
        group.on_done = group.on_update = _nobody
        on_done(group)

    def _control_done(self, message: ControlDone) -> None:
        error = None
        if message.error is not None:
            error = exception_named(message.error, message.text, engines=tuple(message.engines))
        self._answer(message.call_id, error, None)

    def _status(self, message: Status) -> None:
        self._answer(message.call_id, None, message.table)

    def _answer(self, call_id: int, error: RolloutError | None, value: dict[str, Any] | None) -> None:
        call = self._calls.pop(call_id, None)
        if call is not None:
            call.finish(error, value)

    def _barrier_done(self, message: BarrierDone) -> None:
        error = None
        if message.differences:
            error = EngineStateError(
                f"the ranks have not come together: {message.differences}; every rank must make the same calls in the same "
                "order, and count the same weight updates (is the optimizer hook attached on all of them?)"
            )
        for index in [index for index in self._barriers if index <= message.index]:
            for call in self._barriers.pop(index):
                call.finish(error)

    def _refused(self, message: Refused | Disconnect) -> None:
        error = farewell(message)
        if error is not None:
            self.lost(error)
        elif isinstance(message, Refused):
            self._on_refused(message)

    _HANDLERS: ClassVar[dict[type[Message], Callable[[ClientSession, Any], None]]] = {
        Update: _update,
        Accepted: _accepted,
        RequestFailed: _failed,
        ControlDone: _control_done,
        Status: _status,
        BarrierDone: _barrier_done,
        Refused: _refused,
        Disconnect: _refused,
        Heartbeat: lambda session, message: None,
        ConnectAck: lambda session, message: None,
    }


def exception_named(name: str, text: str, request_id: int | None = None, engines: tuple[str, ...] = ()) -> RolloutError:
    """The exception that a message names: one of `rollout.errors`, or one of them that says the name it did not know.

    Args:
        request_id: of the request that failed; None for a control call.
        engines: that the error of a control call names.
    """
    kind = getattr(errors, name, None)
    if not isinstance(kind, type) or not issubclass(kind, RolloutError) or kind is RolloutFailedError:
        kind, text = RequestError if request_id is not None else ControlError, f"{name}: {text}"
    if issubclass(kind, RequestError):
        return kind(text, request_id)
    return kind(text, engines) if issubclass(kind, ControlError) else kind(text)


class _Sample:
    """One sample's pieces of stretches, read."""

    def __init__(self, pieces: Stretch | list[Stretch], index: int) -> None:
        stretches = pieces if isinstance(pieces, list) else [pieces]
        self._pieces = [(stretch, stretch.indices.index(index)) for stretch in stretches]

    def token_ids(self) -> bytes:
        return b"".join(stretch.token_ids[_bytes(stretch, column)] for stretch, column in self._pieces)

    def log_probs(self) -> bytes:
        return b"".join(stretch.log_probs[_bytes(stretch, column)] for stretch, column in self._pieces)

    def versions(self) -> list[int]:
        rows = [stretch.versions[column] for stretch, column in self._pieces]
        spans = VersionSpans(pair for row in rows for pair in zip(row[1::2], row[2::2], strict=True))
        # Without a token the prompt is still to be admitted again, so the last word counts.
        return [rows[-1][0], *spans.serialize()]

    def top_n(self) -> TopN:
        return [row for chunk in self._column("top_n") if chunk is not None for row in unpack_top_n(chunk)]

    def packed_top_n(self) -> bytes | None:
        rows = self.top_n()
        return pack_top_n(rows) if rows else None

    def first(self, name: str) -> Any:
        return next((value for value in self._column(name) if value is not None), None)

    def last(self, name: str) -> Any:
        return next((value for value in reversed(list(self._column(name))) if value is not None), None)

    def _column(self, name: str) -> Iterator[Any]:
        for stretch, column in self._pieces:
            values = getattr(stretch, name)
            if values is not None:
                yield values[column]


def _bytes(stretch: Stretch, column: int) -> slice:
    start = TOKEN_BYTES * sum(stretch.counts[:column])
    return slice(start, start + TOKEN_BYTES * stretch.counts[column])


def _unless_empty(column: list[Any]) -> list[Any] | None:
    return None if all(value is None for value in column) else column


@lru_cache(maxsize=256)
def _packed(params: SamplingParams) -> bytes:
    packed: bytes = msgpack.packb(params.serialize())
    return packed


def _int32(prompt: bytes | Sequence[int] | NDArray[Any]) -> bytes:
    """Token ids as little-endian int32."""
    if isinstance(prompt, bytes):
        packed = prompt
    elif hasattr(prompt, "__array__"):
        packed = _int32_of_array(np.asarray(prompt))
    else:
        packed = _int32_of_list(prompt)
    if not packed:
        raise InvalidRequestError("a prompt of no tokens: must have at least one; a BOS token will do")
    if len(packed) % TOKEN_BYTES:
        raise InvalidRequestError(f"a prompt of {len(packed)} bytes: must be int32 token ids, {TOKEN_BYTES} bytes each")
    tokens = np.frombuffer(packed, "<i4")
    if tokens.min() < 0:
        raise InvalidRequestError(f"prompt token {tokens.min()}: must lie in [0, 2**31)")
    return packed


def _int32_of_array(tokens: NDArray[Any]) -> bytes:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"a prompt of shape {tokens.shape} and dtype {tokens.dtype}: must be integers in a row"
        )
    if len(tokens) and tokens.max() >= 2**31:
        raise InvalidRequestError(f"prompt token {tokens.max()}: must lie in [0, 2**31)")
    if len(tokens) and tokens.min() < 0:
        raise InvalidRequestError(f"prompt token {tokens.min()}: must lie in [0, 2**31)")
    return tokens.astype("<i4").tobytes()


def _int32_of_list(prompt: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(prompt)}i", *prompt)
    except TypeError as exc:
        raise InvalidRequestError(f"prompt of type {type(prompt).__name__}: must be text or token ids ({exc})") from exc
    except struct.error as exc:
        bad = next((token for token in prompt if not _is_int32(token)), None)
        raise InvalidRequestError(f"prompt token {bad!r}: must lie in [0, 2**31) and be an integer") from exc


def _is_int32(token: Any) -> bool:
    return hasattr(token, "__index__") and -(2**31) <= token < 2**31


def _check_options(priority: Any, timeout_s: Any, interval: Any, arrival_time: Any) -> None:
    checks: Collection[tuple[str, Any, bool, str]] = (
        ("priority", priority, _whole(priority) and abs(priority) <= MAX_PRIORITY, "an integer in [-2**31, 2**31]"),
        ("timeout_s", timeout_s, timeout_s is None or (_real(timeout_s) and timeout_s > 0), "None or a number above 0"),
        ("interval", interval, _whole(interval) and 0 <= interval < 2**63, "an integer of at least 0"),
        ("arrival_time", arrival_time, arrival_time is None or _real(arrival_time), "None or a number of seconds"),
    )
    for name, value, holds, rule in checks:
        if not holds:
            raise InvalidRequestError(f"{name}={value!r}: must be {rule}")


def _whole(value: Any) -> bool:
    return type(value) is int


def _real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
