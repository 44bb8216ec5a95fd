"""One process at a time in a folder.

Always true: the lock ends with the process that took it, however that ends, also where children of it live on (a forked
data loader inherits an open file, but not this lock).
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from rollout.errors import EngineStateError

FILE = "lock"
_held: dict[tuple[int, int], int] = {}
"""(device, inode) of the lock files held by this process → its id: the system's lock does not exclude its own holder."""


class FolderLock:
    """Taken when built, until `release` or the end of the process.

    Raises:
        EngineStateError: somebody has it; names the process.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / FILE
        if path.exists() and _held.get(_identity(os.stat(path))) == os.getpid():
            # Not even opened: closing it again would release the lock that is held.
            raise EngineStateError(f"{folder} is open in this process already: close() the other one first")
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            owner = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise EngineStateError(
                f"{folder} is being written by {owner or 'another process'}: end that one first, or give this one a "
                "folder of its own (each rank needs one)"
            ) from exc
        self._key = _identity(os.fstat(self._file))
        _held[self._key] = os.getpid()
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Let others in. Harmless when repeated, and in a forked child, which does not have it."""
        if _held.get(self._key) == os.getpid():
            del _held[self._key]
            os.close(self._file)

    def is_mine(self) -> bool:
        """Whether this process has it."""
        return _held.get(self._key) == os.getpid()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
