"""Puts the parameters of a model that runs on a CPU on huge pages.

A decode step reads all parameters, and with small pages it mostly waits for page table lookups. Linux 6.1 and later can
collapse pages of 4 KiB into one of 2 MiB in place (`MADV_COLLAPSE`, madvise(2)); addresses and content do not change. On
other systems, or if transparent huge pages are turned off, nothing happens.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from torch import Tensor

HUGE_PAGE = 2 << 20
LEAST_BYTES = 16 << 20
"""The minimum total size of parameters to put on huge pages, in bytes; smaller models nearly fit into CPU caches."""
_MADV_COLLAPSE = 25
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_log = logging.getLogger(__name__)

Advise = Callable[[int, int], bool]
"""A function that takes an address and a size in bytes, puts this memory on huge pages, and returns whether it succeeded."""


def collapse(tensors: Iterable[Tensor], advise: Advise | None = None) -> int:
    """Put the memory of CPU tensors on huge pages, as far as the system supports it.

    This takes about 1.5 s per GB, or microseconds if the memory is already on huge pages.

    Args:
        tensors: parameters; tensors on other devices are ignored.
        advise: function that puts memory on huge pages. If None, madvise is used, if the system supports it.

    Returns:
        The number of bytes that are now on huge pages.
    """
    if advise is None and (advise := _madvise()) is None:
        return 0
    places = {(each.data_ptr(), each.nbytes) for each in tensors if each.device.type == "cpu"}
    if sum(size for _, size in places) < LEAST_BYTES:
        return 0
    pages = {page for start, size in places for page in range(start // HUGE_PAGE, -(-(start + size) // HUGE_PAGE))}
    begin = time.monotonic()
    # Try a tensor's first and last page, too: if they reach beyond the mapping, madvise leaves them unchanged.
    done = sum(advise(page * HUGE_PAGE, HUGE_PAGE) for page in sorted(pages)) * HUGE_PAGE
    _log.info("parameters: %d MiB on huge pages, after %.1f s", done >> 20, time.monotonic() - begin)
    return done


@cache
def _madvise() -> Advise | None:
    if sys.platform != "linux" or not _SWITCH.exists() or "[never]" in _SWITCH.read_text(encoding="ascii"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda address, size: madvise(address, size, _MADV_COLLAPSE) == 0
