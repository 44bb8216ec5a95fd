"""Stage `tests`: the tests that are marked `gpu`, in several processes, then those that need the device for themselves."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil

from tests.gpu_first_run.findings import Run

ROOT = Path(__file__).parents[2]
ONE_TEST_S = 200
_OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b")
_NAME = re.compile(r"\S+::\S.*?(?= (?:PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b|$)")
KINDS = {"together": "gpu and not whole_device", "alone": "gpu and whole_device"}


def gpu_tests(run: Run) -> None:
    """Counts of outcomes and the names of tests that failed; their output is in `tests-*.txt`.

    Raises:
        AssertionError: some failed.
    """
    # Other files may need packages that are not there, and collecting them takes each process long.
    root = ROOT / run.tests
    files = [path for path in (sorted(root.rglob("test_*.py")) or [root]) if "mark.gpu" in path.read_text("utf-8")]
    failed = 0
    for kind, marker in KINDS.items():
        workers = run.workers if kind == "together" else 0
        failed += _run(run, kind, ["-m", marker, "-n", str(workers), "--dist", "load", *map(str, files)])
    assert not failed, f"{failed} tests failed"


def _run(run: Run, kind: str, arguments: list[str]) -> int:
    log = run.out / f"tests-{kind}.txt"
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "-p", "no:cacheprovider", "-p", "no:schemathesis",
               "--continue-on-collection-errors", "-o", f"timeout={ONE_TEST_S}", *arguments]  # fmt: skip
    command += ["-p", "tests.pretended_cuda.plugin"] * run.rehearsed
    with log.open("w", encoding="utf-8") as file:
        tests = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
        try:
            tests.wait()
        finally:
            # Also when this stage's time is over: what has run is told.
            end(tests)
            counts, names = outcomes(log.read_text(encoding="utf-8"))
            run.say("tests", kind=kind, status=tests.returncode, **counts, which_failed=names)
    # Five: none of the tests were for this device.
    return len(names) or int(tests.returncode not in (0, 5))


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all of its own, if they have not ended."""
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()
    process.wait()


def outcomes(text: str) -> tuple[dict[str, int], list[str]]:
    """Numbers of tests by outcome, and the names of those that failed, of what `pytest -v` has printed so far.

    A file that cannot be imported is one that failed, by its own name.
    """
    by: Counter[str] = Counter()
    failed = []
    printed, _, summary = text.partition("short test summary info")
    for line in printed.splitlines():
        outcome, name = _OUTCOME.search(line), _NAME.search(line)
        if outcome is None or name is None or "::" not in line:
            continue
        by[outcome[1].lower()] += 1
        if outcome[1] in ("FAILED", "ERROR"):
            failed.append(name[0])
    failed += [name for name in re.findall(r"^ERROR (\S+)", summary, re.MULTILINE) if "::" not in name]
    return dict(by), failed
