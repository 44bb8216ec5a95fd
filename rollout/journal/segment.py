"""One file of a journal, checksummed records of which the first names job and version; and the reader of such files.

    record   marker, sequence number, length, CRC of the body, CRC of these | body

Always true: a record is accepted only if its marker, both checksums and the order of sequence numbers are valid; otherwise
reading resumes at the next marker, so that any damage costs one record, is reported and raises nothing. The marker is a
hash of the random mark in the file's name, so that contents cannot imitate it. A file only grows, except that a failed
append is truncated.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgpack

from rollout.errors import ConfigError, DamagedHeaderError, JournalError, RolloutError, SerializationError
from rollout.requests.codec import OPAQUE, Codec, decode_fields, list_of, refuse, unpack_msgpack
from rollout.requests.request import REQUEST, DynamicInferenceRequest

VERSION = 3
MAX_BODY_BYTES = (1 << 32) - 1
SUFFIX = ".journal"
_OLD_MAGIC = b"rolljrnl"
"""First bytes of a file of versions 1 and 2."""
_RECORD = struct.Struct("<8sQII")
_CRC = struct.Struct("<I")
_HEAD_BYTES = _RECORD.size + _CRC.size
_WINDOW_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class SegmentName(NamedTuple):
    """Parsed file name, such as `000003-40-9f86d081884c7d65.journal`."""

    number: int
    mark: str
    """Step of the checkpoint that the segment begins with, and a random part."""

    def path(self, folder: Path) -> Path:
        """Path of the segment in a folder."""
        return folder / f"{self.number:06d}-{self.mark}{SUFFIX}"


class Record(NamedTuple):
    """Location and checksum of a record; the body is not read yet."""

    sequence: int
    """0: the header; groups are counted from 1."""
    start: int
    length: int
    checksum: int

    @property
    def end(self) -> int:
        """Offset after its last byte."""
        return self.start + _HEAD_BYTES + self.length


class Gap(NamedTuple):
    """A byte range without a valid record."""

    start: int
    end: int
    lost: int | None
    """Number of lost groups; None: unknown."""


@dataclass(frozen=True)
class Damage:
    """A byte range that failed its checksum."""

    path: Path
    start: int
    end: int
    lost: int | None
    """Number of lost groups; None: unknown."""
    what: str

    def __str__(self) -> str:
        lost = "an unknown number of groups" if self.lost is None else f"{self.lost} group{'s' * (self.lost != 1)}"
        return f"{self.path}, bytes {self.start} to {self.end}: {self.what}, {lost} lost"


class Place(NamedTuple):
    """Location of a group, for `Journal.read`."""

    path: Path
    record: Record


@dataclass(frozen=True)
class FinishedGroup:
    """A group as given to `Journal.append`."""

    samples: list[DynamicInferenceRequest]
    key: bytes
    place: Place


# --- reading ----------------------------------------------------------------------------------------------------------


def segments(folder: Path) -> list[SegmentName]:
    """Return the segment names in a folder, oldest first; other entries are ignored. `JournalError`: no such folder."""
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                number, dash, mark = entry.name.removesuffix(SUFFIX).partition("-")
                if entry.name.endswith(SUFFIX) and dash and number.isascii() and number.isdigit() and entry.is_file():
                    found.append(SegmentName(int(number), mark))
    except OSError as exc:
        raise JournalError(f"{folder} is no folder that can be read ({exc.strerror or exc})") from exc
    return sorted(found)


def pack_header(job: str) -> bytes:
    """Encode the body of a file's first record."""
    packed: bytes = msgpack.packb([VERSION, job])
    return packed


def check_header(path: Path, body: bytes, job: str | None) -> None:
    """Check the body of a file's first record; `job`: the required one, None: any.

    Raises:
        SerializationError: the file is of another version.
        ConfigError: it belongs to another job.
    """
    plain = unpack_msgpack(str(path), body)
    if type(plain) is not list or len(plain) != 2 or plain[0] != VERSION:
        refuse(str(path), plain, f"a journal of version {VERSION}, which this release reads,")
    if job is not None and plain[1] != job:
        raise ConfigError(
            f"{path} belongs to job={plain[1]!r}, and this is job={job!r}: give each job a folder of its own"
        )


def walk(file: BinaryIO, mark: str) -> Iterator[Record | Gap]:
    """Yield records and gaps in file order; together they cover the file without overlap."""
    marker, size = _marker(mark), file.seek(0, os.SEEK_END)
    reached = position = expected = 0
    while position < size:
        record = _record_at(file, marker, position, size)
        if record is None or record.sequence < expected:
            position = _next_marker(file, marker, position + 1, size)
            continue
        if reached < position:
            yield Gap(reached, position, max(0, record.sequence - max(1, expected)))
        yield record
        reached = position = record.end
        expected = record.sequence + 1
    if reached < size:
        yield Gap(reached, size, None)


def read_body(file: BinaryIO, record: Record) -> bytes | None:
    """Read the body of a record; None: its checksum failed."""
    file.seek(record.end - record.length)
    body = file.read(record.length)
    return body if len(body) == record.length and zlib.crc32(body) == record.checksum else None


def check_format(file: BinaryIO, path: Path) -> None:
    """Raise a `SerializationError` for a file of an earlier version."""
    file.seek(0)
    if file.read(len(_OLD_MAGIC)) == _OLD_MAGIC:
        refuse(str(path), _OLD_MAGIC, f"a journal of version {VERSION}, which this release reads,")


def _marker(mark: str) -> bytes:
    return hashlib.sha256(mark.encode()).digest()[:8]


def _record_at(file: BinaryIO, marker: bytes, position: int, size: int) -> Record | None:
    file.seek(position)
    head = file.read(_HEAD_BYTES)
    if len(head) < _HEAD_BYTES or not head.startswith(marker):
        return None
    fields, checksum = head[: _RECORD.size], head[_RECORD.size :]
    if _CRC.unpack(checksum)[0] != zlib.crc32(fields):
        return None
    _, sequence, length, body_checksum = _RECORD.unpack(fields)
    record = Record(sequence, position, length, body_checksum)
    return record if record.end <= size else None


def _next_marker(file: BinaryIO, marker: bytes, position: int, size: int) -> int:
    """Offset of the next marker at or after `position`, or `size` if there is none."""
    while position < size:
        file.seek(position)
        window = file.read(_WINDOW_BYTES)
        found = window.find(marker)
        if found >= 0:
            return position + found
        if len(window) < _WINDOW_BYTES:
            break
        # A marker may lie across the edge of two windows.
        position += len(window) - len(marker) + 1
    return size


class GroupReader:
    """Iterates over the groups of a journal, with at most one in memory.

    Attributes:
        damage: byte ranges that could not be read so far; complete after the iteration.
    """

    def __init__(self, folder: Path, names: Sequence[SegmentName], job: str | None) -> None:
        self.damage: list[Damage] = []
        self._folder = folder
        self._names = names
        self._job = job

    def __iter__(self) -> Iterator[FinishedGroup]:
        self.damage.clear()
        for name in self._names:
            path = name.path(self._folder)
            try:
                with path.open("rb") as file:
                    check_format(file, path)
                    yield from self._groups(file, path, name.mark)
            except OSError as exc:
                raise JournalError(f"{path} cannot be read ({exc.strerror or exc})") from exc

    def _groups(self, file: BinaryIO, path: Path, mark: str) -> Iterator[FinishedGroup]:
        for found in walk(file, mark):
            if isinstance(found, Gap):
                self._note(path, found, _what(found))
            elif found.sequence:
                try:
                    samples, key = unpack_group(read_body(file, found))
                except RolloutError as exc:
                    self._note(path, Gap(found.start, found.end, 1), f"record {found.sequence}: {exc}")
                else:
                    yield FinishedGroup(samples, key, Place(path, found))
            elif (body := read_body(file, found)) is None:
                self._note(path, Gap(found.start, found.end, 0), "damaged header")
            else:
                check_header(path, body, self._job)

    def _note(self, path: Path, gap: Gap, what: str) -> None:
        self.damage.append(Damage(path, gap.start, gap.end, gap.lost, what))
        _log.warning("journal: %s", self.damage[-1])


def read_groups(folder: str | os.PathLike[str], *, job: str | None = None) -> GroupReader:
    """Return a reader of all groups of a journal, oldest first, without a lock.

    Raises:
        JournalError: no such folder; while iterating: a file cannot be read.
        SerializationError, ConfigError: while iterating: a file of another version, or the journal of another job.
    """
    return GroupReader(Path(folder), segments(Path(folder)), job)


def pack_group(samples: Sequence[DynamicInferenceRequest], key: bytes) -> bytes:
    """Encode a group as the body of a record."""
    packed: bytes = msgpack.packb({"key": key, "samples": [sample.serialize() for sample in samples]})
    return packed


def unpack_group(body: bytes | None) -> tuple[list[DynamicInferenceRequest], bytes]:
    """Decode (samples, key) from a record's body (None: its checksum failed); `RolloutError` if it is damaged."""
    if body is None:
        raise SerializationError("its checksum is wrong")
    fields = decode_fields("group", unpack_msgpack("group", body, strict_map_key=False), _FIELDS)
    return fields["samples"], fields["key"]


def _decode_key(plain: object) -> bytes:
    if not isinstance(plain, bytes):
        refuse("key", plain, "bytes")
    return plain


_FIELDS = {"key": Codec(OPAQUE.encode, _decode_key), "samples": list_of(REQUEST)}


def _what(gap: Gap) -> str:
    if not gap.start:
        return "damaged header"
    return "torn or damaged tail" if gap.lost is None else "damaged record"


# --- writing ----------------------------------------------------------------------------------------------------------


class SegmentWriter:
    """Appends records to one file. Records are written unbuffered: they survive a kill of the process.

    Args:
        path: an empty or new file gets a header; another is continued after its last whole record and truncated there.
        mark: in the file's name.
        job: name of the job.

    Attributes:
        cut: the truncated range, if any.

    Raises:
        JournalError: the file cannot be written.
        DamagedHeaderError: the header is damaged; the file is left untouched.
        SerializationError, ConfigError: the file is of another version or job.
    """

    def __init__(self, path: Path, mark: str, job: str) -> None:
        self.path = path
        self.mark = mark
        self.cut: Gap | None = None
        self._broken = ""
        self._marker = _marker(mark)
        # (offset, sequence number) of the next record, one tuple: Ctrl-C may interrupt between two assignments.
        self._next = 0, 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as exc:
            raise _trouble(path, "opened for writing", exc) from exc
        try:
            if os.fstat(self._file).st_size:
                self._continue(job)
            else:
                self.append(pack_header(job))
        except BaseException as exc:
            os.close(self._file)
            if isinstance(exc, OSError) and not isinstance(exc, RolloutError):
                raise _trouble(path, "continued", exc) from exc
            raise

    def append(self, body: bytes) -> Record:
        """Append a record.

        Raises:
            JournalError: the write failed (disk full, for example). Nothing was added; a later call may succeed.
            SerializationError: the body exceeds 4 GiB.
        """
        if self._broken:
            raise JournalError(f"{self.path} takes no more records, because {self._broken}: reopen the journal")
        if len(body) > MAX_BODY_BYTES:
            raise SerializationError(f"a record of {len(body)} bytes: at most {MAX_BODY_BYTES} fit; log smaller groups")
        start, sequence = self._next
        record = Record(sequence, start, len(body), zlib.crc32(body))
        fields = _RECORD.pack(self._marker, record.sequence, record.length, record.checksum)
        try:
            self._next = self._write(fields + _CRC.pack(zlib.crc32(fields)) + body, start), sequence + 1
        except BaseException as exc:
            self._take_back(exc)
            if isinstance(exc, OSError):
                raise _trouble(self.path, "appended to", exc) from exc
            raise
        return record

    def sync(self) -> None:
        """Force all records onto the disk. After a `JournalError` the contents are unknown, and appends are refused."""
        try:
            os.fsync(self._file)
        except OSError as exc:
            self._broken = f"its disk failed ({exc})"
            raise _trouble(self.path, "synchronised", exc) from exc

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._broken = "it is closed"

    def _write(self, data: bytes, start: int) -> int:
        view, position = memoryview(data), start
        while view:
            written = os.pwrite(self._file, view, position)
            position += written
            view = view[written:]
        return position

    def _take_back(self, cause: BaseException) -> None:
        try:
            os.ftruncate(self._file, self._next[0])
        except OSError:
            self._broken = f"half a record could not be taken back ({cause})"

    def _continue(self, job: str) -> None:
        header = last = None
        with open(self._file, "rb", closefd=False) as file:
            check_format(file, self.path)
            for found in walk(file, self.mark):
                if isinstance(found, Record):
                    header, last = header or found, found
            body = None if header is None or header.sequence else read_body(file, header)
            if body is None or last is None:
                raise DamagedHeaderError(f"{self.path} begins with no whole header")
            check_header(self.path, body, job)
            size = file.seek(0, os.SEEK_END)
            # A crash of the machine may have left the head of the last record without its body.
            torn = last.end == size and read_body(file, last) is None
        self._next = (last.start, last.sequence) if torn else (last.end, last.sequence + 1)
        if self._next[0] < size:
            self.cut = Gap(self._next[0], size, None)
            os.ftruncate(self._file, self._next[0])


def _trouble(path: Path, what: str, exc: OSError) -> JournalError:
    return JournalError(f"{path} cannot be {what} ({exc.strerror or exc}): {cure_of(exc)}")


def cure_of(exc: OSError) -> str:
    """Return the cure for a file that cannot be read or written."""
    return _CURES.get(exc.errno or 0, "choose a folder that is writable, on a local disk, where this is a regular file")


_CURES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space on that disk, or choose a folder on another one"
    ),
    errno.EIO: "the disk fails: choose a folder on another one",
}
