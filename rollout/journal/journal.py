"""Append-only journal of finished groups, with checkpoints.

    journal = Journal("run/journal-rank0", job="run 17")
    journal.append(samples)                          write a finished group
    mark = journal.checkpoint(step)                  start a new segment; save the mark in the trainer's checkpoint
    for group in journal.since(mark): ...            after a restart: groups finished since that checkpoint

A journal is a folder with one segment file per checkpoint. Always true: every appended group is read back in order,
exactly once per `since`, or reported in its `damage`; nothing else is read, and nothing is unpickled. Segments older
than the oldest of `keep_checkpoints` checkpoints are removed.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from rollout.errors import ConfigError, DamagedHeaderError, EngineStateError, JournalError, RolloutError
from rollout.journal.segment import (
    Damage,
    FinishedGroup,
    GroupReader,
    Place,
    SegmentName,
    SegmentWriter,
    cure_of,
    pack_group,
    read_body,
    segments,
    unpack_group,
)
from rollout.requests.request import DynamicInferenceRequest

FILE = "lock"
_held: dict[tuple[int, int], int] = {}
"""(device, inode) of the folders locked here → process id: a POSIX lock does not exclude its own process."""


class FolderLock:
    """Exclusive lock of a folder by one process, held until `release` or the end of the process.

    It ends with the process even if its children live on: a forked data loader inherits open files but not POSIX
    record locks.

    Raises:
        EngineStateError: the folder is locked, names the process; or the lock's path is not a regular file.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / FILE
        self._folder = _identity(os.stat(folder))
        self._owner = 0
        if _held.get(self._folder) == os.getpid():
            # Do not open the file: closing any descriptor of it would release this process's lock.
            raise EngineStateError(f"{folder} is open in this process already: close() the other one first")
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise EngineStateError(
                f"{path} is not a regular file, so it cannot be a lock: remove it, or choose another folder"
            )
        # O_NOFOLLOW: a planted symbolic link must not make this process overwrite another of its files.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException as exc:
            owner = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            # Closing the file releases the lock.
            os.close(self._file)
            if isinstance(exc, BlockingIOError):
                raise EngineStateError(
                    f"{folder} is being written by {owner or 'another process'}: end that one first, or give this one a "
                    "folder of its own (each rank needs one)"
                ) from exc
            raise
        self._owner = _held[self._folder] = os.getpid()

    def release(self) -> None:
        """Release the lock. Idempotent; no-op in a forked child, which does not hold it."""
        if self.is_mine():
            self._owner = 0
            del _held[self._folder]
            os.close(self._file)

    def is_mine(self) -> bool:
        """Whether this process holds the lock."""
        return self._owner == os.getpid()

    def is_intact(self) -> bool:
        """Whether the lock's path still leads to the locked file."""
        try:
            return _identity(os.stat(self._path, follow_symlinks=False)) == _identity(os.fstat(self._file))
        except OSError:
            return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


Fsync = Literal["always", "interval", "never"]
_log = logging.getLogger(__name__)


class Journal:
    """Writer and reader of finished groups since a checkpoint. Not thread-safe.

    Args:
        folder: created if missing. Exclusive to one writer: every rank needs its own.
        job: name of the run; a folder of another job is rejected.
        fsync: when appended groups are forced onto the disk. `always`: before `append` returns; `interval`: by the
            first `append` after `fsync_interval_s`, by `checkpoint` and by `close`; `never`: left to the operating
            system. It matters for a crash of the machine only.
        fsync_interval_s: seconds.
        keep_checkpoints: number of newest checkpoints that `since` supports. At least 2, because the trainer has not
            yet saved the newest mark when `checkpoint` returns.
        clock: monotonic seconds; replaceable in tests.

    Attributes:
        damage: the torn record cut off the newest file when it was opened, if any.

    Raises:
        ConfigError: an option is out of range, or the folder holds the journal of another job.
        EngineStateError: another process, or another object here, is writing it; names it.
        JournalError: the folder cannot be written.
        SerializationError: written by another version.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        job: str = "",
        fsync: Fsync = "interval",
        fsync_interval_s: float = 1.0,
        keep_checkpoints: int = 2,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check(fsync, fsync_interval_s, keep_checkpoints)
        self.folder = Path(folder).absolute()
        self.job = job
        self.damage: list[Damage] = []
        self._fsync = fsync
        self._interval_s = fsync_interval_s
        self._keep = keep_checkpoints
        self._clock = clock
        self._line: list[str] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder)
        except OSError as exc:
            raise JournalError(f"{self.folder} cannot hold a journal ({exc.strerror or exc}): {cure_of(exc)}") from exc
        try:
            self._writer = self._open_newest()
        except BaseException:
            self._lock.release()
            raise
        self._synced = clock()

    def append(self, samples: Sequence[DynamicInferenceRequest], key: bytes = b"") -> Place:
        """Append a finished group; returns its place, for `read`.

        Args:
            samples: all samples of the group, merged.
            key: opaque bytes of the caller, returned with the group.

        Raises:
            JournalError: the write failed (disk full, for example): nothing was added, and a later call may succeed.
                Or the journal is closed, or was opened before a fork.
        """
        self._check_mine()
        record = self._writer.append(pack_group(samples, key))
        now = self._clock()
        if self._fsync == "always" or (self._fsync == "interval" and now - self._synced >= self._interval_s):
            self.sync()
        return Place(self._writer.path, record)

    def checkpoint(self, step: int) -> str:
        """Start a new segment, just before the trainer saves a checkpoint that covers all groups appended so far.

        Returns the mark to save in the checkpoint. `since(mark)` returns the groups appended after this call, until
        `keep_checkpoints` later checkpoints. After a `JournalError` the journal is as before.
        """
        self._check_mine()
        if self._fsync != "never":
            self.sync()
        names = segments(self.folder)
        before, self._writer = self._writer, self._begin(step, names)
        before.close()
        self._line.append(self._writer.mark)
        self._remove_older(names)
        return self._writer.mark

    def since(self, mark: str | None) -> GroupReader:
        """Return a reader of the groups appended after the checkpoint with this mark; None: of all groups.

        All of them stay on the disk until the next `checkpoint`. An unknown mark raises a `ConfigError` with the known
        ones.
        """
        names = segments(self.folder)
        if mark is None:
            return GroupReader(self.folder, names, self.job)
        marks = [name.mark for name in names]
        if mark not in marks:
            raise ConfigError(
                f"{self.folder} has no checkpoint {mark!r}, only {', '.join(marks)}: continue from one of these, raise "
                f"keep_checkpoints={self._keep}, or continue without the groups finished since"
            )
        self._line = [mark]
        return GroupReader(self.folder, names[marks.index(mark) :], self.job)

    def read(self, place: Place) -> FinishedGroup | None:
        """Read one group again; None: its file was removed since, or is damaged."""
        try:
            with place.path.open("rb") as file:
                samples, key = unpack_group(read_body(file, place.record))
        except (FileNotFoundError, RolloutError):
            return None
        except OSError as exc:
            raise JournalError(f"{place.path} cannot be read ({exc.strerror or exc})") from exc
        return FinishedGroup(samples, key, place)

    def sync(self) -> None:
        """Force all appended groups onto the disk. After a `JournalError` nothing can be appended until the journal is
        reopened.
        """
        self._writer.sync()
        self._synced = self._clock()

    def close(self) -> None:
        """Sync, close the file and release the lock. Idempotent."""
        if not self._lock.is_mine():
            return
        try:
            if self._fsync != "never":
                self.sync()
        finally:
            self._writer.close()
            self._lock.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _open_newest(self) -> SegmentWriter:
        names = segments(self.folder)
        if not names:
            return self._begin(0, names)
        try:
            writer = self._open(names[-1])
        except DamagedHeaderError as exc:
            # Its records can still be read; new groups go into a new file.
            _log.warning("journal: %s", exc)
            return self._begin(0, names)
        if writer.cut is not None:
            self.damage.append(Damage(writer.path, writer.cut.start, writer.cut.end, None, "torn tail, now cut off"))
            _log.warning("journal: %s", self.damage[-1])
        return writer

    def _begin(self, step: int, names: Sequence[SegmentName]) -> SegmentWriter:
        name = SegmentName(names[-1].number + 1 if names else 1, f"{step}-{secrets.token_hex(8)}")
        try:
            return self._open(name)
        except BaseException:
            name.path(self.folder).unlink(missing_ok=True)
            raise

    def _open(self, name: SegmentName) -> SegmentWriter:
        writer = SegmentWriter(name.path(self.folder), name.mark, self.job)
        if self._fsync != "never":
            writer.sync()
            _sync_folder(self.folder)
        return writer

    def _remove_older(self, names: Sequence[SegmentName]) -> None:
        """Remove segments that no kept checkpoint needs, counting along the current line of checkpoints."""
        if len(self._line) < self._keep:
            return
        oldest = next((name.number for name in names if name.mark == self._line[-self._keep]), 0)
        for name in names:
            if name.number < oldest:
                name.path(self.folder).unlink(missing_ok=True)

    def _check_mine(self) -> None:
        if not self._lock.is_mine():
            raise JournalError(f"{self.folder} is not open in process {os.getpid()}: closed, or opened before a fork")
        if not self._lock.is_intact():
            raise JournalError(
                f"{self.folder}: its lock file was removed or replaced, so that another process may be writing it; end "
                "that one, if there is one, and reopen the journal"
            )


def _sync_folder(folder: Path) -> None:
    # A new file is durable only when its directory entry is synced too.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as exc:
        raise JournalError(f"{folder} cannot be synchronised ({exc.strerror or exc})") from exc
    finally:
        os.close(descriptor)


def _check(fsync: str, interval_s: float, keep: int) -> None:
    if fsync not in ("always", "interval", "never"):
        raise ConfigError(f"fsync={fsync!r}: must be 'always', 'interval' or 'never'")
    if not interval_s >= 0:
        raise ConfigError(f"fsync_interval_s={interval_s!r}: must be at least 0")
    if type(keep) is not int or keep < 2:
        raise ConfigError(f"keep_checkpoints={keep!r}: must be an integer of at least 2")
