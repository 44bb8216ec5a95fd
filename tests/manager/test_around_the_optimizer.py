"""Tests of a manager around the optimizer: suspend, phases of wall time, peaks, log-probs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollout.manager.manager import RolloutManager
from rollout.observe.metric_table import ENGINE_STATS, PHASES, Kind
from rollout.state import EngineState
from tests.engines import one_step_per_call
from tests.models import greedy
from tests.rollouts import (
    GREEDY,
    Clock,
    completions,
    group_ids,
    make_rollout,
    tokens,
)

# --- around the optimizer ---------------------------------------------------------------------------------------------


def suspended_and_raising(rollout: RolloutManager, error: type[BaseException]) -> None:
    with rollout.suspended():
        assert rollout.engine.stats()["kv_device_bytes"] == 0
        raise error


def test_an_exception_inside_suspended_leaves_a_rollout_that_goes_on(model):
    rollout = make_rollout(model)
    ids = rollout.submit([[5, 6, 7]], GREEDY)
    rollout.engine.step()
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            suspended_and_raising(rollout, error)
        assert rollout.engine.state is EngineState.SUSPENDED
    batch = rollout.generate([[9]], GREEDY, min_groups=2)
    assert group_ids([batch]) == [ids[0], ids[0] + 1]
    assert completions(batch) == [greedy(model, [5, 6, 7], 6), greedy(model, [9], 6)]


def test_a_suspend_that_fails_changes_nothing(model, monkeypatch):
    rollout = make_rollout(model)
    rollout.submit([[5, 6, 7]], GREEDY)
    rollout.engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(rollout.engine.cache, "save", lambda blocks: 1 / 0)
        with pytest.raises(ZeroDivisionError), rollout.suspended():
            pass
        assert rollout.engine.state is EngineState.RUNNING
        rollout.pause()
        with pytest.raises(ZeroDivisionError):
            rollout.suspend()
        assert rollout.engine.state is EngineState.PAUSED
    rollout.unpause()
    assert completions(rollout.generate([], min_groups=1)) == [greedy(model, [5, 6, 7], 6)]


def test_wall_time_is_shared_out_without_a_gap_and_a_hook_inside_suspended_counts_once(model):
    clock = Clock()
    rollout = make_rollout(model, clock=clock)
    one_step_per_call(rollout.engine)

    def taking(seconds: float, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            clock.now += seconds
            return call(*args, **kwargs)

        return wrapped

    engine = rollout.engine
    for name, seconds in (("step", 1), ("suspend", 10), ("resume", 100)):
        setattr(engine, name, taking(seconds, getattr(engine, name)))
    rollout.submit([[5, 6]], tokens(20))
    for _ in range(2):
        rollout.generate([[5]], tokens(4))
        clock.now += 1000
        with rollout.suspended():
            rollout.before_optimizer_step()
            clock.now += 10000
            rollout.weights_updated()
            rollout.before_optimizer_step()
    metrics = rollout.metrics()
    assert {phase: metrics[f"rollout/{phase}_s"] for phase in PHASES} == {
        "generate": 8,
        "suspend": 20,
        "train": 22000,
        "resume": 100,
    }
    assert sum(metrics[f"rollout/time_share_{phase}"] for phase in PHASES) == pytest.approx(1)
    assert (metrics["rollout/suspends"], metrics["rollout/resumes"]) == (2, 1)
    assert metrics["rollout/suspend_bytes"] > 0
    clock.now += 5
    assert rollout.metrics()["rollout/train_s"] == 5


def test_every_counter_of_the_engine_is_read_where_the_table_says(rollout):
    engine = rollout.engine
    scheduler = engine.context.scheduler
    counters = {name: metric.read for name, metric in ENGINE_STATS.items() if metric.kind is Kind.COUNTER}
    # Recurrent states and a host tier are counted where there are some: tests/engine/test_recurrent_states.py and
    # test_host_tier.py.
    counters = {name: read for name, read in counters.items() if not read.startswith(("states.", "host."))}
    allocator = scheduler.allocator
    objects = {
        "allocator": allocator,
        "allocator.index": allocator.index,
        "images": engine.controller.runner.vision.features,
    }
    rollout.metrics()
    for number, read in enumerate(counters.values(), 1):
        source, _, name = read.rpartition(".")
        if source in objects:
            setattr(objects[source], name, getattr(objects[source], name) + number)
        else:
            {"ledger": engine.inspection.counters, "queues": scheduler.counters}[source][name] += number
    metrics = rollout.metrics()
    assert {name: metrics[f"rollout/{name}"] for name in counters} == {
        name: number for number, name in enumerate(counters, 1)
    }
    assert engine.stats().keys() == ENGINE_STATS.keys()


def out_of_memory(*_: Any) -> int:
    raise torch.OutOfMemoryError("no room for the copy on its way")


def test_suspended_keeps_what_runs_and_drops_what_is_only_cached(model, monkeypatch):
    rollout = make_rollout(model)
    rollout.generate([list(range(3, 30))], GREEDY)
    assert rollout.engine.stats()["kv_blocks_cached"] > 0
    with rollout.suspended():
        assert rollout.engine.stats()["kv_blocks_cached"] == 0
    metrics = rollout.metrics()
    assert (metrics["rollout/suspend_bytes"], metrics["rollout/suspend_fallbacks"]) == (0, 0)
    rollout.generate([list(range(3, 30))], GREEDY)
    move = rollout.suspend()
    assert move.bytes_copied == rollout.metrics()["rollout/suspend_bytes"] > 0
    rollout.resume()
    rollout.metrics()
    rollout.generate([list(range(3, 30))], GREEDY)
    assert rollout.metrics()["rollout/prefill_tokens_saved"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(rollout.engine.cache, "save", out_of_memory)
        rollout.suspend()
    assert rollout.metrics()["rollout/suspend_fallbacks"] == 1
    rollout.resume()


def test_peaks_are_what_was_held_between_two_snapshots(model):
    rollout = make_rollout(model, max_requests=4)
    rollout.generate([[5 + n] * 8 for n in range(10)], tokens(9))
    metrics = rollout.metrics()
    assert metrics["rollout/requests_running_peak"] == 4
    assert metrics["rollout/requests_waiting_peak"] == 6
    assert 8 <= metrics["rollout/kv_blocks_used_peak"] <= 4 * 4
    assert (metrics["rollout/requests_running"], metrics["rollout/requests_waiting"]) == (0, 0)
    assert rollout.metrics()["rollout/requests_running_peak"] == 0


def test_the_trainers_log_probs_are_compared_on_the_tokens_of_the_loss(model):
    rollout = make_rollout(model)
    batch = rollout.generate([[5, 6], [7]], tokens(4))
    rollout.observe_logprobs(batch, batch.logprobs.double() + 0.5)
    assert rollout.metrics()["rollout/logprob_diff_max"] == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(ValueError, match=r"logprobs of shape \(2, 1\): the batch's are \(2, 6\)"):
        rollout.observe_logprobs(batch, batch.logprobs[:, :1])
