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

from rollout.distributed.coordinator.core.dispatch import ScheduleRecord
from rollout.errors import ConfigError
from rollout.state import PrefixCachingCoordinatorPolicy

_log = logging.getLogger(__name__)


class ScheduleFile:
    """Writer of the schedule file, which replaces an earlier one. `ConfigError` if it cannot be written."""

    def __init__(self, path: str, policy: PrefixCachingCoordinatorPolicy, data_parallel_size: int) -> None:
        self._path = path
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - it stays open
        except OSError as exc:
            raise ConfigError(f"schedule_output_path={path!r}: must be a file that can be written: {exc}") from exc
        self._count = self._end = 0
        self._usable = True
        head = json.dumps({"policy": policy.value, "data_parallel_size": data_parallel_size})
        self._write(f'{head[:-1]}, "records": [', 0)

    def append(self, records: Sequence[ScheduleRecord]) -> None:
        """Append records."""
        if records and self._usable:
            lines = ("," if self._count else "") + ",".join(map(_line, records))
            self._write(lines, sum(record.first for record in records))

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._usable = False
        self._file.close()

    def _write(self, lines: str, requests: int) -> None:
        text = lines.encode()
        closing = b'\n], "num_requests": %d}\n' % (self._count + requests)
        try:
            os.pwrite(self._file.fileno(), text + closing, self._end)
        except OSError as exc:
            self._usable = False
            warning = "schedule_output_path=%r ends after %d requests: %s; serving goes on without it"
            _log.warning(warning, self._path, self._count, exc)
        else:
            self._count += requests
            self._end += len(text)


def _line(record: ScheduleRecord) -> str:
    return (
        f'\n{{"request_id": {record.request_id}, "rank_index": {record.rank_index}, "rank": {json.dumps(record.rank)}, '
        f'"num_hashes": {record.num_hashes}, "num_matched": {record.num_matched}}}'
    )
