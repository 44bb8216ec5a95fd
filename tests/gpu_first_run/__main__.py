"""First run on a GPU: what works, how exact it is, how fast it is. Needs no network and no installation of this package.

    python -m tests.gpu_first_run [STAGE ...] [--out FOLDER] [--device cuda:0] [--sizes 0.6b,8b] [--seconds 570]

Without names all stages run, in a good order, each in a process of its own: a stage that fails, hangs or loses the device
does not harm the next. One JSON object per finding is printed and appended to FOLDER/findings.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from tests.gpu_first_run import exactness, memory, speed
from tests.gpu_first_run.findings import FINDINGS, SHAPES, Run, say

STAGES: dict[str, Callable[[Run], None]] = {
    "kernels": exactness.kernels, "truth": exactness.truth, "memory": memory.memory, "speed": speed.speed,
}  # fmt: skip

LIMITS = {"kernels": 150, "truth": 200, "memory": 120, "speed": 270}
"""Names of the stages in a good order, and the seconds that each may take of a GPU's time, imports included."""
GRACE_S = 20.0
"""Seconds that a stage gets to report what it has found, once its time is over."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; returns the number of those that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_first_run", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"of {' '.join(LIMITS)}; none: all")
    add("--out", type=Path, default=Path("findings"), help="folder of the findings (default: findings)")
    add("--device", type=torch.device, default=torch.device("cuda", 0))
    add("--sizes", default="0.6b,8b", help=f"of the models, of {', '.join(SHAPES)}")
    add("--seconds", type=float, default=math.inf, help="for all stages; what is not done then is not run")
    add("--here", action="store_true", help="run in this process, in which a hang or a lost device ends the run")
    options = parser.parse_args(arguments)
    names = options.stages or list(LIMITS)
    for given, known, option in (
        (names, LIMITS, "STAGE"),
        (sizes := tuple(options.sizes.split(",")), SHAPES, "--sizes"),
    ):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"{option} {unknown[0]}: must be of {', '.join(known)}")
    if options.device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch sees no CUDA device; a CPU runs all stages but kernels")
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.device, options.out, sizes)
    if options.here:
        return sum(not _succeeds(run, name) for name in names)
    passed = ["--out", str(options.out), "--device", str(options.device), "--sizes", options.sizes, "--here"]
    end = time.monotonic() + options.seconds
    command = [sys.executable, "-m", "tests.gpu_first_run"]
    failed = 0
    for name in names:
        left = min(end - time.monotonic(), LIMITS[name] if run.cuda else math.inf)
        failed += not supervised([*command, name, *passed], name, run.out, left)
    return failed


def _succeeds(run: Run, name: str) -> bool:
    run.say("begins", name=name)
    start, why = time.perf_counter(), ""
    try:
        STAGES[name](run)
    except Exception as exc:  # noqa: BLE001 - whatever a stage raises is a finding
        why = f"{type(exc).__name__}: {exc}"[:400]
        traceback.print_exc()
    run.say("stage", name=name, ok=not why, seconds=time.perf_counter() - start, why=why)
    with suppress(RuntimeError):
        run.collect()
    return not why


def supervised(command: Sequence[str], name: str, out: Path, seconds: float) -> bool:
    """Run a stage in a process, killed after so many seconds; whether it has said that it went well."""
    start = time.monotonic()
    why = "not run: the time of this call was over"
    if seconds > 0:
        process = subprocess.Popen(command, start_new_session=True)
        try:
            status = process.wait(None if math.isinf(seconds) else seconds)
            why = f"its process ended with status {status}"
        except subprocess.TimeoutExpired:
            why = f"killed after {seconds:.0f} s"
            # It may still tell what it has found.
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    path = out / FINDINGS
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    if not found or (found[-1]["what"], found[-1].get("name")) != ("stage", name):
        say(out, "stage", name=name, ok=False, seconds=time.monotonic() - start, why=why)
        return False
    return bool(found[-1]["ok"])


if __name__ == "__main__":
    sys.exit(main())
