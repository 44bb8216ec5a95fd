"""Server lifecycle: uvicorn as a coroutine on the LLM's event loop.

Always true: it accepts connections when `start` returns; no signal handler of the process is touched but inside `wait`;
what runs when it stops gets its grace, then is aborted, and no connection, task or socket of it is left.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any, Self

import uvicorn

from rollout.config import ServerConfig
from rollout.errors import ConfigError
from rollout.server.app import build_app
from rollout.server.connection import Connection
from rollout.server.serving import Serving

START_TIMEOUT_S = 30.0

ABORT_TIMEOUT_S = 5.0
"""How long an aborted request may take to say so to its client, before its connection is cut."""

KEEP_ALIVE_S = 30
"""How long a connection may be idle between two requests."""

_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Server:
    """An HTTP server over one LLM.

    Args:
        llm: an `AsyncLLM` or `LLM`, on whose `loop` everything runs.
        config: None: defaults.

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
        """Where it is reached from this machine, `http://127.0.0.1:8000`.

        Raises:
            RuntimeError: it was never started.
        """
        if self._url is None:
            raise RuntimeError("this server has no address before start()")
        return self._url

    @property
    def running(self) -> bool:
        """Whether it accepts connections, or still ends what it has."""
        return self._life is not None and not self._life.done()

    def start(self) -> Self:
        """Accept connections. Harmless while it runs.

        Raises:
            ConfigError: the address is taken, or not this machine's.
            RuntimeError: it has been stopped, or the LLM has been shut down.
        """
        with self._changing:
            if self.running:
                return self
            self._loop.refuse_inside("start()")
            if self._life is not None:
                raise RuntimeError("this server has been stopped: build another")
            listener = _listen(self._config.host, self._config.port)
            try:
                self._url = _url(listener)
                self._life = self._loop.start(self._uvicorn.serve([listener]))
                self._loop.run(self._begin(self._life), START_TIMEOUT_S)
            except BaseException:
                listener.close()
                raise
            return self

    def stop(self) -> None:
        """Take nothing in any more, let what runs go on for `shutdown_grace_s`, then abort it. Harmless when repeated.

        Raises:
            RuntimeError: called on the LLM's own loop, which would wait for ever.
        """
        with self._changing:
            if self._life is None or self._life.done():
                return
            try:
                self._loop.run(
                    self._end(self._life), self._config.shutdown_grace_s + 2 * ABORT_TIMEOUT_S + START_TIMEOUT_S
                )
            except RuntimeError:
                # Where the loop was closed meanwhile, it has cancelled everything of ours.
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
        """Cancelled, because whoever waits has no patience any more (a second Ctrl-C), it cuts everything at once."""
        self._uvicorn.stopping.set()
        await asyncio.wrap_future(life)

    def wait(self) -> None:
        """Wait until it has ended; in the main thread also until Ctrl-C or SIGTERM, which stop it in order.

        Raises:
            RuntimeError: called on the LLM's own loop, which would wait for ever.
        """
        if self._life is None:
            return
        self._loop.refuse_inside("wait()")
        if threading.current_thread() is threading.main_thread():
            with _signals() as bell:
                self._life.add_done_callback(lambda _: bell.ring())
                bell.wait()
            self.stop()
        with suppress(CancelledError):
            self._life.result()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def serve(llm: Any, config: ServerConfig | None = None, *, blocking: bool = True) -> Server:
    """Serve an LLM over HTTP.

    Args:
        llm: an `AsyncLLM` or `LLM`; it stays up when the server ends.
        config: None: defaults.
        blocking: wait until Ctrl-C, SIGTERM, or somebody's `stop()`. False: return at once.

    Raises:
        ConfigError: the address is taken, or not this machine's; the chat template cannot be read.
        RuntimeError: the LLM has been shut down.
    """
    server = Server(llm, config).start()
    if blocking:
        server.wait()
    return server


class _Uvicorn(uvicorn.Server):
    """uvicorn's accepting and speaking; when to end, and how, is ours: it is told, and does not look ten times a second."""

    def __init__(self, app: Any, serving: Serving) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
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
        """Accept connections."""
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        """Until it is told to stop."""
        try:
            await self.stopping.wait()
        except asyncio.CancelledError:
            self._cut()
            raise

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nothing new; a grace for what runs; its abort; then the connections are cut."""
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
            self._serving.threads_for_huge_bodies.shutdown(wait=False, cancel_futures=True)
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


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; found out here and not in the loop, so that the caller hears what is wrong.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        found = socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"ServerConfig.port={port}: somebody listens on {host}:{port} already; choose another, or 0 for a free one"
            ) from exc
        raise ConfigError(f"ServerConfig.host={host!r}, port={port}: cannot listen there: {exc}") from exc


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


class _Bell:
    """A pipe that the main thread waits at: it is rung by signals, and by the server's end.

    A pipe and not an event: it is written by whichever thread the signal reaches, and a handler that takes a lock could
    find its own thread holding it.
    """

    ENDED = 0
    """No signal has this number."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self._open = True
        self._closing = threading.Lock()

    def ring(self) -> None:
        """The server has ended. Does nothing once the bell is closed, when the descriptor may be somebody else's."""
        with self._closing:
            if self._open:
                os.write(self.writer, bytes([self.ENDED]))

    def wait(self) -> None:
        """Until it rings for one of ours: other signals with a handler ring it too."""
        while os.read(self._reader, 1)[0] not in (*_STOPPING_SIGNALS, self.ENDED):
            pass

    def close(self) -> None:
        """Give the pipe back."""
        with self._closing:
            self._open = False
            os.close(self._reader)
            os.close(self.writer)


@contextmanager
def _signals() -> Iterator[_Bell]:
    """Inside the block Ctrl-C and SIGTERM ring the bell and do nothing else."""
    bell = _Bell()
    before = {number: signal.signal(number, lambda *_: None) for number in _STOPPING_SIGNALS}
    woken_before = signal.set_wakeup_fd(bell.writer, warn_on_full_buffer=False)
    try:
        yield bell
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        bell.close()
