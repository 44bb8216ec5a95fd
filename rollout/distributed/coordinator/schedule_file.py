"""Append-only JSON file of routing decisions, valid JSON after each write.

    {"policy": …, "data_parallel_size": …, "records": [
    {"request_id": 0, "rank_index": 1, "rank": "rank-1", "num_hashes": 4, "num_matched": 3},
    {"request_id": 1, …}
    ], "num_requests": 2}

New records overwrite the closing line and end with a new one, in one write. `num_requests` counts requests: one that
was split or reassigned has several records. A write error (disk full) ends the file with a warning; serving continues.
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
    """Writer of the schedule file, which replaces an earlier one. `ConfigError` if it cannot be written."""

    def __init__(self, path: str, policy: PrefixCachingCoordinatorPolicy, data_parallel_size: int) -> None:
        self._path = path
        head = json.dumps({"policy": policy.value, "data_parallel_size": data_parallel_size})
        text = f'{head[:-1]}, "records": ['.encode()
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - it stays open
        except OSError as exc:
            raise ConfigError(f"schedule_output_path={path!r}: must be a file that can be written: {exc}") from exc
        self._count = 0
        self._end = len(text)
        self._usable = self._write(text + _closing(0), 0)

    def append(self, records: Sequence[ScheduleRecord]) -> None:
        """Append records."""
        if not records or not self._usable:
            return
        lines = ",".join(map(_line, records))
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


def _line(record: ScheduleRecord) -> str:
    return (
        f'\n{{"request_id": {record.request_id}, "rank_index": {record.rank_index}, "rank": {json.dumps(record.rank)}, '
        f'"num_hashes": {record.num_hashes}, "num_matched": {record.num_matched}}}'
    )
