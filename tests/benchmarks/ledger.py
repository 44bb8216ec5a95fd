"""Measurements: one row per figure with a cell per peer; medians, spread and ratios. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Cell:
    """One figure of one peer."""

    rounds: list[float] = field(default_factory=list)
    """A value per round, in the row's unit."""
    notes: dict[str, list[float]] = field(default_factory=dict)
    """What else the rounds showed, by name."""
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

    @property
    def spread(self) -> float | None:
        """(largest − smallest) / median; None of fewer than two rounds."""
        median = self.median
        return None if not median or len(self.rounds) < 2 else (max(self.rounds) - min(self.rounds)) / median

    @property
    def median_notes(self) -> dict[str, float]:
        """Every note's median over the rounds."""
        return {name: statistics.median(values) for name, values in self.notes.items()}


@dataclass(frozen=True)
class Key:
    """Which figure."""

    size: str
    dtype: str
    workload: str
    case: str
    metric: str


@dataclass
class Row:
    """One figure of every peer."""

    key: Key
    unit: str
    reference: str
    """Whose median the ratios divide."""
    cells: dict[str, Cell] = field(default_factory=dict)

    @property
    def higher_is_better(self) -> bool:
        """Rates, not seconds."""
        return self.unit != "s"

    @property
    def floor(self) -> float | None:
        """What the machine allows, the best of the rounds, in the row's unit; None if there is no such number."""
        return max(self.cells["floor"].rounds, default=None) if "floor" in self.cells else None

    def ratio(self, peer: str) -> float | None:
        """Median of the reference / median of `peer`."""
        ours, other = (self.cells[name].median if name in self.cells else None for name in (self.reference, peer))
        return ours / other if ours is not None and other else None

    def reached(self, peer: str) -> float | None:
        """Fraction of the floor: 1 is as fast as the machine allows."""
        value = self.cells[peer].median
        if not value or self.floor is None:
            return None
        return value / self.floor if self.higher_is_better else self.floor / value


class Ledger:
    """All rows, in the order of their first entry."""

    def __init__(self) -> None:
        self.rows: dict[Key, Row] = {}

    def row(self, key: Key, unit: str, reference: str = "ours") -> Row:
        """The row of `key`, made at first use."""
        return self.rows.setdefault(key, Row(key, unit, reference))

    def by_model(self) -> dict[tuple[str, str], list[Row]]:
        """Rows by (size, dtype)."""
        models: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows.values():
            models.setdefault((row.key.size, row.key.dtype), []).append(row)
        return models

    def as_list(self) -> list[dict[str, Any]]:
        """For the JSON file."""
        return [_row(row) for row in self.rows.values()]


def _row(row: Row) -> dict[str, Any]:
    return {
        **vars(row.key),
        "unit": row.unit,
        "higher_is_better": row.higher_is_better,
        "floor": row.floor,
        "peers": {
            peer: {
                "rounds": cell.rounds,
                "median": cell.median,
                "spread": cell.spread,
                "of_floor": row.reached(peer),
                "notes": cell.median_notes,
                "problem": cell.problem,
            }
            for peer, cell in row.cells.items()
        },
        "reference": row.reference,
        "ratios": {peer: ratio for peer in row.cells if (ratio := row.ratio(peer)) is not None},
    }
