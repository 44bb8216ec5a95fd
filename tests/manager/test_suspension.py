"""The manager's own holds beside the coordinator's: each is ended by its own counterpart only."""

from __future__ import annotations

import pytest

from rollout.engine.parts.holds import COORDINATOR, HoldLevel
from rollout.errors import EngineStateError
from rollout.manager.manager import RolloutManager
from rollout.state import EngineState
from tests.engines import shared_model
from tests.rollouts import make_rollout


@pytest.fixture
def rollout() -> RolloutManager:
    return make_rollout(shared_model("qwen3"))


@pytest.mark.parametrize(
    ("stop", "go"), [("pause", "unpause"), ("suspend", "resume"), ("before_optimizer_step", "resume")]
)
@pytest.mark.parametrize("coordinator_first", [False, True])
def test_what_both_have_stopped_runs_when_both_have_let_it_run(
    rollout: RolloutManager, stop: str, go: str, coordinator_first: bool
) -> None:
    holds = rollout.engine.holds
    getattr(rollout, stop)()
    holds.hold(COORDINATOR, HoldLevel.PAUSED)
    if coordinator_first:
        holds.release(COORDINATOR)
        assert rollout.engine.state is not EngineState.RUNNING
        getattr(rollout, go)()
    else:
        getattr(rollout, go)()
        assert rollout.engine.state is EngineState.PAUSED
        holds.release(COORDINATOR)
    assert rollout.engine.state.value == "running"
    assert len(rollout.generate([[5, 6]])) == 1


def test_a_pause_of_the_manager_is_refused_by_name_though_the_coordinator_holds_the_engine_too(
    rollout: RolloutManager,
) -> None:
    rollout.engine.holds.hold(COORDINATOR, HoldLevel.PAUSED)
    rollout.pause()
    with pytest.raises(EngineStateError, match=r"manager\.unpause\(\)"):
        rollout.generate([[5, 6]])
