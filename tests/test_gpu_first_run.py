"""Tests that the first run on a GPU runs: the stages that a CPU has, on a tiny model, and failures of a stage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_first_run import __main__ as first_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")
ON_A_CPU = ["--device", "cpu", "--sizes", "tiny"]


def findings(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "findings.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_stages_that_a_cpu_has_find_what_they_say(tmp_path: Path) -> None:
    stages = ["truth", "memory", "speed"]
    assert first_run.main([*stages, "--out", str(tmp_path), *ON_A_CPU, "--here"]) == 0
    found = findings(tmp_path)
    assert [each["name"] for each in found if each["what"] == "stage"] == stages
    exact = [each for each in found if each["what"] == "log-probs" and each["dtype"] == "torch.float32"]
    assert len(exact) == 4
    assert all(each["max"] < 1e-4 for each in exact)
    labels = [each["label"] for each in found if each["what"] == "decode step"]
    assert labels == ["bf16", "fp32 under autocast"]
    assert [each["shrunk_by_blocks"] for each in found if each["what"] == "resume"] == [0, 0, 0]


def test_a_stage_that_fails_is_a_finding_and_the_next_one_runs(tmp_path: Path) -> None:
    assert first_run.main(["kernels", "truth", "--out", str(tmp_path), *ON_A_CPU, "--here"]) == 1
    failed, last = (each for each in findings(tmp_path) if each["what"] == "stage")
    assert (failed["name"], failed["ok"]) == ("kernels", False)
    assert "do not load" in failed["why"]
    assert (last["name"], last["ok"]) == ("truth", True)


def test_the_calls_of_the_documentation_have_all_stages_and_time_for_them() -> None:
    text = (Path(__file__).parents[1] / "docs" / "how-to" / "testing.md").read_text(encoding="utf-8")
    calls = [line.split()[3:] for line in text.splitlines() if "tests.gpu_first_run" in line and "--seconds" in line]
    stages = [[word for word in call[: call.index("--out")] if word in first_run.LIMITS] for call in calls]
    assert sorted(name for chosen in stages for name in chosen) == sorted(first_run.LIMITS)
    for call, chosen in zip(calls, stages, strict=True):
        assert sum(first_run.LIMITS[name] for name in chosen) <= float(call[call.index("--seconds") + 1])


STAGE = """
import os, sys, time
from pathlib import Path
name, out = sys.argv[1:]
if name == "hangs":
    time.sleep(1000)
if name == "dies":
    os._exit(9)
with Path(out, "findings.jsonl").open("a") as file:
    print('{"what": "stage", "name": "%s", "ok": %s}' % (name, "false" if name == "fails" else "true"), file=file)
"""


def test_a_stage_that_hangs_or_dies_or_is_not_reached_is_named_and_the_next_one_runs(tmp_path: Path) -> None:
    def went_well(name: str, seconds: float = 60.0) -> bool:
        command = [sys.executable, "-I", "-c", STAGE, name, str(tmp_path)]
        return first_run.supervised(command, name, tmp_path, seconds)

    well = [went_well("one"), went_well("dies"), went_well("fails"), went_well("hangs", 0.5), went_well("last")]
    assert well == [True, False, False, False, True]
    assert not went_well("never", -1.0)
    said = {each["name"]: each.get("why", "") for each in findings(tmp_path)}
    assert "status 9" in said["dies"]
    assert said["fails"] == "", "it ended by itself"
    assert "killed after" in said["hangs"]
    assert "not run" in said["never"]


@pytest.mark.parametrize(
    ("wrong", "message"), [(["--sizes", "9b"], "9b: must be of"), (["--device", "cuda:0"], "sees no CUDA device")]
)
def test_wrong_options_are_refused_by_name(
    wrong: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        first_run.main(["speed", *ON_A_CPU, *wrong])
    assert message in capsys.readouterr().err
