"""Gives the KV pool's device memory back to the driver, and allocates it again at the same addresses.

If the memory were only returned to torch's allocator, the trainer's tensors, such as Adam's states, could occupy parts of
it, and the pool could not be restored. An `Arena` keeps the addresses reserved and maps new memory to them.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any

import torch
from torch import Tensor

from rollout.engine.memory.block_pool import PoolMemory
from rollout.engine.memory.streams import wait_for_steps

_log = logging.getLogger(__name__)
_OUT_OF_MEMORY = 2
_SUPPORTED = 102
"""The driver's constant CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


def _struct(**fields: Any) -> type[Structure]:
    return type("Struct", (Structure,), {"_fields_": tuple(fields.items())})


_Location = _struct(kind=c_int, id=c_int)
_AllocationFlags = _struct(compression=c_ubyte, rdma=c_ubyte, usage=c_ushort, reserved=c_ubyte * 4)
_Properties = _struct(kind=c_int, handle_types=c_int, location=_Location, metadata=c_void_p, flags=_AllocationFlags)
"""The mirror of the driver's struct CUmemAllocationProp."""
_Access = _struct(location=_Location, flags=c_int)
"""The mirror of the driver's struct CUmemAccessDesc."""

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
    """Reserves addresses on a CUDA device and maps physical memory to them, by calling the driver through ctypes.

    Args:
        library: the driver library; libcuda if None. Tests pass a stand-in.

    Attributes:
        granularity: number of bytes of which the sizes and addresses of mappings must be multiples.
        device: the CUDA device, always with its index.

    Raises:
        OSError, AttributeError: there is no libcuda, or it has no virtual memory calls.
        RuntimeError: the device does not support virtual memory management.
    """

    def __init__(self, device: torch.device, library: Any = None) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._library, name)
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
        """Reserve `size` bytes of addresses without mapping memory to them. Return the first address."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def map(self, address: int, size: int) -> int:
        """Map `size` bytes of new physical memory to `address`. Return the handle of the memory.

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
        """Unmap `size` bytes at `address`, and give their physical memory (`handle`) back to the device."""
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)

    def free(self, address: int, size: int) -> None:
        """Release reserved addresses. None of them may be mapped."""
        self._call("cuMemAddressFree", address, size)

    def settle(self) -> None:
        """Wait for queued work that may use mapped memory. This also makes the device's CUDA context current."""
        wait_for_steps(self.device)

    def reclaim(self) -> None:
        """Make torch return its unused cached memory to the device."""
        torch.cuda.empty_cache()

    def _call(self, name: str, *arguments: Any) -> None:
        # Set the device, because the calling thread may have another device's CUDA context, or none.
        with torch.cuda.device(self.device):
            code = getattr(self._library, name)(*arguments)
        if not code:
            return
        text = c_char_p()
        self._library.cuGetErrorName(code, byref(text))
        error = torch.OutOfMemoryError if code == _OUT_OF_MEMORY else RuntimeError
        raise error(f"{name}: {(text.value or b'error').decode()} ({code}) on {self.device}")


class Arena:
    """Device memory for one list of tensors at a time, in ranges of addresses that stay reserved.

    Always true: memory is mapped to the start of each range, and belongs to the tensors that `allocate` returned last. These
    tensors must not be used after `release`.
    """

    def __init__(self, memory: CudaVirtualMemory) -> None:
        self._memory = memory
        self._ranges: list[_Range] = []
        # Do not run the finaliser at exit: the process's memory is freed anyway, and the driver may already be shut down.
        weakref.finalize(self, _free_all, memory, self._ranges).atexit = False

    def allocate(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Allocate a tensor of zeros per size (in elements). A tensor's address changes only if it outgrows its range.

        Raises:
            torch.OutOfMemoryError: the device lacks the memory; no memory is mapped.
        """
        self.release()
        self._memory.settle()
        self._ranges += [_Range(self._memory) for _ in sizes[len(self._ranges) :]]
        try:
            found = [each.map(size * dtype.itemsize) for each, size in zip(self._ranges, sizes, strict=False)]
        except torch.OutOfMemoryError:
            self.release()
            raise
        return [each.view(dtype).zero_() for each in found]

    def release(self) -> None:
        """Give all mapped memory back to the device. The addresses stay reserved."""
        if any(each.mapped for each in self._ranges):
            self._memory.settle()
        for each in self._ranges:
            each.unmap()


def _free_all(memory: CudaVirtualMemory, ranges: list[_Range]) -> None:
    memory.settle()
    for each in ranges:
        each.free()


class _Range:
    """A range of reserved addresses. Memory can be mapped to the start of the range.

    Attributes:
        mapped: number of bytes backed by memory, from the start of the range.
    """

    def __init__(self, memory: CudaVirtualMemory) -> None:
        self._memory = memory
        self._address = self._reserved = self.mapped = self._handle = 0

    def map(self, used: int) -> Tensor:
        """Map memory to the start of a range without mapped memory, and return the first `used` bytes as a tensor."""
        unit = self._memory.granularity
        size = -(-max(used, 1) // unit) * unit
        if size > self._reserved:
            self.free()
            self._address, self._reserved = self._memory.reserve(size), size
        try:
            self._handle = self._memory.map(self._address, size)
        except torch.OutOfMemoryError:
            self._memory.reclaim()
            self._handle = self._memory.map(self._address, size)
        self.mapped = size
        return tensor_at(self._address, used, self._memory.device)

    def unmap(self) -> None:
        """Give the mapped memory back to the device. The memory must not be in use."""
        if self.mapped:
            self._memory.unmap(self._address, self.mapped, self._handle)
            self.mapped = 0

    def free(self) -> None:
        """Release the range's memory, then its addresses."""
        self.unmap()
        if self._reserved:
            self._memory.free(self._address, self._reserved)
            self._reserved = 0


def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
    """Return a uint8 tensor of `size` bytes at a memory address of `device`. The tensor does not own the memory."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)
    # Leave inference mode, because a tensor created in inference mode cannot be written to outside it.
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))


def pool_memory(device: torch.device, *, virtual: bool) -> PoolMemory:
    """Return the functions that allocate and release a pool's memory on `device`.

    Memory comes from torch's allocator if `virtual` is False or if the driver does not support virtual memory calls.
    """
    if device.type != "cuda":
        return PoolMemory()
    if virtual and torch.version.cuda is not None:
        try:
            arena = Arena(CudaVirtualMemory(device))
            _try_out(arena, device)
            return PoolMemory(arena.allocate, arena.release)
        except (OSError, AttributeError, RuntimeError) as exc:
            _log.warning("memory on %s comes from torch's allocator: %s: %s", device, type(exc).__name__, exc)
    # Empty torch's cache after each release, because the trainer's allocations would fragment the cached memory.
    return PoolMemory(release=torch.cuda.empty_cache)


def _try_out(arena: Arena, device: torch.device) -> None:
    (ones,) = arena.allocate([2**20], torch.int32, device)
    ones.fill_(1)
    whole = int(ones.sum()) == 2**20
    del ones
    arena.release()
    if not whole:
        raise RuntimeError("memory that was filled with ones does not hold them")
