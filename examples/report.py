"""Report of a run: a table of steps while it runs, a plot at the end.

Independent of models. Times, lengths and speeds are the rollout's own metrics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.console import Console
from rich.text import Text
from torch import Tensor

from rollout import RolloutBatch

PHASES = {"generate": "#2f6fb0", "resume": "#8fd0c8", "suspend": "#e4572e", "train": "#f2c25b"}
INK, FAINT, BLUE = "#222222", "#9aa0a6", "#2f6fb0"
COLUMNS = (
    ("step", 5), ("reward", 7), ("", 12), ("held-out", 9), ("length", 7), ("stale", 6), ("Δlogp", 6), ("tok/s", 7),
    ("gen", 5), ("train", 6), ("s", 6),
)  # fmt: skip
STYLE = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 26,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#e8eaed", "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 9,
}  # fmt: skip
BAR = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Step:
    """Results of one training step."""

    reward: float
    """Mean of the batch."""

    loss: float
    """Loss of the last update of the step."""

    staleness: Tensor
    """int [tokens]: of every token trained on, the weight updates between its sampling and its use."""

    tokens: int
    """Number of tokens in the completions."""

    batch: RolloutBatch | None = None
    rewards: Tensor | None = None
    """float [N] of the batch."""


class Report:
    """The rows of one run.

    Args:
        title: of the run.
        folder: where `picture` puts its files; made if need be.
        extra: heading of one more column, which `row` fills.
        silent: print nothing (the other ranks do).
    """

    def __init__(self, title: str, folder: Path, *, extra: str = "", silent: bool = False) -> None:
        self.title = title
        self.folder = folder
        self.rows: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._extra = extra
        self._console = Console(highlight=False, soft_wrap=True, quiet=silent)
        self._header_is_due = True
        self._console.print(Text(f"\n{title}", style="bold"))

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(line, markup=False)

    def row(
        self, number: int, step: Step, held_out: float | None, metrics: Mapping[str, float], extra: str = ""
    ) -> None:
        """Take in one step; it is printed if its held-out reward was measured.

        Args:
            number: of the step, from 1.
            step: what it trained on.
            held_out: mean reward on the held-out problems; None where it was not measured.
            metrics: `rollout.metrics()` of the step.
            extra: what the extra column says.
        """
        ages = step.staleness.bincount().cpu().tolist()
        self.rows.append(
            {"step": number, "train": step.reward, "held_out": held_out, "metrics": dict(metrics), "ages": ages}
        )
        if held_out is None:
            return
        if self._header_is_due:
            header = "".join(name.rjust(width) for name, width in COLUMNS)
            self._console.print(Text(f"{header}  {self._extra}".rstrip(), style="dim"))
            self._header_is_due = False
        seconds = {phase: metrics[f"rollout/{phase}_s"] for phase in PHASES}
        cells = (
            str(number), f"{step.reward:.2f}", " " + _bar(step.reward, 10), f"{held_out:.2f}",
            f"{metrics.get('rollout/completion_length_mean', math.nan):.1f}", f"{step.staleness.float().mean():.1f}",
            f"{metrics['rollout/logprob_diff_mean']:.0e}".replace("e-0", "e-"),
            f"{metrics.get('rollout/tokens_per_second', 0):,.0f}",
            f"{seconds['generate'] / sum(seconds.values()):.0%}", f"{seconds['train'] / sum(seconds.values()):.0%}",
            f"{sum(seconds.values()):.2f}",
        )  # fmt: skip
        line = Text()
        for (name, width), cell in zip(COLUMNS, cells, strict=True):
            style = {"": "blue", "held-out": "bold"}.get(name, "default")
            line.append(cell.ljust(width) if name == "" else cell.rjust(width), style=style)
        line.append(f"  {extra}".rstrip())
        self._console.print(line)

    def picture(self, name: str) -> Path:
        """Draw the run into `<folder>/<name>.png`, and write its numbers to `<folder>/<name>.json`."""
        (self.folder / f"{name}.json").write_text(json.dumps(self.rows), encoding="utf-8")
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(11, 7.5), layout="constrained")
            figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
            figure.suptitle(self.title, x=0.015, ha="left", fontsize=14, fontweight="bold", color=INK)
            panels = figure.subplots(2, 2)
            for axes, draw in zip(panels.flat, (self._rewards, self._lengths, self._times, self._ages), strict=True):
                draw(axes)
                axes.set_xlim(1, self.rows[-1]["step"])
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
                axes.legend(
                    loc="lower left", bbox_to_anchor=(-0.015, 0.985), ncols=6, handlelength=1.1, columnspacing=1.3
                )
            for axes in panels[1]:
                axes.set_xlabel("step")
            path = self.folder / f"{name}.png"
            figure.savefig(path, dpi=150)
        return path

    def _rewards(self, axes: Axes) -> None:
        train = self._values("train")
        axes.plot(self._steps, train, color=FAINT, linewidth=0.8, alpha=0.6)
        axes.plot(self._steps, _smooth(train), color=FAINT, linewidth=2, label="training problems")
        measured = [(row["step"], row["held_out"]) for row in self.rows if row["held_out"] is not None]
        axes.plot(*zip(*measured, strict=True), "o-", color=BLUE, linewidth=2, markersize=4, label="held-out problems")
        for (step, value), ha in ((measured[0], "left"), (measured[-1], "right")):
            axes.annotate(
                f"{value:.2f}", (step, value), (0, 10), textcoords="offset points", ha=ha, color=BLUE, weight="bold"
            )
        axes.set(title="Reward: answers that are right", ylim=(0, 1.02))

    def _lengths(self, axes: Axes) -> None:
        mean, p50, p99, longest = (
            self._metric(f"rollout/completion_length_{stat}") for stat in ("mean", "p50", "p99", "max")
        )
        axes.plot(self._steps, mean, color=BLUE, linewidth=2, label="mean")
        axes.fill_between(self._steps, p50, p99, color=BLUE, alpha=0.18, linewidth=0, label="median to 99th percentile")
        axes.plot(self._steps, longest, ".", color=FAINT, markersize=4, label="longest")
        axes.set(title="Completion length in tokens", ylim=(0, np.nanmax([1, *longest]) * 1.05))

    def _times(self, axes: Axes) -> None:
        seconds = [_smooth(self._metric(f"rollout/{phase}_s")) for phase in PHASES]
        total = sum(values.sum() for values in seconds)
        labels = [f"{phase} {_percent(values.sum() / total)}" for phase, values in zip(PHASES, seconds, strict=True)]
        axes.stackplot(self._steps, seconds, labels=labels, colors=list(PHASES.values()), linewidth=0)
        axes.set(title="Where the seconds of a step go", ylim=(0, np.sum(seconds, axis=0).max() * 1.05))

    def _ages(self, axes: Axes) -> None:
        oldest = max(len(row["ages"]) for row in self.rows)
        counts = np.array([row["ages"] + [0] * (oldest - len(row["ages"])) for row in self.rows], dtype=float)
        shares = counts / counts.sum(axis=1, keepdims=True)
        shown = min(oldest, 6)
        bands = [*shares[:, : shown - 1].T, shares[:, shown - 1 :].sum(axis=1)]
        labels = [*map(str, range(shown - 1)), f"{shown - 1}" + " or more" * (oldest > shown)]
        shades = mpl.colormaps["YlGnBu"](np.linspace(0.2, 0.75, shown))
        axes.stackplot(self._steps, bands, labels=labels, colors=shades, linewidth=0)
        mean = float((counts.sum(axis=0) * np.arange(oldest)).sum() / counts.sum())
        axes.set(title=f"Staleness of trained tokens, in updates (mean {mean:.1f})", ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1))

    @property
    def _steps(self) -> list[int]:
        return [row["step"] for row in self.rows]

    def _values(self, name: str) -> np.ndarray:
        return np.array([row[name] for row in self.rows], dtype=float)

    def _metric(self, name: str) -> np.ndarray:
        return np.array([row["metrics"].get(name, np.nan) for row in self.rows], dtype=float)


def _smooth(values: np.ndarray, width: int = 5) -> np.ndarray:
    """Mean over a centred window, which shrinks at the ends."""
    half = width // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.005 or not share else f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def _bar(share: float, width: int) -> str:
    """A bar of `width` characters when `share` is 1, drawn in eighths of a character."""
    eighths = round(share * width * 8)
    return BAR[8] * (eighths // 8) + BAR[eighths % 8].strip()
