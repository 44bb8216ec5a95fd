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


def test_a_changed_number_is_noticed() -> None:
    """A page edited by hand differs from what is written."""
    page = figures.PAGES[1].read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| trees |"))
    assert figures.written(page.replace(line, line.replace("|", "| 9", 2)), ENTRIES) == page
