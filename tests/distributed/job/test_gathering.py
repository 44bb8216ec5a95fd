"""Tests of the barrier before gathering weights: all ranks proceed, or those present learn which are missing."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from rollout.config import Advanced, InferenceConfig
from rollout.distributed.job.meeting import Gathering
from rollout.distributed.job.world import World
from rollout.errors import DeadlineError


class FakeEngine:
    def __init__(self, timeout_s: float = 30.0) -> None:
        self.weights = SimpleNamespace(ready=False)
        self.config = InferenceConfig(advanced=Advanced(control_timeout_s=timeout_s))
        self.gathered = 0
        self.guard = self

    def gather(self) -> None:
        self.weights.ready = True
        self.gathered += 1

    def release(self) -> None:
        self.weights.ready = False


def ranks_of(size: int, **options: Any) -> list[tuple[FakeEngine, Gathering]]:
    store = dist.HashStore()
    backend: Any = SimpleNamespace(barrier=lambda what: None)
    engines = [FakeEngine(**options) for _ in range(size)]
    return [
        (engine, Gathering(engine, backend.barrier, World(rank, size, store, "job", one_host=True)))  # type: ignore[arg-type]
        for rank, engine in enumerate(engines)
    ]


@pytest.fixture
def threads() -> Any:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def generate(gathering: Gathering) -> None:
    with gathering.held():
        gathering.ensure()
        gathering.ensure()


def test_all_ranks_go_together_time_after_time_and_let_go_at_the_end_of_the_outermost_block(threads) -> None:
    ranks = ranks_of(3)
    for round_ in range(1, 4):
        for each in [threads.submit(generate, meeting) for _, meeting in ranks]:
            each.result(120)
        assert [(engine.gathered, engine.weights.ready) for engine, _ in ranks] == [(round_, False)] * 3
    engine, meeting = ranks_of(1)[0]
    with meeting.held():
        generate(meeting)
        assert engine.weights.ready
    assert not engine.weights.ready


def test_one_that_waited_too_long_calls_it_off_for_all_and_the_next_meeting_is_another(threads) -> None:
    ranks = ranks_of(3, timeout_s=0.3)
    here = [threads.submit(generate, meeting) for _, meeting in ranks[:2]]
    for each in here:
        with pytest.raises(
            DeadlineError, match=r"rank 2 did not come within 0\.3 s of rank [01]; every rank must call"
        ):
            each.result(120)
    with pytest.raises(DeadlineError, match=r"rank 0, rank 1 did not come"):
        generate(ranks[2][1])
    assert not any(engine.gathered for engine, _ in ranks)
    for engine, _ in ranks:
        engine.config = InferenceConfig(advanced=Advanced(control_timeout_s=30.0))
    for each in [threads.submit(generate, meeting) for _, meeting in ranks]:
        each.result(120)
    assert [engine.gathered for engine, _ in ranks] == [1, 1, 1]


def test_ctrl_c_while_waiting_calls_it_off_and_the_others_hear_why(threads, monkeypatch) -> None:
    monkeypatch.setattr("rollout.distributed.job.meeting.LOOK_S", 0.02)
    ranks = ranks_of(3)
    other = threads.submit(generate, ranks[1][1])

    def interrupt_once_rank_0_waits() -> None:
        ranks[0][1]._meeting.world.wait_for("gather/0/rank-0", 30)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threads.submit(interrupt_once_rank_0_waits)
        with pytest.raises(KeyboardInterrupt):
            generate(ranks[0][1])
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(DeadlineError, match="rank 0 was interrupted"):
        other.result(120)
    assert not any(engine.gathered for engine, _ in ranks)
