"""Report of a race: tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.common import number
from tests.benchmarks.ledger import Cell, Ledger, Row


def _table(title: str, rows: Sequence[Row], problems: list[str]) -> Table:
    """One model's rows; `problems` takes what does not fit into a cell and is shown below, by number."""
    table = Table("workload", "figure", "peer", title=title, title_justify="left")
    for column in ("median", "spread", "ours / peer", "of floor"):
        table.add_column(column, justify="right")
    for row in rows:
        floor = "" if row.floor is None else f", floor {number(row.floor)}"
        labels = [f"{row.key.workload}, {row.key.case}", f"{row.key.metric} ({row.unit}{floor})"]
        for peer, cell in row.cells.items():
            spread, ratio, reached = cell.spread, row.ratio(peer), row.reached(peer)
            table.add_row(
                *labels, peer, _median(peer, cell, problems),
                "" if spread is None else f"{spread:.0%}",
                "" if ratio is None or peer == row.reference else f"{ratio:.2f}",
                "" if reached is None else f"{reached:.0%}",
            )  # fmt: skip
            labels = ["", ""]
        table.add_section()
    return table


def _median(peer: str, cell: Cell, problems: list[str]) -> str:
    if cell.problem is None:
        return number(cell.median)
    problem = f"{peer}: {cell.problem}"
    if problem not in problems:
        problems.append(problem)
    text = f"{cell.problem.partition(':')[0]} ({problems.index(problem) + 1})"
    return f"{number(cell.median)} {text}".lstrip()


def profile_table(profiles: Sequence[Mapping[str, Any]]) -> Table:
    """Where a decode step of ours goes, in milliseconds; the share is of a step."""
    steps = [profile for profile in profiles if profile["kind"] == "decode step"]
    names = list(dict.fromkeys(name for step in steps for name in step["ms"]))
    table = Table("model", "sequences", title="a decode step of ours, ms", title_justify="left")
    for name in [*names, "Python and bookkeeping"]:
        table.add_column(name, justify="right")
    for step in steps:
        values = [f"{step['ms'].get(name, 0):.2f}" for name in names]
        table.add_row(
            f"{step['size']} {step['dtype']}", str(step["sequences"]), *values, f"{step['bookkeeping_share']:.1%}"
        )
    return table


def show(console: Console, ledger: Ledger, profiles: Sequence[Mapping[str, Any]]) -> None:
    """Print all tables."""
    problems: list[str] = []
    for (size, dtype), rows in ledger.by_model().items():
        console.print(_table(f"{size} {dtype}", rows, problems))
    for index, problem in enumerate(problems, 1):
        console.print(f"({index}) {problem}", markup=False, highlight=False, soft_wrap=True)
    if any(profile["kind"] == "decode step" for profile in profiles):
        console.print(profile_table(profiles))
    for profile in profiles:
        if profile["kind"] == "scheduling":
            console.print(
                f"scheduling {profile['requests']:,} running requests without a model: {profile['step_ms']:.2f} ms a step "
                f"(schedule {profile['schedule_ms']:.2f}, update {profile['update_ms']:.2f})"
            )
