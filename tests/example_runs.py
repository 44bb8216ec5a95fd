"""Runs examples to their end, each in a process of its own."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torch.distributed import TCPStore

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


def fork_example(nursery: Nursery, name: str, out: Path, *flags: str, ranks: int | None = None) -> str:
    """The same in children of a nursery of `tests.example_imports`, which spares the imports.

    Ranks find in their environment what `torchrun` leaves there, and meet at a store of this process, as at its own.
    """
    environments: list[dict[str, str]] = [{}]
    if ranks is not None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environments = [_of_rank(rank, ranks, store.port) for rank in range(ranks)]
    printed = [out / f"printed-{rank}" for rank in range(len(environments))]

    def said() -> str:
        return "".join(path.read_text() for path in printed if path.exists())

    end = time.monotonic() + DEADLINE_S
    with nursery.children() as family:
        for path, environment in zip(printed, environments, strict=True):
            environment |= _environment(out)
            family.append(
                nursery.child(_live, path=str(_path(name)), flags=flags, environment=environment, printed=path)
            )
        running = {child.pipe for child in family}
        while running:
            ready = wait(list(running), max(0.0, end - time.monotonic()))
            assert ready, f"{name} has not ended within {DEADLINE_S} s:\n{said()}"
            for pipe in ready:
                running.discard(pipe)
                try:
                    code = pipe.recv()
                except EOFError:
                    code = None
                assert code == 0, f"{name} has ended with {code}:\n{said()}"
    return said()


def _of_rank(rank: int, ranks: int, port: int) -> dict[str, str]:
    """The environment of a process of `torchrun` on one host."""
    size, place = str(ranks), str(rank)
    return {
        "RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip


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
