"""Measurements of a race: one row per figure with a cell per peer; medians and ratios. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Cell:
    """One figure of one peer."""

    rounds: list[float] = field(default_factory=list)
    """Tokens per second of every round."""
    notes: dict[str, list[float]] = field(default_factory=dict)
    """Further findings of the rounds, by name."""
    problem: str | None = None
    """`error: ...` or `not run: ...`; rounds before it stay."""

    def add(self, value: float, notes: Mapping[str, float]) -> None:
        """One round more."""
        self.rounds.append(value)
        for name, note in notes.items():
            self.notes.setdefault(name, []).append(note)

    @property
    def median(self) -> float | None:
        """Over the rounds; None without any."""
        return statistics.median(self.rounds) if self.rounds else None


@dataclass
class Row:
    """One figure of every peer."""

    size: str
    dtype: str
    workload: str
    case: str
    metric: str
    cells: dict[str, Cell] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return values for the JSON file: ratios are ours / the peer's; a floor is the best of its rounds."""
        medians = {peer: cell.median for peer, cell in self.cells.items()}
        floor = max(self.cells["floor"].rounds, default=None)
        ours = medians.get("ours")
        return {
            "size": self.size, "dtype": self.dtype, "workload": self.workload, "case": self.case, "metric": self.metric,
            "floor": floor,
            "peers": {
                peer: {
                    "rounds": cell.rounds, "median": cell.median, "problem": cell.problem,
                    "of_floor": medians[peer] / floor if medians[peer] and floor else None,
                    "notes": {name: statistics.median(values) for name, values in cell.notes.items()},
                }
                for peer, cell in self.cells.items()
            },
            "ratios": {peer: ours / median for peer, median in medians.items() if ours and median},
        }  # fmt: skip
