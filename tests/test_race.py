"""Tests of the race with a tiny model: every workload is measured, and failures of a peer are reported."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file

from tests.benchmarks import busy, race, remote, report, step_profile, suspend
from tests.benchmarks.child import Child, Late, PeerFailed, clean_environment
from tests.benchmarks.field import Rules, hopeless
from tests.benchmarks.floors import Floor
from tests.benchmarks.ledger import Ledger
from tests.benchmarks.rates import Rates
from tests.benchmarks.step_profile import DeviceTime
from tests.benchmarks.subject import make_subject
from tests.benchmarks.workloads import CONVERSATIONS, NAMES, Scale, Turn, Workload, grpo

BENCHMARKS = Path(race.__file__).parent
SMALL = ["--sizes", "tiny", "--dtypes", "float32", "--scale", "0.02", "--rounds", "1", "--sequences", "1", "4"]


@dataclass(frozen=True)
class Run:
    """What one run of the command left."""

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
    monkeypatch.delenv("RACE_LLAMA_PYTHON", raising=False)


def test_every_workload_is_measured_printed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(tmp_path, capsys, "--peers", "ours", "generate", "cb")
    assert done.status == 0
    assert {row["workload"] for row in done.content["rows"]} == set(NAMES)
    for row in done.content["rows"]:
        cells = row["peers"]
        assert {name.partition(",")[0] for name in cells} <= {"ours", "generate", "cb", "floor"}
        if row["metric"] != "decode":
            # Five tokens may take no longer than one on a busy machine: then there is no decode rate, and no error.
            assert all(cell["median"] > 0 and cell["problem"] is None for cell in cells.values()), row
        reference = cells[row["reference"]]["median"]
        for peer, ratio in row["ratios"].items():
            assert ratio == pytest.approx(reference / cells[peer]["median"])
        if row["workload"] in CONVERSATIONS:
            assert row["floor"] == max(cells["floor"]["rounds"]) > 0
    for name in (*NAMES, "ours, forgetting", "a decode step of ours", "scheduling 4,096 running requests"):
        assert name in done.printed
    assert done.content["versions"]["ours"].keys() == {"rollout-engine", "torch", "transformers"}

    ours, forgetting = (done.rows("multiturn")[0]["peers"][name]["notes"] for name in ("ours", "ours, forgetting"))
    assert ours["prompt_tokens_computed"] <= forgetting["prompt_tokens_computed"]
    computed = done.rows("prefix")[0]["peers"]["ours"]["notes"]["prompt_tokens_computed"]
    assert computed < 64 * 21, "the shared system prompt was computed for every question"
    for mode in ("offload", "recompute", "persist"):
        notes = done.rows("step")[0]["peers"][f"ours, {mode}"]["notes"]
        assert notes["requests in flight"] == 16, "half the requests were to be in flight during the update"
        assert all(notes[phase] > 0 for phase in ("generate", "suspend", "train", "resume", "finish"))
    profiles = {(each["kind"], each.get("sequences")): each for each in done.content["profiles"]}
    assert profiles.keys() == {("decode step", 1), ("decode step", 4), ("scheduling", None)}
    assert 0 < profiles["decode step", 4]["bookkeeping_share"] < 1
    assert 0 < profiles["decode step", 4]["watch_share"] < 1


def test_a_missing_peer_is_not_run_and_one_that_dies_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = program(tmp_path, "echo no such library >&2; exit 3")
    others = ("--peers", "vllm", "llama.cpp", "--vllm-python", fake)
    done = run(tmp_path, capsys, "--workloads", "steady", "startup", *others)
    assert done.status == 0
    for row in [*done.rows("steady")[:1], *done.rows("startup")]:
        missing, dead = (row["peers"][name]["problem"] for name in ("llama.cpp", "vllm"))
        assert missing.startswith("not run: not installed: ")
        assert "--llama-python" in missing
        assert dead.startswith("error: ")
        assert "(exit status 3)" in dead
        assert "no such library" in dead
        assert row["ratios"] == {}
    assert "not run" in done.printed
    assert "no such library" in done.printed


def test_a_peer_that_hangs_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "START_S", 0.5)
    done = run(tmp_path, capsys, "--workloads", "grpo", "--peers", "ours", "vllm", "--vllm-python",
               program(tmp_path, "exec sleep 600"))  # fmt: skip
    assert done.status == 0
    (row,) = done.rows("grpo")
    assert row["peers"]["vllm"]["problem"].startswith("error: no answer to 'load' within 0.5 s")
    assert row["peers"]["ours"]["median"] > 0


def test_ctrl_c_prints_and_saves_what_was_measured_even_if_a_library_swallows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(race.Race, "_training_step", interrupted)
    done = run(tmp_path, capsys, "--workloads", "grpo", "step", "startup", "--peers", "ours")
    assert done.status == 130
    measured = [row for row in done.content["rows"] if any(cell["rounds"] for cell in row["peers"].values())]
    assert [row["workload"] for row in measured] == ["grpo"]
    assert "grpo, 8 × 8 samples" in done.printed


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


def test_a_peer_that_was_far_too_slow_before_does_not_begin() -> None:
    rules = Rules(rounds=3, limit_s=10, say=print)
    assert hopeless(None, 1000, rules) is None
    assert hopeless(60.0, 1000, rules) is None
    assert (hopeless(10.0, 1000, rules) or "").startswith("not run: too slow, about 100 s a round")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    """A process that answers `hello`, fails at `fail`, hangs at `hang`, and talks on stdout meanwhile."""
    script = tmp_path / "child.py"
    script.write_text(f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from serve import serve
def hello(name):
    print("noise on stdout")
    return {{"greeting": "hello " + name}}
serve({{"hello": hello, "fail": lambda: 1 / 0, "hang": lambda: time.sleep(600)}})
""")
    started = Child([sys.executable, str(script)], clean_environment({}), tmp_path / "log")
    yield started
    started.close()


def test_a_child_answers_whatever_its_libraries_print(child: Child, tmp_path: Path) -> None:
    assert child.ask(20, "hello", name="you") == {"greeting": "hello you"}
    assert "noise on stdout" in (tmp_path / "log").read_text()


def test_a_child_that_raises_says_so_and_lives(child: Child) -> None:
    with pytest.raises(PeerFailed, match="ZeroDivisionError"):
        child.ask(20, "fail")
    assert child.ask(20, "hello", name="again")["greeting"] == "hello again"


def test_a_child_that_hangs_is_late_and_ended(child: Child) -> None:
    child.ask(20, "hello", name="you")
    with pytest.raises(Late, match="no answer to 'hang'"):
        child.ask(0.2, "hang")
    with pytest.raises(PeerFailed, match="ended after an earlier failure"):
        child.ask(20, "hello", name="you")


def test_our_interpreter_settings_do_not_reach_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "ours")
    assert "PYTHONPATH" not in clean_environment({})
    assert clean_environment({"PYTHONPATH": "theirs"})["PYTHONPATH"] == "theirs"


def floor() -> Floor:
    """A machine that reads a byte and multiplies ten weights a second."""
    machine = Rates(bandwidth=1.0, matmul=20.0)
    return Floor(machine, weights=100, head=40, weight_bytes=200, kv_bytes_per_token=3)


def test_a_decode_step_is_bound_by_reading_weights_or_by_multiplying_and_reads_its_kv() -> None:
    assert floor().decode_step(sequences=1, kv_tokens=5) == 200 + 15
    assert floor().decode_step(sequences=40, kv_tokens=5) == 400 + 15


def test_what_a_gpu_does_in_a_step_is_told_beside_what_the_host_does(capsys: pytest.CaptureFixture[str]) -> None:
    spent = DeviceTime(kernels=650.0, ms={"attend_parts": 3.0, "nvjet_tst": 2.5, "merge": 1.0, "add_norm": 0.5})
    found = step_profile._of_device(spent, step_ms=10.0, kv_bytes=8 * 10**9, floor_s=0.006)
    assert found == {"kernels": 650.0, "busy_ms": 7.0, "idle_ms": 3.0, "attention_ms": 4.0, "attention_tb_s": 2.0,
                     "of_floor": 0.6}  # fmt: skip
    profile = {"kind": "decode step", "size": "8b", "dtype": "bfloat16", "sequences": 64, "ms": {"step": 10.0},
               "bookkeeping_share": 0.1, "device": found}  # fmt: skip
    report.show(Console(width=140), Ledger(), [profile])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "650" in line)
    assert all(shown in line for shown in ("8b bfloat16", " 7 ", " 3 ", " 4 ", " 2 ", "60%"))


def test_a_subject_is_saved_when_a_peer_in_another_process_asks_for_it(tmp_path: Path) -> None:
    subject = make_subject("tiny", "bfloat16", 64, tmp_path)
    assert not list(tmp_path.iterdir()), "16 GB of a large one, and its peers may be here"
    assert subject.folder == subject.where == tmp_path / "tiny-bfloat16"
    saved = load_file(subject.folder / "model.safetensors")
    name = "model.embed_tokens.weight"
    assert saved[name].equal(subject.model.get_parameter(name))


def test_a_prompt_that_samples_share_is_in_the_floor_once() -> None:
    def work(*prompts: tuple[int, ...]) -> Workload:
        return Workload("grpo", "two", (Turn(prompts, (2, 2)),), ("ours",))

    apart, shared = floor().whole(work((1, 2, 3), (4, 5, 6))), floor().whole(work((1, 2, 3), (1, 2, 3)))
    assert floor().decode(work((1, 2, 3), (4, 5, 6))) - floor().decode(work((1, 2, 3), (1, 2, 3))) == 3 * 3
    assert shared < apart


def test_every_peer_and_every_run_gets_the_same_work() -> None:
    for make in CONVERSATIONS.values():
        assert list(make(100, Scale(0.1), [2])) == list(make(100, Scale(0.1), [2]))


def test_the_long_tail_has_its_mean_and_its_longest() -> None:
    (work,) = grpo(100, Scale(), [])
    lengths = work.turns[0].lengths
    assert max(lengths) == 1024
    assert 100 < sum(lengths) / len(lengths) < 160
    assert len(set(work.turns[0].prompts)) == 8


def test_the_suspend_benchmark_measures_both_ways_to_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "suspend.json"
    options = ["--size", "tiny", "--requests", "5", "--tokens", "300", "--rounds", "2", "--json", str(path)]
    assert suspend.main(options) == 0
    found = json.loads(path.read_text())
    offload, recompute = found["medians"]["offload"], found["medians"]["recompute"]
    # K and V in two layers of two heads of 16 numbers of two bytes; the last, partly filled block counts whole.
    assert 5 * 300 * 256 <= offload["bytes"] <= found["pool_bytes"]
    assert offload["bytes"] % (16 * 256) == recompute["bytes"] == 0
    assert min(offload["back_s"], recompute["back_s"], offload["suspend_s"], offload["resume_s"]) > 0
    assert found["prefill_over_resume"] == pytest.approx(recompute["back_s"] / offload["back_s"])
    assert "prefilling over resuming" in capsys.readouterr().out


def test_speed_beside_busy_processes_is_measured_and_they_are_gone_afterwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert busy.main(["--size", "tiny", "--rounds", "1", "--scale", "0.02", "--sequences", "2", "--several", "1"]) == 0
    printed = capsys.readouterr().out
    assert "vllm: not installed" in printed
    for load in ("quiet", "1 pinned", "1 anywhere"):
        assert f"{load:12} ours" in printed
    with busy.busy(1) as started:
        assert all(process.poll() is None for process in started)
    assert all(process.poll() is not None for process in started)
