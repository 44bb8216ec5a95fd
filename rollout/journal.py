"""An append-only journal of finished groups (all samples of a prompt), with checkpoints.

    journal = Journal("run/journal-rank0")
    journal.append(samples)                          write a finished group
    mark = journal.checkpoint(step)                  start a new file; save the mark in the trainer's checkpoint
    for group in journal.since(mark): ...            after a restart: groups finished since that checkpoint

A journal is a folder of files. Opening the journal, and every checkpoint, starts a new file. One process writes it:

    000003-40-9f86d081884c7d65.journal               file name: a number, and a mark (a step and a random part)
    {"rollout_journal": 5}                           the first line
    length, CRC of the body | body                   per group; the body has the samples and the key, as msgpack

`since` returns every appended group once, in order, even after a kill. Only damaged groups are left out, with a warning. If
a length is damaged, the rest of the file is left out too. Nothing is unpickled. Files older than the oldest of the last
`keep_checkpoints` checkpoints are removed. `checkpoint` and `close` sync files to disk, so a crash of the machine loses at
most the groups that were appended after the last of these calls.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import socket
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from rollout.errors import ConfigError, EngineStateError, JournalError, SerializationError
from rollout.requests.codec import OPAQUE, decode_fields, list_of, unpack_msgpack
from rollout.requests.request import REQUEST, DynamicInferenceRequest
from rollout.threads import forks

VERSION = 5
SUFFIX = ".journal"
_HEADER = b'{"rollout_journal": %d}\n' % VERSION
_LOCK = "lock"
_HEAD = struct.Struct("<QI")
_BODY = {"key": OPAQUE, "samples": list_of(REQUEST)}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger(__name__)


class SegmentName(NamedTuple):
    """The parts of a journal file's name: a number, and the mark by which a checkpoint refers to the file's start."""

    number: int
    mark: str

    def path(self, folder: Path) -> Path:
        return folder / f"{self.number:06d}-{self.mark}{SUFFIX}"


class Place(NamedTuple):
    """The location of a group, for `Journal.read`: the path of its file, and its offset in the file."""

    path: Path
    start: int


@dataclass(frozen=True)
class FinishedGroup:
    """A finished group: its samples and key, as passed to `Journal.append`, and its location."""

    samples: list[DynamicInferenceRequest]
    key: bytes
    place: Place


class Journal:
    """A writer and reader of finished groups. Not thread-safe.

    Args:
        folder: folder of the journal, created if it is missing. A folder has one writer, so every rank needs its own.
        keep_checkpoints: number of newest checkpoints whose marks `since` accepts. At least 2, because when `checkpoint`
            returns, the trainer has not yet saved the newest mark.

    Raises:
        ConfigError: an option is out of range.
        EngineStateError: another process, or another object in this process, is writing the journal; the message names the
            process.
        JournalError: the folder cannot be written.
        SerializationError: another version of this package has written the journal.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep_checkpoints: int = 2) -> None:
        if type(keep_checkpoints) is not int or keep_checkpoints < 2:
            raise ConfigError(f"keep_checkpoints={keep_checkpoints!r}: must be an integer of at least 2")
        self.folder = Path(folder).absolute()
        self._keep = keep_checkpoints
        self._line: list[str] = []
        """The marks of the checkpoints that led to the current state, oldest first."""
        self._file = -1
        """The file descriptor of the newest file. -1 if the journal is closed."""
        self._end = 0
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder)
            try:
                for name in self._names():
                    with name.path(self.folder).open("rb") as file:
                        _read_header(file)
                self._begin(0)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as exc:
            if isinstance(exc, JournalError):
                raise
            raise _trouble(self.folder, "hold a journal", exc) from exc
        forks.in_child(self, lambda journal: journal._release(forked=True))

    def append(self, samples: Sequence[DynamicInferenceRequest], key: bytes = b"") -> Place:
        """Append a finished group. Return its place, for `read`.

        Args:
            samples: all samples of the group, each as one request (`DynamicInferenceRequestRecord.merge`).
            key: bytes chosen by the caller, which `since` and `read` return unchanged with the group.

        Raises:
            JournalError: the write failed, for example on a full disk; nothing was added, and a later call may succeed. Or
                the journal is closed, or was opened before this process was forked.
        """
        self._check_open()
        body = msgpack.packb({"key": key, "samples": [sample.serialize() for sample in samples]})
        place = Place(self._path, self._end)
        try:
            self._end = _write(self._file, _HEAD.pack(len(body), zlib.crc32(body)) + body, self._end)
        except BaseException as exc:
            # Cut off the partial record. If this fails too, ignore the error: the next record overwrites the partial
            # one, and if no record follows, readers skip the partial one at the end of the file.
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            if isinstance(exc, OSError):
                raise _trouble(self._path, "be appended to", exc) from exc
            raise
        return place

    def checkpoint(self, step: int) -> str:
        """Start a new file, just before the trainer saves a checkpoint that covers all groups appended so far.

        After a `JournalError` the journal is unchanged.

        Returns:
            The mark to save in the checkpoint. `since(mark)` returns the groups appended after this call. The mark is valid
            until `keep_checkpoints` later checkpoints.
        """
        self._check_open()
        self.sync()
        before, names = self._file, self._names()
        self._line.append(self._begin(step))
        os.close(before)
        if len(self._line) >= self._keep:
            # Count only checkpoints that led to the current state. A file with a newer mark may belong to a checkpoint
            # that the trainer never finished saving.
            oldest = next((name.number for name in names if name.mark == self._line[-self._keep]), 0)
            for name in names:
                if name.number < oldest:
                    name.path(self.folder).unlink(missing_ok=True)
        return self._line[-1]

    def since(self, mark: str | None) -> Iterator[FinishedGroup]:
        """Return an iterator over the groups appended after the checkpoint that returned `mark`. None means all groups.

        These groups stay on disk until the next `checkpoint`. An unknown mark raises `ConfigError`, which lists the known
        marks.
        """
        names = self._names()
        if mark is not None:
            marks = [name.mark for name in names]
            if mark not in marks:
                raise ConfigError(
                    f"{self.folder} has no checkpoint {mark!r}, only {', '.join(marks)}: continue from one of these, raise "
                    f"keep_checkpoints={self._keep}, or continue without the groups finished since"
                )
            self._line = [mark]
            names = names[marks.index(mark) :]
        return (group for name in names for group in self._groups(name.path(self.folder)))

    def read(self, place: Place) -> FinishedGroup | None:
        """Read the group at `place` again. Return None if a checkpoint has removed its file, or the group is damaged."""
        try:
            with place.path.open("rb") as file:
                file.seek(place.start)
                return _unpack(_read_body(file), place)
        except (FileNotFoundError, SerializationError):
            return None
        except OSError as exc:
            raise _trouble(place.path, "be read", exc) from exc

    def sync(self) -> None:
        """Sync all appended groups to disk. If this fails, close the journal and raise `JournalError`."""
        try:
            os.fsync(self._file)
        except OSError as exc:
            self._release()
            raise _trouble(self._path, "be synchronised, so the journal is closed", exc) from exc

    def close(self) -> None:
        """Sync and close the file, and release the folder's lock. Idempotent."""
        try:
            if self._file >= 0:
                self.sync()
        finally:
            self._release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- internals ----------------------------------------------------------------------------------------------

    def _release(self, *, forked: bool = False) -> None:
        if self._file >= 0:
            os.close(self._file)
            if not forked:
                # Unlock before closing: a child process that was just forked still has a copy of the descriptor, which
                # would keep the lock.
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._file = -1

    def _check_open(self) -> None:
        if self._file < 0:
            raise JournalError(f"{self.folder} is not open in process {os.getpid()}: closed, or opened before a fork")

    def _names(self) -> list[SegmentName]:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                number, dash, mark = entry.name.removesuffix(SUFFIX).partition("-")
                if entry.name.endswith(SUFFIX) and dash and number.isascii() and number.isdigit() and entry.is_file():
                    found.append(SegmentName(int(number), mark))
        return sorted(found)

    def _begin(self, step: int) -> str:
        """Start a new journal file. Return the mark in its name, which begins with `step`."""
        names = self._names()
        name = SegmentName(names[-1].number + 1 if names else 1, f"{step}-{secrets.token_hex(8)}")
        path = name.path(self.folder)
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                end = _write(file, _HEADER, 0)
                os.fsync(file)
                _sync_folder(self.folder)
            except BaseException:
                os.close(file)
                path.unlink(missing_ok=True)
                raise
        except OSError as exc:
            raise _trouble(path, "be written", exc) from exc
        self._path, self._file, self._end = path, file, end
        return name.mark

    def _groups(self, path: Path) -> Iterator[FinishedGroup]:
        try:
            with path.open("rb") as file:
                _read_header(file)
                size = os.fstat(file.fileno()).st_size
                while (start := file.tell()) < size:
                    try:
                        group = _unpack(_read_body(file), Place(path, start))
                    except SerializationError as exc:
                        _log.warning("journal: %s, bytes %d to %d are left out: %s", path, start, file.tell(), exc)
                    else:
                        yield group
        except OSError as exc:
            raise _trouble(path, "be read", exc) from exc


def _locked(folder: Path) -> int:
    """Lock the folder until this process exits; forked children close their copies. Return the lock's file descriptor."""
    # Pass O_NOFOLLOW, so that a planted symbolic link cannot make this process overwrite another file.
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError as exc:
        owner = os.pread(lock, 200, 0).decode(errors="replace").strip()
        os.close(lock)
        raise EngineStateError(
            f"{folder} is being written by {owner or 'another process'}: close that journal first, or give this one its "
            "own folder (each rank needs one)"
        ) from exc
    except BaseException:
        os.close(lock)
        raise
    return lock


def _write(file: int, data: bytes, start: int) -> int:
    """Write `data` at offset `start` and return the next offset. No buffer is used, so the data survive a process kill."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, start)
        start, view = start + written, view[written:]
    return start


def _sync_folder(folder: Path) -> None:
    # Sync the folder too: a new file is durable only if its directory entry is.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_header(file: BinaryIO) -> None:
    """Read and check the first line of a journal file. A line that a crash has cut off is accepted."""
    if not _HEADER.startswith(file.readline(len(_HEADER))):
        raise SerializationError(
            f"{file.name} does not begin as a journal of version {VERSION}, which this release reads: move it away"
        )


def _read_body(file: BinaryIO) -> bytes:
    """Read the body of the group at the file's position. If the group's length is damaged, move to the end of the file.

    Raises:
        SerializationError: the group is damaged.
    """
    size = os.fstat(file.fileno()).st_size
    head = file.read(_HEAD.size)
    length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
    if not 0 < length <= size - file.tell():
        file.seek(size)
        raise SerializationError("the record is cut off, or its length is damaged")
    body = file.read(length)
    if zlib.crc32(body) != checksum:
        raise SerializationError("the record's checksum is wrong")
    return body


def _unpack(body: bytes, place: Place) -> FinishedGroup:
    fields: dict[str, Any] = decode_fields("group", unpack_msgpack("group", body, strict_map_key=False), _BODY)
    return FinishedGroup(fields["samples"], fields["key"], place)


def _trouble(path: Path, what: str, exc: OSError) -> JournalError:
    cure = "free space on that disk" if exc.errno in _FULL else "check that it is writable, on a disk that works"
    return JournalError(f"{path} cannot {what} ({exc.strerror or exc}): {cure}, or choose a folder on another one")
