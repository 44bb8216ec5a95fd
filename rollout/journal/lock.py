"""Exclusive lock of a folder by one process.

Always true: the lock ends with the process that took it, even if its children live on: a forked data loader inherits
open files but not POSIX record locks.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

from rollout.errors import EngineStateError

FILE = "lock"
_held: dict[tuple[int, int], int] = {}
"""(device, inode) of the folders locked here → process id: a POSIX lock does not exclude its own process."""


class FolderLock:
    """Exclusive lock of a folder, acquired by the constructor and held until `release` or the end of the process.

    Raises:
        EngineStateError: the folder is locked, names the process; or the lock's path is not a regular file.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = path = folder / FILE
        self._folder = _identity(os.stat(folder))
        self._owner = 0
        if _held.get(self._folder) == os.getpid():
            # Do not open the file: closing any descriptor of it would release this process's lock.
            raise EngineStateError(f"{folder} is open in this process already: close() the other one first")
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise EngineStateError(f"{path} is no regular file, and so no lock: remove it, or choose another folder")
        # O_NOFOLLOW: a planted symbolic link must not make this process overwrite another of its files.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException as exc:
            owner = os.pread(self._file, 200, 0).decode(errors="replace").strip()
            # Closing the file releases the lock.
            os.close(self._file)
            if isinstance(exc, BlockingIOError):
                raise EngineStateError(
                    f"{folder} is being written by {owner or 'another process'}: end that one first, or give this one a "
                    "folder of its own (each rank needs one)"
                ) from exc
            raise
        self._owner = _held[self._folder] = os.getpid()

    def release(self) -> None:
        """Release the lock. Idempotent; no-op in a forked child, which does not hold it."""
        if self.is_mine():
            self._owner = 0
            del _held[self._folder]
            os.close(self._file)

    def is_mine(self) -> bool:
        """Whether this process holds the lock."""
        return self._owner == os.getpid()

    def is_intact(self) -> bool:
        """Whether the lock's path still leads to the locked file."""
        try:
            return _identity(os.stat(self._path, follow_symlinks=False)) == _identity(os.fstat(self._file))
        except OSError:
            return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
