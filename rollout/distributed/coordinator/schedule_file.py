"""Append-only JSON file of routing decisions, valid JSON after each write.

    {"policy": …, "data_parallel_size": …, "records": [
    {"request_id": 0, "rank_index": 1, "rank": "rank-1", "num_hashes": 4, "num_matched": 3},
    {"request_id": 1, …}
    ], "num_requests": 2}

New records overwrite the closing line and end with a new one, in one write. `num_requests` counts requests: one that
was split or reassigned has several records. A coordinator that replaces a lost one appends, with higher request ids. A
write error (disk full) ends the file with a warning; serving continues.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress

from rollout.distributed.coordinator.core.dispatch import ScheduleRecord
from rollout.errors import ConfigError
from rollout.state import PrefixCachingCoordinatorPolicy

_log = logging.getLogger(__name__)


class ScheduleFile:
    """Writer of the schedule file.

    Args:
        append: keep existing records. A missing or unreadable file is created.

    Raises:
        ConfigError: the file cannot be written, or its records are of another policy or job size.
    """

    def __init__(
        self, path: str, policy: PrefixCachingCoordinatorPolicy, data_parallel_size: int, *, append: bool = False
    ) -> None:
        self._path = path
        head = json.dumps({"policy": policy.value, "data_parallel_size": data_parallel_size})
        text = f'{head[:-1]}, "records": ['.encode()
        try:
            before = _read(path, text) if append else None
            self._file = open(path, "wb" if before is None else "r+b", buffering=0)  # noqa: SIM115 - it stays open
        except OSError as exc:
            raise ConfigError(f"schedule_output_path={path!r}: must be a file that can be written: {exc}") from exc
        earlier, end = before or (set(), len(text))
        self._count = len(earlier)
        self._first_id = max(earlier, default=-1) + 1
        """Id in the file of this coordinator's request 0."""
        self._end = end
        if before is None:
            self._usable = self._write(text + _closing(0), 0)
        else:
            self._usable = self._write(_closing(self._count), end)
            os.truncate(self._file.fileno(), end + len(_closing(self._count)))

    def append(self, records: Sequence[ScheduleRecord]) -> None:
        """Append records."""
        if not records or not self._usable:
            return
        lines = ",".join(_line(record, record.request_id + self._first_id) for record in records)
        text = (("," if self._count else "") + lines).encode()
        count = self._count + sum(record.first for record in records)
        if self._write(text + _closing(count), self._end):
            self._count = count
            self._end += len(text)
            return
        self._usable = False
        before = _closing(self._count)
        # Restore the closing line: its space is allocated already, even on a full disk.
        with suppress(OSError):
            os.pwrite(self._file.fileno(), before, self._end)
            os.truncate(self._file.fileno(), self._end + len(before))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._usable = False
        self._file.close()

    def _write(self, text: bytes, position: int) -> bool:
        try:
            written = os.pwrite(self._file.fileno(), text, position)
        except OSError as exc:
            why = str(exc)
        else:
            if written == len(text):
                return True
            why = f"{written} of {len(text)} bytes were taken"
        warning = "schedule_output_path=%r ends after %d requests: %s; serving goes on without it"
        _log.warning(warning, self._path, self._count, why)
        return False


def _closing(count: int) -> bytes:
    return b'\n], "num_requests": %d}\n' % count


def _line(record: ScheduleRecord, request_id: int) -> str:
    return (
        f'\n{{"request_id": {request_id}, "rank_index": {record.rank_index}, "rank": {json.dumps(record.rank)}, '
        f'"num_hashes": {record.num_hashes}, "num_matched": {record.num_matched}}}'
    )


def _read(path: str, text: bytes) -> tuple[set[int], int] | None:
    """Return (request ids, offset after the last whole record) of a file; None: missing, or without a complete head.

    Raises:
        ConfigError: its head differs from `text`.
        OSError: it cannot be read.
    """
    ids: set[int] = set()
    try:
        file = open(path, "rb")  # noqa: SIM115 - it is closed below
    except FileNotFoundError:
        return None
    with file:
        head = file.readline()
        if not head.endswith(b"\n"):
            return None
        if head.rstrip() != text:
            raise ConfigError(
                f"schedule_output_path={path!r}: begins with {head[:200]!r}, and must with {text!r} to be continued; choose "
                "another file"
            )
        end = len(text)
        position = len(head)
        for line in file:
            record = line.rstrip(b",\n")
            request_id = _request_id(record)
            if request_id is None:
                break
            ids.add(request_id)
            end = position + len(record)
            position += len(line)
    return ids, end


def _request_id(record: bytes) -> int | None:
    try:
        return int(json.loads(record)["request_id"])
    except (ValueError, KeyError, TypeError):
        return None
