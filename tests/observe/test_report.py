"""Tests of a run's log and page: what is in it, that it needs no network, and that a browser draws it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import rollout
from rollout import RunLog, SamplingParams
from rollout.errors import ConfigError
from rollout.observe import charts
from rollout.observe.run_log import read_log
from tests.models import make_model, make_tokenizer
from tests.rollouts import make_rollout, update

PROMPTS = ["<b>one</b> & two", "three", "four"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Three steps, whose last batches hold tokens of several versions; the second is traced."""
    folder = tmp_path_factory.mktemp("run")
    model, tokenizer = make_model("qwen2", num_hidden_layers=1), make_tokenizer()
    log = RunLog(folder, title="a <small> run")
    with make_rollout(model, tokenizer) as manager:
        for step in range(1, 4):
            with manager.trace(folder / f"step-{step}.json"):
                params = [SamplingParams(n=2, max_tokens=length, ignore_eos=True) for length in (20, 4, 12)]
                batch = manager.generate(PROMPTS, params, min_groups=2)
                with manager.suspended():
                    manager.observe_logprobs(batch, batch.logprobs + 1e-6)
                    update(model, manager)
            rewards = torch.arange(len(batch)) / 10
            log.step(step, manager.metrics(), batch=batch, rewards=rewards, tokenizer=tokenizer)
        manager.abort(list(range(9)))
    return folder


@pytest.fixture(scope="module")
def page(run) -> str:
    return rollout.report(run).read_text(encoding="utf-8")


def test_the_page_holds_every_chart_the_slots_and_the_samples(page):
    assert page.count("<svg") == 10
    assert page.count("0 in every step") == 1  # no request was preempted, failed or stale
    assert "not recorded in this run" not in page
    for heading in (
        "Reward", "Completion length", "Staleness", "Where the seconds", "KV blocks", "prefix cache", "Log-prob gap",
        "Slots of a traced step", "Slowest samples", "Most stale samples",
    ):  # fmt: skip
        assert heading in page
    assert "step-3.json" in page
    assert re.search(r"<title>request \d+/\d+: \d+ tokens, \w+, decode [\d.]+ s</title>", page)
    assert "NaN" not in page
    assert "nan" not in re.sub(r"<[^>]*title[^>]*>.*?</", "", page).split("<main>")[1].split("</main>")[0]


def test_the_page_needs_no_network_and_no_script(page):
    assert not re.search(r"<script|<link|src=|@import|url\(|https?://", page)


def test_texts_and_titles_are_escaped(page):
    assert "a &lt;small&gt; run" in page
    assert "<b>one</b>" not in page
    assert "&lt;b&gt;one&lt;/b&gt; &amp; two" in page


def test_a_stale_sample_shows_where_its_version_changed(run, page):
    _, steps = read_log(run)
    stale = [sample for step in steps for sample in step["samples"] if len(sample["runs"]) > 1]
    assert stale
    for sample in stale:
        assert "versions " + " → ".join(str(version) for version, _, _ in sample["runs"]) in page
    assert re.search(r'background:#fdf3d0" title="version \d, 1 update ago, ', page)


def test_a_run_goes_on_after_a_crash_in_the_middle_of_a_line(tmp_path):
    RunLog(tmp_path).step(1, {"rollout/generate_s": 1.0})
    with open(tmp_path / "run.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 2, "metr')
    log = RunLog(tmp_path)
    log.step(2, {"rollout/generate_s": float("nan")})
    log.step(2, {"rollout/generate_s": 3.0})
    _, steps = read_log(tmp_path)
    assert [(row["step"], row["metrics"]["rollout/generate_s"]) for row in steps] == [(1, 1.0), (2, 3.0)]
    assert "not recorded" in rollout.report(tmp_path).read_text(encoding="utf-8")


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"run.jsonl.*RunLog writes it"):
        rollout.report(tmp_path)
    log = RunLog(tmp_path)
    with pytest.raises(ConfigError, match="holds no step"):
        rollout.report(tmp_path)
    with pytest.raises(ValueError, match="2 rewards for no batch"):
        log.step(1, {}, rewards=[1, 2])
    log.step(1, {})
    with pytest.raises(ConfigError, match="cannot be read as a trace"):
        rollout.report(tmp_path, trace=tmp_path / "none.json")
    with pytest.raises(ConfigError, match="samples=-1"):
        RunLog(tmp_path, samples=-1)


@pytest.mark.parametrize("values", [[1.0], [None, 2.0, None], [0.0, 0.0], [-1.0, 1.0], [1e-9, 1e9], [5e-324, 1.0]])
@pytest.mark.parametrize("log", [False, True])
def test_a_chart_of_odd_values_stays_inside_its_frame(values, log):
    drawn = charts.lines(list(range(3, 3 + len(values))), [("name", "#123456", values)], log=log)
    if not any(values):
        assert drawn == charts.note("0 in every step")
        return
    width, height = (float(each) for each in re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn).groups())
    marks = re.findall(r'<use xlink:href="#\w+" x="(-?[\d.]+)" y="(-?[\d.]+)" style="fill: #123456', drawn)
    line = "".join(re.findall(r'<path d="([^"]*)"[^>]* style="[^"]*stroke: #123456', drawn))
    points = [*marks, *re.findall(r"[ML] (-?[\d.]+) (-?[\d.]+)", line)]
    assert points
    for x, y in points:
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= height


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollout-engine\[report\]'"):
        charts.areas([7], [("a", "#111111", [1.0])])
