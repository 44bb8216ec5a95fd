"""First run on a GPU: what works, how exact it is, how fast it is. Needs no network and no installation of this package.

    python -m tests.gpu_first_run [STAGE ...] [--out FOLDER] [--device cuda:0] [--sizes 0.6b,8b] [--seconds 570]
    python -m tests.gpu_first_run [STAGE ...] --rehearse

Without names all stages run, in a good order. One JSON object per finding is printed and appended to FOLDER/findings.jsonl;
findings.json has them by stage, findings.txt for reading, both also when the call is cut off. A stage that fails, hangs or
loses the device does not harm the next. `--rehearse` runs every line of it without a GPU (`tests.pretended_cuda`).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gpu_first_run.findings import SHAPES, Run
from tests.gpu_first_run.limits import LIMITS
from tests.gpu_first_run.supervisor import supervise


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages; returns the number of those that failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_first_run", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"of {' '.join(LIMITS)}; none: all")
    add("--out", type=Path, default=Path("findings"), help="folder of the findings (default: findings)")
    add("--device", type=torch.device, default=torch.device("cuda", 0))
    add("--sizes", default="0.6b,8b", help=f"of the models, of {', '.join(SHAPES)}")
    add("--seconds", type=float, default=math.inf, help="for all stages; what is not done then is not run")
    add("--tests", default="tests/engine", help="folder or file of the stage tests")
    add("--workers", type=int, default=8, help="processes of the stage tests")
    add("--here", action="store_true", help="run in this process, in which a hang or a lost device ends the run")
    add("--rehearse", action="store_true", help="on a device that is pretended on the CPU, with tiny models")
    options = parser.parse_args(arguments)
    if options.rehearse:
        options.sizes = "tiny"
    # Most tests for a GPU take a GPU's time.
    names = options.stages or [name for name in LIMITS if not options.rehearse or name != "tests"]
    for given, known, option in (
        (names, LIMITS, "STAGE"),
        (sizes := tuple(options.sizes.split(",")), SHAPES, "--sizes"),
    ):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"{option} {unknown[0]}: must be of {', '.join(known)}")
    if options.seconds <= 0 or options.workers < 0:
        parser.error("--seconds must be above 0, and --workers 0 or more")
    if options.device.type == "cuda" and not options.rehearse and not torch.cuda.is_available():
        parser.error(
            f"--device {options.device}: torch sees no CUDA device; a CPU runs all stages but kernels and tune"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.device, options.out, sizes, options.tests, options.workers, rehearsed=options.rehearse)
    if options.here:
        from tests.gpu_first_run.stages import run_stages

        if not run.rehearsed:
            return run_stages(run, names)
        from tests.pretended_cuda.driver import install

        with install():
            return run_stages(run, names)
    passed = ["--out", str(options.out), "--device", str(options.device), "--sizes", options.sizes,
              "--tests", options.tests, "--workers", str(options.workers), "--here"]  # fmt: skip
    if run.rehearsed:
        passed.append("--rehearse")
        # Triton looks when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    limits = LIMITS if run.large else dict.fromkeys(LIMITS, math.inf)
    return supervise(
        names, lambda left: [sys.executable, "-m", "tests.gpu_first_run", *left, *passed], options.out, limits,
        options.seconds,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
