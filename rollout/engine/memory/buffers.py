"""Buffers reused across steps, copies of small arrays to and from a device, and helpers for inference mode and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128
"""The number of vocabulary entries per block. Sampling first selects a block, and then a token in this block."""
ALIGNMENT = 64
"""The alignment of packed arrays, in bytes. Triton compiles a second kernel unless addresses are multiples of 16."""


_OUT_OF_MEMORY = ("out of memory", "STATUS_ALLOC_FAILED")


def lacks_device_memory(exc: BaseException) -> bool:
    """Return whether an operation failed for lack of device memory, so that it may succeed once memory is free.

    Torch's allocator raises `torch.OutOfMemoryError`. The driver (when it instantiates a graph or loads a kernel), cuBLAS
    and Triton raise a `RuntimeError` that is recognised by its message.
    """
    if isinstance(exc, torch.OutOfMemoryError):
        return True
    return isinstance(exc, RuntimeError) and any(each in str(exc) for each in _OUT_OF_MEMORY)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Leave inference mode in the `with` block, so that tensors created there can later be trained and changed in place."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class Scratch:
    """Named buffers that one thread reuses across steps.

    On a CPU, mapping fresh memory takes several times as long as the arithmetic on it. On other devices, every call returns
    a new tensor, because torch's caching allocator already reuses memory.
    """

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, scores: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return an uninitialised tensor with the shape of `scores` (two-dimensional), in the buffer called `name`.

        All calls with the same name must use the same dtype.
        """
        return self._take(name, (scores.shape[0], scores.shape[1]), dtype, scores.device)

    def blocks(self, name: str, scores: Tensor, padding: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a buffer [R, ceil(V / BLOCK), BLOCK] for `scores` [R, V], uninitialised except for `padding` beyond V."""
        count, vocabulary = scores.shape
        blocks = self._take(name, (count, -(-vocabulary // BLOCK), BLOCK), dtype, scores.device)
        blocks.flatten(1)[:, vocabulary:] = padding
        return blocks

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size, flat = math.prod(shape), self._flat.get(name)
        if flat is None or flat.numel() < size:
            # Leave inference mode, because a tensor created in inference mode cannot be written to outside it.
            with torch.inference_mode(False):
                flat = self._flat[name] = torch.empty(size, dtype=dtype, device="cpu")
        return flat[:size].view(shape)


def staged(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a host tensor that can be copied to `device` asynchronously (pinned for CUDA)."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Return an array as a tensor on `device`, copied asynchronously."""
    return staged(array, device).to(device, non_blocking=True)


def upload_together(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Return several arrays of one dtype as tensors on `device`, with a single asynchronous copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat, begins = packed(arrays)
    uploaded = upload(flat, device)
    return [uploaded[begin : begin + array.size].view(array.shape) for array, begin in zip(arrays, begins, strict=True)]


def download_together(ids: Tensor, values: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Copy R ids (all below 2^31) and R float32 values to host arrays, with one transfer from the device."""
    if ids.device.type == "cpu":
        return ids.numpy(), values.numpy()
    found = torch.stack((ids.to(torch.int32), values.view(torch.int32))).cpu().numpy()
    return found[0].astype(np.int64), found[1].view(np.float32)


def packed(arrays: Sequence[NDArray[np.generic]]) -> tuple[NDArray[np.generic], list[int]]:
    """Concatenate arrays of one dtype into a flat array, each at a multiple of `ALIGNMENT` bytes.

    Returns:
        The flat array, and the index at which each array starts in it.
    """
    unit = ALIGNMENT // arrays[0].itemsize
    ends = np.cumsum([-(-array.size // unit) * unit for array in arrays]).tolist()
    flat = np.zeros(ends[-1], arrays[0].dtype)
    begins = [0, *ends[:-1]]
    for array, begin in zip(arrays, begins, strict=True):
        flat[begin : begin + array.size] = array.reshape(-1)
    return flat, begins
