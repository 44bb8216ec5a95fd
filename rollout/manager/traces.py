"""Traces of a training process: a block, the whole job's block, and every k-th training step."""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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
        write(_timeline(recorder, backend), _own_path(target))
        raise
    stop(recorder)
    mine = _timeline(recorder, backend)
    try:
        every = backend.gather("trace", _packed(mine))
    except RolloutError:
        write(mine, _own_path(target))
        raise
    if every is not None:
        one = _of_job(every, _decisions(backend, recorder.started))
        # Without a coordinator the ranks know nothing of each other.
        write(one, target if len(every) > 1 else _own_path(target))


class StepTraces:
    """Traces every k-th training step of a manager. A step begins with the first rollout after a weight update.

    On several ranks no rank waits for another: each posts its trace where the step ends, and rank 0 writes those of all in
    the first rollout that finds them there. What is left at the end, or of a rank that has counted other steps, having
    started later, is no reason to stop a training: it is missing in the file, or in files of the ranks' own.

    Args:
        config: where and how often; None: never.
    """

    def __init__(self, config: TraceConfig | None, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._version: int | None = None
        self._step = 0
        self._recorder: TraceRecorder | None = None
        self._posted: _PostedStep | None = None
        if config is not None:
            try:
                Path(config.folder).mkdir(parents=True, exist_ok=True)
            except OSError as exc:
                raise ConfigError(f"TraceConfig.folder={config.folder!r}: cannot be made: {exc}") from exc

    def rollout_begins(self, version: int) -> None:
        """A `generate`, `run` or the like begins under a policy version."""
        if self._config is None:
            return
        self._collect(all_or_nothing=True)
        if version == self._version:
            return
        self._end()
        self._version = version
        self._step += 1
        if self._step % self._config.every_steps:
            return
        if active() is not None:
            _log.warning("step %d is not traced by TraceConfig: another trace is being recorded", self._step)
            return
        self._recorder = start(str(self._path(self._step)))

    def close(self) -> None:
        """Write what is there; a step that is being traced in a file of this rank. None that cannot be written raises."""
        self._collect(all_or_nothing=False)
        self._end(closing=True)

    def _end(self, *, closing: bool = False) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        stop(recorder)
        self._collect(all_or_nothing=False)
        mine = _timeline(recorder, self._backend)
        # At the end the other ranks may not come.
        if not closing and self._backend.post(_POSTED, self._step.to_bytes(_STEP_BYTES) + _packed(mine)):
            self._posted = _PostedStep(self._step, recorder.started)
        else:
            self._write(mine, _own_path(self._path(self._step)))

    def _collect(self, *, all_or_nothing: bool) -> None:
        """On rank 0, write the step whose traces the ranks have posted; unless some are missing, if so asked."""
        step = self._posted
        if step is None:
            return
        try:
            posted = self._backend.posted(_POSTED)
        except RolloutError as exc:
            _log.warning("the trace of step %d is lost: %s", step.number, exc)
            posted = None
        if posted is None:
            self._posted = None
            return
        of_rank = {
            rank: value[_STEP_BYTES:]
            for rank, value in enumerate(posted)
            if value is not None and int.from_bytes(value[:_STEP_BYTES]) == step.number
        }
        missing = [rank for rank in range(len(posted)) if rank not in of_rank]
        if missing and all_or_nothing:
            return
        self._posted = None
        if missing:
            _log.warning("the trace of step %d lacks the ranks %s, which have not posted theirs", step.number, missing)
        decisions = _decisions(self._backend, step.started)
        self._write(_of_job(list(of_rank.values()), decisions), self._path(step.number))

    def _path(self, step: int) -> Path:
        assert self._config is not None
        return Path(self._config.folder) / f"step-{step:06d}.json.gz"

    def _write(self, trace: dict[str, Any], path: Path) -> None:
        try:
            write(trace, path)
        except ConfigError as exc:
            _log.warning("%s; training goes on without it", exc)


_POSTED, _STEP_BYTES = "step trace", 8


@dataclass(frozen=True)
class _PostedStep:
    """A step whose trace this rank has posted."""

    number: int
    started: float


def of_rank(path: Path, rank: int) -> Path:
    """`step.json` → `step.rank1.json`."""
    name, dot, suffixes = path.name.partition(".")
    return path.with_name(f"{name}.rank{rank}{dot}{suffixes}")


def _own_path(path: Path) -> Path:
    rank = _torch_rank()
    return path if rank is None else of_rank(path, rank)


def _timeline(recorder: TraceRecorder, backend: Backend) -> dict[str, Any]:
    """The trace of this rank, with what its clock is aligned by."""
    trace = timeline(recorder, _torch_rank() or 0)
    # Names as JSON has them, wherever the trace is read from.
    trace["otherData"]["clock"] = {str(moment): at for moment, at in backend.clock_readings().items()}
    return trace


def _packed(trace: dict[str, Any]) -> bytes:
    return zlib.compress(json.dumps(trace).encode(), 1)


def _of_job(packed: Sequence[bytes], decisions: Sequence[tuple[float, str, dict[str, Any]]]) -> dict[str, Any]:
    return with_decisions(merged([json.loads(zlib.decompress(each)) for each in packed]), decisions)


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
