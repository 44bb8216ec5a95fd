"""`JobLLM`: requests next to a training job, from a program or over HTTP, that all ranks of the job compute.

training loop, every rank    manager.generate(...)   as_completed(...)   run(...)     the engines step in these calls
any thread of one rank       JobLLM(manager).submit(prompt)   .stream(prompt)   .serve(ServerConfig(...))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rollout.config import ServerConfig
from rollout.errors import ConfigError
from rollout.llm.requests import LLMRequests
from rollout.llm.service import JobRequests
from rollout.manager.manager import RolloutManager
from rollout.threads.loop_thread import LoopThread

if TYPE_CHECKING:
    from rollout.server.server import Server

CONNECT_TIMEOUT_S = 60.0
"""Seconds within which the job's coordinator must accept the connection."""


class JobLLM(LLMRequests):
    """An interface like `LLM` whose requests are computed by all ranks of a running training job.

    Requests are computed while the ranks are in `generate`, `as_completed` or `run`, and wait otherwise. They stay open
    across weight updates: every token has its policy version. The training loop never waits for these requests, and its
    batches do not contain their samples.

    Build a `JobLLM` on any rank, and close it before the manager. If the coordinator is lost, all requests fail with
    `ConnectionLostError`; once the job has another coordinator, build another `JobLLM`.

    Raises:
        EngineStateError: the manager is closed, or has no coordinator (see `RolloutManager.client`).
        DeadlineError, ConnectionLostError: the coordinator does not answer.
    """

    def __init__(self, manager: RolloutManager) -> None:
        self._client = manager.client("beside the job")
        loop = LoopThread("rollout-job-llm")
        try:
            loop.run_sync(self._client.start(CONNECT_TIMEOUT_S))
        except BaseException:
            loop.close()
            raise
        super().__init__(manager.engine, loop, JobRequests(manager.engine, loop, self._client))

    def serve(self, config: ServerConfig | None = None, *, blocking: bool = False) -> Server:
        """Serve like `LLM.serve`, but on all ranks' engines. By default the call returns at once, so training continues.

        Raises:
            ConfigError: `ServerConfig.admin` is True, although only the training loop may control weights and engines.
        """
        if config is not None and config.admin:
            raise ConfigError(
                "ServerConfig.admin=True in front of a training job, whose loop alone may pause engines and move weights: "
                "leave it out"
            )
        return super().serve(config, blocking=blocking)

    def abort(self, request_id: int | None = None) -> int:
        """Abort one request, or by default all open requests of this object; return the number of aborted requests."""
        self.loop.refuse_inside("abort()")
        return self.service.abort(None if request_id is None else [request_id]).result()

    def close(self) -> None:
        """Stop the server and disconnect. Open requests fail, and the training job continues. Idempotent."""
        if self.loop.closed:
            return
        self.loop.refuse_inside("close()")
        if self._server is not None:
            self._server.close()
        self.loop.run_sync(self._client.stop())
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
