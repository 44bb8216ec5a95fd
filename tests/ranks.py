"""Runs functions on several ranks: one process each, with a torch.distributed process group as `torchrun` creates it.

A job is a function at the top of a module, `job(rank, **options)`; what it returns or raises comes back to the test.
"""

from __future__ import annotations

import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tests.distributed.job.nursery import Nursery

DEADLINE_S = 300.0
"""Guards against hanging, no more."""


def run_together(nursery: Nursery, size: int, job: Callable[..., Any], **options: Any) -> list[Any]:
    """Have `size` ranks do a job; what each has returned, None for one that has ended without a word."""
    deadline = time.monotonic() + DEADLINE_S
    answers: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder, nursery.children() as family:
        for rank in range(size):
            family.append(
                nursery.child(_live, rank=rank, size=size, store=str(Path(folder) / "store"), what=job, options=options)
            )
        waiting = {child.pipe: rank for rank, child in enumerate(family)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} have not answered within {DEADLINE_S} s; so far: {answers}"
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure, answers[rank] = pipe.recv()
                except EOFError:
                    failure, answers[rank] = None, None
                assert failure is None, f"rank {rank}:\n{failure}"
    return [answers[rank] for rank in range(size)]


def _live(
    pipe: Connection, rank: int, size: int, store: str, what: Callable[..., Any], options: dict[str, Any]
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        answer = what(rank, **options)
    except BaseException:  # noqa: BLE001 - the test raises it again
        pipe.send((traceback.format_exc(), None))
    else:
        pipe.send((None, answer))


def assert_nothing_is_left() -> None:
    """No thread of ours and no process, once those of the other ranks have ended, too."""
    deadline = time.monotonic() + DEADLINE_S
    for thread in threading.enumerate():
        ours = thread.name.startswith("rollout")
        if ours and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
            assert not thread.is_alive(), f"{thread.name} goes on"
    assert not psutil.Process().children(), psutil.Process().children()
