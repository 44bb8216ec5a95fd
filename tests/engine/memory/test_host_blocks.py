"""Tests of blocks on the host: equal bytes under every order that device queues permit, growth, memory that is not there.

The queues here put work off and then do it in a random order among those that their waits permit: a wait that is missing
shows as a wrong byte for some seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.memory import block_pool, host_blocks
from rollout.engine.memory.host_blocks import HostBlocks, HostMemoryError
from rollout.engine.memory.kv_cache import KVCache, LayerShape, RouteShape
from rollout.engine.memory.streams import HostStream
from tests.engines import assert_greedy, finish, greedily, make_engine, steps, token_ids

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

WIDTHS = [3, 1, 5]


class Queues:
    """The lanes of one pretended device."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.compute, self.copies = Lane(self), Lane(self)
        self.staged: list[int] = []

    def advance_until(self, done: Callable[[], bool]) -> None:
        while not done():
            ready = [lane for lane in (self.compute, self.copies) if lane.can_go_on]
            assert ready, "each lane waits for the other"
            self._random.choice(ready).go_on()

    def stage(self, numel: int) -> torch.Tensor:
        self.staged.append(numel)
        return torch.full((numel,), torch.nan)

    def blocks(self, slots: int, widths: list[int] = WIDTHS, limit: int = 10**6, chunk: int = 10**6) -> HostBlocks:
        """Slots in chunks of so many, copied to by these queues."""
        made = HostBlocks(widths, torch.float32, pinned=False, stage=self.stage, copies=self.copies, limit=limit)
        made._chunks = list(torch.full((slots, sum(widths)), torch.nan).split(chunk)) if slots else []
        return made


class Lane:
    """A queue that does nothing until the host waits for it."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._todo: list[Callable[[], object] | tuple[Lane, int]] = []
        self._reached = 0

    def run(self, work: Callable[[], object]) -> None:
        self._todo.append(work)

    def mark(self) -> tuple[Lane, int]:
        return self, len(self._todo)

    def after(self, mark: tuple[Lane, int]) -> None:
        self._todo.append(mark)

    def finish(self) -> None:
        self._queues.advance_until(lambda: self._reached == len(self._todo))

    @property
    def can_go_on(self) -> bool:
        if self._reached == len(self._todo):
            return False
        item = self._todo[self._reached]
        return callable(item) or item[0]._reached >= item[1]

    def go_on(self) -> None:
        item = self._todo[self._reached]
        if callable(item):
            item()
        self._reached += 1


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
    streams=st.booleans(),
)
def test_a_pool_that_is_copied_out_and_in_has_the_same_bytes(widths, rows, limit, seed, kept, chunk, streams):
    queues, numbers = Queues(seed), np.random.default_rng(seed)
    parts = pool(widths, 16)
    before = [part.clone() for part in parts]
    blocks = np.sort(numbers.permutation(16)[:rows])
    host = queues.blocks(rows, widths, limit, chunk)
    compute = queues.compute
    if not streams:
        host._copies = compute = HostStream()
    host.offload(compute, parts, torch.from_numpy(blocks), range(rows))
    host.finish()
    for part, old in enumerate(before):
        assert torch.equal(host.read(range(rows), part), old[blocks])

    slots = np.flatnonzero(numbers.random(rows) <= kept)
    targets = numbers.permutation(20)[: len(slots)]
    fresh = [torch.full((20, width), torch.inf) for width in widths]
    host.load(compute, fresh, torch.from_numpy(targets), slots)
    queues.compute.finish()
    for part, old in zip(fresh, before, strict=True):
        expected = torch.full_like(part, torch.inf)
        expected[targets] = old[blocks[slots]]
        assert torch.equal(part, expected)
    assert max(queues.staged, default=0) <= max(limit // 4, sum(widths))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), limit=st.integers(1, 400), chunk=st.integers(1, 6))
def test_offloads_and_loads_of_single_blocks_are_exact_in_every_order_that_the_queues_of_a_device_permit(
    seed: int, limit: int, chunk: int
) -> None:
    queues, numbers = Queues(seed), random.Random(seed)
    parts, tier = pool(WIDTHS, 8), queues.blocks(6, limit=limit, chunk=chunk)
    device, host = [torch.cat([part[block] for part in parts]) for block in range(8)], [None] * 6
    for _ in range(6):
        blocks, slots = numbers.sample(range(8), 3), numbers.sample(range(6), 3)
        if numbers.random() < 0.5 or any(host[slot] is None for slot in slots):
            tier.offload(queues.compute, parts, torch.tensor(blocks), slots)
            for block, slot in zip(blocks, slots, strict=True):
                host[slot] = device[block]
            # The next step writes to them.
            queues.compute.run(
                lambda blocks=blocks: [part.index_fill_(0, torch.tensor(blocks), -1.0) for part in parts]
            )
            for block in blocks:
                device[block] = torch.full((9,), -1.0)
        else:
            tier.load(queues.compute, parts, torch.tensor(blocks), slots)
            for block, slot in zip(blocks, slots, strict=True):
                device[block] = host[slot]
    tier.release(queues.compute)
    queues.compute.finish()
    for block, wanted in enumerate(device):
        assert torch.equal(torch.cat([part[block] for part in parts]), wanted)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), limit=st.integers(36, 200), tier_limit=st.integers(36, 120))
def test_a_suspend_while_copies_of_the_host_tier_and_of_the_last_resume_are_in_flight_loses_no_byte(
    seed: int, limit: int, tier_limit: int
) -> None:
    queues, numbers = Queues(seed), random.Random(seed)
    tier, saved = queues.blocks(4, limit=tier_limit), queues.blocks(8, limit=limit)
    whole = torch.arange(8 * 9, dtype=torch.float32).view(8, 9)
    parts = [part.clone() for part in whole.split(WIDTHS, 1)]
    for _ in range(3):
        evicted, slots = numbers.sample(range(8), 2), numbers.sample(range(4), 2)
        tier.offload(queues.compute, parts, torch.tensor(evicted), slots)
        saved.offload(queues.compute, parts, torch.arange(8), range(8))
        saved.finish()
        # The host waits for the stream of the steps alone, as it does when a pool is dropped.
        tier.release(queues.compute)
        queues.compute.finish()
        for part in parts:
            part.fill_(torch.nan)
        parts = [torch.full_like(part, torch.inf) for part in parts]
        # These copies are still in flight when the next suspend begins.
        saved.load(queues.compute, parts, torch.arange(8), range(8))
        tier.load(queues.compute, parts, torch.tensor(evicted[:1]), slots[1:])
        for row in evicted:
            # One came back by the tier's slot of the other, which no suspend has moved.
            queues.compute.run(partial(check_row, parts, row, whole[evicted[1]]))
        queues.compute.run(
            lambda held=parts: [part.copy_(own) for part, own in zip(held, whole.split(WIDTHS, 1), strict=True)]
        )
    queues.compute.finish()
    queues.copies.finish()
    assert torch.equal(torch.cat(parts, 1), whole)


def check_row(parts: list[torch.Tensor], row: int, expected: torch.Tensor) -> None:
    assert torch.equal(torch.cat([part[row] for part in parts]), expected)


@pytest.mark.parametrize(("room", "size"), [(64, 32), (63, 16), (10, 8), (7, None)])
def test_with_less_room_the_staging_buffer_is_smaller(room: int, size: int | None) -> None:
    queues, parts = Queues(0), pool([5, 3], 8)
    host = queues.blocks(8, [5, 3], limit=4 * 8 * 4)
    stage = queues.stage

    def scarce(numel: int) -> torch.Tensor:
        if 2 * numel > room and numel > (room if room < 16 else room // 2):
            raise torch.OutOfMemoryError(f"{numel} elements and room for {room}")
        return stage(numel)

    host._stage = scarce
    if size is None:
        with pytest.raises(torch.OutOfMemoryError):
            host.offload(queues.compute, parts, torch.arange(8), range(8))
        return
    host.offload(queues.compute, parts, torch.arange(8), range(8))
    host.finish()
    assert max(queues.staged) == size
    assert torch.equal(host.read(range(8), 1), parts[1])


@pytest.mark.parametrize("seed", range(8))
def test_staging_memory_is_not_written_to_while_its_last_owner_still_reads_it(seed: int) -> None:
    queues = Queues(seed)
    memory, seen = torch.full((8,), 7.0), torch.zeros(8)
    queues.compute.run(lambda: seen.copy_(memory))
    host = queues.blocks(8, [1])
    host._stage = lambda numel: memory[:numel]
    host.load(queues.compute, pool([1], 8), torch.arange(8), range(8))
    queues.compute.finish()
    assert (seen == 7).all()


@pytest.mark.parametrize("direction", ["offload", "load"])
def test_when_a_copy_fails_the_host_waits_for_those_before_it(direction: str) -> None:
    queues = Queues(0)
    run, left = queues.copies.run, 2

    def failing(work: Callable[[], object]) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("the bus is gone")
        run(work)

    queues.copies.run = failing
    move = getattr(queues.blocks(8, [4], limit=16), direction)
    with pytest.raises(RuntimeError, match="the bus is gone"):
        move(queues.compute, pool([4], 8), torch.arange(8), range(8))
    assert queues.copies._reached == len(queues.copies._todo), "its staging buffer may be given to somebody else now"


# --- an engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_requests_go_on_after_a_suspend_as_if_nothing_had_been(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool moves through pretended queues, and a request that was aborted meanwhile does not come back."""
    engine, queues = make_engine("qwen3"), Queues(seed)
    cache = engine.cache
    cache._host._copies, cache._host._stage, cache._host._rows = queues.copies, queues.stage, 2
    monkeypatch.setattr(block_pool, "current_stream", lambda device: queues.compute)
    load = cache._host.load
    # The model of this engine runs at once, and not behind what is queued.
    monkeypatch.setattr(cache._host, "load", lambda *given: (load(*given), queues.compute.finish()))
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
    return HostBlocks([width], torch.float32, pinned=True, stage=torch.empty, copies=HostStream())


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
