"""Cost per request and memory growth of the coordinator's core, without sockets.

A request goes from `Submit` through `Assign` and a `Progress` that ends its samples to `Update`, as messages. Every prompt
is another one, and its blocks are reported as cached, so that the table of hashes is as full as it gets.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import time
from collections import deque
from typing import Any

import numpy as np
import psutil

from rollout.config import CoordinatorConfig
from rollout.distributed.coordinator.core.coordinator import CoordinatorCore
from rollout.distributed.protocol.messages import (
    PROTOCOL_VERSION,
    Assign,
    Connect,
    EngineMoved,
    Message,
    Progress,
    Register,
    Submit,
)
from rollout.requests.block_hash import compute_block_hashes_batched
from tests.benchmarks.echo import BLOCK_SIZE, Load, answer

RANKS = (1, 2, 16, 1000)
OPEN = 1024
"""Requests at work."""
SLOTS = 256
SAMPLES = 10
"""Of the memory, evenly over a run."""
MAX_HASHES = 1 << 14


class Job:
    """A core, one client, and ranks whose samples end in the order of arrival.

    Args:
        ranks: how many.
        load: what is asked.
    """

    def __init__(self, ranks: int, load: Load) -> None:
        # Room for all that are open.
        self._slots = max(SLOTS, -(-2 * OPEN * load.n // ranks))
        config = CoordinatorConfig(data_parallel_size=ranks, max_hashes_per_rank=MAX_HASHES)
        self.core = CoordinatorCore(config, "benchmark")
        self._load = load
        self._params = load.assign().params
        self._numbers = itertools.count()
        self._sequences: dict[bytes, int] = {}
        self._assigned: deque[tuple[bytes, Assign]] = deque()
        self._say(b"client", Connect(PROTOCOL_VERSION, "client"))
        for index in range(ranks):
            name = f"rank-{index:04}"
            self._say(name.encode(), Register(PROTOCOL_VERSION, name, self._slots, BLOCK_SIZE, "running", 0))
            self._say(name.encode(), EngineMoved("running", 0))
        self.core.take_outbox()

    def _say(self, peer: bytes, message: Message) -> None:
        sequence = self._sequences.get(peer, 0)
        self._sequences[peer] = sequence + 1
        self.core.receive(peer, sequence, message, 0.0)

    def request(self) -> tuple[Submit, bytes]:
        """The next request, and the hashes of its blocks."""
        number = next(self._numbers)
        prompt = np.full(self._load.prompt_tokens, number % 2**31, "<i4")
        hashes = np.array(compute_block_hashes_batched(prompt, BLOCK_SIZE), "<i8").tobytes()
        return Submit(number, prompt.tobytes(), self._load.n, self._params, None, 0, 1.0), hashes

    def submit(self, submit: Submit) -> None:
        """Let it in, and take what it leads to."""
        self._say(b"client", submit)
        self._take()

    def finish(self, hashes: bytes) -> int:
        """The oldest open one ends. Returns how many samples did."""
        rank, assign = self._assigned.popleft()
        stretch = answer(assign, self._load.completion)
        self._say(rank, Progress([stretch], hashes, running=1))
        self._take()
        return len(assign.indices)

    def _take(self) -> None:
        self._assigned += (
            (peer, message) for peer, _, message in self.core.take_outbox() if isinstance(message, Assign)
        )
        self.core.take_decisions()


def run(job: Job, requests: int) -> float:
    """Seconds that the core takes for `requests`, while `OPEN` others are open."""
    seconds = 0.0
    waiting: deque[bytes] = deque()
    for _ in range(OPEN):
        submit, hashes = job.request()
        waiting.append(hashes)
        job.submit(submit)
    for _ in range(requests):
        submit, hashes = job.request()
        waiting.append(hashes)
        start = time.perf_counter()
        job.submit(submit)
        seconds += time.perf_counter() - start
        seconds += _finish(job, waiting.popleft())
    while waiting:
        _finish(job, waiting.popleft())
    if job.core.status()["clients"][0]["open_requests"]:
        raise RuntimeError("requests are open where all have ended: the figures would be of others")
    return seconds


def _finish(job: Job, hashes: bytes) -> float:
    """A group that was split ends in parts; the whole ends at once."""
    samples = 0
    start = time.perf_counter()
    while samples < job._load.n:
        samples += job.finish(hashes)
    return time.perf_counter() - start


def per_request(load: Load, rounds: int, requests: int) -> dict[str, Any]:
    """Median microseconds by number of ranks, rounds alternating, and of what is not the core's: the echo itself."""
    jobs = {ranks: Job(ranks, load) for ranks in RANKS}
    seen: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for number in range(rounds):
        turn = number % len(RANKS)
        for ranks in RANKS[turn:] + RANKS[:turn]:
            seen[ranks].append(1e6 * run(jobs[ranks], requests) / requests)
    assign = load.assign()
    start = time.perf_counter()
    for _ in range(requests):
        answer(assign, load.completion)
    return {
        "load": [load.prompt_tokens, load.n, load.completion],
        "us": {ranks: statistics.median(each) for ranks, each in seen.items()},
        "echo_us": 1e6 * (time.perf_counter() - start) / requests,
    }


def memory(requests: int, ranks: int = 4) -> dict[str, Any]:
    """Resident memory while `requests` pass, in MB at even distances; the first part fills the tables.

    The garbage collector rests, so that flat also means: nothing here forms cycles, and a coordinator needs none.
    """
    job = Job(ranks, Load(64, 1, 8))
    process = psutil.Process(os.getpid())
    points = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(SAMPLES):
            run(job, requests // SAMPLES)
            points.append(process.memory_info().rss / 1e6)
    finally:
        gc.enable()
    return {
        "requests": requests, "ranks": ranks, "rss_mb": points, "grown_mb": points[-1] - points[1],
        "in_cycles": gc.collect(),
    }  # fmt: skip
