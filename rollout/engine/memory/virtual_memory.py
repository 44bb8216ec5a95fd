"""The CUDA driver's virtual memory calls, by ctypes on libcuda: reserve addresses, map physical memory to them, unmap it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any, Protocol

import torch

from rollout.engine.memory.stream_order import wait_for_steps

_OUT_OF_MEMORY = 2
_SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""
_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3


class VirtualMemory(Protocol):
    """Physical memory of one device, and addresses that it can be mapped to.

    Attributes:
        granularity: bytes; sizes and addresses of mappings are multiples of it.
        device: what a tensor at the addresses is on.
    """

    granularity: int
    device: torch.device

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes of addresses, without memory behind them; returns the first."""

    def map(self, address: int, size: int) -> int:
        """Map new physical memory of `size` bytes to `address`; returns its handle.

        Raises:
            torch.OutOfMemoryError: the device has not so much; nothing has changed.
        """

    def unmap(self, address: int, size: int, handle: int) -> None:
        """Unmap `address` and give its physical memory back to the device."""

    def free(self, address: int, size: int) -> None:
        """Give reserved addresses back, of which none is mapped."""

    def settle(self) -> None:
        """Wait for queued work that may use mapped memory."""

    def reclaim(self) -> None:
        """Have torch give the memory that it holds and does not use back to the device."""


class _Location(Structure):
    _fields_ = (("kind", c_int), ("id", c_int))


class _AllocationFlags(Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", c_int), ("handle_types", c_int), ("location", _Location), ("metadata", c_void_p),
        ("flags", _AllocationFlags),
    )  # fmt: skip


class _Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


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
    """`VirtualMemory` of a CUDA device.

    Args:
        library: libcuda, or a stand-in of it.

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
        """Reserve addresses; see `VirtualMemory`."""
        address = c_uint64()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def map(self, address: int, size: int) -> int:
        """Create, map and make accessible; see `VirtualMemory`."""
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
        """Unmap and release; see `VirtualMemory`."""
        self._call("cuMemUnmap", address, size)
        self._call("cuMemRelease", handle)

    def free(self, address: int, size: int) -> None:
        """Free reserved addresses; see `VirtualMemory`."""
        self._call("cuMemAddressFree", address, size)

    def settle(self) -> None:
        """Wait for steps and the current stream, which also makes the device's context current; see `VirtualMemory`."""
        wait_for_steps(self.device)

    def reclaim(self) -> None:
        """Empty the cache of torch's allocator; see `VirtualMemory`."""
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
