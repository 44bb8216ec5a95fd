"""Every routing decision in one JSON file, valid after each write, at the same cost for the millionth as for the first.

    {"policy": …, "data_parallel_size": …, "records": [
    {"request_id": 0, "rank_index": 1, "num_hashes": 4, "num_matched": 3},
    {"request_id": 1, …}
    ], "num_requests": 2}

New records are written over the closing line and followed by another, in one write: the process may be killed at any
moment. `num_requests` counts the records. A disk that takes no more costs the rest of the file and nothing else.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from contextlib import suppress

from rollout.coordinator.dispatch import ScheduleRecord
from rollout.errors import ConfigError
from rollout.state import PrefixCachingCoordinatorPolicy

_log = logging.getLogger(__name__)


class ScheduleFile:
    """The file, made anew.

    Raises:
        ConfigError: nothing can be written there.
    """

    def __init__(self, path: str, policy: PrefixCachingCoordinatorPolicy, data_parallel_size: int) -> None:
        self._path = path
        self._count = 0
        head = json.dumps({"policy": policy.value, "data_parallel_size": data_parallel_size})
        text = f'{head[:-1]}, "records": ['.encode()
        self._end = len(text)
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - it stays open
        except OSError as exc:
            raise ConfigError(f"schedule_output_path={path!r}: must be a file that can be written: {exc}") from exc
        self._usable = self._write(text + _closing(0), 0)

    def append(self, records: Sequence[ScheduleRecord]) -> None:
        """Write records."""
        if not records or not self._usable:
            return
        text = (("," if self._count else "") + ",".join(map(_line, records))).encode()
        count = self._count + len(records)
        if self._write(text + _closing(count), self._end):
            self._count = count
            self._end += len(text)
            return
        self._usable = False
        before = _closing(self._count)
        # What was there is allocated already: it can be written again on a disk that is full.
        with suppress(OSError):
            os.pwrite(self._file.fileno(), before, self._end)
            os.truncate(self._file.fileno(), self._end + len(before))

    def close(self) -> None:
        """Nothing more is written. A second time it does nothing."""
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
        warning = "schedule_output_path=%r ends after %d records: %s; serving goes on without it"
        _log.warning(warning, self._path, self._count, why)
        return False


def _closing(count: int) -> bytes:
    return b'\n], "num_requests": %d}\n' % count


def _line(record: ScheduleRecord) -> str:
    return (
        f'\n{{"request_id": {record.request_id}, "rank_index": {record.rank_index}, '
        f'"num_hashes": {record.num_hashes}, "num_matched": {record.num_matched}}}'
    )
