"""Priority heap with lazy deletion."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class LazyHeap(Generic[Item]):
    """Items by key, least first. An item that is no longer `alive` is forgotten by itself, so that nothing accumulates."""

    def __init__(self, alive: Callable[[Item], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[Any, int, Item]] = []
        self._count = 0
        self._sweep_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Item]:
        return (item for _, _, item in self._heap if self._alive(item))

    def put(self, key: Any, item: Item) -> None:
        """Add an item."""
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._alive(entry[2])]
            heapq.heapify(self._heap)
            self._sweep_at = max(64, 2 * len(self._heap))
        self._count += 1
        heapq.heappush(self._heap, (key, self._count, item))

    def head(self) -> Item | None:
        """The living item of the least key."""
        while self._heap and not self._alive(self._heap[0][2]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def head_key(self) -> Any:
        """Its key; None when there is none."""
        return None if self.head() is None else self._heap[0][0]

    def pop(self) -> Item:
        """Take the head out."""
        return heapq.heappop(self._heap)[2]
