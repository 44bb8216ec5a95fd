"""Tests of the coordinator's latest decisions, as a status query gets them for a trace."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.distributed.coordinator.core.dispatch import ScheduleRecord
from rollout.distributed.coordinator.core.history import MAX_DECISIONS, History
from rollout.distributed.protocol.messages import Barrier, Disconnect, Status, StatusQuery
from tests.distributed.coordinator.job import Job


def test_a_status_query_that_asks_for_decisions_gets_those_of_its_last_seconds_in_order():
    job = Job(data_parallel_size=1)
    client = job.client("loop", member=True)
    first = job.rank("a", slots=4)
    client.submit(n=3)
    job.core.take_decisions()
    job.wait(5.0)
    client.call("set_version", 1)
    client.call("pause")
    client.say(Barrier(0, "generate()", 1))
    first.say(Disconnect("done"))
    job.core.take_decisions()
    job.wait(1.0)

    def told(seconds: float) -> list[list[Any]]:
        client.heard.clear()
        client.say(StatusQuery(9, seconds))
        return client.hear(Status).table["decisions"]

    recent = [["rank left", {"rank": "a"}], ["job paused", {}], ["version 1", {"version": 1}]]
    assert [[name, args] for _, name, args in told(2.0)][:3] == recent
    assert [name for _, name, _ in told(2.0)][3:] == ["barrier passed"]
    assert all(age == pytest.approx(1.0) for age, _, _ in told(2.0))
    asked = {"request": 0, "rank": "a", "samples": 3, "prompt_blocks": 0, "cached_blocks": 0}
    assert [[name, args] for _, name, args in told(60.0)][:2] == [["rank joined", {"rank": "a"}], ["assign", asked]]
    client.say(StatusQuery(10))
    assert "decisions" not in client.hear(Status).table


def test_the_latest_decisions_are_kept_up_to_a_limit():
    job = Job(data_parallel_size=1)
    history = History(job.core.peers, job.core.control, job.core.barriers)
    for number in range(MAX_DECISIONS + 5):
        history.turn_ends([ScheduleRecord(number, 0, 1, 0, "a", samples=1)], now=number)
    kept = history.last(1e9, now=MAX_DECISIONS + 5)
    assert [kept[0][2]["request"], kept[-1][2]["request"], len(kept)] == [5, MAX_DECISIONS + 4, MAX_DECISIONS]
