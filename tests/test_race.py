"""Tests of the race with a tiny model: every workload is measured, and failures of a peer are reported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import race
from tests.benchmarks.floors import Floor
from tests.benchmarks.rates import Rates
from tests.benchmarks.workloads import CONVERSATIONS, Scale, Turn, Workload

SMALL = ["--sizes", "tiny", "--dtypes", "float32", "--scale", "0.02", "--rounds", "1", "--sequences", "1", "4"]


@dataclass(frozen=True)
class Run:
    """The output of one run of the command."""

    status: int
    printed: str
    content: dict[str, Any]

    def rows(self, workload: str) -> list[dict[str, Any]]:
        return [row for row in self.content["rows"] if row["workload"] == workload]


def run(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Run:
    status = race.main([*SMALL, *arguments, "--json", str(folder / "race.json")])
    content = json.loads((folder / "race.json").read_text(encoding="utf-8"))
    return Run(status, capsys.readouterr().out, content)


def program(folder: Path, text: str) -> str:
    """An executable that stands in for a peer's interpreter."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(autouse=True)
def nobody_else_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RACE_VLLM_PYTHON", raising=False)
    monkeypatch.delenv("RACE_OPENVINO_PYTHON", raising=False)


def test_every_workload_is_measured_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, capsys, "--peers", "ours", "generate", "cb")
    assert done.status == 0
    assert {row["workload"] for row in done.content["rows"]} == set(CONVERSATIONS)
    for row in done.content["rows"]:
        cells = row["peers"]
        assert cells.keys() == {"ours", "generate", "cb", "floor"}
        if row["metric"] != "decode":
            # Five tokens may take no longer than one on a busy machine: then there is no decode rate, and no error.
            assert all(cell["median"] > 0 and cell["problem"] is None for cell in cells.values()), row
        for peer, ratio in row["ratios"].items():
            assert ratio == pytest.approx(cells["ours"]["median"] / cells[peer]["median"])
        assert row["floor"] == max(cells["floor"]["rounds"]) > 0
    for name in (*CONVERSATIONS, "a decode step", "Scheduling 4,096 running requests"):
        assert name in done.printed
    assert done.content["versions"]["ours"].keys() == {"rollout-engine", "torch", "transformers"}

    computed = done.rows("prefix")[0]["peers"]["ours"]["notes"]["prompt_tokens_computed"]
    assert computed < 64 * 21, "the shared system prompt was computed for every question"
    profiles = {(each["kind"], each.get("sequences")): each for each in done.content["profiles"]}
    assert profiles.keys() == {("decode step", 1), ("decode step", 4), ("scheduling", None)}
    assert 0 < profiles["decode step", 4]["bookkeeping_share"] < 1


def test_a_missing_peer_is_not_run_and_one_that_dies_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = program(tmp_path, "echo no such library >&2; exit 3")
    others = ("--peers", "vllm", "openvino", "--vllm-python", fake)
    done = run(tmp_path, capsys, "--workloads", "steady", *others)
    assert done.status == 0
    for row in done.rows("steady")[:1]:
        missing, dead = (row["peers"][name]["problem"] for name in ("openvino", "vllm"))
        assert missing.startswith("not run: not installed: ")
        assert "--openvino-python" in missing
        assert dead.startswith("error: ")
        assert "(exit status 3)" in dead
        assert "no such library" in dead
        assert row["ratios"] == {}
    assert "not run" in done.printed
    assert "no such library" in done.printed


@pytest.mark.parametrize("arguments", [["--workloads", "sprint"], ["--peers", "nobody"], ["--rounds", "0"]])
def test_what_does_not_exist_is_refused_before_anything_runs(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        race.main(arguments)
    assert refusal.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_peer_that_is_too_slow_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, capsys, "--workloads", "grpo", "--peers", "ours", "generate", "cb", "--limit", "1e-6")
    (row,) = done.rows("grpo")
    for name in ("ours", "generate", "cb"):
        assert row["peers"][name]["problem"].startswith("error: not done after")


def floor() -> Floor:
    """A machine that reads a byte and multiplies ten weights a second."""
    machine = Rates(bandwidth=1.0, matmul=20.0)
    return Floor(machine, weights=100, head=40, weight_bytes=200, kv_bytes_per_token=3)


def test_a_decode_step_is_bound_by_reading_weights_or_by_multiplying_and_reads_its_kv() -> None:
    assert floor().decode_step(sequences=1, kv_tokens=5) == 200 + 15
    assert floor().decode_step(sequences=40, kv_tokens=5) == 400 + 15


def test_a_prompt_that_samples_share_is_in_the_floor_once() -> None:
    def work(*prompts: tuple[int, ...]) -> Workload:
        return Workload("grpo", "two", (Turn(prompts, (2, 2)),))

    apart, shared = floor().whole(work((1, 2, 3), (4, 5, 6))), floor().whole(work((1, 2, 3), (1, 2, 3)))
    assert floor().decode(work((1, 2, 3), (4, 5, 6))) - floor().decode(work((1, 2, 3), (1, 2, 3))) == 3 * 3
    assert shared < apart


def test_every_peer_and_every_run_gets_the_same_work() -> None:
    for make in CONVERSATIONS.values():
        assert list(make(100, Scale(0.1), [2])) == list(make(100, Scale(0.1), [2]))
