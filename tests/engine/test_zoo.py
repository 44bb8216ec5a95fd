"""Tests of `python -m tests.zoo`: small models, verdicts, the survey of architectures."""

from __future__ import annotations

import pytest

from tests.models import require_recurrent_cache
from tests.zoo.verdicts import EQUAL, NOT_BUILT, REFUSED, judge


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
