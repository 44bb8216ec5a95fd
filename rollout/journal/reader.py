"""Reads a journal: its groups in order, and every byte range that failed its checksum.

Always true: what is damaged is named and passed over; it never raises, and nothing of it is ever taken for a group.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgpack

from rollout.errors import JournalError, RolloutError, SerializationError
from rollout.journal.lock import is_locked
from rollout.journal.segment import Gap, Record, SegmentName, read_body, read_header, segments, walk
from rollout.requests.codec import OPAQUE, Codec, decode_fields, list_of, refuse, unpack_msgpack
from rollout.requests.request import DynamicInferenceRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Damage:
    """A range of bytes that could not be believed."""

    path: Path
    start: int
    end: int
    lost: int | None
    """Groups that were there; None: nobody can know."""
    what: str

    def __str__(self) -> str:
        lost = "an unknown number of groups" if self.lost is None else f"{self.lost} group{'s' * (self.lost != 1)}"
        return f"{self.path}, bytes {self.start} to {self.end}: {self.what}, {lost} lost"


@dataclass(frozen=True)
class Place:
    """Where a group lies, for `Journal.read`."""

    path: Path
    record: Record


@dataclass(frozen=True)
class FinishedGroup:
    """What `append` was given."""

    samples: list[DynamicInferenceRequest]
    key: bytes
    place: Place


class GroupReader:
    """The groups of a journal, one at a time: the memory it needs is that of the largest.

    Args:
        live: somebody may be writing: a file that was removed since is no longer needed, and half a record at the end
            of the newest is on its way.

    Attributes:
        damage: what could not be read so far; complete when the iteration has ended.
    """

    def __init__(self, folder: Path, names: Sequence[SegmentName], job: str | None, *, live: bool = False) -> None:
        self.damage: list[Damage] = []
        self._folder = folder
        self._names = names
        self._job = job
        self._live = live

    def __iter__(self) -> Iterator[FinishedGroup]:
        self.damage.clear()
        for name in self._names:
            path = name.path(self._folder)
            try:
                yield from self._groups(path, name.mark)
            except FileNotFoundError as exc:
                # Its writer has made checkpoints meanwhile, and no longer needs it.
                if not self._live or not any(each > name for each in segments_of(self._folder)):
                    raise JournalError(f"{path} cannot be read ({exc.strerror or exc})") from exc
            except OSError as exc:
                raise JournalError(f"{path} cannot be read ({exc.strerror or exc})") from exc

    def _groups(self, path: Path, mark: str) -> Iterator[FinishedGroup]:
        with path.open("rb") as file:
            reached, expected = 0, 0
            tail: Gap | None = Gap(0, 0, None)
            while tail is not None:
                header = read_header(file, path, self._job)
                # The name repeats what is needed of a header that is damaged.
                start, mark = header or (0, mark)
                tail = None
                for found in walk(file, mark, max(start, reached), expected):
                    if isinstance(found, Gap):
                        if found.lost is None:
                            tail = found
                        else:
                            self._note(path, found, _what(found))
                        continue
                    reached, expected = found.end, found.sequence + 1
                    try:
                        samples, key = unpack_group(read_body(file, found))
                    except RolloutError as exc:
                        self._note(path, Gap(found.start, found.end, 1), f"record {found.sequence}: {exc}")
                    else:
                        yield FinishedGroup(samples, key, Place(path, found))
                if tail is not None and not self._grows(file, tail):
                    if not self._is_being_written(path):
                        self._note(path, tail, _what(tail))
                    return

    def _grows(self, file: BinaryIO, tail: Gap) -> bool:
        """Whether it has changed since a tail was found that is no record: one that was on its way has come."""
        return self._live and os.fstat(file.fileno()).st_size != tail.end

    def _is_being_written(self, path: Path) -> bool:
        """Whether a tail that is no record is one on its way."""
        return self._live and is_locked(self._folder) and segments_of(self._folder)[-1].path(self._folder) == path

    def _note(self, path: Path, gap: Gap, what: str) -> None:
        self.damage.append(Damage(path, gap.start, gap.end, gap.lost, what))
        _log.warning("journal: %s", self.damage[-1])


def read_groups(folder: str | os.PathLike[str], *, job: str | None = None) -> GroupReader:
    """All groups of a journal, oldest first, whoever is writing it meanwhile.

    Raises:
        JournalError: there is no such folder; while iterating: a file cannot be read.
        SerializationError: while iterating: a file of another version.
        ConfigError: while iterating: the journal of another job.
    """
    return GroupReader(Path(folder), segments_of(Path(folder)), job, live=True)


def segments_of(folder: Path) -> list[SegmentName]:
    """The files of a journal, oldest first.

    Raises:
        JournalError: there is no such folder.
    """
    try:
        return segments(folder)
    except OSError as exc:
        raise JournalError(f"{folder} is no folder that can be read ({exc.strerror or exc})") from exc


def pack_group(samples: Sequence[DynamicInferenceRequest], key: bytes) -> bytes:
    """The body of a record."""
    fields = {"key": key, "samples": [sample.serialize() for sample in samples]}
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def unpack_group(body: bytes | None) -> tuple[list[DynamicInferenceRequest], bytes]:
    """The inverse of `pack_group`.

    Args:
        body: None: it is damaged.

    Raises:
        RolloutError: it is no such body.
    """
    if body is None:
        raise SerializationError("its checksum is wrong")
    fields = decode_fields("group", unpack_msgpack("group", body, strict_map_key=False), _FIELDS)
    return fields["samples"], fields["key"]


def _decode_key(plain: object) -> bytes:
    if not isinstance(plain, bytes):
        refuse("key", plain, "bytes")
    return plain


_FIELDS = {
    "key": Codec(OPAQUE.encode, _decode_key),
    "samples": list_of(Codec(DynamicInferenceRequest.serialize, DynamicInferenceRequest.deserialize)),
}


def _what(gap: Gap) -> str:
    if not gap.start:
        return "damaged header"
    return "torn or damaged tail" if gap.lost is None else "damaged record"
