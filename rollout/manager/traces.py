"""Traces of a training process: a block, the whole job's block, and every k-th training step."""

from __future__ import annotations

import json
import logging
import os
import statistics
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rollout.config import TraceConfig
from rollout.errors import ConfigError, RolloutError
from rollout.manager.backend import Backend
from rollout.tracing.recorder import TraceRecorder, active, start, stop
from rollout.tracing.timeline import merged, timeline, with_decisions, write

_log = logging.getLogger(__name__)


def trace(path: str | os.PathLike[str]) -> AbstractContextManager[Path]:
    """A block whose timeline is written when it ends, also after an exception, for Perfetto, Chrome and `rollout trace`.

    All engines of this process are in it: those of managers, of `LLM`, and bare ones. With torch.distributed on several
    ranks each rank writes a file of its own, `.rank<number>` before the suffix; `RolloutManager.trace` writes one for all.

    Args:
        path: `.json`, or `.json.gz`; an existing file is replaced.

    Returns:
        A context manager; its value is the file that will be written.

    Raises:
        EngineStateError: a trace is being recorded already.
        ConfigError: the folder does not exist, or the file cannot be written.
    """
    return _own(_own_path(Path(path)))


@contextmanager
def _own(path: Path) -> Iterator[Path]:
    recorder = start(_checked(path))
    try:
        yield path
    finally:
        stop(recorder)
        write(timeline(recorder, _torch_rank() or 0), path)


@contextmanager
def traced(path: str | os.PathLike[str], backend: Backend) -> Iterator[Path]:
    """See `RolloutManager.trace`."""
    target = Path(path)
    recorder = start(_checked(target))
    try:
        yield target
    except BaseException:
        # The other ranks may not come to the end of their block.
        stop(recorder)
        write(timeline(recorder, _torch_rank() or 0), _own_path(target))
        raise
    stop(recorder)
    mine = timeline(recorder, _torch_rank() or 0)
    try:
        mine["otherData"]["clock"] = backend.clock_readings()
        every = backend.gather("trace", zlib.compress(json.dumps(mine).encode(), 1))
    except RolloutError:
        write(mine, _own_path(target))
        raise
    if every is not None:
        traces = [json.loads(zlib.decompress(each)) for each in every]
        # Without a coordinator the ranks know nothing of each other.
        one = with_decisions(merged(traces, _offsets(traces)), _decisions(backend, recorder.started))
        write(one, target if len(every) > 1 else _own_path(target))


class StepTraces:
    """Traces every k-th training step of a manager. A step begins with the first `generate` after a weight update.

    Args:
        config: where and how often; None: never.
    """

    def __init__(self, config: TraceConfig | None) -> None:
        self._config = config
        self._version: int | None = None
        self._step = 0
        self._recorder: TraceRecorder | None = None
        if config is not None:
            try:
                Path(config.folder).mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise ConfigError(f"TraceConfig.folder={config.folder!r}: cannot be made: {exc}") from exc

    def generate_begins(self, version: int) -> None:
        """A `generate` begins under a policy version."""
        if self._config is None or version == self._version:
            return
        self.end()
        self._version = version
        self._step += 1
        if self._step % self._config.every_steps:
            return
        if active() is not None:
            _log.warning("step %d is not traced by TraceConfig: another trace is being recorded", self._step)
            return
        self._recorder = start(str(self._path()))

    def end(self) -> None:
        """Write the step that is being traced, if one is. A file that cannot be written is a warning."""
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        stop(recorder)
        try:
            write(timeline(recorder, _torch_rank() or 0), self._path())
        except ConfigError as exc:
            _log.warning("%s; training goes on without it", exc)

    def _path(self) -> Path:
        assert self._config is not None
        return _own_path(Path(self._config.folder) / f"step-{self._step:06d}.json.gz")


def of_rank(path: Path, rank: int) -> Path:
    """`step.json` → `step.rank1.json`."""
    name, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{name}.rank{rank}{dot}{suffixes}")


def _own_path(path: Path) -> Path:
    rank = _torch_rank()
    return path if rank is None else of_rank(path, rank)


def _offsets(traces: list[dict[str, Any]]) -> list[float]:
    """Seconds that each rank's clock is ahead of the first one's: the median over moments that were the same on all."""
    readings = [trace["otherData"].pop("clock") for trace in traces]
    return [
        statistics.median(here - first for here, first in zip(each, readings[0], strict=True)) if each else 0.0
        for each in readings
    ]


def _decisions(backend: Backend, since: float) -> list[tuple[float, str, dict[str, Any]]]:
    try:
        return backend.coordinator_decisions(since)
    except RolloutError as exc:
        _log.warning("the trace lacks the coordinator's decisions: %s", exc)
        return []


def _checked(path: Path) -> str:
    """Refuse a path before the block that would be lost."""
    if not path.parent.is_dir():
        raise ConfigError(f"trace({str(path)!r}): there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise ConfigError(f"trace({str(path)!r}): is a folder; give a file, such as step.json")
    return str(path)


def _torch_rank() -> int | None:
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.get_rank() if several else None
