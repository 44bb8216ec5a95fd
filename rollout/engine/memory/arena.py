"""Device memory of the KV pool and of gathered weights, given back to the driver and taken again, at fixed addresses.

Memory that goes back to torch's allocator alone is carved up by the trainer: what lives on (Adam's states, made at the first
step) pins the pool's segment, and the pool cannot come back whole. An `Arena` keeps addresses and maps memory to them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Sequence
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
    """Device memory with one user at a time, in ranges of addresses that stay where they are.

    Always true: mapped memory is a prefix of each range, and belongs to the tensors that were returned last. Nothing may use
    these after `release`.
    """

    def __init__(self, memory: VirtualMemory) -> None:
        self._memory = memory
        self._ranges: list[_Mapped] = []
        # Not at exit: the process gives everything back, and the driver may have been shut down.
        weakref.finalize(self, _free_all, self._ranges).atexit = False

    def allocate(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Zeros of each of these sizes; see `take`."""
        return [each.zero_() for each in self.take(sizes, dtype, device)]

    def take(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """A tensor of each of these sizes, of any content, at the addresses of the last one at its place in the order unless
        that was never as large.

        Raises:
            torch.OutOfMemoryError: the device has not so much memory; nothing is mapped.
        """
        self.release()
        self._memory.settle()
        self._ranges += [_Mapped(self._memory) for _ in sizes[len(self._ranges) :]]
        try:
            return [
                place.grow(size * dtype.itemsize).view(dtype) for place, size in zip(self._ranges, sizes, strict=False)
            ]
        except torch.OutOfMemoryError:
            self.release()
            raise

    def release(self) -> None:
        """Give all memory back to the device; the addresses stay reserved."""
        if any(place.chunks for place in self._ranges):
            self._memory.settle()
        for place in self._ranges:
            place.shrink()


def _free_all(ranges: list[_Mapped]) -> None:
    """Free, unless this process is a fork, in which the driver cannot be called: the memory is its parent's."""
    for place in ranges:
        if os.getpid() == place.process:
            place.free()


@dataclass(eq=False)
class _Mapped:
    """A range of reserved addresses, and the chunks of memory mapped to the first of them."""

    memory: VirtualMemory
    address: int = 0
    reserved: int = 0
    whole: Tensor | None = None
    """Over the whole range."""
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """Address, size and handle of each."""
    process: int = field(default_factory=os.getpid)
    """That the driver's handles are of."""

    def grow(self, used: int) -> Tensor:
        """[used] bytes at the first addresses, none of which is mapped."""
        unit = self.memory.granularity
        size = -(-max(used, 1) // unit) * unit
        if size > self.reserved or self.whole is None:
            self.free()
            self.address, self.reserved = self.memory.reserve(size), size
            self.whole = tensor_at(self.address, size, self.memory.device)
        step = max(CHUNK_BYTES // unit, 1) * unit
        for start in range(0, size, step):
            count = min(step, size - start)
            self.chunks.append((self.address + start, count, self._map(self.address + start, count)))
        return self.whole[:used]

    def _map(self, address: int, size: int) -> int:
        try:
            return self.memory.map(address, size)
        except torch.OutOfMemoryError:
            self.memory.reclaim()
            return self.memory.map(address, size)

    def shrink(self) -> None:
        """Unmap all of it, which nothing uses any more."""
        while self.chunks:
            self.memory.unmap(*self.chunks.pop())

    def free(self) -> None:
        """Give the addresses back too."""
        if self.chunks:
            self.memory.settle()
        self.shrink()
        if self.reserved:
            self.memory.free(self.address, self.reserved)
            self.address = self.reserved = 0


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
    return (fixed_memory(device, zeroed=True) if virtual else None) or PoolMemory(zeros, torch.cuda.empty_cache)


def fixed_memory(device: torch.device, *, zeroed: bool = False) -> PoolMemory | None:
    """Memory of a CUDA device at the same addresses each time; None where the device or its driver has no such.

    Args:
        zeroed: fill it with zeros, where not all of it is written before it is read.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        arena = Arena(CudaVirtualMemory(device))
        _try_out(arena, device)
    except (OSError, RuntimeError) as exc:
        _log.warning("memory on %s comes from torch's allocator: %s: %s", device, type(exc).__name__, exc)
        return None
    return PoolMemory(arena.allocate if zeroed else arena.take, arena.release)


def _try_out(arena: Arena, device: torch.device) -> None:
    (ones,) = arena.allocate([2**20], torch.int32, device)
    ones.fill_(1)
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
