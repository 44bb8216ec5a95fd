"""Tests of the stored figures and their pages, and of the study of equal learning in a short form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks import equivalence, figures

ENTRIES = figures.load()
MARKED = [
    match["name"] for page in figures.PAGES for match in figures.MARKED.finditer(page.read_text(encoding="utf-8"))
]


def test_pages_say_what_is_stored() -> None:
    assert figures.differing(ENTRIES) == [], "run `python -m tests.benchmarks.figures --write`"


@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_stored_was_measured_by_the_present_command(name: str) -> None:
    assert ENTRIES[name]["command"] == figures.command(name), f"run `python -m tests.benchmarks.figures --renew {name}`"


def test_every_table_has_been_measured_and_is_shown_once() -> None:
    assert sorted(MARKED) == sorted(fragment for fragment, (name, _) in figures.FRAGMENTS.items() if name in ENTRIES)


def test_nothing_is_measured_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([2.0, 1.5, 1.4])
    monkeypatch.setattr(figures.os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    monkeypatch.setattr(figures.time, "sleep", lambda seconds: None)
    assert figures.load_when_quiet() == 1.4
    monkeypatch.setattr(figures.os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    with pytest.raises(TimeoutError, match=r"load 9\.0"):
        figures.load_when_quiet(patience_s=0.0)


def test_a_changed_number_is_noticed() -> None:
    """A page edited by hand differs from what is written."""
    page = figures.PAGES[1].read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| trees |"))
    assert figures.written(page.replace(line, line.replace("|", "| 9", 2)), ENTRIES) == page


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
