"""Tests of suspend and resume: what is moved and freed, and resumes with too little memory."""

from __future__ import annotations

import gc
import logging
import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.memory.block_pool import zeros
from rollout.engine.memory.host_blocks import HostMemoryError
from rollout.errors import DeadlineError, EngineStateError
from rollout.state import EngineState, FinishReason, Status
from tests.engines import (
    BLOCK,
    Room,
    assert_greedy,
    at_random,
    finish,
    gated,
    greedily,
    in_one_piece,
    make_engine,
    pass_suspended,
    steps,
    suspended,
    token_ids,
)
from tests.invariants import check_scheduler


def busy_engine(requests: int = 4, after: int = 4, max_tokens: int = 10, **options: Any) -> DynamicInferenceEngine:
    engine = make_engine("qwen3", **options)
    for seed in range(requests):
        engine.add_request(token_ids(5 + 2 * seed, seed), greedily(max_tokens))
    assert steps(engine, after) == []
    return engine


def finish_exact(engine: DynamicInferenceEngine, count: int) -> None:
    done = finish(engine)
    assert sorted(done) == [(number, 0) for number in range(count)]
    for request in done.values():
        assert_greedy("qwen3", request)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_the_device_memory_is_given_back_and_taken_again(mode: str) -> None:
    engine = busy_engine()
    whole = engine.cache.device_bytes
    assert whole == 64 * engine.cache.block_bytes
    engine.pause()
    engine.suspend(mode)
    assert engine.cache.device_bytes == 0
    assert not engine.cache.on_device
    assert engine.stats()["kv_device_bytes"] == 0
    engine.resume()
    assert engine.cache.device_bytes == whole
    engine.unpause()
    finish_exact(engine, 4)


def test_persist_moves_nothing() -> None:
    engine = busy_engine()
    before = engine.cache.layer(0)[0].data_ptr()
    engine.pause()
    move = engine.suspend("persist")
    assert (move.bytes_copied, engine.cache.host_bytes) == (0, 0)
    assert engine.resume().bytes_copied == 0
    assert engine.cache.layer(0)[0].data_ptr() == before
    engine.unpause()
    finish_exact(engine, 4)


@pytest.mark.parametrize("keep_prefix_cache", [True, False])
def test_offload_copies_the_live_blocks_and_no_other(keep_prefix_cache: bool) -> None:
    engine = make_engine("qwen3", kv_cache_blocks=200)
    engine.generate([token_ids(30, 9)], greedily(2))
    for seed in range(3):
        engine.add_request(token_ids(6, seed), greedily(10))
    steps(engine, 3)
    engine.pause()
    held, cached = engine.stats()["kv_blocks_used"], engine.stats()["kv_blocks_cached"]
    assert held == 6
    assert cached == 7, "the complete blocks"
    live = int(held + cached * keep_prefix_cache)
    assert (
        engine.suspend("offload", keep_prefix_cache=keep_prefix_cache).bytes_copied == live * engine.cache.block_bytes
    )
    assert engine.cache.host_bytes == live * engine.cache.block_bytes
    assert engine.resume().bytes_copied == live * engine.cache.block_bytes
    engine.unpause()
    done = finish(engine)
    assert all(request.finish_reason is FinishReason.LENGTH for request in done.values())
    (request,) = engine.generate([token_ids(30, 9)], greedily(2))
    assert request.num_cached_tokens == (28 if keep_prefix_cache else 0)


def test_after_offload_every_live_value_is_the_same_bit_for_bit() -> None:
    engine = busy_engine()
    blocks = engine.context.allocator.pages.live()
    before = [[part[blocks].clone() for part in engine.cache.layer(index)] for index in range(3)]
    tables = {sample.key: engine.context.scheduler.table.held(sample.row).copy() for sample in engine.context.scheduler}
    engine.pause()
    engine.suspend("offload")
    engine.resume()
    for index in range(3):
        for old, new in zip(before[index], engine.cache.layer(index), strict=True):
            assert torch.equal(old, new[blocks])
    for sample in engine.context.scheduler:
        assert np.array_equal(tables[sample.key], engine.context.scheduler.table.held(sample.row))
    engine.unpause()
    finish_exact(engine, 4)


def test_an_empty_engine_can_be_suspended_in_every_mode() -> None:
    engine = make_engine("qwen3")
    for mode in ("persist", "offload", "recompute"):
        pass_suspended(engine, mode)
    assert_greedy("qwen3", engine.generate([token_ids(5)], greedily(3))[0])


def test_the_mode_is_the_configurations_unless_the_call_says_otherwise() -> None:
    engine = busy_engine(kv_cache_management_mode="recompute")
    engine.pause()
    assert engine.suspend().tokens_given_up == 5 + 7 + 9 + 11 + 4 * 3
    engine.resume()
    engine.unpause()
    steps(engine, 1)
    engine.pause()
    assert engine.suspend("persist").tokens_given_up == 0
    engine.resume()
    with pytest.raises(ValueError, match=r"'ofload': must be None or one of 'persist', 'offload', 'recompute'"):
        engine.suspend("ofload")
    assert engine.state is EngineState.PAUSED
    engine.unpause()
    finish_exact(engine, 4)


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_a_thousand_suspends_with_live_requests_grow_nothing(mode: str) -> None:
    engine = make_engine("qwen3", kv_cache_blocks=512, block_size_tokens=16, max_tokens_per_step=1024)
    for seed in range(4):
        engine.add_request(token_ids(40 + seed, seed), at_random(200))
    device, host, resident = set(), set(), []
    for cycle in range(1, 1001):
        if cycle % 10 == 1:
            steps(engine, 1)
            assert engine.context.scheduler.num_active == 4
        pass_suspended(engine, mode)
        device.add(engine.cache.device_bytes)
        host.add(engine.cache.host_bytes)
        if cycle % 200 == 0:
            gc.collect()
            resident.append(psutil.Process().memory_info().rss)
    assert device == {512 * engine.cache.block_bytes}
    assert len(host) <= 3, "the host pool follows the most live blocks there ever were, and no count of cycles"
    assert max(host) < max(device) // 4
    # With recompute every step prefills longer prompts than the one before. A pool per cycle would be 6 GiB.
    assert resident[-1] - resident[0] < (24 if mode == "recompute" else 8) * 2**20


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_the_order_of_arrival_survives(mode: str) -> None:
    engine = make_engine("qwen3", max_requests=2, max_tokens_per_step=16)
    for seed in range(4):
        engine.add_request(token_ids(6, seed), greedily(4))
    ended = steps(engine, 2)
    engine.pause()
    engine.suspend(mode)
    for seed in range(4, 6):
        engine.add_request(token_ids(6, seed), greedily(4))
    engine.add_request(token_ids(6, 6), greedily(4), priority=1)
    engine.resume()
    queue = [sample.record.request_id for sample in engine.context.scheduler.waiting]
    assert queue == ([6, 0, 1, 2, 3, 4, 5] if mode == "recompute" else [6, 2, 3, 4, 5])
    engine.unpause()
    while engine.has_unfinished:
        ended += steps(engine, 1)
    first = {record.request_id: record[0].events for record in ended}
    assert sorted(first, key=lambda number: first[number][1].timestamp) == [0, 1, 6, 2, 3, 4, 5], "order of admission"


# --- memory that does not come back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_with_less_memory_the_pool_shrinks_and_every_request_that_fits_keeps_its_kv(mode: str) -> None:
    room = Room()
    engine = busy_engine(allocate=room.allocate)
    computed = engine.stats()["prefill_tokens_computed"]
    live = len(engine.context.allocator.pages.live())
    engine.pause()
    engine.suspend(mode)
    room.leave(20, engine)
    move = engine.resume()
    assert live <= 20 == engine.cache.num_blocks
    assert move.shrunk_by_blocks == 44
    assert move.requests_given_up == 0
    assert engine.stats()["kv_blocks_total"] == engine.cache.num_blocks
    assert engine.cache.device_bytes == engine.cache.num_blocks * engine.cache.block_bytes
    engine.unpause()
    finish_exact(engine, 4)
    if mode == "offload":
        again = engine.stats()["prefill_tokens_computed"] - engine.stats()["preemption_tokens_recomputed"]
        assert again <= computed
    pass_suspended(engine, mode)
    assert engine.cache.num_blocks == 20
    room.leave(64, engine)
    pass_suspended(engine, mode)
    assert engine.cache.num_blocks == 64, "when there is room again, it is taken again"
    assert_greedy("qwen3", engine.generate([token_ids(9)], greedily(3))[0])


def test_what_does_not_fit_any_more_is_computed_again_youngest_first() -> None:
    room = Room()
    engine = busy_engine(allocate=room.allocate)
    engine.pause()
    engine.suspend("offload")
    room.leave(8, engine)
    move = engine.resume()
    assert engine.cache.num_blocks == 8
    assert move.requests_given_up == 1
    assert move.tokens_given_up == 11 + 3
    assert [sample.key for sample in engine.context.scheduler.waiting] == [(3, 0)]
    check_scheduler(engine.context.scheduler)
    engine.unpause()
    finish_exact(engine, 4)


def test_without_room_for_the_largest_request_resume_fails_by_name_and_can_be_called_again() -> None:
    room = Room()
    engine = busy_engine(allocate=room.allocate)
    engine.pause()
    engine.suspend("offload")
    room.leave(4, engine)
    before = engine.snapshot()
    with pytest.raises(EngineStateError, match=r"no device memory for 5 KV blocks .* call resume\(\) again") as caught:
        engine.resume()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert engine.state is EngineState.SUSPENDED
    assert engine.cache.device_bytes == 0
    assert [record.serialize() for record in engine.snapshot()] == [record.serialize() for record in before]
    engine.add_request(token_ids(3, 4), greedily(10))
    assert engine.abort_request(3) == 1
    room.leave(64, engine)
    move = engine.resume()
    assert move.requests_given_up == move.shrunk_by_blocks == 0
    engine.unpause()
    done = finish(engine)
    assert done.pop((3, 0)).finish_reason is FinishReason.ABORT
    assert sorted(done) == [(0, 0), (1, 0), (2, 0), (4, 0)]
    for request in done.values():
        assert_greedy("qwen3", request)


@pytest.mark.parametrize("mode", ["offload", "recompute"])
@pytest.mark.parametrize("failures", range(1, 6))
def test_a_failure_at_any_allocation_loses_nothing(mode: str, failures: int) -> None:
    room = Room()
    engine = busy_engine(allocate=room.allocate)
    engine.pause()
    engine.suspend(mode)
    left = failures

    @in_one_piece
    def failing(numel: int, dtype: torch.dtype, where: torch.device) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("taken")
        return zeros([numel], dtype, where)[0]

    engine.cache._allocate = failing
    try:
        engine.resume()
    except EngineStateError:
        assert engine.state is EngineState.SUSPENDED
        engine.resume()
    assert engine.state is EngineState.PAUSED
    check_scheduler(engine.context.scheduler)
    engine.unpause()
    finish_exact(engine, 4)


def test_an_allocation_that_fails_for_another_reason_is_not_taken_for_a_lack_of_memory() -> None:
    engine = busy_engine()
    with suspended(engine, "offload"):
        allocate, engine.cache._allocate = engine.cache._allocate, lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.resume()
        assert engine.state is EngineState.SUSPENDED
        engine.cache._allocate = allocate
    finish_exact(engine, 4)


@pytest.mark.parametrize("blocks", [64, 20])
def test_memory_that_runs_out_while_blocks_are_copied_back_costs_a_recompute_and_no_request(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room()
    engine = busy_engine(allocate=room.allocate)
    engine.pause()
    engine.suspend("offload")
    room.leave(blocks, engine)

    def failing(*_: Any) -> int:
        raise torch.OutOfMemoryError("no room for the copy on its way")

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "restore", failing)
        move = engine.resume()
    assert move.requests_given_up == 4
    assert move.tokens_given_up == 5 + 7 + 9 + 11 + 4 * 3
    check_scheduler(engine.context.scheduler)
    engine.unpause()
    finish_exact(engine, 4)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HostMemoryError("1.00 GiB of pinned host memory (out of memory)"), "no 1.00 GiB of pinned host memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nto"), "no device memory for the copies on their way (CUDA"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), "no device memory for the copies"),
    ],
)
def test_without_memory_to_offload_the_kv_is_computed_again_and_a_warning_says_so_once(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = busy_engine()

    def failing(*_: Any) -> None:
        raise error

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            steps(engine, 1)
            engine.pause()
            with monkeypatch.context() as patch:
                patch.setattr(engine.cache._host, "grow", failing)
                move = engine.suspend("offload")
            assert (move.bytes_copied, move.tokens_given_up > 0, move.offload_failed) == (0, True, True)
            assert not engine.cache.on_device
            engine.resume()
            engine.unpause()
    (warning,) = caplog.messages
    assert "cannot be offloaded" in warning
    assert said in warning
    assert "\n" not in warning
    steps(engine, 1)
    pass_suspended(engine, "offload")
    assert engine.cache.host_bytes > 0, "it is tried again every time"
    finish_exact(engine, 4)


def test_an_offload_begins_when_the_device_has_done_its_work_and_another_error_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, order = busy_engine(), list[str]()
    runner = engine.controller.runner

    def failing(*_: Any) -> int:
        order.append("save")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner.order, "settle", lambda: order.append("settle"))
    engine.pause()
    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "save", failing)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            engine.suspend("offload")
    assert order == ["settle", "save"], "steps may have run on another stream than the caller's"
    assert engine.state is EngineState.PAUSED
    engine.unpause()
    finish_exact(engine, 4)


def test_a_block_that_held_nan_is_not_zeroed_under_its_new_owner_after_a_resume() -> None:
    room = Room()
    engine = busy_engine(allocate=room.allocate)
    engine.add_request(token_ids(20, 8), greedily(4))
    steps(engine, 1)
    engine.context.scheduler.leave(engine.context.scheduler.active()[-1], FinishReason.ERROR, "as if it had met NaN")
    engine.parts.ledger.live.pop(4)
    assert engine.context.scheduler.allocator.pages.poisoned
    with suspended(engine, "offload"):
        room.leave(20, engine)
    finish_exact(engine, 4)


# --- lifecycle --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [None, 1])
@pytest.mark.parametrize("state", ["running", "paused", "persist", "offload", "recompute"])
def test_abort_frees_the_blocks_before_it_returns_in_any_state(state: str, sample: int | None) -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(6, 1), at_random(8, n=3))
    engine.add_request(token_ids(6, 2), greedily(8))
    steps(engine, 3)
    if state != "running":
        engine.pause()
    if state in ("persist", "offload", "recompute"):
        engine.suspend(state, keep_prefix_cache=False)
    before = engine.stats()["kv_blocks_used"]
    assert engine.abort_request(0, sample) == (3 if sample is None else 1)
    assert engine.abort_request(0, sample) == 0
    freed = before - engine.stats()["kv_blocks_used"]
    assert freed == (0 if state == "recompute" else 4 if sample is None else 1)
    check_scheduler(engine.context.scheduler)
    if state in ("persist", "offload", "recompute"):
        engine.resume()
    if state != "running":
        engine.unpause()
    done = finish(engine)
    for (number, index), request in done.items():
        gone = number == 0 and sample in (None, index)
        assert (request.finish_reason is FinishReason.ABORT) == gone
        assert request.failed() == gone
        if gone:
            assert request.error == "RequestAbortedError: request 0 was aborted"
            assert len(request.generated_tokens) == 3
    assert_greedy("qwen3", done[1, 0])


def test_abort_reaches_waiting_requests_and_samples_that_have_not_forked() -> None:
    engine = make_engine("qwen3", max_tokens_per_step=4, max_requests=4)
    engine.add_request(token_ids(10, 1), at_random(4, n=3))
    engine.add_request(token_ids(10, 2), greedily(4))
    engine.add_request(token_ids(10, 3), at_random(4, n=3))
    steps(engine, 1)
    assert engine.abort_request(0, 0) == 1, "the leader, in the middle of its prompt"
    assert engine.abort_request(2, 1) == 1
    assert engine.abort_request(2, 0) == 1
    check_scheduler(engine.context.scheduler)
    done = finish(engine)
    aborted = {key for key, request in done.items() if request.finish_reason is FinishReason.ABORT}
    assert aborted == {(0, 0), (2, 0), (2, 1)}
    assert_greedy("qwen3", done[1, 0])
    alone = make_engine("qwen3")
    alone.add_request(token_ids(10, 1), at_random(4, n=3))
    alone.add_request(token_ids(10, 3), at_random(4, n=3), request_id=2)
    for key, request in finish(alone).items():
        assert key in aborted or done[key].generated_tokens == request.generated_tokens


def test_pause_takes_effect_at_the_next_step_boundary_and_requests_keep_their_kv() -> None:
    engine = busy_engine()
    computed = engine.stats()["prefill_tokens_computed"]
    engine.pause()
    assert {record[-1].status for record in engine.snapshot()} == {Status.ACTIVE_BUT_NOT_GENERATING_TOKENS}
    with pytest.raises(EngineStateError, match=r"step\(\) while paused: call unpause\(\) first"):
        engine.step()
    engine.unpause()
    assert {record[-1].status for record in engine.snapshot()} == {Status.ACTIVE_AND_GENERATING_TOKENS}
    finish_exact(engine, 4)
    assert engine.stats()["prefill_tokens_computed"] == computed


@pytest.mark.parametrize(
    ("before", "call", "message"),
    [
        ([], "suspend", r"suspend\(\) while running.*pause\(\) first"),
        ([], "stop", r"stop\(\) while running.*pause\(\) first"),
        (["pause", "suspend"], "unpause", r"unpause\(\) while suspended.*resume\(\) first"),
        (["pause", "suspend"], "step", r"step\(\) while suspended: call resume\(\) and unpause\(\) first"),
        *((["pause", "stop"], call, "stopped.*build another")
          for call in ("pause", "unpause", "suspend", "resume", "step", "weights_updated")),
        ([], "unpause", None), ([], "resume", None), (["pause"], "pause", None), (["pause"], "resume", None),
        (["pause", "suspend"], "pause", None), (["pause", "suspend"], "suspend", None), (["pause", "stop"], "stop", None),
    ],
)  # fmt: skip
def test_a_call_that_the_state_forbids_names_the_cure_and_one_that_asks_for_what_is_so_does_nothing(
    before: list[str], call: str, message: str | None
) -> None:
    engine = make_engine("qwen3")
    for name in before:
        getattr(engine, name)()
    state = engine.state
    with pytest.raises(EngineStateError, match=message) if message else nullcontext():
        getattr(engine, call)()
    assert engine.state is state


def test_requests_are_accepted_in_every_state_but_stopped_and_run_in_order() -> None:
    engine = make_engine("qwen3", max_requests=1, max_tokens_per_step=16)
    engine.add_request(token_ids(5, 0), greedily(3))
    engine.pause()
    engine.add_request(token_ids(5, 1), greedily(3))
    engine.suspend("offload")
    engine.add_request(token_ids(5, 2), greedily(3))
    engine.resume()
    engine.unpause()
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
    assert [record.request_id for record in ended] == [0, 1, 2]
    engine.pause()
    engine.stop()
    with pytest.raises(EngineStateError, match="stopped: it accepts no requests"):
        engine.add_request(token_ids(5, 3), greedily(3))


@pytest.mark.parametrize("suspended", [False, True])
def test_stop_ends_every_request_and_gives_the_memory_back(suspended: bool) -> None:
    engine = busy_engine(max_requests=3)
    engine.pause()
    if suspended:
        engine.suspend("offload")
    ended = engine.stop()
    assert sorted(record.request_id for record in ended) == [0, 1, 2, 3]
    for record in ended:
        assert record[-1].failed()
        assert record[-1].error == "RequestAbortedError: the engine was stopped"
    assert engine.cache.device_bytes == 0
    assert not engine.has_unfinished
    assert engine.stop() == []


def test_wait_until_returns_when_another_thread_gets_there() -> None:
    engine = make_engine("qwen3")
    waiter = threading.Thread(target=engine.wait_until, args=(EngineState.SUSPENDED, 20.0))
    waiter.start()
    engine.pause()
    engine.suspend("offload")
    waiter.join(120.0)
    assert not waiter.is_alive()
    engine.wait_until(EngineState.SUSPENDED, 0.0)


def test_wait_until_ends_at_its_deadline_and_refuses_a_state_that_does_not_last() -> None:
    engine = make_engine("qwen3", control_timeout_s=0.01)
    with pytest.raises(DeadlineError, match=r"running, not paused, after 0\.01 s"):
        engine.wait_until(EngineState.PAUSED)
    with pytest.raises(DeadlineError, match=r"after 0\.02 s"):
        engine.wait_until(EngineState.PAUSED, 0.02)
    with pytest.raises(ValueError, match=r"wait_until\(pausing\).*paused, running, stopped, suspended"):
        engine.wait_until(EngineState.PAUSING)


def test_a_pause_from_another_thread_waits_for_the_step_and_no_longer() -> None:
    """With a plain lock, the loop took it again before the waiting thread woke up, step after step."""
    engine = busy_engine(max_tokens=400, kv_cache_blocks=440)
    failures: list[BaseException] = []
    stepped = threading.Event()

    def run() -> None:
        try:
            while engine.has_unfinished:
                engine.step()
                stepped.set()
        except EngineStateError as exc:
            failures.append(exc)

    runner = threading.Thread(target=run)
    with gated(engine, 400):
        runner.start()
        assert stepped.wait(120.0)
        engine.pause()
        runner.join(120.0)
    assert [str(failure) for failure in failures] == ["step() while paused: call unpause() first"]
    assert engine.has_unfinished
    check_scheduler(engine.context.scheduler)
    engine.unpause()
    finish_exact(engine, 4)


def test_blocks_of_a_shrunk_pool_hold_the_prefix_cache_they_held() -> None:
    room = Room()
    engine = make_engine("qwen3", allocate=room.allocate)
    prompt = token_ids(4 * BLOCK, 3)
    engine.generate([token_ids(20, 1), prompt], greedily(1))
    with suspended(engine, "offload"):
        room.leave(20, engine)
    (request,) = engine.generate([prompt], greedily(5))
    assert request.num_cached_tokens == 4 * BLOCK - 1
    assert_greedy("qwen3", request)
