"""Traces of one training process, or of all processes of a job."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from rollout.errors import ConfigError
from rollout.observe.recorder import start, stop
from rollout.observe.timeline import merged, timeline, write


def trace(path: str | os.PathLike[str]) -> AbstractContextManager[Path]:
    """Write a timeline of a `with` block for Perfetto or Chrome, even after an exception.

    The timeline covers all engines of this process, with or without a manager or `LLM`. With torch.distributed on several
    ranks, each rank writes its own file, with `.rank<number>` before the suffix. `RolloutManager.trace` writes one file for
    all ranks.

    Args:
        path: a `.json` or `.json.gz` file; an existing file is replaced.

    Returns:
        A context manager whose value is the path of the file that will be written.

    Raises:
        EngineStateError: a trace is already being recorded.
        ConfigError: the folder does not exist, or the file cannot be written.
    """
    return traced(_own_path(Path(path)), None)


@contextmanager
def traced(path: str | os.PathLike[str], gather: Callable[[str, bytes], list[bytes] | None] | None) -> Iterator[Path]:
    """Implement `RolloutManager.trace`.

    Args:
        path: see `RolloutManager.trace`.
        gather: the method `Backend.gather` of the manager's backend; None if `path` is already this rank's own file.
    """
    target = Path(path)
    own = target if gather is None else _own_path(target)
    every: list[bytes] | None = []
    recorder = start(_checked(target))
    try:
        yield target
        if gather is not None:
            stop(recorder)
            every = gather("trace", zlib.compress(json.dumps(timeline(recorder, _torch_rank() or 0)).encode(), 1))
    finally:
        stop(recorder)
        # Write this rank's own trace if no other rank's was gathered: without a coordinator the ranks cannot exchange
        # traces, and after an exception some ranks may never leave their `with` block.
        if every is not None and len(every) < 2:
            write(timeline(recorder, _torch_rank() or 0), own)
    if every is not None and len(every) > 1:
        write(merged([json.loads(zlib.decompress(each)) for each in every]), target)


def of_rank(path: Path, rank: int) -> Path:
    """Insert the rank into a file name: `step.json` → `step.rank1.json`."""
    name, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{name}.rank{rank}{dot}{suffixes}")


def _own_path(path: Path) -> Path:
    rank = _torch_rank()
    return path if rank is None else of_rank(path, rank)


def _checked(path: Path) -> str:
    """Check the path before recording starts, because a bad path found later would lose the trace; return it as str."""
    if not path.parent.is_dir():
        raise ConfigError(f"trace({str(path)!r}): there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise ConfigError(f"trace({str(path)!r}): is a folder; give a file, such as step.json")
    return str(path)


def _torch_rank() -> int | None:
    import torch.distributed as dist

    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.get_rank() if several else None
