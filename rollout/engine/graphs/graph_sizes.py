"""Sizes that captured steps are padded to, and the device memory that their graphs take."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
"""Rows that decode steps are padded to; beyond, multiples of 128."""
GRAPH_BYTES = 2**23
"""Bytes of one graph until some were measured: about 1,600 kernels, of which the driver keeps about 5 KiB each."""
LEAST_LACKING = 2**26
"""Bytes that are kept free more at least, once a capture has found no memory."""


def row_sizes(most: int) -> list[int]:
    """Rows of the graphs for steps of up to `most` rows."""
    sizes = [*SIZES, *range(SIZES[-1] + 128, most + 128, 128)]
    return sizes[: 1 + next(place for place, size in enumerate(sizes) if size >= most)]


class GraphMemory:
    """Device memory of graphs: what their captures took, and what those to come will take.

    Graphs share one pool, as large as the largest of their steps needs. Each graph also takes memory of the driver.

    Args:
        sizes: positions of each step that may be captured.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._per_position = 0.0
        self._growths: list[int] = []
        self._captured: list[int] = []
        self._most = 0
        self._lacking: dict[int, int] = {}
        """Bytes that a capture of so many positions is given the next time."""

    def expect(self, peak: int, positions: int) -> None:
        """Record that an eager step of so many positions takes `peak` bytes next to weights and pool."""
        self._per_position = peak / positions

    def captured(self, positions: int, before: int, held: int) -> None:
        """Record a capture of so many positions, before and after which all graphs held so many bytes."""
        if positions <= max(self._captured, default=0):
            # The pool was as large already: this is what a graph takes by itself.
            self._growths.append(held - before)
        self._captured.append(positions)
        self._most = max(self._most, held)
        self._lacking.pop(positions, None)

    def lacked(self, positions: int) -> int:
        """Record that there was no memory for a capture; returns the bytes that are kept free for it from now on."""
        expected = max(LEAST_LACKING, int(positions * self._per_position))
        self._lacking[positions] = max(expected, 2 * self._lacking.get(positions, 0))
        return self._lacking[positions]

    def released(self) -> None:
        """Record that all graphs are gone, and may be captured again."""
        self._captured.clear()

    def to_come(self, held: int) -> int:
        """Bytes that captures will take next to the `held` ones: at least what they have had before."""
        larger = max(0, max(self._sizes, default=0) - max(self._captured, default=0))
        each = median(self._growths) if self._growths else GRAPH_BYTES
        more = int(larger * self._per_position + max(0, len(self._sizes) - len(self._captured)) * each)
        return max(self._lacking.values(), default=0) + max(self._most - held, more)
