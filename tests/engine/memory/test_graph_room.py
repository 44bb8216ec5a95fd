"""Tests of the room that a KV pool leaves to CUDA graphs, on a pretended device whose memory the trainer takes too."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.graphs import cuda_graphs
from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.memory.arena import Arena
from tests.engine.graphs.recorded_graphs import Plain, Recorder
from tests.engine.memory.test_arena import BLOCKS, PAGE, CachingAllocator, Driver
from tests.engines import assert_greedy, finish, greedily, make_engine, steps, suspended, token_ids

GRAPH = 30 * PAGE
"""The bytes of the first capture, whose memory the others use; each of these takes a page more."""
SIZES = 4
"""The number of graph sizes for steps of up to 8 rows."""


class Capturing(Recorder):
    """Captures take memory of a pretended device, and give it back when they are forgotten."""

    def __init__(self, allocator: CachingAllocator) -> None:
        super().__init__()
        self._allocator = allocator
        self._held: list[tuple[list[int], int]] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        size = PAGE if self._held else GRAPH
        self._held.append((self._allocator.take(size), size))
        self.graph_bytes += size
        return super().capture(work)

    def forget(self) -> None:
        super().forget()
        for segment, size in self._held:
            segment[1] -= size
        self._held.clear()
        self._allocator.empty()
        self.graph_bytes = 0


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "GRAPH_BYTES", PAGE)
    monkeypatch.setattr(cuda_graphs, "LEAST_LACKING", GRAPH)


def on(driver: Driver, allocator: CachingAllocator) -> tuple[DynamicInferenceEngine, Capturing]:
    arena = Arena(driver)
    driver.reclaim = allocator.empty  # type: ignore[method-assign]
    engine = make_engine("qwen3", allocate=arena.allocate, kv_cache_blocks=BLOCKS, fused_forward=False)
    engine.cache._release = arena.release
    runner, recorder = engine.controller.runner, Capturing(allocator)
    runner.graphs = GraphedDecode(runner.model, runner.layout, engine.cache, 8, recorder, Plain(engine.cache))
    # Torch counts the pool of graphs as free, although nothing else can have it.
    engine.context._spare = lambda: driver.total - driver.used + recorder.graph_bytes
    return engine, recorder


def generate(engine: DynamicInferenceEngine) -> None:
    for seed in range(3):
        engine.add_request(token_ids(5 + seed, seed), greedily(6))
    for request in finish(engine).values():
        assert_greedy("qwen3", request)


def suspend_while(engine: DynamicInferenceEngine, take: Callable[[], object]) -> None:
    with suspended(engine, "offload"):
        take()


@pytest.mark.parametrize("counted", [True, False])
def test_a_resume_leaves_the_room_that_graphs_have_had_to_those_that_are_captured_again(
    counted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(2**30)
    allocator = CachingAllocator(driver)
    engine, recorder = on(driver, allocator)
    whole = engine.cache.device_bytes
    generate(engine)
    assert recorder.captures == SIZES
    if not counted:
        engine.context.to_come = lambda: recorder.graph_bytes
    # Adam's states are born, and leave the pool and half a graph.
    engine.controller.runner.release_workspace(graphs=True)
    with caplog.at_level(logging.WARNING):
        suspend_while(engine, lambda: allocator.take(driver.total - driver.used - whole - GRAPH // 2))
        generate(engine)
    assert (recorder.captures == 2 * SIZES) == counted
    assert ("no memory to capture" in caplog.text) != counted
    assert (engine.cache.num_blocks < BLOCKS) == counted


def test_after_a_capture_without_memory_the_pool_leaves_it_at_the_next_resume(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(2**30)
    allocator = CachingAllocator(driver)
    engine, recorder = on(driver, allocator)
    allocator.take(driver.total - driver.used - GRAPH // 2)
    with caplog.at_level(logging.WARNING):
        generate(engine)
    assert recorder.captures == 0
    assert (
        "no memory to capture decode steps of 1, 2, 4, 8 rows until the next suspend, after which the KV pool leaves"
        in (caplog.text)
    )
    suspend_while(engine, lambda: None)
    assert engine.cache.num_blocks < BLOCKS
    generate(engine)
    assert recorder.captures == SIZES
    assert engine.context._spare() >= engine.context.headroom + engine.context.to_come()


def test_a_model_that_is_not_captured_needs_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(2**30)
    engine, _ = on(driver, CachingAllocator(driver))
    graphs = engine.controller.runner.graphs
    assert graphs is not None
    steps(engine, 1)
    assert engine.context.to_come() > 0
    monkeypatch.setattr(graphs, "_given_up", "of the test")
    assert engine.context.to_come() == 0
