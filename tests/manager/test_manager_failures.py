"""Tests of a manager when something goes wrong: deadlines, Ctrl-C, failed samples, a dead engine, a full disk."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from rollout.engine.parts.stepper import MAX_FAILED_STEPS
from rollout.errors import (
    DeadlineError,
    EngineDeadError,
    EngineStateError,
    JournalError,
    RolloutFailedError,
)
from rollout.manager.groups import GroupJournal
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.invariants import check_scheduler
from tests.models import greedy
from tests.rollouts import (
    GREEDY,
    Clock,
    Every,
    FailingForward,
    assert_nothing_leaked,
    completions,
    group_ids,
    make_rollout,
    tokens,
)

# --- when something goes wrong --------------------------------------------------------------------------------------


def test_a_deadline_leaves_everything_in_flight(model):
    clock = Clock()
    rollout = make_rollout(model, clock=clock)
    step = rollout.engine.step

    def slow(**_: object) -> Any:
        clock.now += 1
        return step()

    rollout.engine.step = slow
    with pytest.raises(DeadlineError, match=r"timeout_s=3 after 1 of 2 groups had finished"):
        rollout.generate([[5, 6], [7]], [tokens(3), tokens(9)], timeout_s=3)
    assert rollout.groups_in_flight == 2
    batch = rollout.generate([], min_groups=2, timeout_s=100)
    assert (group_ids([batch]), batch.response_lengths.tolist()) == ([0, 1], [3, 9])


@pytest.mark.parametrize("forward", [0, 1, 4])
@pytest.mark.parametrize("earlier", [0, 3])
def test_ctrl_c_gives_up_the_prompts_of_this_call_and_keeps_the_others(model, earlier, forward):
    rollout = make_rollout(model)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7 + n] for n in range(earlier)]
    before = rollout.submit(prompts, params)
    for _ in range(min(earlier, 2)):
        rollout.engine.step()
    with FailingForward(model, KeyboardInterrupt, forwards={forward}), pytest.raises(KeyboardInterrupt):
        rollout.generate([[9], [10]], params)
    check_scheduler(rollout.engine.context.scheduler)
    assert rollout.groups_in_flight == earlier
    batch = rollout.generate([[11]], params, min_groups=earlier + 1)
    assert group_ids([batch])[:-1] == before
    assert completions(batch) == [greedy(model, prompt, 12) for prompt in [*prompts, [11]]]
    assert_nothing_leaked(rollout)


@pytest.mark.parametrize("where", ["schedule", "update", "leave"])
def test_a_real_ctrl_c_waits_for_the_end_of_the_step(model, monkeypatch, where):
    """In the middle of the bookkeeping it would leave tables half written, and the engine useless."""
    rollout = make_rollout(model)
    before = rollout.submit([[5, 6, 7]], tokens(3, temperature=0))
    scheduler = rollout.engine.context.scheduler
    owner = scheduler._results if where == "leave" else scheduler
    original = getattr(owner, where)
    calls = []

    def pressed(*args: Any) -> Any:
        calls.append(where)
        if len(calls) == (1 if where == "leave" else 2):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, where, pressed)
        with pytest.raises(KeyboardInterrupt):
            rollout.generate([[9]], tokens(9, temperature=0))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    check_scheduler(scheduler)
    batch = rollout.generate([], min_groups=1)
    assert group_ids([batch]) == before
    assert completions(batch) == [greedy(model, [5, 6, 7], 3)]
    assert_nothing_leaked(rollout)


def test_a_failed_step_names_its_rows_and_the_batch_carries_the_others(model):
    rollout = make_rollout(model)
    with (
        FailingForward(model, lambda: ValueError("broken layer"), forwards={3}),
        pytest.raises(RolloutFailedError, match=r"2 of 3 samples failed, the first in row 1 .*broken layer") as caught,
    ):
        rollout.generate([[5], [6], [7]], [tokens(2), tokens(8), tokens(8)])
    batch = caught.value.batch
    assert batch.response_mask.any(1).tolist() == [True, False, False]
    assert batch.errors == [None, "ValueError: broken layer", "ValueError: broken layer"]
    assert_nothing_leaked(rollout)
    assert completions(rollout.generate([[9]], GREEDY)) == [greedy(model, [9], 6)]


def test_a_group_that_fails_among_completed_ones_leaves_the_others(model):
    rollout = make_rollout(model)
    rollout.submit([[5], [6]], [tokens(2), tokens(8)])
    completed = rollout.as_completed()
    assert group_ids([next(completed)]) == [0]
    with FailingForward(model, lambda: ValueError("broken layer"), forwards={0}):
        late = rollout.submit([[7]], tokens(3))
        with pytest.raises(RolloutFailedError, match="broken layer"):
            next(completed)
    with pytest.raises(RolloutFailedError):
        list(rollout.as_completed(late))
    assert_nothing_leaked(rollout)


def test_when_the_engine_dies_everything_in_flight_comes_back_and_training_goes_on(model):
    rollout = make_rollout(model, max_requests=1, max_tokens_per_step=1)
    waiting = rollout.submit([[number] for number in range(3, 13)], tokens(4))
    with (
        FailingForward(model, lambda: ValueError("broken layer"), forwards=Every()) as forwards,
        pytest.raises(RolloutFailedError, match="broken layer"),
    ):
        rollout.generate([[5]], tokens(4))
    assert forwards.seen == MAX_FAILED_STEPS - 1
    with pytest.raises(EngineDeadError, match=r"the engine is dead.*broken layer; build another"):
        rollout.generate([[5]], tokens(4))
    with rollout.suspended():
        rollout.before_optimizer_step()
        assert rollout.weights_updated() == 0
    batch = rollout.generate([], min_groups=99, on_error="mask")
    assert group_ids([batch]) == waiting
    assert all("broken layer" in error for error in batch.errors)
    rollout.close()
    assert rollout.engine.stats()["kv_device_bytes"] == 0


def test_samples_that_somebody_else_took_are_an_error_and_no_endless_loop(model):
    rollout = make_rollout(model)
    rollout.submit([[5]], tokens(2))
    while rollout.engine.has_unfinished:
        rollout.engine.step()
    with pytest.raises(EngineStateError, match=r"cannot end.*abort\(\) them"):
        rollout.generate([], min_groups=1)
    rollout.abort([0])
    assert len(rollout.generate([[5]], tokens(2))) == 1


def test_a_batch_that_cannot_be_built_loses_no_group(model, monkeypatch):
    rollout = make_rollout(model)
    with monkeypatch.context() as patch:
        patch.setattr("rollout.manager.generation.RolloutBatch.from_requests", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rollout.generate([[5]], GREEDY)
    assert completions(rollout.generate([], min_groups=1)) == [greedy(model, [5], 6)]


def test_ctrl_c_while_prompts_are_queued_gives_them_up(rollout, monkeypatch):
    submit = rollout._rounds.backend.submit

    def pressed(*args: Any) -> None:
        submit(*args)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(rollout._rounds.backend, "submit", pressed)
    with pytest.raises(KeyboardInterrupt):
        rollout.generate([[5]], GREEDY)
    monkeypatch.undo()
    assert_nothing_leaked(rollout)
    assert len(rollout.generate([[5]], GREEDY)) == 1


class FullDisk:
    """A journal that has no room for its first group."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.full = True

    def append(self, samples: list[DynamicInferenceRequest], key: bytes) -> None:
        if self.full:
            raise JournalError("the disk is full")
        self.written.append(samples[0].request_id)


def test_a_journal_that_cannot_be_written_does_not_stop_an_update(model):
    rollout = make_rollout(model, max_staleness=0)
    disk = FullDisk()
    rollout._rounds.loop.journal = GroupJournal(disk)  # type: ignore[arg-type]
    rollout.submit([[5, 6]], tokens(9))
    for _ in range(3):
        rollout.engine.step()
    assert rollout.weights_updated() == 1
    disk.full = False
    batch = rollout.generate([], min_groups=1)
    assert batch.finish_reasons == ["stale"]
    rollout.generate([[7]], GREEDY)
    assert disk.written == [0, 1]
