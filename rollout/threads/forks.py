"""Resources that a forked child must close.

Other processes notice that this process has ended only when the last copy of a socket is closed. A worker of a data loader
or process pool is forked with all sockets open and may outlive this process, so it must close them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

T = TypeVar("T")
_acts: WeakKeyDictionary[Any, Callable[[Any], object]] = WeakKeyDictionary()


def in_child(owner: T, act: Callable[[T], object]) -> None:
    """Call `act(owner)` in every child process forked while `owner` exists; ignore its `OSError` and `ValueError`."""
    _acts[owner] = act


def close_connections(url: str) -> None:
    """Close this process's TCP sockets that listen at, or are connected to, a URL's host (an IP address) and port."""
    parts = urlsplit(url)
    place = _place(parts.hostname or "", parts.port)
    for number in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            connection = socket.socket(fileno=number)
            try:
                here = connection.family in (socket.AF_INET, socket.AF_INET6) and place in _ends(connection)
            finally:
                connection.detach()
            if here:
                os.close(number)


def _ends(connection: socket.socket) -> list[tuple[str, int]]:
    ends = [_place(*connection.getsockname()[:2])]
    with suppress(OSError):
        ends.append(_place(*connection.getpeername()[:2]))
    return ends


def _place(host: str, port: int | None) -> tuple[str, int]:
    """Return (host, port), with one common host for all names of the loopback device and of "all interfaces"."""
    local = host in ("localhost", "::", "::1", "0.0.0.0", "*") or host.startswith("127.")
    return "local" if local else host, port or 0


def _after_fork() -> None:
    for owner, act in list(_acts.items()):
        with suppress(OSError, ValueError):
            act(owner)


os.register_at_fork(after_in_child=_after_fork)
