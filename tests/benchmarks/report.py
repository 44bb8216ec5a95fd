"""Report of a race: tables, and a plot with one panel per figure and its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.benchmarks.ledger import Cell, Ledger, Row

COLOURS = {
    "ours": "#1f5fa8", "ours, forgetting": "#8fb4dc", "ours, offload": "#1f5fa8", "ours, recompute": "#5b8fc9",
    "ours, persist": "#8fb4dc", "generate": "#c9742c", "cb": "#e0b23c", "vllm": "#5a8f4e", "llama.cpp": "#8c5a9e",
}  # fmt: skip
PANELS_PER_LINE = 5


def number(value: float | None) -> str:
    """Three digits that matter, thousands apart."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


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


def _notes_table(title: str, rows: Sequence[Row]) -> Table | None:
    """What else was seen: prompt tokens computed, and seconds of the phases of a training step."""
    table = Table("workload", "peer", "beside it", title=title, title_justify="left")
    seen = set()
    for row in rows:
        for peer, cell in row.cells.items():
            where = f"{row.key.workload}, {row.key.case}"
            if cell.notes and (where, peer) not in seen:
                seen.add((where, peer))
                notes = ", ".join(f"{name} {number(value)}" for name, value in cell.median_notes.items())
                table.add_row(where, peer, notes)
    return table if seen else None


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


def device_table(profiles: Sequence[Mapping[str, Any]]) -> Table:
    """What a GPU does in a decode step of ours."""
    table = Table("model", "sequences", title="a decode step of ours on the device", title_justify="left")
    for name in ("kernels", "busy ms", "idle ms", "attention ms", "attention TB/s", "of floor"):
        table.add_column(name, justify="right")
    for each in profiles:
        found = each["device"]
        values = [number(found[name]) for name in ("kernels", "busy_ms", "idle_ms", "attention_ms", "attention_tb_s")]
        table.add_row(f"{each['size']} {each['dtype']}", str(each["sequences"]), *values, f"{found['of_floor']:.0%}")
    return table


def show(console: Console, ledger: Ledger, profiles: Sequence[Mapping[str, Any]]) -> None:
    """Print all tables."""
    problems: list[str] = []
    for (size, dtype), rows in ledger.by_model().items():
        console.print(_table(f"{size} {dtype}", rows, problems))
        if (notes := _notes_table(f"{size} {dtype}, medians", rows)) is not None:
            console.print(notes)
    for index, problem in enumerate(problems, 1):
        console.print(f"({index}) {problem}", markup=False, highlight=False, soft_wrap=True)
    if any(profile["kind"] == "decode step" for profile in profiles):
        console.print(profile_table(profiles))
    if on_device := [profile for profile in profiles if "device" in profile]:
        console.print(device_table(on_device))
    for profile in profiles:
        if "watch_share" in profile:
            console.print(
                f"{profile['size']} {profile['dtype']}: {profile['watch_share']:.2%} of a generate call of one sample looks "
                "for changes of the module"
            )
        if profile["kind"] == "scheduling":
            console.print(
                f"scheduling {profile['requests']:,} running requests without a model: {profile['step_ms']:.2f} ms a step "
                f"(schedule {profile['schedule_ms']:.2f}, update {profile['update_ms']:.2f})"
            )


def picture(path: Path, ledger: Ledger, title: str) -> None:
    """A PNG: per model one or more lines of panels, each with the medians of all peers and the floor as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    lines = [
        rows[start : start + PANELS_PER_LINE]
        for rows in ledger.by_model().values()
        for start in range(0, len(rows), PANELS_PER_LINE)
    ] or [[]]
    figure, panels = plt.subplots(
        len(lines), PANELS_PER_LINE, figsize=(3.6 * PANELS_PER_LINE, 3.1 * len(lines) + 0.6), squeeze=False
    )
    for line, axes in zip(lines, panels, strict=True):
        for axis in axes[len(line) :]:
            axis.set_visible(False)
        for row, axis in zip(line, axes, strict=False):
            _panel(axis, row)
    figure.suptitle(title, fontsize=12)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _panel(axis: Any, row: Row) -> None:
    key = row.key
    heights = [cell.median or 0.0 for cell in row.cells.values()]
    bars = axis.bar(range(len(heights)), heights, color=[COLOURS.get(peer, "#777777") for peer in row.cells])
    for bar, cell in zip(bars, row.cells.values(), strict=True):
        text = number(cell.median) or (cell.problem or "").partition(":")[0]
        axis.annotate(text, (bar.get_x() + bar.get_width() / 2, bar.get_height()), ha="center", va="bottom", fontsize=8)
    if row.floor is not None:
        axis.axhline(row.floor, color="black", linewidth=1, linestyle="--")
        axis.annotate(f"floor {number(row.floor)}", (0.98, row.floor), xycoords=("axes fraction", "data"), ha="right",
                      va="bottom", fontsize=8)  # fmt: skip
    axis.set_ylim(0, 1.18 * max([*heights, row.floor or 0.0, 1e-9]))
    axis.set_xticks(range(len(heights)), [peer.replace(", ", "\n") for peer in row.cells], fontsize=8)
    axis.set_title(f"{key.size} {key.dtype}\n{key.workload}, {key.case}: {key.metric} ({row.unit})", fontsize=8)
    axis.tick_params(axis="y", labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)
