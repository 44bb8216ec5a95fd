"""Errors that say that a device has no memory left, by whatever part of CUDA they are raised."""

from __future__ import annotations

import torch

_SAID = ("out of memory", "STATUS_ALLOC_FAILED")


def lacks_device_memory(exc: BaseException) -> bool:
    """Whether an operation failed for want of device memory, so that it may succeed with more.

    Torch's allocator raises `torch.OutOfMemoryError`; the driver (when a graph is instantiated or a kernel loaded), cuBLAS
    and Triton raise a RuntimeError whose message says so.
    """
    if isinstance(exc, torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(each in str(exc) for each in _SAID)
