"""The stages of a first run on a GPU, and what runs some of them in this process."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from tests.gpu_first_run import exactness, memory, speed
from tests.gpu_first_run.findings import Run
from tests.gpu_first_run.gpu_tests import gpu_tests
from tests.gpu_first_run.tune import tune

STAGES: dict[str, Callable[[Run], None]] = {
    "tests": gpu_tests, "kernels": exactness.kernels, "truth": exactness.truth, "memory": memory.memory,
    "speed": speed.speed, "tune": tune,
}  # fmt: skip


def run_stages(run: Run, names: Iterable[str]) -> int:
    """Run the stages; returns the number of those that failed."""
    return sum(not _succeeds(run, name) for name in names)


def _succeeds(run: Run, name: str) -> bool:
    run.say("begins", name=name)
    start, why = time.perf_counter(), ""
    try:
        STAGES[name](run)
    except Exception as exc:  # noqa: BLE001 - whatever a stage raises is a finding
        why = f"{type(exc).__name__}: {exc}"[:400]
        traceback.print_exc()
    if run.rehearsed:
        from tests.pretended_cuda.driver import compiled

        run.say("kernels compiled so far", **{name: len(each) for name, each in compiled.items()})
    run.say("stage", name=name, ok=not why, seconds=time.perf_counter() - start, why=why)
    gc.collect()
    if run.device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return not why
