"""Tests of traces: what a block of rollouts leaves in the file, the lives of its samples, merging, and nothing while off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rollout
from rollout import SamplingParams
from rollout.errors import ConfigError, EngineStateError
from rollout.observe import recorder
from rollout.observe.recorder import DECODE, HELD, PREEMPTED, PREFILL, WAITING
from rollout.observe.timeline import Event, ReadTrace, merged, read, write
from tests.models import make_model
from tests.rollouts import make_rollout, update

PROMPTS = [[5 + index, 6, 7, 8, 9, 10, 11, 12, 13] for index in range(6)]
PARAMS = SamplingParams(n=4, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model():
    return make_model("qwen2", num_hidden_layers=1)


@pytest.fixture(scope="module")
def step(model, tmp_path_factory) -> Path:
    """A training step in a pool that is too small: preemption, and samples that go on under the next weights."""
    path = tmp_path_factory.mktemp("trace") / "step.json"
    manager = make_rollout(model, kv_cache_blocks=60)
    with manager.trace(path):
        batch = manager.generate(PROMPTS, PARAMS, min_groups=2)
        with rollout.span("reward", samples=len(batch)):
            pass
        with manager.suspended():
            manager.before_optimizer_step()
            update(model, manager)
        manager.generate([], min_groups=3)
    manager.abort(list(range(6)))
    manager.close()
    return path


@pytest.fixture(scope="module")
def seen(step) -> ReadTrace:
    return read(step)


def events_of(path: Path) -> list[Event]:
    return list(json.loads(path.read_text())["traceEvents"])


def named(path: Path, category: str) -> list[str]:
    return [event["name"] for event in events_of(path) if event.get("cat") == category]


def steps_of(path: Path) -> list[dict[str, int]]:
    return [event["args"] for event in events_of(path) if event.get("cat") == "step"]


def test_every_event_is_one_that_perfetto_and_chrome_read(step):
    events = events_of(step)
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys()
        assert event["ph"] in "MXCi"
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
    assert {event["ph"] for event in events} == set("MXCi")


def test_spans_of_a_track_are_nested_or_apart(step):
    """A viewer draws overlapping slices of one track wrongly."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events_of(step):
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= start + 0.3:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 0.3
            open_until.append(end)


def test_steps_carry_their_tokens_and_the_kv_pool(step, seen):
    (engine,) = seen.engines
    steps = steps_of(step)
    assert sum(each["sampled"] for each in steps) == sum(each.tokens for each in engine.samples)
    assert all(sum(event["args"].values()) == 60 for event in events_of(step) if event["name"] == "KV blocks")
    assert {each["version"] for each in steps} == {0, 1}
    assert sum(each["prefix_tokens_saved"] for each in steps) > 0


def test_every_sample_has_a_life_without_gaps(seen):
    (engine,) = seen.engines
    assert {(each.request, each.sample) for each in engine.samples} == {(r, s) for r in range(6) for s in range(4)}
    for sample in engine.samples:
        assert sample.states[0][0] == WAITING
        for (_, _, end), (_, start, _) in zip(sample.states, sample.states[1:], strict=False):
            assert start == pytest.approx(end, abs=2e-6)
    every = {state for sample in engine.samples for state, _, _ in sample.states}
    assert every == {WAITING, PREFILL, DECODE, PREEMPTED, HELD}


def test_a_change_of_version_is_marked_where_it_happened(step):
    events = events_of(step)
    versions = {tuple(event["args"]["versions"]) for event in events if event.get("cat") == "sample"}
    assert {(0,), (0, 1), (1,)} <= versions
    (updated,) = [event["ts"] for event in events if event["name"] == "weights updated"]
    marks = [event["ts"] for event in events if event.get("cat") == "version"]
    assert marks
    assert min(marks) > updated


def test_phases_controls_and_the_trainers_spans_are_there(step, seen):
    (engine,) = seen.engines
    assert " ".join(named(step, "phases")) == "generate train suspend train resume train generate train"
    assert [name for name, _, _ in engine.controls] == ["pause", "suspend", "weights updated", "resume", "unpause"]
    assert {"reward", "optimizer.step"} <= set(named(step, "trainer"))


def test_traces_of_ranks_become_one_timeline(step, seen, tmp_path):
    one = json.loads(step.read_text())
    events = [event | {"pid": event["pid"] + 100} for event in one["traceEvents"]]
    later = one["otherData"] | {"rank": 1, "started_s": one["otherData"]["started_s"] + 2}
    write(merged([one, one | {"traceEvents": events, "otherData": later}]), tmp_path / "both.json.gz")
    both = read(tmp_path / "both.json.gz")
    assert both.duration_s == pytest.approx(seen.duration_s + 2)
    first, second = both.engines
    assert second.controls[0][1] == pytest.approx(first.controls[0][1] + 2, abs=1e-5)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"otherData": {"format": "x"}}', b"\x1f\x8bbroken"])
def test_a_file_that_is_no_trace_is_refused_by_name(content, tmp_path):
    (tmp_path / "odd.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"odd\.json"):
        read(tmp_path / "odd.json")


def test_an_exception_in_the_block_still_leaves_the_file(tmp_path):
    with pytest.raises(ZeroDivisionError), rollout.trace(tmp_path / "step.json"):
        _ = 1 / 0
    assert steps_of(tmp_path / "step.json") == []
    assert recorder.active() is None


def test_two_traces_at_once_and_a_folder_that_is_not_there_are_refused(tmp_path):
    with rollout.trace(tmp_path / "a.json"), pytest.raises(EngineStateError, match="one trace at a time"):
        rollout.trace(tmp_path / "b.json").__enter__()
    with pytest.raises(ConfigError, match="no folder"):
        rollout.trace(tmp_path / "no" / "b.json").__enter__()
    assert recorder.active() is None


def test_a_failed_step_is_in_the_trace(model, tmp_path, monkeypatch):
    manager = make_rollout(model)

    def fail(step):
        raise RuntimeError("the forward failed")

    monkeypatch.setattr(manager.engine.controller.runner, "execute", fail)
    with manager.trace(tmp_path / "step.json"):
        batch = manager.generate(PROMPTS[:1], PARAMS, on_error="mask")
    assert batch.errors[0] is not None
    manager.close()
    engine = read(tmp_path / "step.json").engines[0]
    assert "step failed" in [name for name, _, _ in engine.controls]
    assert {sample.finish for sample in engine.samples} == {"error"}


def test_nothing_is_kept_while_no_trace_is_recorded(model):
    manager = make_rollout(model)
    manager.generate(PROMPTS[:2], PARAMS)
    assert manager.engine.tap.log is None
    manager.close()
