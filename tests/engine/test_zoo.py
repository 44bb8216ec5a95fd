"""Tests of `python -m tests.zoo`: small models, verdicts, the survey of architectures."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engine.engine import DynamicInferenceEngine
from rollout.requests.request import DynamicInferenceRequest
from tests.models import require_recurrent_cache
from tests.zoo.verdicts import EQUAL, ERROR, NOT_BUILT, REFUSED, WRONG, judge

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


@pytest.mark.parametrize(
    ("architecture", "outcome", "detail"),
    [
        ("qwen3", EQUAL, "fused"),
        ("phimoe", EQUAL, "log-probs within"),
        ("mimo_v2_flash", EQUAL, "log-probs within"),
        ("nemotron_h", EQUAL, "log-probs within"),
        ("jamba", REFUSED, "differ from the model's own forward"),
        ("mamba2", EQUAL, "log-probs within"),
        ("falcon", REFUSED, "0 of 4 layers go through transformers' attention interface"),
        ("no_such_model", NOT_BUILT, "KeyError"),
    ],
)
def test_an_architecture_is_equal_or_refused_by_name(architecture: str, outcome: str, detail: str) -> None:
    if architecture in ("nemotron_h", "jamba", "mamba2"):
        require_recurrent_cache()
    verdict = judge(architecture)
    assert (verdict.outcome, detail in verdict.detail) == (outcome, True), verdict
    assert not verdict.failed


def test_other_log_probs_other_tokens_and_other_errors_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    own = DynamicInferenceEngine.generate

    def generate(engine: DynamicInferenceEngine, *args: Any) -> list[DynamicInferenceRequest]:
        results = own(engine, *args)
        results[-1].generated_log_probs[-1] -= 1e-3
        return results

    monkeypatch.setattr(DynamicInferenceEngine, "generate", generate)
    verdict = judge("llama")
    assert (verdict.outcome, verdict.failed) == (WRONG, True)
    assert "log-probs differ from the model's own by 0.0" in verdict.detail
    monkeypatch.setattr("tests.zoo.verdicts.greedy", lambda *args, **options: [])
    monkeypatch.setattr(DynamicInferenceEngine, "generate", own)
    assert judge("llama").detail.startswith("tokens differ from generate's after 1 tokens")
    monkeypatch.setattr(DynamicInferenceEngine, "generate", lambda *args: 1 / 0)
    verdict = judge("llama")
    assert (verdict.outcome, verdict.failed) == (ERROR, True)
    assert "ZeroDivisionError" in verdict.detail
