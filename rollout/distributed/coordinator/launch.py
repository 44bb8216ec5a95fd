"""The launch of the coordinator in a child process.

    launcher                                   child (`python -m rollout.distributed.coordinator`)
    stdin   ── pickle of configuration and keys ──▶   then stays open, so that the child notices when the launcher dies
    stdout  ◀── JSON of the address, or an error ─    then is closed

Secrets are sent only through the pipe, because other users could read command-line arguments and environment variables.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from rollout.config import CoordinatorConfig
from rollout.distributed.transport.keys import JobKeys
from rollout.errors import ConfigError, ConnectionLostError, DeadlineError
from rollout.threads import forks

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class CoordinatorHandle:
    """A handle of the coordinator's process. The process exits once the launcher and the last client have exited."""

    address: str
    process: subprocess.Popen[bytes]

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Terminate the process; kill it if it still runs after `timeout_s` seconds. Open requests fail with an error.

        Returns:
            The exit code: 0, or minus the number of the signal that killed the process.
        """
        self.process.terminate()
        try:
            return self.wait(timeout_s)
        except DeadlineError:
            return self.kill()

    def release(self) -> None:
        """Detach from the process, which then exits when its last client has disconnected."""
        cast(IO[bytes], self.process.stdin).close()

    def kill(self) -> int:
        """Kill the process; return the exit code."""
        self.process.kill()
        return self.wait(STOP_TIMEOUT_S)

    def wait(self, timeout_s: float) -> int:
        """Wait until the process has exited, and return the exit code.

        Raises:
            DeadlineError: the process still runs after `timeout_s` seconds.
        """
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired as exc:
            raise DeadlineError(
                f"coordinator (process {self.process.pid}): has not ended within {timeout_s} s"
            ) from exc
        cast(IO[bytes], self.process.stdin).close()
        return code


def launch_coordinator(
    config: CoordinatorConfig, keys: JobKeys | None = None, timeout_s: float = 30.0
) -> CoordinatorHandle:
    """Start a coordinator in a child process with its own process session; return once the coordinator listens.

    Args:
        config: options of the coordinator.
        keys: the job's keys, including the server's secret key; if None, the coordinator uses no keys.
        timeout_s: seconds within which the coordinator must listen.

    Raises:
        ConfigError: the coordinator cannot listen as configured.
        DeadlineError: the coordinator does not listen within `timeout_s`.
        ConnectionLostError: the process exited before it listened.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "rollout.distributed.coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        start_new_session=True,
        env=_environment(),
    )
    # Close the pipe in forked children. Otherwise a child's copy would keep the pipe open after this process has exited,
    # and the coordinator would keep running.
    forks.in_child(cast(IO[bytes], process.stdin), lambda pipe: pipe.close())
    late = threading.Event()

    def give_up() -> None:
        late.set()
        process.kill()

    # Use one timer for writing and reading: killing the process unblocks both pipes.
    timer = threading.Timer(timeout_s, give_up)
    timer.daemon = True
    timer.start()
    try:
        orders = memoryview(pickle.dumps((config, keys)))
        with suppress(BrokenPipeError):
            while orders:
                orders = orders[cast(IO[bytes], process.stdin).write(orders) :]
        answer = cast(IO[bytes], process.stdout).read()
        if not answer:
            raise ConnectionLostError(
                "coordinator: its process ended before it listened; see its error output on stderr"
            )
        address, error = json.loads(answer)
        if error is not None:
            raise ConfigError(error)
    except BaseException as exc:
        process.kill()
        code = process.wait()
        cast(IO[bytes], process.stdin).close()
        if late.is_set():
            raise DeadlineError(f"coordinator: did not listen within timeout_s={timeout_s}; was killed") from exc
        if isinstance(exc, ConnectionLostError):
            exc.add_note(f"its exit code: {code}")
        raise
    finally:
        timer.cancel()
        cast(IO[bytes], process.stdout).close()
    return CoordinatorHandle(address, process)


def _environment() -> dict[str, str]:
    """Return the launcher's environment, changed so that a child finds this package and runs numeric code on one thread."""
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return os.environ | single | {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)}
