"""Tests that the first run on a GPU runs: the stages that a CPU has, on a tiny model, and failures of a stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_first_run import __main__ as first_run

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
ON_A_CPU = ["--device", "cpu", "--sizes", "tiny"]


def findings(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "findings.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_the_stages_that_a_cpu_has_find_what_they_say(tmp_path: Path) -> None:
    stages = ["env", "poison", "truth", "fused", "exact", "speed", "without", "ways", "top_p", "memory"]
    assert first_run.main([*stages, "--out", str(tmp_path), *ON_A_CPU]) == 0
    found = findings(tmp_path)
    assert [each["name"] for each in found if each["what"] == "stage"] == stages
    exact = [each for each in found if each["what"] == "log-probs" and each["dtype"] == "torch.float32"]
    assert len(exact) == 4
    assert all(each["max"] < 1e-4 for each in exact)
    same = [each["same_bits"] for each in found if each["what"] == "exact"]
    assert same == [True] * 12
    assert {each["work"] for each in found if each["what"] == "price"} == {"sampling", "training"}
    fused = [(each["fused_forward"], each["max"] < 0.1) for each in found if each["what"] == "log-probs, fused"]
    assert fused == [(True, True), (False, True)] * 2
    labels = [each["label"] for each in found if each["what"] == "decode step"]
    assert labels == [
        "bf16, fused_forward=True", "bf16, fused_forward=False", "fp32, autocast_dtype, fused_forward=True",
        "fp32, autocast_dtype, fused_forward=False", "bf16", "2 samples a prompt, with all parts",
        "fp32, autocast_dtype", "fp32, autocast around the call",
        "fp32, a bf16 copy", "fp32, autocast in the forward",
    ]  # fmt: skip
    steps = [each for each in found if each["what"] == "decode step"]
    assert all(set(each["host_ms"]) == {"schedule", "update", "forward", "_sample"} for each in steps)
    assert [each["shrunk_by_blocks"] for each in found if each["what"] == "resume"] == [0, 0, 0]


def test_a_stage_that_fails_is_a_finding_and_the_next_one_runs(tmp_path: Path) -> None:
    assert first_run.main(["kernels", "top_p", "--out", str(tmp_path), *ON_A_CPU]) == 1
    failed, *_, last = findings(tmp_path)
    assert (failed["name"], failed["ok"]) == ("kernels", False)
    assert "do not load" in failed["why"]
    assert (last["name"], last["ok"]) == ("top_p", True)


@pytest.mark.parametrize(
    ("wrong", "message"), [(["--sizes", "9b"], "9b: must be of"), (["--device", "cuda:0"], "sees no CUDA device")]
)
def test_wrong_options_are_refused_by_name(
    wrong: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        first_run.main(["env", *ON_A_CPU, *wrong])
    assert message in capsys.readouterr().err
