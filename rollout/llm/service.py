"""The engine thread, worker and client behind an `LLM` that is one rank of a job with a coordinator.

    private loop    client and connections
    engine thread   the engine's steps, while there are any
    apply thread    the coordinator's messages, at the next step boundary (`rollout.distributed.worker.worker`)

Always true: calls to a service that has ended fail immediately, and so do requests that are open when it ends; `close`
leaves no thread and no process.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import torch

from rollout.config import CoordinatorConfig
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.job_coordinator import JobCoordinator
from rollout.distributed.job.member import JobMember
from rollout.distributed.job.world import World
from rollout.distributed.protocol.status import parse_status
from rollout.distributed.transport.keys import JobKeys
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import DeadlineError, EngineStateError, RolloutError
from rollout.llm.job_requests import JobRequests
from rollout.state import EngineState
from rollout.threads.loop_thread import LoopThread

T = TypeVar("T")
_log = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 30.0
"""For all engines to stop."""
RECONNECT_TIMEOUT_S = 10.0
"""A lost coordinator is not replaced, so that waiting calls fail soon."""
JOIN_POLL_S = 0.05
"""Between two looks at which ranks have joined."""


class EngineService(JobRequests):
    """Client, worker and engine thread of one `LLM`; running once built.

    Args:
        engine: this rank's.
        loop: the private loop.
        coordinator: options of the coordinator, which is a process of its own, one for all ranks of the job.

    Attributes:
        is_primary: whether requests are taken here.
        member: this rank of the job.
        over: done when the engine's thread has ended; its exception says why it died.

    Raises:
        DeadlineError: the ranks have not found each other.
    """

    def __init__(self, engine: DynamicInferenceEngine, loop: LoopThread, coordinator: CoordinatorConfig) -> None:
        super().__init__(engine, loop)
        self.over: Future[None] = Future()
        self._thread: threading.Thread | None = None
        self._closing = threading.Lock()
        world = World.of_torch()
        rank = 0 if world is None else world.rank
        self.world_size = 1 if world is None else world.size
        self._all_joined = False
        self.is_primary = rank == 0
        # All requests come from the rank that launched it: without that rank it has nothing to do.
        job = JobCoordinator(coordinator.replace(outlive_launcher=False), engine, world)
        self.member = JobMember(
            engine, job, loop, name=f"rank-{rank:04d}", new_client=self._new_client if self.is_primary else None,
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
        return InferenceClient(address, name="llm", keys=keys, control_timeout_s=self.engine.config.control_timeout_s)

    def control_all(self, ask: Callable[[InferenceClient], Coroutine[Any, Any, T]]) -> Future[T]:
        """A control call that no rank may miss: `ask` is called when every rank has joined once.

        Raises, from the future:
            DeadlineError: a rank has not joined within the engine's `control_timeout_s`.
        """

        async def when_joined(client: InferenceClient) -> T:
            if not self._all_joined:
                await _joined(client, self.world_size, self.engine.config.control_timeout_s)
                self._all_joined = True
            return await ask(client)

        return self.control(when_joined)

    def refuse_when_over(self) -> None:
        """Raises: EngineDeadError, EngineStateError, ConnectionLostError: no request is served any more."""
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
        except Exception as exc:  # noqa: BLE001 - the thread ends here; later calls raise it
            if not self._closed:
                _log.error("the engine's thread has ended: %s: %s", type(exc).__name__, exc)
            try:
                # Without steps nothing here would ever end: other ranks are to have it.
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

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End everything this service has begun; on the primary rank, the engines of all ranks. Harmless when repeated."""
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
    """Stop every engine and the coordinator."""
    try:
        if client.lost is None:
            await client.pause_engines(SHUTDOWN_TIMEOUT_S)
            await client.stop_engines(SHUTDOWN_TIMEOUT_S)
            client.shutdown_coordinator()
    except RolloutError as exc:
        _log.warning("shutting down: %s", exc)


async def _joined(client: InferenceClient, size: int, timeout_s: float) -> None:
    """Return when the coordinator knows `size` ranks."""
    end = time.monotonic() + timeout_s
    while len(ranks := parse_status(await client.status()).ranks) < size:
        if time.monotonic() > end:
            there = ", ".join(each.name for each in ranks) or "none"
            raise DeadlineError(
                f"{size} ranks: {len(ranks)} have joined the coordinator within timeout_s={timeout_s} ({there}); every rank "
                "builds an LLM, and those that are not primary call wait_for_shutdown()"
            )
        await asyncio.sleep(JOIN_POLL_S)
