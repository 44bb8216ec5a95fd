"""Runs examples to their end, each in a process of its own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from tests.distributed.job.nursery import Nursery

ROOT = Path(__file__).parent.parent
DEADLINE_S = 500
"""Guards against hanging, no more."""


def run_example(name: str, out: Path, *flags: str, ranks: int | None = None) -> str:
    """Run an example as its command line says, on several ranks by `torchrun`. Returns what it has printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, str(_path(name)), *flags], capture_output=True, text=True, timeout=DEADLINE_S,
        env=os.environ | _environment(out), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fork_example(nursery: Nursery, name: str, out: Path, *flags: str) -> str:
    """The same on one rank in a child of a nursery of `tests.example_imports`, which spares the imports."""
    printed = out / "printed"
    with nursery.children() as family:
        child = nursery.child(_live, path=str(_path(name)), flags=flags, environment=_environment(out), printed=printed)
        family.append(child)
        assert child.pipe.poll(DEADLINE_S), f"{name} has not ended within {DEADLINE_S} s:\n{printed.read_text()}"
        try:
            code = child.pipe.recv()
        except EOFError:
            code = None
    assert code == 0, f"{name} has ended with {code}:\n{printed.read_text()}"
    return printed.read_text()


def _path(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


def _environment(out: Path) -> dict[str, str]:
    return {"WANDB_MODE": "offline", "WANDB_DATA_DIR": str(out / "staged"), "OMP_NUM_THREADS": "1"}


def _live(pipe: Connection, path: str, flags: tuple[str, ...], environment: dict[str, str], printed: Path) -> None:
    os.environ |= environment
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [path, *flags]
    sys.path.insert(0, str(Path(path).parent))
    code: object = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as exc:
        code = exc.code or 0
    except BaseException:  # noqa: BLE001 - the test shows it
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send(code)
