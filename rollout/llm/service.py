"""Requests through a coordinator client, and the engine thread of an `LLM` that is one rank of the coordinator's job.

An `EngineService` uses three threads:

    private loop    runs the event loop with the client and the connections
    engine thread   runs the engine's steps while there is work
    apply thread    applies the coordinator's messages at the next step boundary (`rollout.distributed.worker.worker`)

Every accepted group reports its result to its listener exactly once. Calls to a closed service fail immediately. `close`
stops all threads and processes that the service started.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from rollout.config import CoordinatorConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.client.futures import Readers, RequestStream
from rollout.distributed.client.group import OpenGroup
from rollout.distributed.job.job_coordinator import JobCoordinator
from rollout.distributed.job.member import JobMember
from rollout.distributed.job.world import World
from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.transport.keys import JobKeys
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError, EngineStateError, RolloutError
from rollout.llm.delivery import Listener
from rollout.llm.engine_loop import CLOSED
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from rollout.threads.loop_thread import LoopThread

T = TypeVar("T")
_log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 30.0
"""Seconds to wait for all engines to stop."""
RECONNECT_TIMEOUT_S = 10.0
"""Seconds to try to reconnect to a lost coordinator. It is short because an `LLM` does not replace its coordinator."""
JOIN_POLL_S = 0.05
"""Seconds between two checks of whether all ranks have joined."""


class JobRequests:
    """A `Service` that submits groups through a coordinator client. Any thread may call the methods.

    Args:
        engine: this rank's engine.
        loop: the private event loop, on which the client runs.
        client: a connected client; if None, this rank accepts no requests.
    """

    def __init__(self, engine: DynamicInferenceEngine, loop: LoopThread, client: InferenceClient | None = None) -> None:
        self.engine = engine
        self.loop = loop
        self.readers = Readers(loop.call_soon)
        # Map each request number to its group, or to None until the group is submitted on the event loop.
        self._groups: dict[int, OpenGroup | None] = {}
        self._client = client
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def num_open(self) -> int:
        return len(self._groups)

    def refuse_when_over(self) -> None:
        self.engine.lifecycle.refuse_when_stopped()
        if self._closed or self.loop.closed:
            raise EngineStateError(CLOSED)
        if self._client is not None and self._client.lost is not None:
            raise ConnectionLostError(str(self._client.lost), final=True)

    def open_group(
        self, number: int, tokens: list[int], params: SamplingParams, listener: Listener, **options: Any
    ) -> None:
        """Submit a group (see `Service.open_group`). `options` are keyword arguments of `ClientSession.submit`."""
        self.refuse_when_over()
        self._groups[number] = None
        try:
            self.loop.call_soon(self._open, number, tokens, params, listener, options)
        except RuntimeError as exc:
            del self._groups[number]
            raise EngineStateError(CLOSED) from exc

    def _open(
        self, number: int, tokens: list[int], params: SamplingParams, listener: Listener, options: dict[str, Any]
    ) -> None:
        try:
            group = self._the_client().open_group(tokens, params, **options)
        except Exception as exc:  # noqa: BLE001 - pass any error to the waiting caller
            del self._groups[number]
            listener.fail(exc)
            return
        self._groups[number] = group
        group.on_done = partial(self._ended, number, listener)
        if isinstance(listener, RequestStream) and not listener.whole:
            group.on_update = partial(_grown, listener)

    def _ended(self, number: int, listener: Listener, group: OpenGroup) -> None:
        self._groups.pop(number, None)
        try:
            samples = group.result()
        except Exception as exc:  # noqa: BLE001 - pass any error to the waiting caller
            listener.fail(exc)
        else:
            for sample in samples:
                sample.request_id, sample.prompt = number, listener.prompt
            listener.end(samples)

    def _abort(self, number: int) -> bool:
        group, client = self._groups.get(number), self._client
        if group is None or client is None or client.lost is not None:
            return False
        return client.abort_request(group.request_id)

    def abort(self, numbers: Iterable[int] | None = None) -> Future[int]:

        async def abort() -> int:
            return sum([self._abort(number) for number in (list(self._groups) if numbers is None else numbers)])

        return self._start(abort())

    # --- control calls ----------------------------------------------------------------------------------------------

    def control(self, ask: Callable[[InferenceClient], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a control call, the coroutine `ask(client)`, on the private loop; return a future of its result.

        Raises:
            EngineStateError: there is no client, or the service is closed.
        """
        return self._start(ask(self._the_client()))

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return self.loop.start(coroutine)
        except RuntimeError as exc:
            raise EngineStateError(CLOSED) from exc

    def _the_client(self) -> InferenceClient:
        if self._client is None:
            raise EngineStateError("only the primary rank accepts requests and control calls")
        return self._client


def _grown(stream: RequestStream, group: OpenGroup, stretch: Stretch) -> None:
    for delta in stretch.deltas():
        stream.take(delta, None if delta.outcome is None else group.request(delta.sample_index))


class EngineService(JobRequests):
    """The client, worker and engine thread of one `LLM`. They start when the service is built.

    Args:
        coordinator: options of the coordinator, one separate process for all ranks of the job.

    Attributes:
        is_primary: whether this rank accepts requests.
        member: this rank's membership in the job: its worker, client and connection to the coordinator.
        over: a future that is done when the engine's thread has finished. If the engine died, the future raises the error.

    Raises:
        DeadlineError: this rank could not reach the coordinator, which rank 0 starts, in time.
    """

    def __init__(self, engine: DynamicInferenceEngine, loop: LoopThread, coordinator: CoordinatorConfig) -> None:
        super().__init__(engine, loop)
        self.over: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        world = World.of_torch() or World.alone()
        self.world_size = world.size
        self._all_joined = False
        self.is_primary = world.rank == 0
        job = JobCoordinator(coordinator, engine, world)
        self.member = JobMember(
            engine, job, loop, name=f"rank-{world.rank:04d}", new_client=self._new_client if self.is_primary else None,
            reconnect_timeout_s=RECONNECT_TIMEOUT_S,
        )  # fmt: skip
        try:
            self.member.start()
        except BaseException:
            self.close()
            raise
        self._client = self.member.client if self.is_primary else None
        self._thread = threading.Thread(target=self._compute, name="rollout-engine", daemon=True)
        self._thread.start()

    def _new_client(self, address: str, keys: JobKeys | None) -> InferenceClient:
        return InferenceClient(
            address, name="llm", keys=keys, control_timeout_s=self.engine.config.advanced.control_timeout_s
        )

    def control_all(self, ask: Callable[[InferenceClient], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a control call that must reach every rank: call `ask` once all ranks have joined.

        The returned future raises `DeadlineError` if a rank has not joined within the engine's `control_timeout_s`."""

        async def when_joined(client: InferenceClient) -> T:
            if not self._all_joined:
                await _joined(client, self.world_size, self.engine.config.advanced.control_timeout_s)
                self._all_joined = True
            return await ask(client)

        return self.control(when_joined)

    def refuse_when_over(self) -> None:
        super().refuse_when_over()
        if self.over.done() and self.over.exception() is not None:
            raise EngineStateError("the engine's thread has ended") from self.over.exception()

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _compute(self) -> None:
        device = self.engine.controller.layout.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            self.member.worker.run()
        except Exception as exc:  # noqa: BLE001 - the thread ends here, and later calls raise this error
            if not self._closed:
                _log.error("the engine's thread has ended: %s: %s", type(exc).__name__, exc)
            try:
                # Leave the job: this engine runs no more steps, so the coordinator must reassign its samples.
                self.member.worker.stop()
            finally:
                self._end(exc)
        else:
            self._end(None)

    def _end(self, failure: Exception | None) -> None:
        if failure is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(failure)

    # --- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop everything that this service started, and on the primary rank the engines of all ranks. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with suppress(DeadlineError):
                self.member.leave(_end_job)
            if self.engine.state is not EngineState.STOPPED:
                self.engine.pause()
                self.engine.stop()
            if self._thread is not None:
                self._thread.join(SHUTDOWN_TIMEOUT_S)
            self.member.close(SHUTDOWN_TIMEOUT_S)
            if not self.over.done():
                self.over.set_result(None)


async def _end_job(client: InferenceClient) -> None:
    try:
        if client.lost is None:
            await client.pause_engines(SHUTDOWN_TIMEOUT_S)
            await client.stop_engines(SHUTDOWN_TIMEOUT_S)
    except RolloutError as exc:
        _log.warning("shutting down: %s", exc)


async def _joined(client: InferenceClient, size: int, timeout_s: float) -> None:
    """Wait until `size` ranks have joined the coordinator; raise `DeadlineError` after `timeout_s` seconds."""
    end = time.monotonic() + timeout_s
    while len(ranks := (await client.status())["ranks"]) < size:
        if time.monotonic() > end:
            there = ", ".join(each["name"] for each in ranks) or "none"
            raise DeadlineError(
                f"{size} ranks: {len(ranks)} have joined the coordinator within timeout_s={timeout_s} ({there}); every rank "
                "builds an LLM, and those that are not primary call wait_for_shutdown()"
            )
        await asyncio.sleep(JOIN_POLL_S)


def options_of_coordinator(
    wanted: bool, host: str | None, port: int | None, config: CoordinatorConfig | None
) -> CoordinatorConfig | None:
    """Return the coordinator options of an `LLM`, or None if `wanted` (its `use_coordinator`) is False.

    Raises:
        ConfigError: an option was given although `wanted` is False, or `config` was given together with `host` or `port`.
    """
    given = {"coordinator_host": host, "coordinator_port": port, "coordinator_config": config}
    named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if not wanted:
        if named:
            raise ConfigError(f"{', '.join(named)} without a coordinator: set use_coordinator=True, or leave it out")
        return None
    if config is not None and (host is not None or port is not None):
        raise ConfigError(
            "coordinator_host and coordinator_port with coordinator_config: give them as its fields host and "
            "inference_coordinator_port"
        )
    chosen = config or CoordinatorConfig()
    if host is not None:
        chosen = chosen.replace(host=host)
    return chosen if port is None else chosen.replace(inference_coordinator_port=port)
