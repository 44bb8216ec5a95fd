"""Device memory of the KV pool and of gathered weights, given back to the driver and taken again, at fixed addresses.

Memory that goes back to torch's allocator alone is carved up by the trainer: what lives on (Adam's states, made at the first
step) pins the pool's segment, and the pool cannot come back whole. An `Arena` keeps addresses and maps memory to them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollout.engine.memory.block_pool import Allocate, zeros
from rollout.engine.memory.virtual_memory import CudaVirtualMemory, VirtualMemory

CHUNK_BYTES = 64 * 2**20
"""Physical memory per mapping: few calls for a pool of 100 GB, and little less than all there is can be mapped."""
_log = logging.getLogger(__name__)


class Arena:
    """Flat device memory with one user at a time.

    Always true: mapped memory is a prefix of the reserved addresses, and it belongs to the tensor that `allocate` returned
    last. Nothing may use that tensor after `release`.
    """

    def __init__(self, memory: VirtualMemory) -> None:
        self._memory = memory
        self._mapped = _Mapped(memory)
        self._whole: Tensor | None = None
        # Not at exit: the process gives everything back, and the driver may have been shut down.
        weakref.finalize(self, self._mapped.free_if_own).atexit = False

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[numel] zeros, at the addresses of the last ones unless those were fewer.

        Raises:
            torch.OutOfMemoryError: the device has not so much memory; nothing is mapped.
        """
        unit = self._memory.granularity
        used = numel * dtype.itemsize
        size = -(-used // unit) * unit
        self.release()
        if size > self._mapped.reserved:
            self._mapped.reserve(size)
            self._whole = tensor_at(self._mapped.address, size, self._memory.device)
        try:
            self._mapped.grow(size)
        except torch.OutOfMemoryError:
            self.release()
            raise
        assert self._whole is not None
        return self._whole[:used].zero_().view(dtype)

    def release(self) -> None:
        """Give all memory back to the device; the addresses stay reserved."""
        self._mapped.shrink()


@dataclass(eq=False)
class _Mapped:
    """Reserved addresses, and the chunks of memory mapped to the first of them."""

    memory: VirtualMemory
    address: int = 0
    reserved: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """Address, size and handle of each."""
    process: int = field(default_factory=os.getpid)
    """That the driver's handles are of."""

    def reserve(self, size: int) -> None:
        self.free()
        self.address = self.memory.reserve(size)
        self.reserved = size

    def grow(self, size: int) -> None:
        self.memory.settle()
        unit = self.memory.granularity
        step = max(CHUNK_BYTES // unit, 1) * unit
        for start in range(0, size, step):
            count = min(step, size - start)
            self.chunks.append((self.address + start, count, self._map(self.address + start, count)))

    def _map(self, address: int, size: int) -> int:
        try:
            return self.memory.map(address, size)
        except torch.OutOfMemoryError:
            self.memory.reclaim()
            return self.memory.map(address, size)

    def shrink(self) -> None:
        if self.chunks:
            self.memory.settle()
        while self.chunks:
            self.memory.unmap(*self.chunks.pop())

    def free(self) -> None:
        self.shrink()
        if self.reserved:
            self.memory.free(self.address, self.reserved)
            self.address = self.reserved = 0

    def free_if_own(self) -> None:
        """Free, unless this process is a fork, in which the driver cannot be called: the memory is its parent's."""
        if os.getpid() == self.process:
            self.free()


@dataclass(frozen=True)
class PoolMemory:
    """Where device memory of one user comes from and how it goes back."""

    allocate: Allocate
    release: Callable[[], object] | None = None
    """Called after the tensor was dropped; None: nothing is left to do."""


def pool_memory(device: torch.device, *, virtual: bool) -> PoolMemory:
    """Memory for a pool on `device`; from torch's allocator where `virtual` is False or the driver lacks the calls."""
    if device.type != "cuda":
        return PoolMemory(zeros)
    # What is cached would be carved up by the trainer.
    return (fixed_memory(device) if virtual else None) or PoolMemory(zeros, torch.cuda.empty_cache)


def fixed_memory(device: torch.device) -> PoolMemory | None:
    """Memory of a CUDA device at the same addresses each time; None where the device or its driver has no such."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        arena = Arena(CudaVirtualMemory(device))
        _try_out(arena, device)
    except (OSError, RuntimeError) as exc:
        _log.warning("memory on %s comes from torch's allocator: %s: %s", device, type(exc).__name__, exc)
        return None
    return PoolMemory(arena.allocate, arena.release)


def _try_out(arena: Arena, device: torch.device) -> None:
    ones = arena.allocate(2**20, torch.int32, device).fill_(1)
    whole = int(ones.sum()) == 2**20
    del ones
    arena.release()
    if not whole:
        raise RuntimeError("memory that was filled with ones does not hold them")


# --- a tensor over memory of others -------------------------------------------------------------------------------------


class _Device(Structure):
    _fields_ = (("kind", c_int32), ("id", c_int32))


class _Type(Structure):
    _fields_ = (("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16))


class _DLTensor(Structure):
    _fields_ = (
        ("data", c_void_p), ("device", _Device), ("ndim", c_int32), ("dtype", _Type), ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)), ("byte_offset", c_uint64),
    )  # fmt: skip


class _DLManagedTensor(Structure):
    _fields_ = (("tensor", _DLTensor), ("context", c_void_p), ("deleter", c_void_p))


_DEVICE_KINDS = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1
_NAME = b"dltensor"
_kept: list[tuple[Any, ...]] = []
"""Descriptions of tensors, which torch reads when it frees them: some tens of bytes each, one per reservation."""


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """[size] uint8 at an address of `device`, without copying and without owning it. Nothing is read or written."""
    shape = (c_int64 * 1)(size)
    # No strides: contiguous. No deleter: the memory is not torch's.
    described = _DLManagedTensor(
        _DLTensor(
            address, _Device(_DEVICE_KINDS[device.type], device.index or 0), 1, _Type(_UNSIGNED, 8, 1), shape, None, 0
        ),
        None,
        None,
    )
    _kept.append((described, shape))
    capsule = _new_capsule(ctypes.addressof(described), _NAME, None)
    # A tensor created in inference mode could not be written outside it.
    with torch.inference_mode(False):
        return from_dlpack(capsule)


_new_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))
