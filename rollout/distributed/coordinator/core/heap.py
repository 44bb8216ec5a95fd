"""Priority heap with lazy deletion."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class LazyHeap(Generic[Item]):
    """Min-heap of items by key. Items that are no longer `alive` are skipped and swept periodically."""

    def __init__(self, alive: Callable[[Item], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[Any, int, Item]] = []
        self._count = 0
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, key: Any, item: Item) -> None:
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._alive(entry[2])]
            heapq.heapify(self._heap)
            self._sweep_at = max(64, 2 * len(self._heap))
        self._count += 1
        heapq.heappush(self._heap, (key, self._count, item))

    def head(self) -> Item | None:
        """The live item with the lowest key, or None."""
        while self._heap and not self._alive(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def head_key(self) -> Any:
        return None if self.head() is None else self._heap[0][0]

    def pop(self) -> Item:
        return heapq.heappop(self._heap)[2]
