"""`JobLLM`: requests next to a training job, in a program or over HTTP, computed by all of its ranks.

training loop, every rank    manager.generate(...)   as_completed(...)   run(...)     steps while one of these runs
any thread of one rank       JobLLM(manager).submit(prompt)   .stream(prompt)   .serve(ServerConfig(...))
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from rollout.config import ServerConfig
from rollout.distributed.client.group import OpenGroup
from rollout.errors import (
    ConfigError,
    ConnectionLostError,
    DeadlineError,
    EngineStateError,
    RequestAbortedError,
    RequestTimeoutError,
)
from rollout.llm.delivery import Listener
from rollout.llm.requests import LLMRequests
from rollout.llm.service import JobRequests, follow
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from rollout.threads.loop_thread import LoopThread

if TYPE_CHECKING:
    from rollout.server.server import Server

CONNECT_TIMEOUT_S = 60.0
"""Deadline for a connection to the job's coordinator."""
ATTEMPT_S = 10.0
"""Deadline of one attempt, after which the job is asked for its coordinator again."""
PAUSE_S = 0.1
"""Seconds between two attempts."""
SHORTEST_S = 0.001
"""Minimum `timeout_s` of a request that is submitted again."""
_CLOSED = "the JobLLM was closed: build another"


class JobLLM(LLMRequests):
    """An `LLM` in front of all ranks of a training job, next to its loop.

    Requests are computed while the ranks are in `generate`, `as_completed` or `run`, and wait otherwise. They stay open
    across weight updates: every token has its policy version. No rank waits for them, and no batch contains them. If the
    coordinator dies and the job replaces it, open requests continue from the tokens received. Build one on any rank; close
    it before the manager.

    Raises:
        EngineStateError: the manager is closed, or has no coordinator (see `RolloutManager.client`).
        DeadlineError, ConnectionLostError: the coordinator does not answer.
    """

    def __init__(self, manager: RolloutManager) -> None:
        manager.client()
        loop = LoopThread("rollout-job-llm")
        self._beside = _BesideRequests(manager, loop)
        try:
            loop.run_sync(self._beside.connected(), CONNECT_TIMEOUT_S + ATTEMPT_S + 5)
        except BaseException:
            loop.close()
            raise
        super().__init__(manager.engine, loop, self._beside)

    def serve(self, config: ServerConfig | None = None, *, blocking: bool = False) -> Server:
        """Serve like `LLM.serve`, in front of all ranks; by default it returns at once, and the training loop continues.

        Raises:
            ConfigError: with `ServerConfig.admin`: the training loop controls weights and engines.
        """
        if config is not None and config.admin:
            raise ConfigError(
                "ServerConfig.admin=True in front of a training job, whose loop alone may pause engines and move weights: "
                "leave it out"
            )
        return super().serve(config, blocking=blocking)

    def abort(self, request_id: int | None = None) -> int:
        """Abort one request, or all open requests of this object (None); returns their number."""
        self.loop.refuse_inside("abort()")
        return self.service.abort(None if request_id is None else [request_id]).result()

    def close(self) -> None:
        """Stop the server and disconnect; open requests fail, the training job continues. Idempotent."""
        if self._beside.closed:
            return
        self.loop.refuse_inside("close()")
        if self._server is not None:
            self._server.close()
        self._beside.close()
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BesideRequests(JobRequests):
    """The requests of a client that reconnects after a loss, because the job replaces a dead coordinator.

    Open groups are submitted again with the received tokens, which are not recomputed, and the rest of their
    `timeout_s`."""

    def __init__(self, manager: RolloutManager, loop: LoopThread) -> None:
        super().__init__(manager.engine, loop)
        self._manager = manager
        self._connecting: asyncio.Task[None] | None = None
        self._serving: dict[int, asyncio.Task[None]] = {}

    async def connected(self) -> None:
        """Connect unless a client is connected; concurrent callers share one attempt and its failure.

        Raises:
            EngineStateError: this object or the manager is closed.
            DeadlineError, ConnectionLostError: the coordinator does not answer.
        """
        if self._client is None or self._client.lost is not None:
            if self._connecting is None or self._connecting.done():
                self._connecting = asyncio.get_running_loop().create_task(self._connect())
            await asyncio.shield(self._connecting)

    async def _connected_by(self, number: int, ends_at: float | None) -> None:
        try:
            async with asyncio.timeout_at(ends_at) as limit:
                await self.connected()
        except TimeoutError as exc:
            if not limit.expired():
                raise
            raise RequestTimeoutError(
                f"request {number}: its timeout_s has passed while the coordinator was replaced", number
            ) from exc

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + CONNECT_TIMEOUT_S
        while True:
            # Each client belongs to the current coordinator, because a successor may listen elsewhere.
            client = self._manager.client("beside the job")
            try:
                await client.start(ATTEMPT_S)
            except (ConnectionLostError, DeadlineError):
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(PAUSE_S)
            else:
                self._client = client
                return

    def refuse_when_over(self) -> None:
        self.engine.lifecycle.refuse_when_stopped()
        if self._closed:
            raise EngineStateError(_CLOSED)

    def _open(
        self, number: int, tokens: list[int], params: SamplingParams, listener: Listener, options: dict[str, Any]
    ) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(number, tokens, params, listener, options))
        self._serving[number] = task

    async def _serve(
        self, number: int, tokens: list[int], params: SamplingParams, listener: Listener, options: dict[str, Any]
    ) -> None:
        """Serve a group until it ends, through successive clients."""
        loop, timeout_s = asyncio.get_running_loop(), options.get("timeout_s")
        ends_at = None if timeout_s is None else loop.time() + timeout_s
        try:
            while True:
                await self._connected_by(number, ends_at)
                if ends_at is not None:
                    options["timeout_s"] = max(SHORTEST_S, ends_at - loop.time())
                group = self._groups[number] = self._the_client().open_group(tokens, params, **options)
                ended: asyncio.Future[OpenGroup] = loop.create_future()
                group.on_done = ended.set_result
                follow(group, listener)
                await ended
                if self._closed or not isinstance(group.error, ConnectionLostError):
                    break
                options |= {"known": group.known(), "arrival_time": group.arrival_time}
                self._groups[number] = None
        except asyncio.CancelledError:
            aborted = RequestAbortedError("aborted by its caller", number)
            self._failed(number, listener, EngineStateError(_CLOSED) if self._closed else aborted)
        except Exception as exc:  # noqa: BLE001 - the waiting caller gets any error
            self._failed(number, listener, exc)
        else:
            self._ended(number, listener, group)
        finally:
            del self._serving[number]

    def _abort(self, number: int) -> bool:
        task = self._serving.get(number)
        if task is not None and self._groups[number] is None:
            return task.cancel()
        return super()._abort(number)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._closed = True

        async def leave() -> None:
            tasks = [task for number, task in self._serving.items() if self._groups[number] is None]
            if self._connecting is not None:
                tasks.append(self._connecting)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._client is not None:
                await self._client.stop()

        self.loop.run_sync(leave(), CONNECT_TIMEOUT_S)
