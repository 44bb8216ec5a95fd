"""Tests of the KV pool's device memory: on a pretended device whose memory the trainer takes too, and on a GPU.

The pretended driver maps pieces of host memory; what is read or written where nothing is mapped is not what was written
there before. The pretended caching allocator cuts tensors out of free segments, as torch's does.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.memory import arena as arena_module
from rollout.engine.memory.arena import Arena, CudaVirtualMemory, pool_memory
from rollout.engine.memory.block_pool import PoolMemory, zeros
from rollout.engine.memory.kv_cache import KVCache, LayerShape
from rollout.engine.memory.streams import StreamOrder, wait_for_steps
from tests.engines import assert_greedy, finish, greedily, make_engine, steps, token_ids
from tests.interpreter import on_a_gpu

CPU = torch.device("cpu")
PAGE = 4096
BLOCKS = 512


class Driver:
    """`CudaVirtualMemory` of a pretended device of `total` bytes."""

    granularity = PAGE
    device = CPU

    def __init__(self, total: int) -> None:
        self.total = total
        self.taken = 0
        self.settled = True
        self.reclaimable = 0
        self.mappings: dict[int, tuple[int, int]] = {}
        self._reserved: dict[int, mmap.mmap] = {}
        self._handles = 0

    @property
    def used(self) -> int:
        return self.taken + sum(size for size, _ in self.mappings.values())

    @property
    def reservations(self) -> int:
        return len(self._reserved)

    def reserve(self, size: int) -> int:
        assert size % PAGE == 0
        area = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        self._reserved[address] = area
        return address

    def map(self, address: int, size: int) -> int:
        assert size % PAGE == 0
        assert any(start <= address and address + size <= start + len(area) for start, area in self._reserved.items())
        assert all(address + size <= at or at + each <= address for at, (each, _) in self.mappings.items())
        if self.used + size > self.total:
            raise torch.OutOfMemoryError(f"{size} bytes of {self.total - self.used}")
        self._handles += 1
        self.mappings[address] = size, self._handles
        self.settled = False
        ctypes.memset(address, 0xFF, size)
        return self._handles

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert self.settled, "the device may still use it"
        assert self.mappings.pop(address) == (size, handle)
        ctypes.memset(address, 0xFF, size)

    def free(self, address: int, size: int) -> None:
        assert not [at for at in self.mappings if address <= at < address + size]
        assert len(self._reserved.pop(address)) == size

    def settle(self) -> None:
        self.settled = True

    def reclaim(self) -> None:
        self.taken -= self.reclaimable
        self.reclaimable = 0


# --- the arena ----------------------------------------------------------------------------------------------------------


def test_memory_goes_back_to_the_driver_and_comes_back_at_the_same_addresses() -> None:
    """Parts that lay behind one another moved when a pool came back smaller, and CUDA graphs had to look for them."""
    driver = Driver(100 * PAGE)
    arena = Arena(driver)
    shapes = [LayerShape(2, 16, 8), LayerShape(1, 16, 16)]
    cache = KVCache(shapes, 70, 8, torch.float32, CPU, PoolMemory(arena.allocate, arena.release))
    before = cache.addresses
    assert driver.reservations == 4
    for blocks in (35, 1, 70):
        cache.drop()
        assert driver.used == 0
        cache.materialize(blocks)
        assert cache.addresses == before
        for part in (*cache.layer(0), *cache.layer(1)):
            assert len(part) == blocks
            assert not part.any(), "what was there is gone, and a masked NaN would be one"
            part.fill_(7)
    cache.drop()
    cache.materialize(140)
    assert driver.reservations == 4


def test_too_much_is_refused_and_leaves_nothing_mapped() -> None:
    driver = Driver(10 * PAGE)
    arena = Arena(driver)
    driver.taken = 3 * PAGE
    with pytest.raises(torch.OutOfMemoryError):
        arena.allocate([4 * PAGE, 4 * PAGE], torch.uint8, CPU)
    assert driver.used == driver.taken
    assert arena.allocate([7 * PAGE], torch.uint8, CPU)[0].numel() == 7 * PAGE


def test_memory_that_torch_holds_without_using_it_is_asked_back_and_a_dropped_arena_gives_all_back() -> None:
    driver = Driver(10 * PAGE)
    driver.taken = driver.reclaimable = 6 * PAGE
    arena = Arena(driver)
    assert arena.allocate([9 * PAGE], torch.uint8, CPU)[0].numel() == 9 * PAGE
    del arena
    gc.collect()
    assert driver.used == 0
    assert driver.reservations == 0


# --- three training steps -----------------------------------------------------------------------------------------------


class CachingAllocator:
    """Torch's allocator over a pretended device: freed segments are kept, and tensors are cut out of them."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.segments: list[list[int]] = []
        """Size and bytes in use of each."""

    def take(self, size: int) -> list[int]:
        fits = [each for each in self.segments if each[0] - each[1] >= size]
        if not fits:
            if self._driver.used + size > self._driver.total:
                self.empty()
            if self._driver.used + size > self._driver.total:
                raise torch.OutOfMemoryError(f"{size} bytes")
            self._driver.taken += size
            fits = [[size, 0]]
            self.segments += fits
        best = min(fits, key=lambda each: each[0] - each[1])
        best[1] += size
        return best

    def empty(self) -> None:
        """`torch.cuda.empty_cache`: only a segment of which nothing is used goes back."""
        for segment in [each for each in self.segments if not each[1]]:
            self._driver.taken -= segment[0]
            self.segments.remove(segment)


def test_a_pool_stays_whole_although_adam_is_born_while_it_is_suspended() -> None:
    """Rollout, suspend, a training step, resume; the first step makes Adam's states, which would lie in a freed pool."""
    cache = make_engine("qwen3", kv_cache_blocks=BLOCKS).cache
    assert cache.device_bytes > 100 * PAGE
    # Each part takes whole pages.
    driver = Driver((cache.device_bytes // PAGE + len(cache.addresses) + 70) * PAGE)
    allocator, arena = CachingAllocator(driver), Arena(driver)
    driver.reclaim = allocator.empty  # type: ignore[method-assign]
    engine = make_engine("qwen3", allocate=arena.allocate, kv_cache_blocks=BLOCKS)
    engine.cache._release = arena.release
    for step in range(3):
        for seed in range(3):
            engine.add_request(token_ids(5 + seed, seed), greedily(8))
        steps(engine, 3)
        engine.pause()
        engine.suspend("offload")
        if step == 0:
            allocator.take(24 * PAGE)
        activations = [(allocator.take(size), size) for size in (40 * PAGE, 20 * PAGE)]
        for segment, size in activations:
            segment[1] -= size
        assert engine.resume().shrunk_by_blocks == 0
        engine.unpause()
        for request in finish(engine).values():
            assert_greedy("qwen3", request)


# --- the driver's calls -------------------------------------------------------------------------------------------------


class Library:
    """A stand-in of libcuda."""

    def __init__(self, *, supported: int = 1, missing: str = "", failing: dict[str, int] | None = None) -> None:
        self.calls: list[str] = []
        self.supported = supported
        self.failing = failing or {}
        self._missing = missing

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu") or name == self._missing:
            raise AttributeError(name)

        def function(*arguments: Any) -> int:
            assert len(arguments) == len(function.argtypes)  # type: ignore[attr-defined]
            return self.called(name, arguments)

        setattr(self, name, function)
        return function

    def called(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name == "cuGetErrorName":
            arguments[1]._obj.value = b"CUDA_ERROR_OF_THE_TEST"
            return 0
        self.calls.append(name)
        if name in self.failing:
            return self.failing[name]
        results = {"cuDeviceGetAttribute": self.supported, "cuMemGetAllocationGranularity": 2**21,
                   "cuMemAddressReserve": 2**40, "cuMemCreate": 77}  # fmt: skip
        if name in results:
            arguments[0]._obj.value = results[name]
        return 0


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "wait_for_steps", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


class Lane:
    """A stream whose events are waited for."""

    def __init__(self, name: str, waited: list[str], device: torch.device) -> None:
        self.name, self.waited, self.device = name, waited, device

    def record_event(self) -> Lane:
        return self

    def synchronize(self) -> None:
        self.waited.append(self.name)


def test_memory_is_unmapped_behind_the_steps_of_every_stream_and_no_device_is_waited_for(monkeypatch) -> None:
    """A wait for the device breaks the captures of every thread of the process."""
    device, other, waited = torch.device("cuda", 0), torch.device("cuda", 1), list[str]()
    lanes = {name: Lane(name, waited, other if name == "other" else device) for name in ("steps", "caller", "other")}
    current = ["steps"]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the device"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: lanes[current[0]])
    order = StreamOrder(device)
    order.follow()
    current[0] = "other"
    StreamOrder(other).follow()
    current[0] = "caller"
    memory = CudaVirtualMemory.__new__(CudaVirtualMemory)
    memory.device = device
    memory.settle()
    assert sorted(waited) == ["caller", "steps"]
    waited.clear()
    order.settle()
    assert waited == ["caller"], "no step has run since"
    current[0] = "other"
    wait_for_steps(other)


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("cuMemCreate", []),
        ("cuMemMap", ["cuMemRelease"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemRelease"]),
    ],
)
def test_a_mapping_that_fails_halfway_is_undone(name: str, after: list[str]) -> None:
    for code, error in ((2, torch.OutOfMemoryError), (1, RuntimeError)):
        library = Library(failing={name: code})
        memory = CudaVirtualMemory(torch.device("cuda", 0), library)
        with pytest.raises(error, match=f"{name}: CUDA_ERROR_OF_THE_TEST"):
            memory.map(2**40, 2**21)
        assert library.calls[library.calls.index(name) + 1 :] == after


@pytest.mark.usefixtures("no_device")
def test_a_driver_without_the_calls_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="cuMemMap"):
        CudaVirtualMemory(torch.device("cuda", 0), Library(missing="cuMemMap"))
    with pytest.raises(RuntimeError, match="no virtual memory management"):
        CudaVirtualMemory(torch.device("cuda", 0), Library(supported=0))


@pytest.mark.parametrize("virtual", [True, False])
def test_without_the_driver_the_pool_comes_from_torch_and_its_cache_is_emptied(
    virtual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(device: torch.device) -> CudaVirtualMemory:
        assert virtual
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(arena_module, "CudaVirtualMemory", absent)
    memory = pool_memory(torch.device("cuda", 0), virtual=virtual)
    assert memory.allocate is zeros
    assert memory.release is torch.cuda.empty_cache
    assert pool_memory(CPU, virtual=True) == PoolMemory()


# --- on a device --------------------------------------------------------------------------------------------------------


def driver_free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@on_a_gpu
@pytest.mark.whole_device
@pytest.mark.parametrize("virtual", [True, False])
def test_on_a_device_a_suspended_pool_is_with_the_driver_and_comes_back_bit_for_bit(virtual: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    memory = pool_memory(device, virtual=virtual)
    assert (memory.allocate is not zeros) == virtual, "the arena works here"
    shapes = [LayerShape(2, 64, 64)] * 12
    cache = KVCache(shapes, 20_000, 16, torch.bfloat16, device, memory)
    whole, address = cache.device_bytes, cache.layer(0)[0].data_ptr()
    for layer in range(12):
        for part in cache.layer(layer):
            part.normal_()
    blocks = np.sort(np.random.default_rng(0).permutation(20_000)[:1500]).astype(np.int32)
    index = torch.from_numpy(blocks.astype(np.int64)).to(device)
    before = [[part[index].cpu() for part in cache.layer(layer)] for layer in range(12)]
    adam = []
    for _ in range(3):
        held = driver_free()
        cache.save(blocks)
        torch.cuda.empty_cache()
        assert driver_free() - held >= 0.98 * whole
        adam.append(torch.full((2**24,), torch.nan, device=device))
        cache.materialize(20_000)
        assert not virtual or cache.layer(0)[0].data_ptr() == address
        cache.restore(blocks)
        after = [[part[index].cpu() for part in cache.layer(layer)] for layer in range(12)]
        assert all(torch.equal(*pair) for pairs in zip(before, after, strict=True) for pair in zip(*pairs, strict=True))
