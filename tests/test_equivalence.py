"""Tests of the study of equal learning, in a short form: every variant runs, and its statistics are those of the book."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import equivalence


@pytest.mark.slow
def test_every_variant_learns_from_the_same_policy(tmp_path: Path) -> None:
    flags = ["--seeds", "2", "--steps", "2", "--prompts", "4", "--lessons", "3"]
    equivalence.main([*flags, "--json", str(tmp_path / "found.json"), "--picture", str(tmp_path / "found.png")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["runs"].keys() == equivalence.VARIANTS.keys()
    assert all(len(run["reward"]) == 2 and len(runs) == 2 for runs in found["runs"].values() for run in runs)
    assert found["equivalent"]["generate"]
    assert (tmp_path / "found.png").stat().st_size > 10_000


def test_the_interval_is_students() -> None:
    """Sleep data of Student 1908: mean difference 1.58, standard error 0.389, t(9, 95 %) = 1.833."""
    low, high = equivalence.interval([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])
    assert (low, high) == pytest.approx((0.867, 2.293), abs=1e-3)
