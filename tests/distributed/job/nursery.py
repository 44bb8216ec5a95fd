"""Process nursery: forks child processes within milliseconds, so that a test can kill many of them.

    test process ── job, options, a pipe ──▶ nursery ── fork ──▶ child: job(pipe, **options)
         ▲ └──────── signals ─────────────────────────────────────▶ │
         └────────── answers ───────────────────────────────────────┘

The nursery has imported everything and computed nothing, and it has one thread: a child of it begins its job within
milliseconds. No process outlives the test process: the nursery ends with its socket and ends its children.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

PATIENCE_S = 120.0
"""Guards against hanging, no more."""

BEGIN = "from tests.distributed.job.nursery import keep; keep({descriptor}, {module!r})"


class Child:
    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid = pid
        self.pipe = pipe
        # The nursery collects its dead only when it is asked for another child: the number is still this one's.
        self._descriptor = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        assert select.select([self._descriptor], [], [], PATIENCE_S)[0], f"process {self.pid} cannot be killed"
        self.pipe.close()

    def hear(self) -> Any:
        assert self.pipe.poll(PATIENCE_S), f"process {self.pid} has not answered"
        return self.pipe.recv()

    def hear_bytes(self) -> bytes:
        """Return the next bytes that the child sends, which are not an object."""
        assert self.pipe.poll(PATIENCE_S), f"process {self.pid} has not answered"
        return self.pipe.recv_bytes()

    def ask(self, question: Any) -> Any:
        self.pipe.send(question)
        return self.hear()

    def __del__(self) -> None:
        os.close(self._descriptor)


class Nursery:
    """Makes children. Not thread-safe.

    Args:
        module: what every child would have to import.
    """

    def __init__(self, module: str = "tests.distributed.job.rank_jobs") -> None:
        self._socket, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN.format(descriptor=theirs.fileno(), module=module)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def child(self, job: Callable[..., None], **options: Any) -> Child:
        """Have a new process do a job; job and options travel pickled."""
        ours, theirs = Pipe()
        try:
            with theirs:
                self._socket.send((job, options))
                send_handle(self._socket, theirs.fileno(), self._process.pid)
            assert self._socket.poll(PATIENCE_S), "the nursery has not answered"
            return Child(self._socket.recv(), ours)
        except (ConnectionError, EOFError) as exc:
            code = self._process.wait(PATIENCE_S)
            raise RuntimeError(f"the nursery has ended with {code}; its traceback is on stderr") from exc

    @contextmanager
    def children(self) -> Iterator[list[Child]]:
        """Yield a list of children, which are killed at the end."""
        family: list[Child] = []
        try:
            yield family
        finally:
            for child in family:
                child.kill()

    def close(self) -> None:
        """End it, and what is left of its children."""
        self._socket.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()


def keep(descriptor: int, module: str) -> None:
    import_module(module)
    # A thread that an import started and joined is listed until the kernel has removed it: under load, a while longer.
    end = time.monotonic() + PATIENCE_S
    while len(threads := os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(threads) == 1, f"a fork of {len(threads)} threads takes one of them along"
    # Ctrl-C reaches all processes of a terminal, but it is the test's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    alive: set[int] = set()
    with Connection(descriptor) as orders:
        while True:
            try:
                job, options = orders.recv()
                handle = recv_handle(orders)
            except EOFError:
                break
            for pid in list(alive):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    alive.discard(pid)
            pid = os.fork()
            if not pid:
                os.close(descriptor)
                _live(job, Connection(handle), options)
            os.close(handle)
            alive.add(pid)
            orders.send(pid)
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _live(job: Callable[..., None], pipe: Connection, options: dict[str, Any]) -> None:
    # What has been imported stays, and need not be looked at for garbage.
    gc.freeze()
    code = 1
    try:
        job(pipe, **options)
        code = 0
    except BaseException:  # noqa: BLE001 - the end of a process whose stack is the nursery's
        traceback.print_exc()
    finally:
        # No farewell of the interpreter: its hooks are the nursery's.
        os._exit(code)


def answer(pipe: Connection, respond: Callable[[Any], Any]) -> None:
    """In a child: answer the test's questions, in a thread; end with the test."""

    def serve() -> None:
        with suppress(EOFError, OSError):
            while True:
                pipe.send(respond(pipe.recv()))
        os._exit(2)

    threading.Thread(target=serve, daemon=True).start()
