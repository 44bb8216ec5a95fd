"""Tests of the coordinator benchmark at minimal size: it runs, prints its tables and saves its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import coordinator


@pytest.mark.distributed
def test_round_trips_rates_and_routing_stand_beside_plain_zmq(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "RANKS", (1, 3))
    path = tmp_path / "figures.json"
    small = ["--rounds", "1", "--seconds", "0.2", "--in-flight", "32", "--requests", "5"]
    assert coordinator.main([*small, "--json", str(path)]) == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    for each in (found["latency"], *found["throughput"].values()):
        assert each.keys() == {"ours", "plain"}
        assert min(each.values()) > 0
    assert found["throughput"].keys() == coordinator.LOADS.keys()
    assert found["routing"].keys() == {"1", "3"}
    assert min(found["routing"].values()) > 0
    printed = capsys.readouterr().out
    assert "round trip" in printed
    assert "routing decision" in printed


def test_an_echo_is_an_answer_that_a_client_can_read() -> None:
    _, stretch = coordinator.Load(5, 3, 2).answered()
    stretch.check()
    assert stretch.ended() == stretch.indices
