"""Tests of `rollout top`: views, rates, and refused addresses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.__main__ import main
from rollout.config import CoordinatorConfig
from rollout.distributed.client.top import Reading, facts_of, rates_of
from rollout.distributed.coordinator.launch import launch_coordinator
from rollout.distributed.transport.keys import JobKeys
from rollout.sampling_params import SamplingParams
from rollout.server.prometheus import RequestMetrics
from tests.models import make_model
from tests.rollouts import make_rollout

RANK = {
    "name": "rank-0", "state": "suspended", "policy_version": 3, "ready": True, "resting": False, "max_requests": 8,
    "assigned_samples": 5, "running": 4, "waiting": 1, "tokens": 70, "silent_for_s": 0.1, "since_progress_s": 0.2,
}  # fmt: skip
STATUS = {
    "state": "paused", "policy_version": 3, "queued_samples": 2, "oldest_request_s": 12.34, "ranks": [RANK],
    "clients": [{"name": "loop", "open_requests": 2, "member": True}], "barrier_waits_for": ["rank-1"],
    "first_token_s": [], "per_token_s": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def metrics() -> str:
    """Text of /metrics while an engine is at work."""
    with make_rollout(make_model("qwen2", num_hidden_layers=1)) as manager:
        manager.generate([[5, 6, 7, 8, 9]], SamplingParams(n=4, max_tokens=5, ignore_eos=True))
        manager.submit([[5, 6, 7]], SamplingParams(max_tokens=5))
        llm = SimpleNamespace(stats=manager.engine.stats, num_open=1)
        text = RequestMetrics(llm).text().decode()
        manager.suspend()
        manager.resume()
        manager.abort([1])
    return text


def test_top_names_what_holds_the_engines_and_shows_latency_and_history():
    busy = STATUS | {"ranks": [RANK | {"running": 8, "tokens": 250}], "queued_samples": 8, "first_token_s": [0.25, 2.0]}
    facts = dict(facts_of([Reading(1.0, STATUS), Reading(2.0, STATUS), Reading(4.0, busy)]))
    assert facts["held by"] == "the coordinator (paused), rank-0 suspended"
    assert facts["oldest request"] == "12.3 s"
    assert facts["barrier waits for"] == "rank-1"
    assert facts["open requests"] == "loop 2"
    assert facts["tokens/s"].split() == ["90", "▁█"]
    assert facts["running"].split() == ["8", "of", "8", "▄▄█"]
    assert facts["waiting"].split() == ["9", "▃▃█"]
    assert facts["first token"] == "median 250.0 ms, p99 2.0 s"
    assert facts["per token"] == "no sample has finished yet"


def test_rates_are_differences_and_a_rank_that_counts_anew_has_none():
    def reading(at: float, **tokens: float) -> Reading:
        return Reading(at, {"ranks": [{"name": name, "tokens": count} for name, count in tokens.items()]})

    before, after = reading(1.0, a=10.0, b=50.0), reading(3.0, a=30.0, b=5.0, c=9.0)
    assert rates_of(before, after) == {"a": 10.0, "b": 0.0}
    assert rates_of(after) == {}


def test_top_shows_a_running_coordinator_that_asks_for_keys(tmp_path, capsys):
    keys = JobKeys.generate()
    mine = {name: None if key is None else key.decode() for name, key in keys.client_side().serialize().items()}
    (tmp_path / "keys.json").write_text(json.dumps(mine), encoding="utf-8")
    handle = launch_coordinator(CoordinatorConfig(), keys)
    try:
        arguments = ["--keys", str(tmp_path / "keys.json"), "--once", "--interval", "0.1"]
        assert main(["top", handle.address, *arguments]) == 0
    finally:
        handle.stop(10)
    said = capsys.readouterr().out
    assert handle.address in said
    assert "barrier waits for" in said
    assert "no engine has joined this job yet" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://127.0.0.1:9"], "must begin with tcp://"),
        (["tcp://127.0.0.1:9", "--keys", "no-such-file"], "--keys no-such-file"),
    ],
)
def test_an_address_that_does_not_answer_is_one_line(arguments, said, capsys):
    assert main(["top", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_grafana_dashboard_asks_for_metrics_that_a_server_has(metrics):
    """Histograms and replies appear with labels; a name that nothing exports would be an empty panel for ever."""
    dashboard = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text(encoding="utf-8"))
    exported = set(re.findall(r"^# TYPE (\w+) ", metrics, re.MULTILINE))
    exported |= {f"{name}_bucket" for name in exported}
    asked = {
        name
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"\brollout_\w+", target["expr"])
    }
    assert len(asked) > 15
    assert not asked - exported
