"""The asyncio client of a coordinator: requests as futures, streams of tokens, awaitable control calls.

- Every future finishes with a result or an error. Nothing is polled.
- Once the connection is lost, every call raises `ConnectionLostError` immediately. To reconnect, build another client.
- A client belongs to one event loop and is not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from rollout.config import Advanced
from rollout.distributed.client.futures import Readers, RequestFuture, RequestStream
from rollout.distributed.client.group import OpenGroup
from rollout.distributed.client.session import Call, ClientSession, Prompt, RequestOptions
from rollout.distributed.client.text_stream import GroupText
from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import (
    FLUSH_PREFIX_CACHE,
    LOAD_ADAPTER,
    LOAD_WEIGHTS,
    SET_VERSION,
    UNLOAD_ADAPTER,
)
from rollout.distributed.transport.dealer import Dealer
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError, RolloutError, SerializationError
from rollout.sampling_params import SamplingParams
from rollout.state import ControlSignal, KVCacheManagementMode, Mode
from rollout.threads.diagnosis import answer_signal, watch

if TYPE_CHECKING:
    from rollout.distributed.transport.keys import JobKeys

CONTROL_TIMEOUT_S = Advanced.control_timeout_s
"""The default deadline of a control call, in seconds."""
ANSWER_MARGIN_S = 5.0
"""Seconds to wait beyond a control call's deadline for the coordinator's own error, which names the late engines."""
QUERY_TIMEOUT_S = 30.0
"""The default deadline, in seconds, of a query that the coordinator answers without the engines."""


class InferenceClient:
    """A client that sends requests and control calls to a coordinator. It connects in `start` or `async with`.

    Args:
        address: the coordinator's address, `tcp://host:port`.
        name: the client's name in logs.
        keys: the job's keys; None if the coordinator uses no keys.
        member: the rank in [0, data_parallel_size) whose training loop uses this client, so that barriers wait for the
            client. If None, barriers do not wait for it.
        control_timeout_s: default deadline of a control call, in seconds.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "client",
        keys: JobKeys | None = None,
        member: int | None = None,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        if not isinstance(name, str) or len(name) > 256:
            raise ConfigError(f"name={name!r}: must be a string of at most 256 characters")
        if member is not None and (type(member) is not int or member < 0):
            raise ConfigError(f"member={member!r}: must be None or the number of a rank, from 0")
        self.address = address
        self.name = name
        self._member = member
        self._dealer = Dealer(address, name, keys=keys, on_message=self._receive, on_lost=self._lost)
        self._session = ClientSession(self._dealer.send, on_refused=self._refused)
        self._greeting: asyncio.Future[wire.ConnectAck] | None = None
        self._policy_version: int | None = None

        self._control_timeout_s = control_timeout_s
        self._readers = Readers(lambda flush: flush())
        watch(self)
        answer_signal()

    def describe_state(self) -> Iterator[str]:
        """Yield the line that `rollout.threads.diagnosis` prints about this client."""
        how = f"lost ({self.lost})" if self.lost is not None else "connected" if self.connected else "not connected"
        yield f"client {self.name!r} of {self.address}: {how}; {self._session.waits_for()}"

    async def start(self, timeout_s: float = 30.0) -> None:
        """Connect and perform the handshake. Idempotent.

        Raises:
            DeadlineError: the coordinator did not answer within `timeout_s` seconds.
            ConnectionLostError: the coordinator rejected this client, or the connection was lost before; build another.
            ConfigError: the address is invalid.
        """
        if self.lost is not None:
            raise ConnectionLostError(f"{self.lost}; build another client")
        if self.connected:
            return
        if self._greeting is not None:
            raise RuntimeError(f"client {self.name!r}: start() while another start() waits for the coordinator")
        self._greeting = asyncio.get_running_loop().create_future()
        try:
            self._dealer.open()
            self._dealer.send(wire.Connect(wire.PROTOCOL_VERSION, self.name, self._member))
            done, _ = await asyncio.wait((self._greeting,), timeout=timeout_s)
            if not done:
                raise DeadlineError(
                    f"no coordinator answered at {self.address} within timeout_s={timeout_s}; is it running there, and "
                    "does this client have the keys of its job?"
                )
            welcome = self._greeting.result()
        except BaseException as exc:
            self._dealer.close("the handshake failed", quietly=isinstance(exc, DeadlineError))
            raise
        finally:
            self._greeting = None
        self._policy_version = welcome.policy_version
        self._dealer.heartbeat(welcome.heartbeat_interval_s, welcome.heartbeat_timeout_s)

    async def stop(self) -> None:
        """Disconnect. Open requests and calls fail with `ConnectionLostError`. Idempotent."""
        self._dealer.close(f"client {self.name!r} has stopped")
        self._lost(ConnectionLostError(f"{self.address}: client {self.name!r} was stopped"))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def connected(self) -> bool:
        """Whether the handshake has completed and the connection is alive."""
        return self._policy_version is not None and self.lost is None

    @property
    def lost(self) -> ConnectionLostError | None:
        """The error with which the connection was lost; None while the connection is alive, and before `start`."""
        return self._session.error

    @property
    def policy_version(self) -> int | None:
        """The policy version at the handshake or in this client's latest `set_policy_version`; None before `start`."""
        return self._policy_version

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestFuture:
        """Submit a group: one prompt with n samples. Cancelling the future aborts the group.

        Returns:
            A future whose result is the list of n samples. It fails with a `RequestError` if the whole group fails, and
            with `ConnectionLostError` if the connection is lost. If a single sample fails, the list still contains that
            sample, with `error` set.

        Raises:
            InvalidRequestError: a value is out of range; nothing was sent.
            ConnectionLostError: the client is not connected.
            TypeError: an option is unknown.
        """
        return self._future(self.open_group(prompt, sampling_params, wanted=None, **options))

    def add_request_streaming(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptions]
    ) -> RequestStream:
        """Submit a group; stream its tokens `interval` at a time (default: 1). Raises the same errors as `add_request`."""
        options.setdefault("interval", 1)
        group = self.open_group(prompt, sampling_params, wanted=None, **options)
        stream = RequestStream(self._future(group), GroupText(group.params, None), self._readers)
        group.on_update = partial(_grown, stream)
        group.on_done = partial(self._ended, stream)
        return stream

    def abort_request(self, request: RequestFuture | RequestStream | int) -> bool:
        """Abort a request, which then fails with `RequestAbortedError`. Return False if it has already finished."""
        return self._session.abort(request if isinstance(request, int) else request.request_id)

    def open_group(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        wanted: Collection[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> OpenGroup:
        """Submit a group and return the `OpenGroup`, on which the caller may set `on_update` and `on_done`.

        For `wanted` and `options` see `ClientSession.submit`.
        """
        return self._session.submit(prompt, sampling_params or _DEFAULT_PARAMS, wanted=wanted, **options)

    def _abort(self, request_id: int) -> None:
        if self.connected:
            self._session.abort(request_id)

    def _future(self, group: OpenGroup) -> RequestFuture:
        loop = asyncio.get_running_loop()
        future = RequestFuture(group.request_id, self._abort, loop=loop, prompt=group.text, group=group)
        group.on_done = partial(self._ended, future)
        return future

    def _ended(self, listener: RequestFuture | RequestStream, group: OpenGroup) -> None:
        try:
            samples = group.result()
        except RolloutError as exc:
            listener.fail(exc)
        else:
            listener.end(samples)

    # --- control calls ------------------------------------------------------------------------------------------

    async def pause_engines(self, timeout_s: float | None = None) -> None:
        """Pause every engine at its next step boundary; return when all engines are paused.

        Args:
            timeout_s: deadline of the call, in seconds; if None, this client's `control_timeout_s`. The `timeout_s` of
                every control call has this meaning.

        Raises:
            ControlError: the coordinator's state does not allow the call, or some engines failed or did not answer in
                time. The message and the attribute `engines` name them.
            DeadlineError: the coordinator itself did not answer.
            ConnectionLostError: the client is not connected.
        """
        await self._control(ControlSignal.PAUSE.value, None, timeout_s)

    async def unpause_engines(self, timeout_s: float | None = None) -> None:
        """Resume stepping on every paused engine. Raises the same errors as `pause_engines`."""
        await self._control(ControlSignal.UNPAUSE.value, None, timeout_s)

    async def suspend_engines(self, mode: Mode = None, timeout_s: float | None = None) -> None:
        """Suspend every paused engine and release its KV memory. Raises the same errors as `pause_engines`.

        Args:
            mode: what happens to the KV cache; if None, each engine's configured mode. An unknown mode raises `ConfigError`.
        """
        chosen = KVCacheManagementMode.parse(mode)
        await self._control(ControlSignal.SUSPEND.value, None if chosen is None else chosen.value, timeout_s)

    async def resume_engines(self, timeout_s: float | None = None) -> None:
        """Restore the KV memory of every suspended engine and leave the engine paused.

        An engine that its own training loop has suspended stays suspended until that loop resumes the engine.
        """
        await self._control(ControlSignal.RESUME.value, None, timeout_s)

    async def stop_engines(self, timeout_s: float | None = None) -> None:
        """Stop every paused or suspended engine. Unfinished requests fail with `RequestAbortedError`."""
        await self._control(ControlSignal.STOP.value, None, timeout_s)

    async def set_policy_version(self, version: int, timeout_s: float | None = None) -> None:
        """Announce changed weights with this policy version to every engine. Raises the same errors as `pause_engines`.

        A version that is not an integer in [0, 2**63) raises `ConfigError`.
        """
        if type(version) is not int or not 0 <= version < 2**63:
            raise ConfigError(f"version={version!r}: must be an integer in [0, 2**63)")
        await self._control(SET_VERSION, version, timeout_s)
        self._policy_version = version

    async def flush_prefix_cache(self, timeout_s: float | None = None) -> int:
        """Evict all cached blocks that no request uses, on every engine; return the number of evicted blocks."""
        return await self._control(FLUSH_PREFIX_CACHE, None, timeout_s)

    async def load_weights(self, folder: str, timeout_s: float | None = None) -> None:
        """Load a folder of safetensors into the model of every engine. The caller must have paused the engines.

        A `ControlError` names the engines that could not load the folder; the other engines have loaded it.
        """
        await self._control(LOAD_WEIGHTS, folder, timeout_s)

    async def load_adapter(self, name: str, folder: str, timeout_s: float | None = None) -> None:
        """Load the LoRA adapter in a folder into every engine; requests use it with `SamplingParams(adapter=name)`.

        Raises the same errors as `load_weights`.
        """
        await self._control(LOAD_ADAPTER, f"{name}={folder}", timeout_s)

    async def unload_adapter(self, name: str, timeout_s: float | None = None) -> int:
        """Unload an adapter from every engine; return the number of samples that failed because they used the adapter."""
        return await self._control(UNLOAD_ADAPTER, name, timeout_s)

    async def status(self, timeout_s: float = QUERY_TIMEOUT_S) -> dict[str, Any]:
        """Return a snapshot of the job: state, queue, ranks, clients and barrier; see `CoordinatorCore.status`."""
        table: dict[str, Any] = await self._answer(self._session.status(), timeout_s, "status()")
        return table

    async def barrier(
        self, index: int, timeout_s: float = CONTROL_TIMEOUT_S, *, what: str = "", policy_version: int = 0
    ) -> None:
        """Wait until every member (the client of a rank's training loop) has arrived at barrier `index` or a later one.

        Args:
            index: number of the barrier, from 0.
            timeout_s: seconds to wait for the other members.
            what: name of the collective call, which must be the same on all members.
            policy_version: version of this member's weights, which must be the same on all members.

        Raises:
            DeadlineError: a member did not arrive within `timeout_s`. This member's arrival stays registered.
            EngineStateError: all members have arrived, but their `what` or `policy_version` differs.
            ConfigError: `index` is not an integer in [0, 2**63).
            ConnectionLostError: the client is not connected.
        """
        if type(index) is not int or not 0 <= index < 2**63:
            raise ConfigError(f"index={index!r}: must be an integer in [0, 2**63)")
        await self._answer(self._session.barrier(index, what, policy_version), timeout_s, f"barrier({index})")

    def give_up_barrier(self, index: int) -> None:
        """Report that this member's call failed, so that barrier `index` does not compare it with other members' calls."""
        self._session.give_up_barrier(index)

    async def _control(self, signal: str, argument: int | str | None, timeout_s: float | None) -> int:
        """Run a control call; return the sum of the numbers that the engines report, such as evicted blocks."""
        limit = self._control_timeout_s if timeout_s is None else timeout_s
        call = self._session.control(signal, argument, limit)
        amount: int = await self._answer(call, limit + ANSWER_MARGIN_S, signal)
        return amount

    async def _answer(self, call: Call, timeout_s: float, what: str) -> Any:
        answered = asyncio.wrap_future(call)
        try:
            await asyncio.wait((answered,), timeout=timeout_s)
            if not answered.done():
                raise DeadlineError(f"{what}: no answer from the coordinator at {self.address} within {timeout_s} s")
            return answered.result()
        finally:
            self._session.forget(call)
            answered.cancel()

    # --- received messages --------------------------------------------------------------------------------------

    def _receive(self, message: wire.Message) -> None:
        if self._greeting is None or self._greeting.done():
            self._session.receive(message)
        elif not isinstance(message, wire.ConnectAck):
            raise SerializationError(
                f"{type(message).__name__} arrived instead of ConnectAck: this is not a coordinator"
            )
        else:
            self._greeting.set_result(message)

    def _lost(self, error: ConnectionLostError) -> None:
        self._session.lost(error)
        if self._greeting is not None and not self._greeting.done():
            self._greeting.set_exception(error)

    def _refused(self, message: wire.Refused) -> None:
        # Close the connection: the message does not say which frame was rejected, so the call that sent the frame could
        # not be failed alone, and would wait for its reply forever.
        why = f"the coordinator could not take a frame ({message.code}): {message.text}"
        self._dealer.close(why)
        self._lost(ConnectionLostError(f"{self.address}: {why}; this is a bug or a mix of versions", final=True))


def _grown(stream: RequestStream, _: OpenGroup, stretch: wire.Stretch) -> None:
    for delta in stretch.deltas():
        stream.take(delta)


_DEFAULT_PARAMS = SamplingParams()
