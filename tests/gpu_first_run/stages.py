"""The stages of a first run on a GPU, and the process that runs some of them, one after the other."""

from __future__ import annotations

import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from tests.gpu_first_run import exactness, memory, speed
from tests.gpu_first_run.findings import Run
from tests.gpu_first_run.gpu_tests import gpu_tests
from tests.gpu_first_run.limits import LIMITS
from tests.gpu_first_run.tune import tune

STAGES: dict[str, Callable[[Run], None]] = {
    "tests": gpu_tests, "kernels": exactness.kernels, "truth": exactness.truth, "memory": memory.memory,
    "speed": speed.speed, "tune": tune,
}  # fmt: skip


def run_stages(run: Run, names: Iterable[str]) -> int:
    """Run the stages until one leaves the device unusable; returns the number of those that failed."""
    failed = 0
    for name in names:
        failed += not _within(run, name, STAGES[name], LIMITS[name])
        if run.lost:
            break
    return failed


def _within(run: Run, name: str, stage: Callable[[Run], None], limit: int) -> bool:
    def late(*_: object) -> None:
        raise TimeoutError(f"stage {name} took longer than {limit} s")

    run.say("begins", name=name)
    before, start = signal.signal(signal.SIGALRM, late), time.perf_counter()
    signal.alarm(limit if run.large else 0)
    why = ""
    try:
        stage(run)
    except Exception as exc:  # noqa: BLE001 - whatever a stage raises is a finding
        why = f"{type(exc).__name__}: {exc}"[:400]
        traceback.print_exc()
        # After such an error every call of the process fails.
        run.lost = "CUDA error" in why and "memory" not in why.lower()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    if run.rehearsed:
        from tests.pretended_cuda.driver import compiled

        run.say("kernels compiled so far", **{name: len(each) for name, each in compiled.items()})
    run.say("stage", name=name, ok=not why, seconds=time.perf_counter() - start, why=why)
    gc.collect()
    if run.device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return not why
