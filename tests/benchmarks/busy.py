"""Throughput next to busy processes: this engine, and vLLM if it is installed, quiet and under load, in alternation.

    nice -n -15 python -m tests.benchmarks.busy --vllm-python V/bin/python

Loads: none, one process pinned to the last core, several unpinned ones. A busy process counts in a loop at the priority
that this command has. A fair share beside k others on c cores is c / (c + k) of the machine, at most.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import tables
from tests.benchmarks.child import NotRun, PeerFailed
from tests.benchmarks.common import finish, parse, quiet_transformers
from tests.benchmarks.peers import Ours, Peer
from tests.benchmarks.remote import Interpreters, open_remote
from tests.benchmarks.subject import SIZES, Subject, make_subject
from tests.benchmarks.workloads import Room, Scale, Workload, steady

DEADLINE_S = 600.0
SETTLE_S = 0.2
COUNT = "import os, sys\nif len(sys.argv) > 1: os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"


@contextmanager
def busy(count: int, core: int | None = None) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that do nothing but count, on one core or on any.

    Each has a session of its own: Linux gives sessions, not processes, equal shares of a core, and a peer may have one.
    """
    pinned = [] if core is None else [str(core)]
    command = [sys.executable, "-c", COUNT, *pinned]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        time.sleep(SETTLE_S)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def loads(several: Sequence[int]) -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """Return the contexts that surround a measurement, by name."""
    last = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"quiet": partial(busy, 0), "1 pinned": partial(busy, 1, last)} | {
        f"{count} anywhere": partial(busy, count) for count in several
    }


def opened(subject: Subject, room: Room, options: argparse.Namespace, stack: ExitStack) -> dict[str, Peer]:
    """The peers that there are; why another is not is printed."""
    peers: dict[str, Peer] = {"ours": Ours(subject, room)}
    stack.callback(peers["ours"].close)
    try:
        peers["vllm"] = open_remote("vllm", subject, room, Interpreters(options.vllm_python, None))
        stack.callback(peers["vllm"].close)
    except (NotRun, PeerFailed) as exc:
        print(f"vllm: {exc}")
    return peers


def rate(peer: Peer, workload: Workload) -> float:
    """Tokens per second."""
    (turn,) = workload.turns
    peer.forget()
    return workload.new_tokens / peer.generate([list(p) for p in turn.prompts], turn.lengths, DEADLINE_S).seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Returns the exit status."""
    options = parse(
        __doc__, arguments, size="10m", dtype="bfloat16", sequences=16, rounds=5, scale=0.25, vllm_python=None,
        several={"default": [3, 6], "help": "busy processes of the loads without a pin"},
    )  # fmt: skip
    (workload,) = steady(SIZES[options.size]["vocab_size"], Scale(options.scale), [options.sequences])
    room = Room.of([workload])
    surroundings = loads(options.several)
    with quiet_transformers(), tempfile.TemporaryDirectory(prefix="busy-") as folder, ExitStack() as stack:
        subject = make_subject(options.size, options.dtype, room.longest, Path(folder))
        peers = opened(subject, room, options, stack)
        rates: dict[tuple[str, str], list[float]] = {(load, name): [] for load in surroundings for name in peers}
        for name in peers:
            rate(peers[name], workload)
        for _ in range(options.rounds):
            for load, surround in surroundings.items():
                for name, peer in peers.items():
                    with surround():
                        rates[load, name].append(rate(peer, workload))
    found = {f"{load}|{name}": values for (load, name), values in rates.items()}
    finish(options.json, found, tables.busy(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
