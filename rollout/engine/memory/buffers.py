"""Buffers reused from step to step, and uploads of numpy arrays to a device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128
"""Tokens summed together; a draw finds its block first and then its token."""
ALIGNMENT = 64
"""Bytes. Triton compiles a kernel once for addresses that 16 divides and once for others: all of ours are the former."""


class Scratch:
    """Buffers kept from step to step, for one thread.

    On a CPU memory new from the system costs several times the arithmetic done in it. Elsewhere the device's own
    allocator keeps memory, and the buffers here are new.
    """

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, scores: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """[R, V] as `scores`, uninitialised. Overwrites what was taken by this name before; a name has one dtype."""
        return self._take(name, (scores.shape[0], scores.shape[1]), dtype, scores.device)

    def blocks(self, name: str, scores: Tensor, padding: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """[R, ceil(V / BLOCK), BLOCK] for scores [R, V], uninitialised but for the padding past V."""
        count, vocabulary = scores.shape
        blocks = self._take(name, (count, -(-vocabulary // BLOCK), BLOCK), dtype, scores.device)
        blocks.flatten(1)[:, vocabulary:] = padding
        return blocks

    def _take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(shape, dtype=dtype, device=device)
        size, flat = math.prod(shape), self._flat.get(name)
        if flat is None or flat.numel() < size:
            # A tensor born in inference mode could not be written to outside it.
            with torch.inference_mode(False):
                flat = self._flat[name] = torch.empty(size, dtype=dtype, device="cpu")
        return flat[:size].view(shape)


def staged(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """`array` as a tensor from which a copy to `device` need not wait for the device."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """`array` as a tensor on `device`, without waiting for the device."""
    return staged(array, device).to(device, non_blocking=True)


def upload_together(arrays: Sequence[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Each of `arrays`, which have one dtype, as a tensor on `device`, by one copy that does not wait for the device."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat, begins = packed(arrays)
    uploaded = upload(flat, device)
    return [uploaded[begin : begin + array.size].view(array.shape) for array, begin in zip(arrays, begins, strict=True)]


def packed(arrays: Sequence[NDArray[np.generic]]) -> tuple[NDArray[np.generic], list[int]]:
    """`arrays` of one dtype one behind the other, flat, and where each begins: at a multiple of `ALIGNMENT` bytes."""
    unit = ALIGNMENT // arrays[0].itemsize
    ends = np.cumsum([-(-array.size // unit) * unit for array in arrays]).tolist()
    flat = np.zeros(ends[-1], arrays[0].dtype)
    begins = [0, *ends[:-1]]
    for array, begin in zip(arrays, begins, strict=True):
        flat[begin : begin + array.size] = array.reshape(-1)
    return flat, begins
