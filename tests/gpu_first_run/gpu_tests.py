"""Stage `tests`: the tests that are marked `gpu`, in several processes, then those that need the device for themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.gpu_first_run.findings import Run

ROOT = Path(__file__).parents[2]
ONE_TEST_S = 200
_OUTCOME = re.compile(r"^\[gw\d+\] \[ *\d+%\] (PASSED|FAILED|ERROR|SKIPPED|XFAIL) (.+?) *$", re.MULTILINE)
_UNCOLLECTED = re.compile(r"^ERROR (\S+)$|^ERROR (\S+) - ", re.MULTILINE)


def gpu_tests(run: Run) -> None:
    """Counts of outcomes and the names of tests that failed; their output is in `tests-*.txt`.

    Raises:
        AssertionError: some failed.
    """
    # Other files may need packages that are not there, and collecting them takes each process long.
    root = ROOT / run.tests
    files = [path for path in (sorted(root.rglob("test_*.py")) or [root]) if "mark.gpu" in path.read_text("utf-8")]
    kinds = {"together": ("gpu and not whole_device", run.workers), "alone": ("gpu and whole_device", 1)}
    failed = sum(_run(run, kind, marker, workers, files) for kind, (marker, workers) in kinds.items())
    assert not failed, f"{failed} tests failed"


def _run(run: Run, kind: str, marker: str, workers: int, files: list[Path]) -> int:
    log = run.out / f"tests-{kind}.txt"
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "-p", "no:cacheprovider", "-p", "no:schemathesis",
               "--continue-on-collection-errors", "-o", f"timeout={ONE_TEST_S}", "-m", marker, "-n", str(workers),
               "--dist", "load", *map(str, files)]  # fmt: skip
    status: int | None = None
    try:
        with log.open("w", encoding="utf-8") as file:
            status = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    finally:
        # Even if this stage is interrupted, the outcomes so far are reported.
        text = log.read_text(encoding="utf-8")
        found = _OUTCOME.findall(text)
        failed = [name for outcome, name in found if outcome in ("FAILED", "ERROR")]
        # A file that cannot be imported counts as a failed test.
        failed += [a or b for a, b in _UNCOLLECTED.findall(text) if "::" not in (a or b)]
        counts = Counter(outcome.lower() for outcome, _ in found)
        run.say("tests", kind=kind, status=status, **counts, which_failed=failed)
    # Five: none of the tests are for this device.
    return len(failed) or int(status not in (0, 5))
