"""What torch.cuda, libcuda and Triton are on the pretended device."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rollout.engine.kernels import triton_paged
from rollout.engine.models import originals
from rollout.engine.scheduling import run_ahead, scheduler
from tests.pretended_cuda import graphs, interpreted
from tests.pretended_cuda.mode import CUDA, PretendedCuda, is_on, put

TOTAL = 80 * 2**30
FREE = 40 * 2**30
_pools = itertools.count(1)
compiled: dict[str, set[tuple[object, ...]]] = {}
"""What a device would have compiled, by kernel: once for each of these."""


def _index(device: Any = None) -> int:
    """Of a device; raises ValueError as torch does of one that is none of CUDA's."""
    if device is None or isinstance(device, int):
        return 0
    if torch.device(device).type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    return 0


class Event:
    """Stands in for `torch.cuda.Event`: what was queued has been done."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: object = None) -> None:
        """Nothing is queued."""

    def synchronize(self) -> None:
        """Nothing is queued."""

    def wait(self, stream: object = None) -> None:
        """Nothing is queued."""

    def query(self) -> bool:
        """Whether it has been reached."""
        return True

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        return 1.0


class Stream:
    """Stands in for `torch.cuda.Stream`: work is done when it is queued."""

    device = CUDA
    cuda_stream = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        _index(device)

    def wait_stream(self, other: Stream) -> None:
        """Nothing is queued."""
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        """Nothing is queued."""
        assert isinstance(event, Event)

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has been reached."""
        return event or Event()

    def synchronize(self) -> None:
        """Nothing is queued."""
        if graphs.capturing():
            graphs.refuse("synchronize")

    def query(self) -> bool:
        """Whether all is done."""
        return True


_streams = [Stream()]


@contextmanager
def _stream(stream: Stream | None) -> Any:
    _streams.append(stream or _streams[-1])
    try:
        yield
    finally:
        _streams.pop()


def _settled(device: object = None) -> None:
    _index(device)
    if graphs.capturing():
        graphs.refuse("synchronize")


def _properties(device: object = None) -> Any:
    _index(device)
    return SimpleNamespace(
        name="NVIDIA H100 (pretended)", multi_processor_count=1, total_memory=TOTAL, major=9, minor=0,
        shared_memory_per_block_optin=227 * 2**10, L2_cache_size=50 * 2**20, warp_size=32,
    )  # fmt: skip


class Device:
    """Stands in for `torch.cuda.device`."""

    def __init__(self, device: object) -> None:
        _index(device)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _no_such_pool(device: int, pool: tuple[int, int]) -> None:
    if not (isinstance(device, int) and isinstance(pool, tuple)):
        raise TypeError(f"({device!r}, {pool!r})")
    raise RuntimeError("no such pool")


_FUNCTIONS: dict[str, Any] = {
    "_lazy_init": lambda: None, "init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
    "device_count": lambda: 1, "current_device": lambda: 0, "set_device": _index, "synchronize": _settled,
    "empty_cache": lambda: None, "mem_get_info": lambda device=None: (FREE - _index(device), TOTAL),
    "memory_allocated": _index, "memory_reserved": _index, "max_memory_allocated": _index,
    "max_memory_reserved": _index, "reset_peak_memory_stats": _index, "memory_snapshot": lambda *_: [],
    "memory_stats": lambda device=None: {}, "get_device_properties": _properties,
    "get_device_name": lambda device=None: _properties(device).name, "get_device_capability": lambda device=None: (9, 0),
    "current_stream": lambda device=None: _streams[_index(device) - 1], "default_stream": lambda device=None: _streams[0],
    "Stream": Stream, "Event": Event, "stream": _stream, "device": Device, "CUDAGraph": graphs.CUDAGraph,
    "graph_pool_handle": lambda: (0, next(_pools)), "is_current_stream_capturing": graphs.capturing,
    "is_bf16_supported": lambda including_emulation=True: True, "set_sync_debug_mode": lambda mode: None,
    "get_sync_debug_mode": lambda: 0, "manual_seed": lambda seed: None, "manual_seed_all": lambda seed: None,
    "ipc_collect": lambda: None,
}  # fmt: skip
_PRIVATE: dict[str, Any] = {
    "_cuda_endAllocateToPool": _no_such_pool, "_cuda_releasePool": _no_such_pool,
    "_cuda_clearCublasWorkspaces": lambda: None,
}  # fmt: skip


def install() -> PretendedCuda:
    """Have this process see the pretended device, in all threads that begin from now on; returns the mode, not entered."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "the kernels of Triton are interpreted"
    mode = PretendedCuda(graphs.capturing, graphs.refuse)
    for name, function in _FUNCTIONS.items():
        setattr(torch.cuda, name, function)
    for name, function in _PRIVATE.items():
        setattr(torch._C, name, function)
    torch.version.cuda = torch.version.cuda or "13.0"
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    _redirect_autocast()
    _interpret()
    _replace_libcuda()
    _follow_threads(mode)
    # No mode but this device's is active.
    originals._torch_mode_active = lambda: False
    # A step takes seconds: the interpreter runs the programs of a launch one after the other.
    run_ahead.LONGEST_S, scheduler.MOST = 1e9, 3  # type: ignore[attr-defined]
    triton_paged.PROGRAMS = 3
    return mode


def _redirect_autocast() -> None:
    """Autocast on the device is autocast on the CPU."""
    for name in ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"):
        function = getattr(torch, name)

        def redirected(*args: Any, function: Callable[..., Any] = function) -> Any:
            kind, *rest = args or ("cuda",)
            return function("cpu" if kind == "cuda" else kind, *rest)

        setattr(torch, name, redirected)


def _interpret() -> None:
    """Launches take the device's memory alone, and are recorded; bfloat16 is what it is."""
    from triton.runtime import interpreter

    interpreted.mend(interpreter)
    launch = interpreter.GridExecutor.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        for at, each in enumerate((*args, *kwargs.values())):
            if isinstance(each, Tensor) and not is_on(each):
                raise ValueError(f"Pointer argument (at {at}) cannot be accessed from Triton (cpu tensor?)")

        compiled.setdefault(self.fn.__name__, set()).add(_specialised(self, args, kwargs))

        def work() -> None:
            with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
                launch(self, *args, **kwargs)

        if graphs.capturing():
            graphs.open_captures[-1].work.append(work)
        work()

    interpreter.GridExecutor.__call__ = checked


def _specialised(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """What Triton compiles a kernel for, of a launch. Arguments that are not specialised are taken for some that are."""

    def kind(name: str, value: Any) -> object:
        if isinstance(value, Tensor):
            with torch._C.DisableTorchFunction():
                return value.dtype, value.data_ptr() % 16 == 0
        if name in executor.constexprs or not isinstance(value, int):
            return type(value) if isinstance(value, float) else value
        return value if value == 1 else value % 16 == 0

    named = (dict(zip(executor.arg_names, args, strict=False)) | kwargs).items()
    return tuple((name, kind(name, value)) for name, value in named)


class _Function:
    """A function of the pretended libcuda."""

    argtypes: Any = None
    restype: Any = None

    def __init__(self, call: Callable[..., int | None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        assert len(arguments) == len(self.argtypes)
        return self._call(*arguments) or 0


class Libcuda:
    """The driver's virtual memory: reserved addresses are of host memory, and all of them can be used."""

    def __init__(self) -> None:
        self._areas: dict[int, mmap.mmap] = {}

    def __getattr__(self, name: str) -> _Function:
        calls: dict[str, Callable[..., int | None]] = {
            "cuDeviceGetAttribute": lambda found, *_: _set(found, 1), "cuGetErrorName": lambda code, text: None,
            "cuMemGetAllocationGranularity": lambda found, *_: _set(found, 2**21),
            "cuMemAddressReserve": self._reserve, "cuMemCreate": lambda found, *_: _set(found, 77),
        }  # fmt: skip
        if not name.startswith("cu"):
            raise AttributeError(name)
        function = _Function(calls.get(name, lambda *_: None))
        setattr(self, name, function)
        return function

    def _reserve(self, found: Any, size: int, *_: Any) -> None:
        area = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self._areas[address] = area
        _set(found, address)


def _set(found: Any, value: int) -> None:
    found._obj.value = value


def _replace_libcuda() -> None:
    from rollout.engine.memory import arena

    real, library = ctypes.CDLL, Libcuda()
    made = arena.tensor_at

    def opened(name: Any, *args: Any, **kwargs: Any) -> Any:
        return library if name == "libcuda.so.1" else real(name, *args, **kwargs)

    def tensor_at(address: int, size: int, device: torch.device) -> Tensor:
        return put(made(address, size, torch.device("cpu"))) if device.type == "cuda" else made(address, size, device)

    ctypes.CDLL = opened  # type: ignore[misc,assignment]
    arena.tensor_at = tensor_at


def _follow_threads(mode: PretendedCuda) -> None:
    run = threading.Thread.run

    def followed(self: threading.Thread) -> None:
        # Modes are of one thread each.
        with mode if isinstance(self, threading.Thread) else nullcontext():
            run(self)

    threading.Thread.run = followed  # type: ignore[method-assign]
