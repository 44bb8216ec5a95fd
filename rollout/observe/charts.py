"""Charts as inline SVG, drawn by matplotlib: lines with bands, stacked areas, and an engine's slots over time."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from rollout.errors import ConfigError
from rollout.observe.recorder import DECODE, HELD, PREEMPTED, PREFILL
from rollout.observe.timeline import TracedEngine, TracedSample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = Sequence[float | None]
SIZE = (4.8, 2.2)
"""The width and height of a chart over steps, in inches."""
# Use the palette of Okabe and Ito, whose colours colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#8a949e"
SLOT_COLORS = {PREFILL: ORANGE, DECODE: BLUE, HELD: "#c3ccd5", PREEMPTED: RED}
CONTROL_COLORS = {"weights updated": "#000000", "suspend": PURPLE, "resume": GREEN}
SLOT_ROWS = 96
SMALLEST = 1e-30
"""The largest value that is drawn as a gap on a logarithmic axis."""

_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "rollout", "font.size": 9, "axes.spines.top": False,
    "axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": GREY, "axes.labelcolor": "#616e7c",
    "xtick.color": "#616e7c", "ytick.color": "#616e7c", "ytick.left": False, "axes.grid": True,
    "axes.grid.axis": "y", "grid.color": "#e4e7eb", "axes.axisbelow": True, "axes.xmargin": 0,
}  # fmt: skip


def lines(
    steps: Sequence[int],
    series: Sequence[tuple[str, str, Values]],
    *,
    band: tuple[str, str, Values, Values] | None = None,
    log: bool = False,
    top: float | None = None,
) -> str:
    """Return a chart of lines over steps.

    Args:
        steps: the number of each step.
        series: (name, colour, values) of each line; a value of None is a gap.
        band: (name, colour, lower values, upper values) of an area behind the lines; None means no area.
        log: whether the y axis is logarithmic; values up to `SMALLEST` are then drawn as gaps.
        top: upper end of the y axis; None means the largest value.
    """

    def plain(values: Values) -> list[float]:
        return [math.nan if v is None or (log and v <= SMALLEST) else v for v in values]

    columns = [plain(values) for _, _, values in series]
    low, high = ([], []) if band is None else (plain(band[2]), plain(band[3]))
    known = [value for values in (*columns, low, high) for value in values if not math.isnan(value)]
    if not any(known):
        return note("0 in every step") if any(v == 0 for _, _, values in series for v in values) else note()

    def draw(axes: Axes) -> None:
        if band is not None:
            axes.fill_between(steps, low, high, color=band[1], alpha=0.18, linewidth=0)
        for (_, color, _), values in zip(series, columns, strict=True):
            gaps = [math.isnan(value) for value in [math.nan, *values, math.nan]]
            alone = [place for place in range(len(values)) if gaps[place] and gaps[place + 2]]
            axes.plot(steps, values, color=color, marker="o", markersize=3, markevery=alone)
        if log:
            axes.set_yscale("log")
        else:
            axes.set_ylim(min(0.0, *known), top)

    named = [(name, color) for name, color, _ in series] + ([] if band is None else [(band[0], band[1] + "55")])
    return _svg(draw, SIZE) + legend(named)


def areas(steps: Sequence[int], series: Sequence[tuple[str, str, Values]], *, shares: bool = False) -> str:
    """Return a chart of stacked areas. A value of None counts as 0. `shares` divides the values of a step by their sum."""
    columns = [[value or 0.0 for value in values] for _, _, values in series]
    present = [name for (name, _, _), values in zip(series, columns, strict=True) if any(values)]
    if not present:
        return note()
    if shares:
        if len(present) == 1:
            return note(f"{present[0]} in every step")
        sums = [sum(values) for values in zip(*columns, strict=True)]
        columns = [[v / total if total else 0.0 for v, total in zip(values, sums, strict=True)] for values in columns]

    def draw(axes: Axes) -> None:
        # Draw a single step as a bar of the chart's width.
        at = list(steps) if len(steps) > 1 else [steps[0] - 0.5, steps[0] + 0.5]
        tall = columns if len(steps) > 1 else [values * 2 for values in columns]
        axes.stackplot(at, tall, colors=[color for _, color, _ in series], linewidth=0)
        axes.set_ylim(0, 1 if shares else None)

    return _svg(draw, SIZE) + legend([(name, color) for name, color, _ in series])


Stay = list[tuple[str, float, float]]
"""One stay of a sample in a slot: its (state, start, end) from admission until it finishes or is preempted."""


def slots(engine: TracedEngine, duration_s: float) -> str:
    """Return a chart of an engine's slots: a sample has a slot (row) from admission until it finishes or is preempted."""
    stays = [(sample, stay, evicted) for sample in engine.samples for stay, evicted in _stays(sample)]
    rows: list[list[tuple[TracedSample, Stay, bool]]] = []
    for each in sorted(stays, key=lambda each: each[1][0][1]):
        # Allow 1 microsecond of overlap: times in a trace are rounded to a tenth of a microsecond.
        free = next((row for row in rows if row[-1][1][-1][2] <= each[1][0][1] + 1e-6), None)
        if free is None:
            rows.append(free := [])
        free.append(each)
    if not rows or duration_s <= 0:
        return note()
    shown, tips = rows[:SLOT_ROWS], list[str]()

    def draw(axes: Axes) -> None:
        for number, row in enumerate(shown):
            for sample, stay, evicted in row:
                told = f"request {sample.request}/{sample.sample}: {sample.tokens} tokens, {sample.finish}"
                for state, start, end in stay:
                    bar = axes.broken_barh([(start, end - start)], (number, 0.92), facecolors=SLOT_COLORS[state])
                    bar.set_gid(f"tip{len(tips)}")
                    tips.append(f"{told}, {state} {end - start:.3f} s")
                # Draw an edge at the end, which separates a sample from its successor in the slot.
                color = SLOT_COLORS[PREEMPTED] if evicted else "#ffffff"
                axes.plot([stay[-1][2]] * 2, [number, number + 0.92], color=color, linewidth=2.5 if evicted else 0.8)
        for name, start, _ in engine.controls:
            if name in CONTROL_COLORS:
                axes.axvline(start, color=CONTROL_COLORS[name], linestyle="--", linewidth=0.8)
        axes.set(xlim=(0, duration_s), ylim=(len(shown), 0), xlabel="seconds", ylabel="slot")

    more = f"<p>{len(rows) - len(shown)} more slots are not drawn.</p>" if len(rows) > len(shown) else ""
    picture = _svg(draw, (11.0, 0.6 + min(4.2, 0.15 * len(shown))), tips)
    return f'<div class="slots">{picture}</div>' + legend([*SLOT_COLORS.items(), *CONTROL_COLORS.items()]) + more


def _stays(sample: TracedSample) -> Iterator[tuple[Stay, bool]]:
    """Yield (stay, whether a preemption ended it) for each stay of a sample in a slot."""
    stay: Stay = []
    for state in sample.states:
        if state[0] in (PREFILL, DECODE, HELD):
            stay.append(state)
        elif stay:
            yield stay, True
            stay = []
    if stay:
        yield stay, False


def note(text: str = "not recorded in this run") -> str:
    """Return the HTML of a sentence that is shown in place of a chart."""
    return f'<p class="none">{escape(text)}</p>'


def _svg(draw: Any, size: tuple[float, float], tips: Sequence[str] = ()) -> str:
    """Call `draw` on new axes; return the chart as SVG for HTML, with tooltips, without XML declarations and clip paths."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as exc:
        raise ConfigError("report() draws with matplotlib: pip install 'rollout-engine[report]'") from exc
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=not tips))
        axes.set_xlabel("step")
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = file.getvalue()
    svg = re.sub(r' (xmlns(:\w+)?|clip-path|width="[^"]*pt" height)="[^"]*"', "", svg[svg.index("<svg") :])
    return re.sub(r'<g id="tip(\d+)">', lambda each: f"<g><title>{escape(tips[int(each[1])])}</title>", svg)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return the HTML of a legend for (name, colour) pairs: each name follows a square in its colour."""
    keys = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in entries)
    return f'<div class="legend">{keys}</div>'
