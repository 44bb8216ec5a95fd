"""Compiles every module of the package under each supported Python that is installed, warnings as errors.

    python -m tests.pythons

Interpreters are `python3.11` … `python3.14` on the PATH and those of pyenv; one that is missing is listed as not run. They
need no packages: syntax and what a version deprecates in it, no import. Exit status 1 if a module does not compile, or if
there is no interpreter at all.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("rollout", "trainer_hooks", "examples")
MINORS = range(11, 15)
TIMEOUT_S = 120
COMPILE = """
import pathlib, sys
for folder in sys.argv[1:]:
    for path in pathlib.Path(folder).rglob("*.py"):
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
print(sys.version.split()[0])
"""


def candidates(minor: int) -> list[str]:
    """Commands that may be this version: of the PATH first, then pyenv's."""
    home = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    return [f"python3.{minor}", *(str(path / "bin" / "python") for path in sorted(home.glob(f"3.{minor}.*")))]


def interpreter(minor: int) -> str | None:
    """A command that is this version and runs; None: there is none."""
    for command in candidates(minor):
        try:
            told = subprocess.run(
                [command, "-V"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            ).stdout
        except OSError:
            continue
        if told.startswith(f"Python 3.{minor}."):
            return command
    return None


def main() -> int:
    """Print one line per version; returns the exit status."""
    ran, failed = 0, False
    for minor in MINORS:
        command = interpreter(minor)
        if command is None:
            print(f"3.{minor}: not installed, not run")
            continue
        ran += 1
        folders = [str(ROOT / folder) for folder in FOLDERS]
        done = subprocess.run(
            [command, "-I", "-W", "error", "-c", COMPILE, *folders],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode:
            failed = True
            print(f"3.{minor}: {done.stderr.strip()}")
        else:
            print(f"{done.stdout.strip()}: every module compiles")
    if not ran:
        print("no supported Python found: install one, such as Debian's python3.13", file=sys.stderr)
    return int(failed or not ran)


if __name__ == "__main__":
    raise SystemExit(main())
