"""One rank's membership in a job: the worker and client of the rank, and how they connect, reconnect and leave."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rollout.distributed.client.client import InferenceClient
from rollout.distributed.job.job_coordinator import JobCoordinator
from rollout.distributed.transport.keys import JobKeys
from rollout.distributed.worker.worker import EngineWorker
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConnectionLostError, DeadlineError
from rollout.threads.loop_thread import LoopThread

_log = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 60.0
"""Seconds within which the coordinator must answer for the first time. Its address is published only once it listens, so a
coordinator that does not answer is busy or has exited."""
ATTEMPT_S = 5.0
"""Seconds that one attempt to reconnect may take. If it fails, the rank looks for another coordinator."""
LONGEST_LEAVE_S = 90.0
"""Seconds within which the client must send its last messages and disconnect."""


class JobMember:
    """The worker and client of one rank. `start` connects them to the job's coordinator, which rank 0 launches.

    Args:
        engine: the engine of this rank.
        coordinator: the job's coordinator, which is not launched yet.
        loop: the event loop of worker and client. The caller closes the loop after `close`.
        name: name of this rank.
        new_client: a function that builds this rank's client from address and keys; None if this rank sends no requests.
        on_joined: called on the event loop when the client has connected.
        on_event: called from any thread when a session is lost or the coordinator's process has exited. It must not block.
        worker_options: keyword arguments for `EngineWorker`.

    Attributes:
        worker: the worker, which runs the engine's steps.
        sessions_left: the number of client sessions that have ended.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        coordinator: JobCoordinator,
        loop: LoopThread,
        *,
        name: str,
        new_client: Callable[[str, JobKeys | None], InferenceClient] | None,
        on_joined: Callable[[], object] = lambda: None,
        on_event: Callable[[], None] = lambda: None,
        **worker_options: Any,
    ) -> None:
        self.name = name
        self.coordinator = coordinator
        self.sessions_left = 0
        self._timeout_s = engine.config.advanced.control_timeout_s
        self.loop = loop
        self._new_client = new_client
        self._on_joined = on_joined
        self._on_event = on_event
        self._client: InferenceClient | None = None
        self.engine = engine
        self.worker = EngineWorker(
            engine, "", name=name, loop=loop, on_lost=lambda error: self._on_event(), **worker_options
        )

    def start(self, *, idle: bool = False) -> None:
        """Launch or find the coordinator, and connect worker and client. After an exception, call `leave` and `close`.

        Args:
            idle: whether to report this rank as idle until its first step.

        Raises:
            DeadlineError, ConnectionLostError: the coordinator was not found or did not answer in time.
            ConfigError: the coordinator cannot listen as configured.
        """
        self._launch_or_learn()
        self.worker.address, self.worker.keys = self.coordinator.address, self.coordinator.keys
        if idle:
            self.worker.report_idle()
        self.worker.start(JOIN_TIMEOUT_S)
        self._join(JOIN_TIMEOUT_S)

    def _launch_or_learn(self) -> None:
        self.coordinator.launch_or_learn()
        if (handle := self.coordinator.handle) is not None:

            def wait() -> None:
                handle.process.wait()
                self._on_event()

            threading.Thread(target=wait, name="rollout-coordinator-watch", daemon=True).start()

    def _join(self, timeout_s: float) -> None:
        if self._new_client is None:
            return
        client = self._new_client(self.coordinator.address, self.coordinator.keys)

        async def join() -> None:
            await client.start(timeout_s)
            self._client = client
            self._on_joined()

        self.loop.run_sync(join(), timeout_s + 5)

    # --- the session ------------------------------------------------------------------------------------------------

    @property
    def client(self) -> InferenceClient:
        """This rank's client. Raises `ConnectionLostError` if there is no client, because the rank has left the job."""
        if self._client is None:
            raise ConnectionLostError(f"{self.name}: there is no connection to the coordinator; it was closed")
        return self._client

    @property
    def connected(self) -> InferenceClient | None:
        """This rank's client if its session is alive, otherwise None."""
        return None if self._client is None or self._client.lost is not None else self._client

    @property
    def lost(self) -> Exception | None:
        """The reason why a session of this rank or the coordinator was lost; None if nothing was lost."""
        handle, address = self.coordinator.handle, self.coordinator.address
        if handle is not None and not handle.alive:
            return ConnectionLostError(
                f"{address}: the coordinator's process has ended with code {handle.process.returncode}"
            )
        if self._new_client is not None and self._client is None:
            return ConnectionLostError(f"{address}: the last session has ended, and none was started since")
        return self.worker.lost or (None if self._client is None else self._client.lost)

    def status(self) -> dict[str, Any]:
        """Return the job's status, as `CoordinatorCore.status` describes it.

        Raises:
            ConnectionLostError, DeadlineError: the coordinator does not answer.
        """
        return self.loop.run_sync(self.client.status(), self._timeout_s)

    def recover(self, why: Exception) -> None:
        """Reconnect, to a new coordinator if there is one. Rank 0 starts a new coordinator if the old one has exited.

        Args:
            why: reason for the loss. If it is neither a `ConnectionLostError` nor a `DeadlineError`, it is raised again.

        Raises:
            ConnectionLostError: no coordinator accepted this rank in `control_timeout_s`, or the error's `final` is True.
            EngineDeadError: `why` is an `EngineDeadError`.
        """
        if not isinstance(why, ConnectionLostError | DeadlineError) or _is_final(why):
            raise why
        deadline = time.monotonic() + self._timeout_s
        attempts = 0
        while True:
            try:
                self._reconnect(again=attempts > 0)
                return
            except (ConnectionLostError, DeadlineError) as exc:
                if time.monotonic() > deadline or _is_final(exc):
                    raise ConnectionLostError(
                        f"{self.name}: no coordinator within {self._timeout_s} s (control_timeout_s) after: {why}; the "
                        f"last attempt: {exc}"
                    ) from exc
                attempts += 1

    def _reconnect(self, again: bool) -> None:
        replaced = self._find_coordinator(again)
        # Keep a live client session: if it were closed, the job would treat this rank as lost.
        if replaced or self.connected is None:
            self._leave_client(None)
            self._join(ATTEMPT_S)
        if replaced or self.worker.lost is not None:
            self.worker.reconnect(self.coordinator.address, self.coordinator.keys, ATTEMPT_S)

    def _find_coordinator(self, again: bool) -> bool:
        """Find a new coordinator, or on rank 0 start one. Return whether there is a new coordinator.

        Args:
            again: whether an attempt to reconnect to the current coordinator has failed.
        """
        coordinator = self.coordinator
        before = coordinator.address, coordinator.keys
        if coordinator.handle is not None:
            if coordinator.handle.alive and not again:
                return False
            if coordinator.handle.alive:
                # Kill the coordinator: its process runs, but it does not answer even on its own host.
                coordinator.handle.kill()
            coordinator.handle.release()
            self._launch_or_learn()
            return True
        if not coordinator.next_is_published:
            return False
        self._launch_or_learn()
        return before != (coordinator.address, coordinator.keys)

    # --- leaving the job --------------------------------------------------------------------------------------------

    def leave(self, before: Callable[[InferenceClient], Awaitable[None]] | None = None) -> None:
        """Disconnect client and worker. The other ranks take over this rank's unfinished samples. Idempotent.

        Args:
            before: a coroutine function to call with the client before the client disconnects, or None.
        """
        try:
            self._leave_client(before)
        finally:
            self.worker.stop()

    def close(self, stop_timeout_s: float | None = None) -> None:
        """Release or stop the coordinator's process, if this rank has launched it.

        Args:
            stop_timeout_s: seconds to wait for the process to terminate before it is killed. If None, the process is
                released and exits when its last client has disconnected.
        """
        handle = self.coordinator.handle
        if handle is not None and stop_timeout_s is None:
            handle.release()
        elif handle is not None and stop_timeout_s is not None:
            handle.stop(stop_timeout_s)

    def _leave_client(self, before: Callable[[InferenceClient], Awaitable[None]] | None) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        self.sessions_left += 1

        async def leave() -> None:
            try:
                if before is not None:
                    await before(client)
            finally:
                await client.stop()

        self.loop.run_sync(leave(), LONGEST_LEAVE_S)


def _is_final(error: Exception) -> bool:
    return isinstance(error, ConnectionLostError) and error.final
