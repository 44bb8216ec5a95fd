"""The README and `docs/explanation/performance.md` say what `docs/figures.json` holds."""

from __future__ import annotations

import pytest

from tests.benchmarks import figures

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
