"""Tests of the worker over a real socket: engine, training loop and network failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from rollout.distributed.protocol import messages as wire
from rollout.distributed.worker.worker import EngineWorker
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.parts.holds import COORDINATOR, PAUSE, HoldLevel
from rollout.errors import ConnectionLostError, DeadlineError, EngineDeadError
from tests.distributed.fake_coordinator import DEADLINE_S, FakeCoordinator
from tests.distributed.worker.rank_sessions import assign, put_together
from tests.engines import gated, greedily, make_engine, token_ids


class Coordinator(FakeCoordinator):
    """Welcomes ranks with what `ack` says; None: does not answer."""

    def __init__(self, **ack: Any) -> None:
        self.ack: wire.RegisterAck | wire.Refused | None = wire.RegisterAck("running", 0, 100.0, 1000.0)
        for name, value in ack.items():
            setattr(self.ack, name, value)
        self.ranks: list[bytes] = []
        super().__init__(Coordinator._welcome, greet=False)

    def _welcome(self, peer: bytes, message: wire.Message) -> None:
        if isinstance(message, wire.Register):
            self.ranks.append(peer)
            if self.ack is not None:
                self.say(peer, self.ack)

    def tell(self, *messages: wire.Message) -> None:
        self.say(self.ranks[-1], *messages)

    def hear_stretches(self, samples: int) -> list[wire.Stretch]:
        """Everything up to the end of so many samples."""
        stretches: list[wire.Stretch] = []
        while samples:
            progress = self.hear(wire.Progress)
            assert isinstance(progress, wire.Progress)
            stretches += progress.stretches
            samples -= sum(len(each.ended()) for each in progress.stretches)
        return stretches


def running(worker: EngineWorker) -> Future[None]:
    """`worker.run()` on a thread, as a rank without a training loop has it."""
    return ThreadPoolExecutor(1).submit(worker.run)


@contextmanager
def serving(
    engine: DynamicInferenceEngine | None = None, *, run: bool = True, **options: Any
) -> Iterator[tuple[Coordinator, EngineWorker]]:
    with Coordinator() as coordinator:
        worker = EngineWorker(engine or make_engine("qwen3"), coordinator.address, name="rank-0", **options)
        worker.start(DEADLINE_S)
        run_of_it = running(worker) if run else None
        coordinator.hear(wire.EngineMoved)
        try:
            yield coordinator, worker
        finally:
            worker.stop()
            if run_of_it is not None:
                run_of_it.exception(DEADLINE_S)


def wait_until(holds: Callable[[], bool], worker: EngineWorker) -> None:
    with worker._changed:
        assert worker._changed.wait_for(holds, DEADLINE_S)


# --- registration -----------------------------------------------------------------------------------------------------


def test_a_worker_registers_with_its_room_its_version_and_its_cache() -> None:
    engine = make_engine("qwen3", max_requests=5)
    engine.generate([token_ids(9)], greedily(2))
    engine.pause()
    cached = sorted(engine.context.allocator.index.current)
    with Coordinator(state="paused", policy_version=3) as coordinator:
        worker = EngineWorker(engine, coordinator.address, name="rank-0")
        worker.start(DEADLINE_S)
        register = coordinator.hear(wire.Register)
        assert isinstance(register, wire.Register)
        assert sorted(np.frombuffer(register.hashes, "<i8").tolist()) == cached
        assert (register.protocol_version, register.name, register.max_requests, register.block_size) == (
            wire.PROTOCOL_VERSION, "rank-0", 5, 4,
        )  # fmt: skip
        assert (register.state, register.policy_version) == ("paused", 0)
        assert coordinator.hear(wire.EngineMoved) == wire.EngineMoved("paused", 3)
        assert worker.lost is None
        worker.stop()
        assert coordinator.hear(wire.Disconnect) == wire.Disconnect("the worker was stopped")
        worker.stop()


@pytest.mark.parametrize("state", ["paused", "suspended"])
def test_a_worker_that_stops_leaves_no_hold_of_its_coordinator(state: str) -> None:
    engine = make_engine("qwen3")
    engine.holds.hold(PAUSE, HoldLevel.PAUSED)
    with Coordinator(state=state) as coordinator:
        worker = EngineWorker(engine, coordinator.address, name="rank-0")
        worker.start(DEADLINE_S)
        assert engine.state.value == state
        worker.stop()
    assert COORDINATOR not in engine.holds
    assert engine.state.value == "paused"
    engine.holds.release(PAUSE)
    assert len(engine.generate([token_ids(5)], greedily(2))) == 1


def test_a_coordinator_that_does_not_answer_is_named_with_its_address() -> None:
    with Coordinator() as coordinator:
        coordinator.ack = None
        worker = EngineWorker(make_engine("qwen3"), coordinator.address, name="rank-0")
        with pytest.raises(DeadlineError, match=coordinator.address):
            worker.start(0.05)


# --- work -------------------------------------------------------------------------------------------------------------


def test_a_cancel_frees_the_blocks_also_while_nobody_steps() -> None:
    with serving(run=False) as (coordinator, worker):
        coordinator.tell(assign(token_ids(9), greedily(30, n=2)))
        assert worker.wait_for_work(DEADLINE_S)
        assert worker.step()
        assert worker.engine.context.allocator.num_used > 0
        coordinator.tell(wire.Cancel(0, 1))
        wait_until(lambda: not worker.engine.has_unfinished, worker)
        assert worker.engine.context.allocator.num_used == 0
        assert not worker.step()


# --- control ----------------------------------------------------------------------------------------------------------


def test_a_pause_takes_effect_at_the_next_boundary_while_the_engine_is_stepping() -> None:
    with serving() as (coordinator, worker):
        with gated(worker.engine):
            coordinator.tell(assign(token_ids(7), greedily(200, logprobs=1), interval=1))
            coordinator.hear(wire.Progress)
            coordinator.tell(wire.Command(1, "pause", None))
            assert coordinator.hear(wire.CommandAck) == wire.CommandAck(1, "paused", 0, None)
        steps = worker.engine.inspection.counters["steps"]
        assert steps < 200
        coordinator.tell(wire.Command(2, "set_version", 1))
        coordinator.hear(wire.CommandAck)
        assert worker.engine.inspection.counters["steps"] == steps
        coordinator.tell(wire.Command(3, "unpause", None))
        assert coordinator.hear(wire.CommandAck) == wire.CommandAck(3, "running", 1, None)
        coordinator.hear_stretches(1)


def test_what_the_training_loop_does_to_the_engine_is_told() -> None:
    with serving() as (coordinator, worker):
        worker.engine.pause()
        assert coordinator.hear(wire.EngineMoved) == wire.EngineMoved("paused", 0)
        worker.engine.weights_updated()
        assert coordinator.hear(wire.EngineMoved) == wire.EngineMoved("paused", 1)
        worker.engine.unpause()
        assert coordinator.hear(wire.EngineMoved) == wire.EngineMoved("running", 1)


def test_samples_that_an_update_ends_are_told_without_another_step() -> None:
    with serving(make_engine("qwen3", max_staleness=0), run=False) as (coordinator, worker):
        coordinator.tell(assign(token_ids(7), greedily(20)))
        assert worker.wait_for_work(DEADLINE_S)
        worker.step()
        worker.engine.pause()
        worker.engine.weights_updated()
        outcome = put_together(coordinator.hear_stretches(1))[0].outcome
        assert outcome is not None
        assert outcome.finish_reason == "stale"


def test_stopping_a_worker_tells_what_it_has_and_leaves() -> None:
    with serving(run=False) as (coordinator, worker):
        coordinator.tell(assign(token_ids(7), greedily(20), interval=10))
        assert worker.wait_for_work(DEADLINE_S)
        worker.step()
        worker.step()
        worker.stop()
        stretches: list[wire.Stretch] = []
        while isinstance(message := coordinator.hear(), wire.Progress):
            stretches += message.stretches
        assert [each.counts for each in stretches] == [[2]]
        assert message == wire.Disconnect("the worker was stopped")
        assert not worker.engine.has_unfinished
        assert worker.engine.lifecycle.on_move is None


# --- losses -----------------------------------------------------------------------------------------------------------


def test_a_session_that_is_over_ends_its_samples_and_another_one_begins() -> None:
    lost: list[Exception] = []
    with serving(on_lost=lost.append) as (coordinator, worker):
        with gated(worker.engine):
            coordinator.tell(assign(token_ids(7), greedily(200, logprobs=1), interval=1))
            coordinator.hear(wire.Progress)
            coordinator.tell(wire.Refused("silent", "nothing was heard of it", True))
            coordinator.hear(wire.Register)
            first, second = coordinator.ranks
            assert first != second
            coordinator.hear(wire.EngineMoved)
        assert worker.engine.context.allocator.num_used == 0
        assert [str(error) for error in lost] == [str(lost[0])]
        assert "nothing was heard of it" in str(lost[0])
        coordinator.tell(assign(token_ids(7), greedily(3), attempt=9, request_id=9))
        assert {each.attempt for each in coordinator.hear_stretches(1)} == {9}
        assert worker.lost is None


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (wire.Disconnect("going home"), "within 0.2 s"),
        (wire.Refused("replaced", "another process is 'rank-0'", True), "another process is 'rank-0'"),
    ],
    ids=["no coordinator any more", "another process took its name"],
)
def test_a_run_that_cannot_go_on_says_why(ending: wire.Message, words: str) -> None:
    with serving(run=False, reconnect_timeout_s=0.2) as (coordinator, worker):
        run = running(worker)
        coordinator.ack = None
        coordinator.tell(ending)
        error = run.exception(DEADLINE_S)
        assert isinstance(error, ConnectionLostError)
        assert words in str(error)
        assert coordinator.address in str(error)
        assert (len(coordinator.ranks) == 1) is isinstance(ending, wire.Refused), "it takes no name back"


def test_a_stop_interrupts_the_search_for_a_coordinator() -> None:
    with serving(run=False, reconnect_timeout_s=1000) as (coordinator, worker):
        run = running(worker)
        coordinator.ack = None
        coordinator.tell(wire.Disconnect("going home"))
        coordinator.hear(wire.Register)
        worker.stop()
        assert run.exception(DEADLINE_S) is None


def test_a_dead_engine_leaves_at_once_so_that_others_go_on_with_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(step: object) -> None:
        raise ValueError("the device is gone")

    with serving(run=False) as (coordinator, worker):
        monkeypatch.setattr(worker.engine.controller.runner, "execute", fail)
        coordinator.tell(*(assign(token_ids(30, n), greedily(4), attempt=n, request_id=n) for n in range(8)))
        with pytest.raises(EngineDeadError, match="the device is gone"):
            worker.run()
        left = coordinator.hear(wire.Disconnect)
        assert isinstance(left, wire.Disconnect)
        assert "the device is gone" in left.reason
        assert isinstance(worker.lost, EngineDeadError)


def test_an_engine_that_cannot_follow_leaves_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen3")

    def fail(version: int) -> int:
        raise ValueError("no such weights")

    monkeypatch.setattr(engine, "weights_updated", fail)
    with Coordinator(policy_version=4) as coordinator:
        worker = EngineWorker(engine, coordinator.address, name="rank-0")
        with pytest.raises(ValueError, match="no such weights"):
            worker.start(DEADLINE_S)
        left = coordinator.hear(wire.Disconnect)
        assert isinstance(left, wire.Disconnect)
        assert left.reason == "ValueError: no such weights"


def test_an_interrupt_inside_a_step_loses_no_result() -> None:
    with serving(run=False) as (coordinator, worker):
        coordinator.tell(assign(token_ids(7), greedily(1)))
        assert worker.wait_for_work(DEADLINE_S)
        original = worker.engine.controller.runner.execute

        def pressed(step: Any) -> Any:
            import signal

            signal.raise_signal(signal.SIGINT)
            return original(step)

        worker.engine.controller.runner.execute = pressed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            worker.step()
        assert put_together(coordinator.hear_stretches(1))[0].outcome is not None
