"""`docs/figures.json`: what was measured, by figure, each with its machine, versions and date."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
FILE = ROOT / "docs" / "figures.json"
DIGITS = 5
"""Significant digits that are stored: more than any figure has."""


@dataclass(frozen=True)
class Entry:
    """One figure as it was measured.

    Attributes:
        command: that anybody can run.
        date: UTC, `YYYY-MM-DD`.
        commit: of this project, abbreviated.
        machine: processor and number of cores the command could use.
        versions: of packages, by name.
        load: other runnable processes before it began, mean of a minute.
        found: what the benchmark wrote.
    """

    command: str
    date: str
    commit: str
    machine: str
    versions: dict[str, str]
    load: float
    found: Any

    @property
    def about(self) -> str:
        """One line below a table."""
        versions = ", ".join(f"{name} {each}" for name, each in self.versions.items())
        return f"`{self.command}`; {self.date}, {self.commit}, {self.machine}, load {self.load:.1f} before, {versions}."


def new_entry(command: str, found: Any, load: float) -> Entry:
    """Describe this machine beside what was found on it."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return Entry(
        command=command,
        date=datetime.now(UTC).date().isoformat(),
        commit=commit.stdout.strip() or "no commit",
        machine=f"{len(os.sched_getaffinity(0))} cores of {_processor()}",
        versions={name: version(name) for name in ("torch", "transformers")},
        load=round(load, 1),
        found=rounded(found),
    )


def load() -> dict[str, Entry]:
    """All entries by figure; {} before the first run."""
    if not FILE.exists():
        return {}
    return {name: Entry(**each) for name, each in json.loads(FILE.read_text(encoding="utf-8")).items()}


def save(entries: dict[str, Entry]) -> None:
    """Replace the file."""
    content = {name: asdict(entry) for name, entry in entries.items()}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    # A list of numbers on one line.
    text = re.sub(r"\[[-+.0-9eE,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    FILE.write_text(text + "\n", encoding="utf-8")


def rounded(found: Any) -> Any:
    """Floats cut to `DIGITS` significant digits, at any depth."""
    if isinstance(found, float):
        return float(f"{found:.{DIGITS}g}")
    if isinstance(found, dict):
        return {key: rounded(each) for key, each in found.items()}
    return [rounded(each) for each in found] if isinstance(found, list) else found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
