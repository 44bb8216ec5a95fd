"""Stage `sanitize`: the smallest tests of the kernels under NVIDIA's compute-sanitizer, which finds what no result shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from glob import glob

from tests.gpu_first_run.findings import Run
from tests.gpu_first_run.gpu_tests import ROOT, end

PROGRAM = "compute-sanitizer"
TOOLS = {"memcheck": "reads and writes outside of a tensor", "racecheck": "unordered uses of shared memory"}
KERNELS = "tests/engine/kernels/test_triton_paged.py"
LAYERS = "tests/engine/forward/test_cuda_forward.py"
TESTS = (
    f"{KERNELS}::test_decode_is_right_on_both_sides_of_every_edge_of_a_part",
    f"{KERNELS}::test_caches_are_read_and_written_at_the_addresses_in_the_cells",
    f"{KERNELS}::test_prefill_leaves_what_is_behind_the_last_chunk_alone",
    f"{KERNELS}::test_many_groups_each_have_their_own_prefix_and_more_rows_than_a_tile",
    f"{KERNELS}::test_the_write_fills_its_slots_in_the_type_of_the_cache_and_touches_no_other",
    f"{LAYERS}::test_under_autocast_values_are_rounded_where_the_module_rounds_them",
    f"{LAYERS}::test_experts_that_have_no_position_or_several_blocks_of_them_are_computed",
)
"""Few and tiny: a kernel runs up to a hundred times as long."""
FOUND = 77
TOOL_S = 145.0


def sanitize(run: Run) -> None:
    """Errors that each tool finds; its output is in `sanitize-*.txt`. Where the program is not installed, that is told.

    Raises:
        AssertionError: a tool found some, or did not end.
    """
    program = found_program()
    if program is None or not run.large:
        why = "a CPU has no use for it" if program else f"{PROGRAM} is neither on PATH nor under CUDA_HOME"
        run.say("sanitizer", ran=False, why=why)
        return
    bad = [tool for tool in TOOLS if not _clean(run, program, tool)]
    assert not bad, f"{', '.join(bad)} found errors or did not end: see sanitize-*.txt"


def found_program(environment: Mapping[str, str] = os.environ) -> str | None:
    """Path of compute-sanitizer: on PATH, or of a CUDA toolkit; None: it is not installed."""
    homes = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    places = [os.path.join(home, part) for home in (*homes, *glob("/usr/local/cuda*")) for part in ("bin", PROGRAM)]
    return shutil.which(PROGRAM, path=os.pathsep.join([environment.get("PATH", ""), *places]))


def _clean(run: Run, program: str, tool: str) -> bool:
    log = run.out / f"sanitize-{tool}.txt"
    # What torch asks the driver in vain is no error of a kernel.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [program, "--tool", tool, *quiet, "--target-processes", "all", "--error-exitcode", str(FOUND),
               sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=0",
               *TESTS]  # fmt: skip
    # Out of a cached segment a tensor has neighbours, whose memory may be read.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(TOOL_S)
            status = process.poll()
        finally:
            end(process)
    lines = [line.strip("= ") for line in log.read_text("utf-8", "replace").splitlines() if line.startswith("=====")]
    errors = [int(number) for line in lines for number in re.findall(r"SUMMARY:.*?(\d+) error", line)]
    run.say(
        "sanitizer", ran=True, tool=tool, looks_for=TOOLS[tool], status=status, errors=sum(errors) if errors else None,
        ended=status is not None, first=[line for line in lines if line][:12] if status else [],
    )  # fmt: skip
    # Status 1: the tests failed, which is for the stage `tests` to tell.
    return status is not None and status != FOUND and not sum(errors)
