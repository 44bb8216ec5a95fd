"""An append-only JSON file of routing decisions, which is valid JSON after each write.

    {"policy": …, "data_parallel_size": …, "records": [
    {"request_id": 0, "rank_index": 1, "rank": "rank-1", "num_hashes": 4, "num_matched": 3},
    {"request_id": 1, …}
    ], "num_requests": 2}

A single write replaces the closing line with the new records and a new closing line. `num_requests` counts requests, not
records: a request that was split or reassigned has several records. After a write error (such as a full disk) the file is
closed with a warning, and the coordinator continues without the file.
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
COLUMNS = ("request_id", "rank_index", "rank", "num_hashes", "num_matched")
"""The `ScheduleRecord` fields that the file contains for each routing decision."""


class ScheduleFile:
    """A writer of the schedule file. If a file exists at `path`, the writer overwrites it.

    Args:
        path: path of the file; if None, nothing is written.
        policy: the routing policy that is in effect (`Dispatcher.policy`).
        data_parallel_size: number of ranks of the job.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | None, policy: PrefixCachingCoordinatorPolicy, data_parallel_size: int) -> None:
        self._path = path
        self._count = self._end = 0
        if path is None:
            return
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        except OSError as exc:
            raise ConfigError(f"schedule_output_path={path!r}: must be a file that can be written: {exc}") from exc
        head = json.dumps({"policy": policy.value, "data_parallel_size": data_parallel_size})
        self._write(f'{head[:-1]}, "records": [', 0)

    def append(self, records: Sequence[ScheduleRecord]) -> None:
        """Append routing decisions to the file."""
        if records and self._path is not None:
            plain = [{name: getattr(record, name) for name in COLUMNS} for record in records]
            lines = ("," if self._count else "") + ",".join(f"\n{json.dumps(each)}" for each in plain)
            self._write(lines, sum(record.first for record in records))

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._path is not None:
            self._path = None
            os.close(self._file)

    def _write(self, lines: str, requests: int) -> None:
        text = lines.encode()
        closing = b'\n], "num_requests": %d}\n' % (self._count + requests)
        try:
            os.pwrite(self._file, text + closing, self._end)
        except OSError as exc:
            warning = "schedule_output_path=%r ends after %d requests: %s; serving continues without it"
            _log.warning(warning, self._path, self._count, exc)
            self.close()
        else:
            self._count += requests
            self._end += len(text)
