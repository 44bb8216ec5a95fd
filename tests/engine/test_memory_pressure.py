"""Tests of device memory that runs out: in a step, at construction, at a resume. No request fails of it that could go on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward.trial_forwards import peak_bytes, run_prefill
from rollout.engine.parts.context import DynamicInferenceContext
from rollout.errors import EngineDeadError, EngineStateError
from rollout.state import EngineState
from tests.engines import assert_greedy, finish, greedily, in_one_piece, make_engine, steps, suspended, token_ids
from tests.interpreter import on_a_gpu
from tests.invariants import check_scheduler
from tests.models import make_model


class Device:
    """A device of so many bytes, of which the pool takes its size and every forward what `forward` says."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.forward = 0
        self.pool = 0
        self.others = 0

    @in_one_piece
    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if numel * dtype.itemsize + self.others > self.total:
            raise torch.OutOfMemoryError("no room for the pool")
        self.pool = numel * dtype.itemsize
        return torch.zeros(numel, dtype=dtype)

    def release(self) -> None:
        self.pool = 0

    def spare(self) -> int:
        return self.total - self.pool - self.others

    def run(self, *_: Any) -> None:
        if self.forward > self.spare():
            raise torch.OutOfMemoryError("no room for the forward\nand a second line")


def on(device: Device, **options: Any) -> tuple[Any, DynamicInferenceEngine]:
    model = make_model("qwen3", num_hidden_layers=1)
    engine = make_engine(model, allocate=device.allocate, fused_forward=False, **options)
    engine.cache._release = device.release
    model.model.norm.register_forward_hook(device.run)
    return model, engine


def small_device(*, spare_blocks: int) -> Device:
    block = make_engine(make_model("qwen3", num_hidden_layers=1)).cache.block_bytes
    return Device((64 + spare_blocks) * block)


def test_a_step_without_memory_is_computed_again_in_a_smaller_pool_and_no_request_fails(caplog: Any) -> None:
    device = small_device(spare_blocks=2)
    model, engine = on(device)
    for seed in range(3):
        engine.add_request(token_ids(5 + seed, seed), greedily(6))
    ended = steps(engine, 2)
    device.forward = 20 * engine.cache.block_bytes
    with caplog.at_level(logging.WARNING):
        done = finish(engine, ended)
    assert len(done) == 3
    for request in done.values():
        assert_greedy(model, request)
    # 64 → 56 → 49 → 43 blocks leave the forward its 20.
    assert engine.cache.num_blocks == 43
    assert engine.stats()["kv_pool_shrinks"] == 3
    assert "from 64 to 56 blocks" in caplog.text
    assert "second line" not in caplog.text
    check_scheduler(engine.context.scheduler)


def test_a_step_that_no_pool_leaves_room_for_fails_its_requests_and_the_engine_goes_on() -> None:
    device = small_device(spare_blocks=2)
    model, engine = on(device)
    device.forward = 10**12
    engine.add_request(token_ids(5), greedily(6))
    (failed,) = finish(engine).values()
    assert "no room for the forward" in failed.error
    device.forward = 0
    engine.add_request(token_ids(5), greedily(6))
    (request,) = finish(engine).values()
    assert_greedy(model, request)


def test_an_engine_whose_pool_was_taken_while_it_shrank_ends_its_requests_by_name() -> None:
    device = small_device(spare_blocks=2)
    _, engine = on(device)
    device.forward = 20 * engine.cache.block_bytes
    engine.add_request(token_ids(5), greedily(6))

    def taken() -> None:
        device.pool, device.others = 0, device.total

    engine.cache._release = taken
    engine.step()
    assert engine.state is EngineState.STOPPED
    with pytest.raises(EngineDeadError, match="no device memory for 3 KV blocks"):
        engine.add_request(token_ids(5), greedily(6))


def test_what_a_step_needs_stays_free_at_construction_and_at_every_resume() -> None:
    device = small_device(spare_blocks=2)
    _, engine = on(device)
    context: DynamicInferenceContext = engine.context
    context._spare = device.spare
    context.keep_free(2 * engine.cache.block_bytes)
    assert engine.cache.num_blocks == 64
    context.keep_free(20 * engine.cache.block_bytes)
    assert 44 <= engine.cache.num_blocks <= 46
    check_scheduler(context.scheduler)
    for others, least, most in ((0, 44, 46), (10, 34, 36), (0, 44, 46)):
        with suspended(engine, "recompute"):
            device.others = others * engine.cache.block_bytes
        assert least <= engine.cache.num_blocks <= most
        assert device.spare() >= 20 * engine.cache.block_bytes


def test_a_resume_takes_what_the_largest_request_needs_before_it_gives_up() -> None:
    """The headroom is for speed and safety: with less than it, a step may still fit."""
    device = small_device(spare_blocks=2)
    model, engine = on(device)
    engine.context._spare = device.spare
    engine.context.headroom = 20 * engine.cache.block_bytes
    engine.add_request(token_ids(30), greedily(6))
    ended = steps(engine, 2)
    engine.pause()
    engine.suspend("offload")
    device.others = (66 - 15) * engine.cache.block_bytes
    engine.resume()
    assert engine.cache.num_blocks == 9
    engine.unpause()
    (request,) = finish(engine, ended).values()
    assert_greedy(model, request)
    engine.add_request(token_ids(30, 1), greedily(6))
    engine.pause()
    engine.suspend("offload")
    device.others = device.total - engine.cache.block_bytes
    with pytest.raises(EngineStateError, match="no device memory for 9 KV blocks"):
        engine.resume()


@pytest.mark.parametrize(("tokens", "longest", "blocks"), [(64, 1000, 64), (64, 20, 64), (64, 1000, 3), (1, 1, 1)])
def test_the_step_that_is_measured_is_as_large_as_the_options_and_the_pool_allow(
    tokens: int, longest: int, blocks: int
) -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    engine = make_engine(model, kv_cache_blocks=blocks, fused_forward=False)
    seen: list[tuple[int, int]] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].shape[1], 1)))
    model.model.norm.register_forward_hook(lambda module, inputs, output: seen.append((output.shape[1], 0)))
    runner = engine.controller.runner
    run_prefill(runner, tokens, longest, rows=8)
    (forward, _), (scored, _) = seen
    assert forward == {64: 64, 3: 12, 1: 1}[blocks]
    assert scored == min(8, forward)
    assert all(not part.any() for part in engine.cache.layer(0))
    assert peak_bytes(runner, tokens, longest, 8) == 0, "on a CPU nothing is measured"


@on_a_gpu
@pytest.mark.whole_device
def test_on_a_device_that_is_nearly_full_requests_end_in_a_smaller_pool() -> None:
    model = make_model("qwen3").cuda()
    engine = make_engine(model, kv_cache_blocks=None, kv_cache_memory_gb=2.0, block_size_tokens=16)
    assert engine.context.headroom > 0
    torch.cuda.empty_cache()
    rest = torch.empty(torch.cuda.mem_get_info()[0] - 2**26, dtype=torch.uint8, device="cuda")
    hook = model.model.norm.register_forward_hook(
        lambda module, inputs, output: torch.empty(2**28, dtype=torch.uint8, device="cuda") is None
    )
    engine.add_request(token_ids(9), greedily(8))
    (request,) = finish(engine).values()
    hook.remove()
    del rest
    assert request.error is None
    assert engine.stats()["kv_pool_shrinks"] >= 1
