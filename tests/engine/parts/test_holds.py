"""Tests of named holds: the engine is at the highest requested level, whatever the order of holding and releasing."""

from __future__ import annotations

import random
import threading

import pytest

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.holds import BLOCK, COORDINATOR, DIRECT, PAUSE, SUSPEND, UPDATE, HoldLevel
from rollout.errors import ConfigError, EngineStateError
from rollout.state import EngineState
from tests.engines import make_engine

RUNNING, PAUSED, SUSPENDED = HoldLevel


@pytest.fixture
def engine() -> DynamicInferenceEngine:
    return make_engine("qwen3")


def test_the_engine_stands_at_the_highest_level_that_any_holder_asks_for(engine: DynamicInferenceEngine) -> None:
    rng = random.Random(5)
    asked = dict.fromkeys((COORDINATOR, UPDATE, PAUSE, SUSPEND), RUNNING)
    for _ in range(300):
        holder, level = rng.choice(list(asked)), rng.choice(list(HoldLevel))
        engine.holds.hold(holder, level, rng.choice([None, "persist", "offload", "recompute"]))
        asked[holder] = level
        assert engine.state.name == max(asked.values()).name
        assert {name for name in asked if name in engine.holds} == {name for name in asked if asked[name]}
        assert engine.holds.forbid_steps is any(asked.values())
        assert engine.holds.level(DIRECT) is RUNNING
    engine.holds.release(*asked)
    assert engine.state is EngineState.RUNNING


@pytest.mark.parametrize("own", [PAUSED, SUSPENDED])
def test_what_the_engines_own_verbs_stopped_outlives_every_hold(engine: DynamicInferenceEngine, own: HoldLevel) -> None:
    engine.pause()
    if own is SUSPENDED:
        engine.suspend()
    engine.holds.hold(COORDINATOR, PAUSED)
    with engine.holds.held(BLOCK, SUSPENDED):
        assert engine.state is EngineState.SUSPENDED
    engine.holds.release(COORDINATOR)
    assert engine.state.name == engine.holds.level(DIRECT).name == own.name
    engine.holds.release(DIRECT)
    assert engine.state is EngineState.RUNNING


def test_an_engine_set_going_by_its_own_verbs_under_a_hold_goes_on_when_that_is_released(
    engine: DynamicInferenceEngine,
) -> None:
    engine.pause()
    engine.holds.hold(UPDATE, SUSPENDED)
    engine.resume()
    engine.unpause()
    assert engine.holds.forbid_steps
    engine.holds.release(UPDATE)
    assert engine.state is EngineState.RUNNING


def test_of_overlapping_blocks_the_last_releases(engine: DynamicInferenceEngine) -> None:
    first, second = engine.holds.held(BLOCK, PAUSED), engine.holds.held(BLOCK, PAUSED)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert engine.state is EngineState.PAUSED
    second.__exit__(None, None, None)
    assert engine.state is EngineState.RUNNING
    assert BLOCK not in engine.holds


def test_a_move_that_fails_leaves_holds_and_engine_as_they_were(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.context, "suspend", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.holds.hold(UPDATE, SUSPENDED)
        assert (engine.state, UPDATE in engine.holds) == (EngineState.RUNNING, False)
        engine.holds.hold(PAUSE, PAUSED)
        with pytest.raises(ZeroDivisionError):
            engine.holds.hold(PAUSE, SUSPENDED)
        assert (engine.state, engine.holds.level(PAUSE)) == (EngineState.PAUSED, PAUSED)
    engine.holds.hold(PAUSE, SUSPENDED)
    with monkeypatch.context() as patch:
        patch.setattr(engine.context, "resume", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.holds.release(PAUSE)
        assert (engine.state, engine.holds.level(PAUSE)) == (EngineState.SUSPENDED, SUSPENDED)
    with pytest.raises(ConfigError, match="mode='disk'"):
        engine.holds.hold(UPDATE, SUSPENDED, "disk")
    engine.holds.release(PAUSE)
    assert engine.state is EngineState.RUNNING


def test_a_stopped_engine_refuses_to_be_held_and_a_block_around_it_does_nothing(engine: DynamicInferenceEngine) -> None:
    with engine.holds.held(BLOCK, PAUSED):
        engine.stop()
    for call in (lambda: engine.holds.hold(UPDATE, PAUSED), lambda: engine.holds.release(BLOCK)):
        with pytest.raises(EngineStateError, match="stopped"):
            call()
    with engine.holds.held(BLOCK, SUSPENDED):
        assert engine.state is EngineState.STOPPED


def test_holders_on_many_threads_leave_nothing_behind(engine: DynamicInferenceEngine) -> None:
    def hold(name: str) -> None:
        for _ in range(50):
            with engine.holds.held(BLOCK, PAUSED):
                engine.holds.hold(name, SUSPENDED)
                assert engine.state is EngineState.SUSPENDED
                engine.holds.release(name)

    threads = [threading.Thread(target=hold, args=(f"holder {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (engine.state, engine.holds.forbid_steps) == (EngineState.RUNNING, False)
