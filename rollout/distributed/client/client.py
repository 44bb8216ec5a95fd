"""Asyncio client of a coordinator: requests as futures, streams of tokens, awaitable control calls.

Always true: every future ends, with a result or with an error that gives the reason; nothing is polled: a reply resolves
its future in the same loop iteration; after the connection is lost, every call raises `ConnectionLostError` immediately.

Not thread-safe: a client is bound to one event loop. `rollout.threads.loop_thread` makes it usable from other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack

from rollout.config import Advanced
from rollout.distributed.client.connection import ClientConnection
from rollout.distributed.client.futures import Delta, GroupTokens, Readers, RequestFuture, RequestStream
from rollout.distributed.client.group import OpenGroup
from rollout.distributed.client.submission import Prompt, RequestOptions
from rollout.distributed.protocol.fields import (
    FLUSH_PREFIX_CACHE,
    LOAD_ADAPTER,
    LOAD_WEIGHTS,
    SET_VERSION,
    UNLOAD_ADAPTER,
)
from rollout.distributed.protocol.messages import Shutdown, Stretch
from rollout.errors import ConfigError
from rollout.sampling_params import SamplingParams
from rollout.state import COORDINATOR_TRANSITIONS, ControlSignal, KVCacheManagementMode, Mode

if TYPE_CHECKING:
    from rollout.distributed.transport.keys import JobKeys

CONTROL_TIMEOUT_S = Advanced.control_timeout_s
"""Default deadline of a control call, in seconds."""
ANSWER_MARGIN_S = 5.0
"""Added to the coordinator's own deadline, so that its error, which names the late engines, arrives first."""
QUERY_TIMEOUT_S = 30.0
"""Deadline of a query that the coordinator answers without the engines."""


class InferenceClient(ClientConnection):
    """Requests and control calls to a coordinator. No network before `start`; usable as an async context manager.

    Args:
        address: `tcp://host:port`.
        name: shown in logs.
        keys: of the job, if the coordinator requires them.
        member: rank in [0, data_parallel_size) whose training loop this client is; barriers wait for it. None: not a
            member.
        deserialize: return results as requests; False: as plain dicts.
        control_timeout_s: default deadline of a control call.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str = "client",
        keys: JobKeys | None = None,
        member: int | None = None,
        deserialize: bool = True,
        control_timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        super().__init__(address, name, keys, member)
        self._deserialize = deserialize
        self._control_timeout_s = control_timeout_s
        self._readers = Readers(lambda flush: flush())

    # --- requests -----------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestFuture:
        """Submit a group of n samples of a prompt; cancelling the future aborts it.

        Returns:
            A future of a `GroupResult`. It fails with a `RequestError` if the whole group failed, or with
            `ConnectionLostError`; a sample that failed alone is in the result with its `error`.

        Raises:
            InvalidRequestError: a value is out of range; nothing was sent.
            ConnectionLostError: not connected.
            TypeError: unknown option.
        """
        return self._future(self.open_group(prompt, sampling_params, wanted=None, **options))

    def add_request_streaming(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestStream[Delta]:
        """Submit a group and stream its deltas, every `interval` tokens (default 1); raises as `add_request` does."""
        options.setdefault("interval", 1)
        group = self.open_group(prompt, sampling_params, wanted=None, **options)
        stream = RequestStream(self._future(group), GroupTokens(), self._readers)
        group.on_update = partial(_grown, stream)
        group.on_done = partial(self._ended, stream)
        return stream

    def abort_request(self, request: RequestFuture | RequestStream[Delta] | int) -> bool:
        """Abort a request; it fails with `RequestAbortedError` unless it has just ended.

        Returns:
            Whether it was open.

        Raises:
            ConnectionLostError: not connected.
        """
        self._refuse_unless_connected()
        return self._session.abort(request if isinstance(request, int) else request.request_id)

    def open_group(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        wanted: Collection[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> OpenGroup:
        """Submit a group and return its record; the caller sets `on_update` and `on_done` on it.

        `wanted` as of `ClientSession.submit`; raises as `add_request` does.
        """
        self._refuse_unless_connected()
        return self._session.submit(
            prompt,
            sampling_params or _DEFAULT_PARAMS,
            wanted=wanted,
            **options,
        )

    def _abort(self, request_id: int) -> None:
        if self.connected:
            self._session.abort(request_id)

    def _future(self, group: OpenGroup) -> RequestFuture:
        loop = asyncio.get_running_loop()
        future = RequestFuture(group.request_id, self._abort, loop=loop, prompt=group.text, group=group)
        group.on_done = partial(self._ended, future)
        return future

    def _ended(self, listener: RequestFuture | RequestStream[Delta], group: OpenGroup) -> None:
        if group.error is not None:
            listener.fail(group.error)
        else:
            listener.end(group.result(serialized=not self._deserialize))

    # --- control ------------------------------------------------------------------------------------------------

    async def pause_engines(self, timeout_s: float | None = None) -> None:
        """Pause every engine at its next step boundary; returns when all are paused.

        Args:
            timeout_s: deadline, as of every control call; None: this client's `control_timeout_s`.

        Raises:
            ControlError: not allowed in the coordinator's current state, or some engines failed or did not answer in
                time; the message and `engines` name them.
            DeadlineError: the coordinator itself did not answer.
            ConnectionLostError: not connected.
        """
        await self._signal(ControlSignal.PAUSE, None, timeout_s)

    async def unpause_engines(self, timeout_s: float | None = None) -> None:
        """Unpause every engine. Raises as `pause_engines` does."""
        await self._signal(ControlSignal.UNPAUSE, None, timeout_s)

    async def suspend_engines(self, mode: Mode = None, timeout_s: float | None = None) -> None:
        """Suspend every paused engine, which releases its KV memory. Also raises as `pause_engines` does.

        Args:
            mode: how the KV cache is kept; None: as each engine is configured.

        Raises:
            ConfigError: unknown mode.
        """
        chosen = KVCacheManagementMode.parse(mode)
        await self._signal(ControlSignal.SUSPEND, None if chosen is None else chosen.value, timeout_s)

    async def resume_engines(self, timeout_s: float | None = None) -> None:
        """Resume every suspended engine, which restores its KV memory; leads to PAUSED.

        An engine suspended by its own training loop stays suspended until that loop resumes it, and the call succeeds;
        `status()` has the state of every rank.
        """
        await self._signal(ControlSignal.RESUME, None, timeout_s)

    async def stop_engines(self, timeout_s: float | None = None) -> None:
        """Stop every paused or suspended engine; unfinished requests fail."""
        await self._signal(ControlSignal.STOP, None, timeout_s)

    async def set_policy_version(self, version: int, timeout_s: float | None = None) -> None:
        """Set the policy version of every engine's weights.

        Raises:
            ConfigError: not an integer in [0, 2**63).
        """
        if type(version) is not int or not 0 <= version < 2**63:
            raise ConfigError(f"version={version!r}: must be an integer in [0, 2**63)")
        await self._control(SET_VERSION, version, timeout_s)
        self._policy_version = version

    async def flush_prefix_cache(self, timeout_s: float | None = None) -> int:
        """Drop all unreferenced cached blocks of every engine; returns their total number."""
        done = await self._control(FLUSH_PREFIX_CACHE, None, timeout_s)
        return int((done or {})["amount"])

    async def load_weights(self, folder: str, timeout_s: float | None = None) -> None:
        """Load the weights of a folder of safetensors into the module of every engine, which the caller has paused.

        Raises:
            ControlError: the folder does not fit, or is not there, on the engines it names; the others have loaded it.
        """
        await self._control(LOAD_WEIGHTS, folder, timeout_s)

    async def load_adapter(self, name: str, folder: str, timeout_s: float | None = None) -> None:
        """Load the LoRA adapter of a folder into every engine, as `SamplingParams.adapter=name`.

        Raises:
            ControlError: it does not fit, or is not there, on the engines it names; the others have loaded it.
        """
        await self._control(LOAD_ADAPTER, f"{name}={folder}", timeout_s)

    async def unload_adapter(self, name: str, timeout_s: float | None = None) -> int:
        """Unload an adapter from every engine; returns how many samples have ended by it."""
        done = await self._control(UNLOAD_ADAPTER, name, timeout_s)
        return int((done or {})["amount"])

    async def status(self, timeout_s: float = QUERY_TIMEOUT_S) -> dict[str, Any]:
        """Snapshot of the coordinator: states, queue, ranks, clients, barrier; `parse_status` makes it typed.

        Raises:
            DeadlineError: no answer within `timeout_s`.
            ConnectionLostError: not connected.
        """
        self._refuse_unless_connected()
        return await self._answer(self._session.status(), timeout_s, "status()") or {}

    async def barrier(
        self, index: int, timeout_s: float = CONTROL_TIMEOUT_S, *, what: str = "", policy_version: int = 0
    ) -> None:
        """Wait until every member has arrived at barrier `index` or a later one.

        Args:
            what, policy_version: name of the collective call and version of the weights; must agree on all members.

        Raises:
            DeadlineError: some member did not arrive within `timeout_s`. This member's arrival stays registered.
            EngineStateError: all have arrived, but `what` or `policy_version` differ.
            ConfigError: `index` is not an integer in [0, 2**63).
            ConnectionLostError: not connected.
        """
        if type(index) is not int or not 0 <= index < 2**63:
            raise ConfigError(f"index={index!r}: must be an integer in [0, 2**63)")
        self._refuse_unless_connected()
        await self._answer(self._session.barrier(index, what, policy_version), timeout_s, f"barrier({index})")
        self._next_barrier = max(self._next_barrier, index + 1)

    def give_up_barrier(self, index: int) -> None:
        """Let the arrival at barrier `index` agree with every call of the other members: the own one was given up.

        Raises:
            ConnectionLostError: not connected.
        """
        self._refuse_unless_connected()
        self._session.give_up_barrier(index)

    def shutdown_coordinator(self) -> None:
        """End the coordinator's process; open requests fail with a named error.

        Raises:
            ConnectionLostError: not connected.
        """
        self._refuse_unless_connected()
        self._dealer.send(Shutdown())

    async def _signal(self, signal: ControlSignal, argument: str | None, timeout_s: float | None) -> None:
        await self._control(signal.value, argument, timeout_s)
        _, reached, harmless = COORDINATOR_TRANSITIONS[signal]
        if self._state not in harmless:
            self._state = reached

    async def _control(self, signal: str, argument: int | str | None, timeout_s: float | None) -> dict[str, Any] | None:
        self._refuse_unless_connected()
        limit = self._control_timeout_s if timeout_s is None else timeout_s
        call = self._session.control(signal, argument, limit)
        return await self._answer(call, limit + ANSWER_MARGIN_S, signal)


def _grown(stream: RequestStream[Delta], _: OpenGroup, stretch: Stretch) -> None:
    for delta in stretch.deltas():
        stream.take(delta)


_DEFAULT_PARAMS = SamplingParams()
