"""Device memory of the KV pool, returned to the driver and allocated again at fixed addresses.

If memory only returned to torch's allocator, the trainer's tensors (Adam's states, made at the first step) would pin parts
of it, and the whole pool could not be restored. An `Arena` keeps addresses and maps memory to them.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_ubyte,
    c_uint8,
    c_uint16,
    c_uint64,
    c_ushort,
    c_void_p,
    py_object,
)  # fmt: skip
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from rollout.engine.memory.block_pool import Allocate, zeros
from rollout.engine.memory.streams import wait_for_steps

CHUNK_BYTES = 64 * 2**20
"""Physical memory per mapping: few calls for a pool of 100 GB, and almost all free memory can be mapped."""
_log = logging.getLogger(__name__)
_OUT_OF_MEMORY = 2
_SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


def _struct(**fields: Any) -> type[Structure]:
    """A C struct of these fields."""
    return type("Struct", (Structure,), {"_fields_": tuple(fields.items())})


_Location = _struct(kind=c_int, id=c_int)
_AllocationFlags = _struct(compression=c_ubyte, rdma=c_ubyte, usage=c_ushort, reserved=c_ubyte * 4)
_Properties = _struct(kind=c_int, handle_types=c_int, location=_Location, metadata=c_void_p, flags=_AllocationFlags)
"""CUmemAllocationProp."""
_Access = _struct(location=_Location, flags=c_int)
"""CUmemAccessDesc."""

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(_Access), c_size_t),
    "cuMemUnmap": (c_uint64, c_size_t),
}


class CudaVirtualMemory:
    """Physical memory of a CUDA device, and addresses that it can be mapped to, by ctypes on the driver.

    Args:
        library: libcuda, or a stand-in for it.

    Attributes:
        granularity: bytes; sizes and addresses of mappings are multiples of it.
        device: device of a tensor at the addresses.

    Raises:
        OSError: there is no libcuda.
        RuntimeError: the driver or the device has no virtual memory calls.
    """

    def __init__(self, device: torch.device, library: Any = None) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise RuntimeError(f"the CUDA driver has no {name}")
            function.argtypes, function.restype = arguments, c_int
        self.settle()
        supported, granularity = c_int(), c_size_t()
        self._call("cuDeviceGetAttribute", byref(supported), _SUPPORTED, index)
        if not supported.value:
            raise RuntimeError(f"{self.device} has no virtual memory management")
        self._properties = _Properties(kind=_PINNED, location=_Location(_ON_DEVICE, index))
        self._access = _Access(_Location(_ON_DEVICE, index), _READ_WRITE)
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), 0)
        self.granularity = granularity.value

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes of addresses, without memory behind them; returns the first."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def map(self, address: int, size: int) -> int:
        """Map new physical memory of `size` bytes to `address`; returns its handle.

        Raises:
            torch.OutOfMemoryError: the device lacks the memory; nothing has changed.
        """
        handle = c_uint64()
        self._call("cuMemCreate", byref(handle), size, byref(self._properties), 0)
        try:
            self._call("cuMemMap", address, size, 0, handle, 0)
            try:
                self._call("cuMemSetAccess", address, size, byref(self._access), 1)
            except BaseException:
                self._call("cuMemUnmap", address, size)
                raise
        except BaseException:
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Unmap `address` and return its physical memory to the device."""
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)

    def free(self, address: int, size: int) -> None:
        """Return reserved addresses, none of which is mapped."""
        self._call("cuMemAddressFree", address, size)

    def settle(self) -> None:
        """Wait for queued work that may use mapped memory; this also makes the device's context current."""
        wait_for_steps(self.device)

    def reclaim(self) -> None:
        """Let torch return unused memory to the device."""
        torch.cuda.empty_cache()

    def _call(self, name: str, *arguments: Any) -> None:
        # A thread may have another device's context, or none.
        with torch.cuda.device(self.device):
            code = getattr(self._library, name)(*arguments)
        if not code:
            return
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        error = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else RuntimeError
        raise error(f"{name}: {(text.value or b'error').decode()} ({code}) on {self.device}")


class Arena:
    """Device memory with one user at a time, in ranges of fixed addresses.

    Always true: mapped memory is a prefix of each range, and belongs to the last returned tensors, which must not be used
    after `release`.
    """

    def __init__(self, memory: CudaVirtualMemory) -> None:
        self._memory = memory
        self._ranges: list[_Mapped] = []
        # Not at exit: the process returns everything, and the driver may have been shut down.
        weakref.finalize(self, _free_all, self._ranges).atexit = False

    def allocate(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Zeros of each of these sizes, at the addresses of its predecessor unless it is larger.

        Raises:
            torch.OutOfMemoryError: the device lacks the memory; nothing is mapped.
        """
        self.release()
        self._memory.settle()
        self._ranges += [_Mapped(self._memory) for _ in sizes[len(self._ranges) :]]
        try:
            found = [place.grow(size * dtype.itemsize) for place, size in zip(self._ranges, sizes, strict=False)]
        except torch.OutOfMemoryError:
            self.release()
            raise
        return [each.view(dtype).zero_() for each in found]

    def release(self) -> None:
        """Return all memory to the device; the addresses stay reserved."""
        if any(place.chunks for place in self._ranges):
            self._memory.settle()
        for place in self._ranges:
            place.shrink()


def _free_all(ranges: list[_Mapped]) -> None:
    """Free, unless this process is a fork, in which the driver cannot be called: the memory belongs to its parent."""
    for place in ranges:
        if os.getpid() == place.process:
            place.free()


@dataclass(eq=False)
class _Mapped:
    """A range of reserved addresses, and the chunks of memory mapped to its start."""

    memory: CudaVirtualMemory
    address: int = 0
    reserved: int = 0
    whole: Tensor | None = None
    """Tensor over the whole range."""
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """Address, size and handle of each."""
    process: int = field(default_factory=os.getpid)
    """Process of the driver's handles."""

    def grow(self, used: int) -> Tensor:
        """[used] bytes at the first addresses; none of them may be mapped yet."""
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
        """Unmap all of it; it must not be in use."""
        while self.chunks:
            self.memory.unmap(*self.chunks.pop())

    def free(self) -> None:
        """Return the addresses too."""
        if self.chunks:
            self.memory.settle()
        self.shrink()
        if self.reserved:
            self.memory.free(self.address, self.reserved)
            self.address = self.reserved = 0


@dataclass(frozen=True)
class PoolMemory:
    """Source of one user's device memory, and how it is returned."""

    allocate: Allocate
    release: Callable[[], object] | None = None
    """Called after the tensor was dropped. None: nothing else to do."""


def pool_memory(device: torch.device, *, virtual: bool) -> PoolMemory:
    """Memory for a pool on `device`; from torch's allocator if `virtual` is False or the driver lacks the calls."""
    if device.type != "cuda":
        return PoolMemory(zeros)
    if virtual and torch.version.cuda is not None:
        try:
            arena = Arena(CudaVirtualMemory(device))
            _try_out(arena, device)
            return PoolMemory(arena.allocate, arena.release)
        except (OSError, RuntimeError) as exc:
            _log.warning("memory on %s comes from torch's allocator: %s: %s", device, type(exc).__name__, exc)
    # The trainer would fragment cached memory.
    return PoolMemory(zeros, torch.cuda.empty_cache)


def _try_out(arena: Arena, device: torch.device) -> None:
    (ones,) = arena.allocate([2**20], torch.int32, device)
    ones.fill_(1)
    whole = int(ones.sum()) == 2**20
    del ones
    arena.release()
    if not whole:
        raise RuntimeError("memory that was filled with ones does not hold them")


# --- a tensor over memory of others -------------------------------------------------------------------------------------


_Device = _struct(kind=c_int32, id=c_int32)
_Type = _struct(code=c_uint8, bits=c_uint8, lanes=c_uint16)
_DLTensor = _struct(
    data=c_void_p, device=_Device, ndim=c_int32, dtype=_Type, shape=POINTER(c_int64), strides=POINTER(c_int64),
    byte_offset=c_uint64,
)  # fmt: skip
_DLManagedTensor = _struct(tensor=_DLTensor, context=c_void_p, deleter=c_void_p)
_DEVICE_KINDS = {"cpu": 1, "cuda": 2}
_UNSIGNED = 1
_NAME = b"dltensor"
_kept: list[tuple[Any, ...]] = []
"""Descriptions of tensors, which torch reads when it frees them: some tens of bytes each, one per reservation."""


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """[size] uint8 at an address of `device`, without copying, owning, reading or writing it."""
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
