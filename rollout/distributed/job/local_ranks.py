"""Ranks of one command on this host: starts a process for each, joins their process group, and stops them with this process.

This process is rank 0 and holds the store of the process group, on loopback. The other ranks read their standard input,
whose other end this process holds, so they exit when it exits.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from rollout.engine.parts.explain import usable_cores
from rollout.errors import EngineDeadError

JOIN_TIMEOUT = timedelta(hours=1)
"""Seconds that all ranks have to load their models."""
POLL_S = 0.05
END_TIMEOUT_S = 30.0
"""Seconds that the ranks have to exit by themselves."""
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LocalRank:
    """Place of this process among the ranks of its command; `port` is the store's, on loopback."""

    rank: int
    size: int
    port: int

    def share_processors(self) -> None:
        """Give torch this rank's share of the processors, unless `OMP_NUM_THREADS` sets their number."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, int(usable_cores()) // self.size))

    def follow_parent(self) -> None:
        """Exit at once when the parent process has exited."""

        def wait() -> None:
            sys.stdin.buffer.read()
            os._exit(1)

        threading.Thread(target=wait, name="rollout-parent-watch", daemon=True).start()

    def join(self) -> None:
        """Report that this rank is ready, and join the process group once all are."""
        store = TCPStore(_HOST, self.port, self.size, is_master=False, timeout=JOIN_TIMEOUT)
        store.set(_ready(self.rank), "")
        _join(store, self)


class LocalRanks:
    """Processes of ranks 1 … `size` - 1; this process is rank 0.

    Args:
        size: number of ranks, at least 2.
        command: of the process of a rank, which calls `follow_parent` and `join` of its `LocalRank`.
        on_end: called by a thread with (rank, exit code) when a rank exits after `join` and before `close`.
    """

    def __init__(
        self, size: int, command: Callable[[LocalRank], Sequence[str]], on_end: Callable[[int, int], object]
    ) -> None:
        # Bound here: the store itself would listen on all interfaces.
        listener = socket.create_server((_HOST, 0))
        self.place = LocalRank(0, size, listener.getsockname()[1])
        self._store = TCPStore(
            _HOST, self.place.port, size, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        self._on_end = on_end
        self._closing = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, size):
                # A session of its own: Ctrl-C goes to rank 0, which stops the others in order.
                self._processes[rank] = subprocess.Popen(
                    command(LocalRank(rank, size, self.place.port)), stdin=subprocess.PIPE, start_new_session=True
                )
        except BaseException:
            self.kill()
            raise

    def join(self) -> None:
        """Wait until every rank is ready, and join the process group; `EngineDeadError` if one has exited."""
        ready = [_ready(rank) for rank in self._processes]
        while not self._store.check(ready):
            for rank, process in self._processes.items():
                if (code := process.poll()) is not None:
                    raise EngineDeadError(
                        f"rank {rank} has ended with code {code} before it was ready; its error is above"
                    )
            time.sleep(POLL_S)
        _join(self._store, self.place)
        for rank, process in self._processes.items():
            threading.Thread(target=self._watch, args=(rank, process), name="rollout-rank-watch", daemon=True).start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._closing:
            self._on_end(rank, code)

    def close(self) -> None:
        """Wait for the processes to exit, and terminate those that do not."""
        self._closing = True
        deadline = time.monotonic() + END_TIMEOUT_S
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kill the processes at once. Harmless after they have exited."""
        self._closing = True
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


def _ready(rank: int) -> str:
    return f"ready/{rank}"


def _join(store: TCPStore, place: LocalRank) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(place.size)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=JOIN_TIMEOUT)
