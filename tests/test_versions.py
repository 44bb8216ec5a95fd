"""Tests of the table of tested versions."""

from __future__ import annotations

from tests.versions import PAGE, entered, versions


def test_a_row_comes_on_top_and_replaces_an_older_one_of_the_same_versions_and_tests() -> None:
    page = "# T\n\nText.\n\n| date | torch | tests | result |\n|---|---|---|---|\n"
    page = entered(page, "| 1 | 2.13 | all | 7 passed |")
    page = entered(page, "| 2 | 2.11 | all | 8 passed |")
    page = entered(page, "| 3 | 2.13 | all | 9 passed |")
    assert page.splitlines()[6:] == ["| 3 | 2.13 | all | 9 passed |", "| 2 | 2.11 | all | 8 passed |"]


def test_the_table_has_a_column_for_every_package() -> None:
    head = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    assert head.count("|") == len(versions()) + 4
