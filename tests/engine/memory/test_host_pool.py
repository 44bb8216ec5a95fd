"""Tests of the host pool: chunks, growth, and memory that cannot be had."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.memory import host_pool
from rollout.engine.memory.host_pool import HostMemoryError, HostPool
from rollout.engine.memory.kv_cache import KVCache, LayerShape, RouteShape

CHUNK = 64


class PinnedMemory:
    """`torch.empty` of a host with so many elements of pinned memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int = 10**9) -> None:
        self.room = room
        self.asked: list[int] = []
        self._empty = torch.empty
        monkeypatch.setattr(host_pool, "CHUNK_BYTES", 4 * CHUNK)
        monkeypatch.setattr(torch, "empty", self.empty)

    def empty(self, numel: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            self.asked.append(numel)
            if sum(self.asked) > self.room:
                raise RuntimeError("CUDA error: out of memory")
        return self._empty(numel, **options)


def test_pinned_memory_grows_by_chunks_and_none_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PinnedMemory(monkeypatch)
    pool = HostPool(torch.float32, pinned=True)
    pool.grow(20, 1000)
    assert memory.asked == [32], "powers of two, which torch does not round"
    first = pool.chunks[0]
    for numel in (200, 10, 250):
        pool.grow(numel, 1000)
    assert memory.asked == [32, CHUNK, CHUNK, 64, 32]
    assert pool.chunks[0] is first
    assert pool.nbytes == 4 * 256


def test_memory_is_pinned_in_the_background_and_growing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, gate = PinnedMemory(monkeypatch, room=3 * CHUNK), threading.Event()
    pool = HostPool(torch.float32, pinned=True)
    within = contextlib.contextmanager(lambda: iter([gate.wait()]))
    pool.prepare(2 * CHUNK, within)
    pool.prepare(8 * CHUNK, within)
    assert memory.asked == [], "no caller waits"
    threading.Timer(0.05, gate.set).start()
    pool.grow(2 * CHUNK, 1000)
    assert memory.asked == [CHUNK, CHUNK]
    pool.prepare(8 * CHUNK)
    with pytest.raises(HostMemoryError, match="pinned host memory"):
        pool.grow(8 * CHUNK, 1000)


def test_memory_of_a_cpu_is_in_one_piece() -> None:
    pool = HostPool(torch.float32, pinned=False)
    for numel in (0, 100, 150, 350):
        pool.grow(numel, 320)
        assert len(pool.chunks) == (numel > 0)
        assert pool.span(0, numel).shape == (numel,)
    assert len(pool) == 350


def test_pinning_that_fails_keeps_what_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PinnedMemory(monkeypatch, room=3 * CHUNK)
    pool = HostPool(torch.float32, pinned=True)
    pool.grow(CHUNK, 10**6)
    with pytest.raises(HostMemoryError, match=r"pinned host memory \(CUDA error: out of memory\)"):
        pool.grow(10 * CHUNK, 10**6)
    assert len(pool) == CHUNK
    memory.asked = [CHUNK]
    pool.grow(2 * CHUNK, 10**6)
    assert len(pool) == 2 * CHUNK


def test_routes_are_read_in_a_host_pool_of_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    PinnedMemory(monkeypatch)
    cache = KVCache([LayerShape(1, 4, 4)], 8, 2, torch.float32, torch.device("cpu"), routes=RouteShape(3, 2, 8))
    blocks = np.array([1, 4, 6], np.int32)
    experts = torch.arange(8 * 2 * 2).remainder(8).view(16, 2)
    for layer in range(3):
        cache.write_routes(torch.arange(16), layer, experts)
    before = cache.read_routes(blocks, 1, 5)
    cache.save(blocks)
    in_one = cache._host.chunks[0].clone()
    assert np.array_equal(cache.read_routes(blocks, 1, 5), before)
    cache._host.chunks[:] = in_one.split(7)
    assert np.array_equal(cache.read_routes(blocks, 1, 5), before)
