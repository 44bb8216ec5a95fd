"""Tests of blocks on the host: equal bytes, with and without a staging buffer; growth; memory that is not there."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.memory import host_blocks
from rollout.engine.memory.host_blocks import HostBlocks, HostMemoryError
from rollout.engine.memory.kv_cache import KVCache, LayerShape, RouteShape
from tests.engines import assert_greedy, finish, greedily, make_engine, steps, token_ids

WIDTHS = [3, 1, 5]


def host_of(
    slots: int, widths: list[int], *, staged: bool, limit: int = 10**6, chunk: int = 10**6
) -> tuple[HostBlocks, list[int]]:
    """Slots in chunks of so many, and the sizes of the staging buffers that they ask for."""
    sizes: list[int] = []

    def stage(numel: int) -> torch.Tensor:
        sizes.append(numel)
        return torch.full((numel,), torch.nan)

    host = HostBlocks(widths, torch.float32, pinned=False, stage=stage if staged else None, limit=limit)
    host._chunks = list(torch.full((slots, sum(widths)), torch.nan).split(chunk)) if slots else []
    return host, sizes


def pool(widths: list[int], blocks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(blocks, width, generator=generator) for width in widths]


# --- copies -----------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    rows=st.integers(0, 12),
    limit=st.integers(1, 240),
    seed=st.integers(0, 2**16),
    kept=st.sampled_from([0.0, 0.5, 1.0]),
    chunk=st.integers(1, 13),
    staged=st.booleans(),
)
def test_a_pool_that_is_copied_out_and_in_has_the_same_bytes(widths, rows, limit, seed, kept, chunk, staged):
    numbers = np.random.default_rng(seed)
    parts = pool(widths, 16)
    blocks = np.sort(numbers.permutation(16)[:rows])
    host, sizes = host_of(rows, widths, staged=staged, limit=limit, chunk=chunk)
    host.offload(parts, torch.from_numpy(blocks), range(rows))
    for part, old in enumerate(parts):
        assert torch.equal(host.read(range(rows), part), old[blocks])

    slots = np.flatnonzero(numbers.random(rows) <= kept)
    targets = numbers.permutation(20)[: len(slots)]
    fresh = [torch.full((20, width), torch.inf) for width in widths]
    host.load(fresh, torch.from_numpy(targets), slots)
    for part, old in zip(fresh, parts, strict=True):
        expected = torch.full_like(part, torch.inf)
        expected[targets] = old[blocks[slots]]
        assert torch.equal(part, expected)
    assert max(sizes, default=0) <= max(limit // 4, sum(widths))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), limit=st.integers(1, 400), chunk=st.integers(1, 6), staged=st.booleans())
def test_single_blocks_in_any_slots_keep_their_bytes(seed: int, limit: int, chunk: int, staged: bool) -> None:
    numbers = random.Random(seed)
    parts, (tier, _) = pool(WIDTHS, 8), host_of(6, WIDTHS, staged=staged, limit=limit, chunk=chunk)
    device, host = [torch.cat([part[block] for part in parts]) for block in range(8)], [None] * 6
    for _ in range(6):
        blocks, slots = numbers.sample(range(8), 3), numbers.sample(range(6), 3)
        offloads = numbers.random() < 0.5 or any(host[slot] is None for slot in slots)
        (tier.offload if offloads else tier.load)(parts, torch.tensor(blocks), slots)
        for block, slot in zip(blocks, slots, strict=True):
            if offloads:
                host[slot] = device[block]
            else:
                device[block] = host[slot]
    for block, wanted in enumerate(device):
        assert torch.equal(torch.cat([part[block] for part in parts]), wanted)


@pytest.mark.parametrize(("room", "size"), [(64, 32), (63, 16), (10, 8), (7, None)])
def test_with_less_room_the_staging_buffer_is_smaller(room: int, size: int | None) -> None:
    parts, (host, sizes) = pool([5, 3], 8), host_of(8, [5, 3], staged=True, limit=4 * 8 * 4)
    stage = host._stage

    def scarce(numel: int) -> torch.Tensor:
        if 2 * numel > room and numel > (room if room < 16 else room // 2):
            raise torch.OutOfMemoryError(f"{numel} elements and room for {room}")
        return stage(numel)

    host._stage = scarce
    if size is None:
        with pytest.raises(torch.OutOfMemoryError):
            host.offload(parts, torch.arange(8), range(8))
        return
    host.offload(parts, torch.arange(8), range(8))
    assert max(sizes) == size
    assert torch.equal(host.read(range(8), 1), parts[1])


# --- an engine --------------------------------------------------------------------------------------------------------


def test_requests_go_on_after_a_suspend_as_if_nothing_had_been() -> None:
    """The pool moves through a staging buffer, and a request that was aborted meanwhile does not come back."""
    engine = make_engine("qwen3")
    cache = engine.cache
    cache._host._stage, cache._host._rows = torch.empty, 2
    for number in range(4):
        engine.add_request(token_ids(5 + 2 * number, number), greedily(10))
    assert steps(engine, 4) == []
    for aborted in (None, 1):
        live = len(engine.context.allocator.pages.live())
        engine.pause()
        assert engine.suspend("offload").bytes_copied == live * cache.block_bytes
        assert cache.device_bytes == 0
        if aborted is not None:
            engine.abort_request(aborted)
            live = len(engine.context.allocator.pages.live())
        assert engine.resume().bytes_copied == live * cache.block_bytes
        engine.unpause()
    done = finish(engine)
    done.pop((1, 0), None)
    assert len(done) == 3
    for request in done.values():
        assert_greedy("qwen3", request)


# --- growth -----------------------------------------------------------------------------------------------------------


class PinnedMemory:
    """`torch.empty` of a host with so many elements of pinned memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int = 10**9) -> None:
        self.room = room
        self.asked: list[int] = []
        self._empty = torch.empty
        monkeypatch.setattr(host_blocks, "CHUNK_BYTES", 4 * 64)
        monkeypatch.setattr(torch, "empty", self.empty)

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        if pin_memory:
            self.asked.append(int(np.prod(shape[0])))
            if sum(self.asked) > self.room:
                raise RuntimeError("CUDA error: out of memory")
        return self._empty(*shape, **options)


def pinned(width: int = 1) -> HostBlocks:
    return HostBlocks([width], torch.float32, pinned=True, stage=torch.empty)


def test_pinned_memory_grows_by_chunks_and_none_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, host = PinnedMemory(monkeypatch), pinned()
    host.grow(20, 1000)
    assert memory.asked == [32], "powers of two, which torch does not round"
    first = host._chunks[0]
    for slots in (200, 10, 250):
        host.grow(slots, 1000)
    assert memory.asked == [32, 64, 64, 64, 32]
    assert host._chunks[0] is first
    assert host.nbytes == 4 * 256
    wide = pinned(24)
    wide.grow(5, 5)
    assert memory.asked[5:] == [48, 48, 24], "as many blocks as fit into a chunk, and none across two"


def test_without_pinned_memory_what_there_was_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, host = PinnedMemory(monkeypatch, room=3 * 64), pinned()
    host.grow(2 * 64, 1000)
    with pytest.raises(HostMemoryError, match=r"pinned host memory \(CUDA error: out of memory\)"):
        host.grow(8 * 64, 1000)
    kept = host.num_slots
    assert kept >= 2 * 64
    memory.asked = [kept]
    host.grow(2 * 64, 10**6)
    assert host.num_slots == kept


def test_routes_are_read_from_the_host_while_the_pool_is_away() -> None:
    cache = KVCache([LayerShape(1, 4, 4)], 8, 2, torch.float32, torch.device("cpu"), routes=RouteShape(3, 2, 8))
    blocks = np.array([1, 4, 6], np.int32)
    experts = torch.arange(8 * 2 * 2).remainder(8).view(16, 2)
    for layer in range(3):
        cache.write_routes(torch.arange(16), layer, experts)
    before = cache.read_routes(blocks, 1, 5)
    cache.save(blocks)
    assert np.array_equal(cache.read_routes(blocks, 1, 5), before)
