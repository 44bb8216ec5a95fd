"""The lifecycle of an HTTP server, which runs uvicorn as a coroutine on the LLM's event loop.

The server accepts connections once `start` has returned. The process's signal handlers are replaced only during `wait`. When
the server stops, running requests get a grace period and are then aborted. Every connection, task and socket is closed.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, Self

import uvicorn

from rollout.config import ServerConfig
from rollout.server.address import listen, url_of
from rollout.server.app import build_app
from rollout.server.serving import Serving
from rollout.threads import forks

START_TIMEOUT_S = 30.0
ABORT_TIMEOUT_S = 5.0
"""Seconds that aborted requests have to send their error replies. After that, their connections are closed."""
KEEP_ALIVE_S = 30
"""Seconds that a connection may be idle between two requests."""


class Server:
    """An HTTP server in front of one LLM, which runs on the LLM's private event loop.

    Args:
        llm: the `LLM`, `AsyncLLM` or `JobLLM` to serve.
        config: address, key and limits. If None, the defaults are used.

    Raises:
        ConfigError: the chat template cannot be read.
    """

    def __init__(self, llm: Any, config: ServerConfig | None = None) -> None:
        self._config = config or ServerConfig()
        self._loop = llm.loop
        app = build_app(llm, self._config)
        self._serving: Serving = app.state.serving
        self._uvicorn = _Uvicorn(app, self._serving)
        self._url: str | None = None
        self._life: Future[None] | None = None
        self._changing = threading.Lock()

    @property
    def url(self) -> str:
        """The server's URL on this machine, such as `http://127.0.0.1:8000`. Raises `RuntimeError` before `start`."""
        if self._url is None:
            raise RuntimeError("this server has no address yet: call server.start() first")
        return self._url

    @property
    def running(self) -> bool:
        """Whether the server accepts connections or is still stopping."""
        return self._life is not None and not self._life.done()

    def start(self) -> Self:
        """Start accepting connections. Does nothing while the server is running.

        Raises:
            ConfigError: the address is in use, or not an address of this machine.
            RuntimeError: the server has been stopped, or the LLM has been shut down.
        """
        with self._changing:
            if self.running:
                return self
            self._loop.refuse_inside("start()")
            if self._life is not None:
                raise RuntimeError("this server has been stopped: build another, Server(llm, config)")
            listener = listen(self._config)
            try:
                self._url = url_of(listener)
                forks.in_child(self, lambda server: forks.close_connections(server.url))
                self._life = self._loop.start(self._uvicorn.serve([listener]))
                self._loop.run_sync(self._begin(self._life), START_TIMEOUT_S)
            except BaseException:
                listener.close()
                raise
            return self

    def close(self) -> None:
        """Reject new requests, wait up to `shutdown_grace_s` for running requests, then abort them. Idempotent.

        Raises `RuntimeError` if called on the LLM's private loop, because waiting there would deadlock.
        """
        with self._changing:
            if self._life is None or self._life.done():
                return
            try:
                self._loop.run_sync(
                    self._end(self._life), self._config.shutdown_grace_s + 2 * ABORT_TIMEOUT_S + START_TIMEOUT_S
                )
            except RuntimeError:
                # If the server's task has finished, ignore the error: the LLM's loop was closed, which stops the server.
                if not self._life.done():
                    raise

    async def _begin(self, life: Future[None]) -> None:
        up = asyncio.ensure_future(self._uvicorn.up.wait())
        over = asyncio.wrap_future(life)
        await asyncio.wait((up, over), return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            up.cancel()
            await over

    async def _end(self, life: Future[None]) -> None:
        self._uvicorn.stopping.set()
        await asyncio.wrap_future(life)

    def wait(self, announce: Callable[[], object] = lambda: None) -> None:
        """Wait until the server has stopped. In the main thread, Ctrl-C or SIGTERM stops the server as `close` does.

        Args:
            announce: a function that is called as soon as a signal can stop the server. A second signal raises
                `KeyboardInterrupt`.

        Raises `RuntimeError` if called on the LLM's private loop, because waiting there would deadlock.
        """
        if self._life is None:
            return
        self._loop.refuse_inside("wait()")
        try:
            with _interruptible():
                announce()
                futures.wait([self._life])
        except KeyboardInterrupt:
            self.close()
        with suppress(CancelledError):
            self._life.result()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Uvicorn(uvicorn.Server):
    """A uvicorn server whose shutdown is triggered by an event instead of polling ten times a second."""

    def __init__(self, app: Any, serving: Serving) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._serving = serving
        self.up = asyncio.Event()
        self.stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        try:
            await self.stopping.wait()
        except asyncio.CancelledError:
            self._cut()
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reject new requests, wait for the grace period, abort running requests, then close the connections."""
        self._serving.stopping = True
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            if not await self._all_end(self._serving.config.shutdown_grace_s):
                await self._serving.abort_all()
                await self._all_end(ABORT_TIMEOUT_S)
        finally:
            self._cut()
        await self._all_end(ABORT_TIMEOUT_S)

    async def _all_end(self, timeout_s: float) -> bool:
        tasks = set(self.server_state.tasks)
        return not tasks or not (await asyncio.wait(tasks, timeout=timeout_s))[1]

    def _cut(self) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Make SIGINT and SIGTERM raise `KeyboardInterrupt` during the `with` block. Do nothing outside the main thread."""
    main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if main else ()
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
