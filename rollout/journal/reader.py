"""Reads a journal: its groups in order, and every byte range that failed its checksum.

Always true: damaged ranges are reported and skipped; they neither raise nor yield a group.
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
from rollout.journal.segment import Gap, Record, SegmentName, read_body, read_header, segments, walk
from rollout.requests.codec import OPAQUE, Codec, decode_fields, list_of, refuse, unpack_msgpack
from rollout.requests.request import REQUEST, DynamicInferenceRequest

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Place:
    """Location of a group, for `Journal.read`."""

    path: Path
    record: Record


@dataclass(frozen=True)
class FinishedGroup:
    """A group as given to `Journal.append`."""

    samples: list[DynamicInferenceRequest]
    key: bytes
    place: Place


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
                    yield from self._groups(file, path, name.mark)
            except OSError as exc:
                raise JournalError(f"{path} cannot be read ({exc.strerror or exc})") from exc

    def _groups(self, file: BinaryIO, path: Path, mark: str) -> Iterator[FinishedGroup]:
        # The file's name repeats the mark, in case the header is damaged.
        start, mark = read_header(file, path, self._job) or (0, mark)
        for found in walk(file, mark, start):
            if isinstance(found, Gap):
                self._note(path, found, _what(found))
                continue
            try:
                samples, key = unpack_group(read_body(file, found))
            except RolloutError as exc:
                self._note(path, Gap(found.start, found.end, 1), f"record {found.sequence}: {exc}")
            else:
                yield FinishedGroup(samples, key, Place(path, found))

    def _note(self, path: Path, gap: Gap, what: str) -> None:
        self.damage.append(Damage(path, gap.start, gap.end, gap.lost, what))
        _log.warning("journal: %s", self.damage[-1])


def read_groups(folder: str | os.PathLike[str], *, job: str | None = None) -> GroupReader:
    """Return a reader of all groups of a journal, oldest first, without a lock.

    Raises:
        JournalError: no such folder; while iterating: a file cannot be read.
        SerializationError: while iterating: a file of another version.
        ConfigError: while iterating: the journal of another job.
    """
    return GroupReader(Path(folder), segments(Path(folder)), job)


def pack_group(samples: Sequence[DynamicInferenceRequest], key: bytes) -> bytes:
    """Encode a group as the body of a record."""
    fields = {"key": key, "samples": [sample.serialize() for sample in samples]}
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def unpack_group(body: bytes | None) -> tuple[list[DynamicInferenceRequest], bytes]:
    """Decode (samples, key) from a record's body; the inverse of `pack_group`.

    Args:
        body: None: its checksum failed.

    Raises:
        RolloutError: damaged or malformed.
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
    "samples": list_of(REQUEST),
}


def _what(gap: Gap) -> str:
    if not gap.start:
        return "damaged header"
    return "torn or damaged tail" if gap.lost is None else "damaged record"
