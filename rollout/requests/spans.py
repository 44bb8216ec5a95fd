"""Run-length encoded policy versions of token positions.

A run is a version and the number of consecutive positions that have it. Runs cover positions 0 … len-1 in order. No run is
empty, and adjacent runs differ in version. A weight update adds at most one run per request, whatever the request's length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.errors import SerializationError

MAX_VERSION = 2**31 - 1
"""The highest policy version. It is limited because staleness, a difference of versions, is stored as int32."""


class VersionSpans:
    """The policy version of each position, as consecutive (version, count) runs. Versions may decrease from run to run.

    `version_at` costs O(log runs), `extend` and `len` O(1), `dense` O(positions).

    Raises:
        ValueError: a count is negative.
    """

    __slots__ = ("_ends", "_versions")

    def __init__(self, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._versions: list[int] = []
        self._ends: list[int] = []
        for version, count in runs:
            self.extend(count, version)

    @classmethod
    def of_run(cls, version: int, count: int) -> VersionSpans:
        """Create spans of a single run; `count` must be at least 0. This is cheaper than the constructor."""
        spans = cls.__new__(cls)
        spans._versions, spans._ends = ([version], [count]) if count else ([], [])
        return spans

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The (version, count) pair of every run, in order."""
        starts = [0, *self._ends[:-1]]
        return tuple((v, end - start) for v, start, end in zip(self._versions, starts, self._ends, strict=False))

    def extend(self, count: int, version: int) -> None:
        """Append `count` positions with `version`; raise `ValueError` if `count` is negative."""
        if count < 0:
            raise ValueError(f"VersionSpans.extend: count={count!r} must be at least 0")
        if count == 0:
            return
        ends = self._ends
        if not ends:
            self._versions.append(int(version))
            ends.append(int(count))
        elif self._versions[-1] == version:
            ends[-1] += int(count)
        else:
            self._versions.append(int(version))
            ends.append(ends[-1] + int(count))

    def append(self, other: VersionSpans) -> None:
        """Append all positions of `other`, which is unchanged."""
        start = 0
        for version, end in zip(other._versions, other._ends, strict=True):
            self.extend(end - start, version)
            start = end

    def extend_to(self, length: int, version: int) -> None:
        """Append positions with `version` until there are `length` positions; do nothing if there are already that many."""
        self.extend(max(0, length - len(self)), version)

    def shift(self, count: int) -> None:
        """Add `count` to every version."""
        self._versions = [version + count for version in self._versions]

    def clear(self) -> None:
        """Remove all positions."""
        self._versions.clear()
        self._ends.clear()

    def version_at(self, position: int) -> int:
        """Return the version at `position`; raise `IndexError` if the position is not covered."""
        if not 0 <= position < len(self):
            raise IndexError(f"VersionSpans.version_at: position={position!r} must be in [0, {len(self)})")
        return self._versions[bisect_right(self._ends, position)]

    def window(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the (version, count) runs of positions `start` … `stop` - 1. Positions after the last run are left out."""
        runs = []
        at = max(0, start)
        for index in range(bisect_right(self._ends, at), len(self._ends)):
            if at >= stop:
                break
            end = min(self._ends[index], stop)
            runs.append((self._versions[index], end - at))
            at = end
        return runs

    def dense(self) -> NDArray[np.int64]:
        """Return the version of every covered position, int64 [len]."""
        runs = self.runs
        return np.repeat(np.array([v for v, _ in runs], dtype=np.int64), np.array([n for _, n in runs], dtype=np.int64))

    def tolist(self) -> list[int]:
        """Return the version of every covered position."""
        if len(self._versions) == 1:
            return self._versions * self._ends[0]
        return [version for version, count in self.runs for _ in range(count)]

    def oldest(self, start: int = 0) -> int | None:
        """Return the lowest version from position `start` on; None if no position is covered."""
        return min(self._versions[bisect_right(self._ends, start) :], default=None)

    def newest(self) -> int | None:
        """Return the highest version of any position; None if no position is covered."""
        return max(self._versions, default=None)

    def copy(self) -> VersionSpans:
        """Return an independent copy."""
        twin = VersionSpans()
        twin._versions, twin._ends = self._versions.copy(), self._ends.copy()
        return twin

    def serialize(self) -> list[int]:
        """Return the flat list [version, count, version, count, …]."""
        if len(self._versions) == 1:
            return [self._versions[0], self._ends[0]]
        return [number for run in self.runs for number in run]

    @classmethod
    def deserialize(cls, flat: Sequence[int]) -> VersionSpans:
        """Decode the result of `serialize`; raise `SerializationError` for malformed values or counts below 1."""
        if not isinstance(flat, list | tuple) or any(type(number) is not int for number in flat):
            raise SerializationError(f"VersionSpans: {flat!r} must be a list of integers")
        if len(flat) % 2 or any(count < 1 for count in flat[1::2]):
            raise SerializationError(f"VersionSpans: {flat!r} must be (version, count) pairs with counts of at least 1")
        return cls(zip(flat[::2], flat[1::2], strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VersionSpans):
            return NotImplemented
        return self._versions == other._versions and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"VersionSpans({list(self.runs)!r})"
