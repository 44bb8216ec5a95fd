"""First run on a GPU: what works, how exact it is, how fast it is. Needs no network and no installation of this package.

    python -m tests.gpu_first_run STAGE [STAGE ...] [--out FOLDER] [--device cuda:0] [--sizes 0.6b,8b]

Stages, in a good order: env kernels poison truth fused exact, then speed without tune top_p ways, then memory. One JSON
object per finding, printed and appended to FOLDER/findings.jsonl. A stage that fails or exceeds its time does not harm the
next.
"""

from __future__ import annotations

import argparse
import gc
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from tests.gpu_first_run import exact_mode, exactness, memory, speed
from tests.gpu_first_run.findings import SHAPES, Run
from tests.gpu_first_run.fused import fused
from tests.gpu_first_run.without import without

STAGES: dict[str, tuple[Callable[[Run], None], int]] = {
    "env": (speed.env, 60), "kernels": (exactness.kernels, 90), "poison": (memory.poison, 60),
    "truth": (exactness.truth, 150), "fused": (fused, 240), "exact": (exact_mode.exact_mode, 240),
    "speed": (speed.speed, 240), "tune": (speed.tune, 240), "top_p": (speed.top_p, 40), "ways": (speed.ways, 90),
    "without": (without, 240), "memory": (memory.memory, 120),
}  # fmt: skip
"""Stage → what runs, and the seconds that it may take of a GPU's time."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; returns the number of those that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_first_run", description=__doc__.partition("\n")[0])
    parser.add_argument("stages", nargs="+", choices=STAGES)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--sizes", default="0.6b,8b", help=f"of the models, of {', '.join(SHAPES)}")
    options = parser.parse_args(arguments)
    sizes = tuple(options.sizes.split(","))
    if unknown := [size for size in sizes if size not in SHAPES]:
        parser.error(f"--sizes {unknown[0]}: must be of {', '.join(SHAPES)}")
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(
            f"--device {options.device}: torch sees no CUDA device; a CPU runs env, truth, exact, speed and top_p"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.device, options.out, sizes)
    failed = 0
    for name in options.stages:
        stage, limit = STAGES[name]
        failed += not _within(run, name, stage, limit)
        if run.lost:
            break
    return failed


def _within(run: Run, name: str, stage: Callable[[Run], None], limit: int) -> bool:
    def late(*_: object) -> None:
        raise TimeoutError(f"stage {name} took longer than {limit} s")

    before, start = signal.signal(signal.SIGALRM, late), time.perf_counter()
    signal.alarm(limit if run.cuda else 0)
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
    run.say("stage", name=name, ok=not why, seconds=time.perf_counter() - start, why=why)
    gc.collect()
    if run.device.type == "cuda":
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
    return not why


if __name__ == "__main__":
    sys.exit(main())
