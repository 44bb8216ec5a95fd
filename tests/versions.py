"""Writes the table of tested versions: runs the suite, or a part of it, and enters the versions it passed with.

python -m tests.versions                                    the whole suite
python -m tests.versions tests/engine tests/trainer_hooks   a part, which the row names
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "versions.md"
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "triton")


def versions() -> list[str]:
    """Python's and every package's version here; a dash for one that is not installed."""
    found = [platform.python_version()]
    for package in PACKAGES:
        try:
            found.append(version(package))
        except PackageNotFoundError:
            found.append("–")
    return found


def entered(page: str, row: str) -> str:
    """The page with a row on top of its table, in place of an older one of the same versions and tests."""
    head, rule, *rows = [line for line in page.splitlines() if line.startswith("|")]
    same = row.split("|")[2:-2]
    kept = [each for each in rows if each.split("|")[2:-2] != same]
    return "\n".join([page[: page.index(head)].rstrip("\n"), "", head, rule, row, *kept]) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run the tests; write a row if they pass. Returns pytest's exit status."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    print(done.stdout)
    if done.returncode == 0:
        counts = re.findall(r"\d+ (?:passed|skipped)", done.stdout.splitlines()[-1])
        tests = "all" if not arguments else " ".join(f"`{each}`" for each in arguments)
        cells = [datetime.now(UTC).date().isoformat(), *versions(), tests, ", ".join(counts)]
        PAGE.write_text(entered(PAGE.read_text(encoding="utf-8"), f"| {' | '.join(cells)} |"), encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
