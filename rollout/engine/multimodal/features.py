"""Cache of the vision tower's outputs: an item is encoded once, for all samples of a group and later turns.

Always true: what `of` returns was computed under the present weights and adapters, since `clear` is called when they change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor

from rollout.engine.multimodal.family import ImageItem

Embeddings = list[Tensor]


class FeatureCache:
    """Embeddings of items by their digest; the least recently used go first.

    Args:
        limit: bytes kept. A larger item is encoded whenever a step needs it.
        encode: computes an item's embeddings.

    Attributes:
        encoded: items encoded so far.
        reused: look-ups that found an item.
    """

    def __init__(self, limit: int, encode: Callable[[ImageItem], Embeddings]) -> None:
        self._limit = limit
        self._encode = encode
        self._kept: OrderedDict[bytes, Embeddings] = OrderedDict()
        self.bytes = 0
        self.encoded = 0
        self.reused = 0

    def of(self, item: ImageItem) -> Embeddings:
        """Embeddings of an item."""
        known = self._kept.get(item.digest)
        if known is not None:
            self._kept.move_to_end(item.digest)
            self.reused += 1
            return known
        made = self._encode(item)
        self.encoded += 1
        self._kept[item.digest] = made
        self.bytes += _bytes(made)
        while self.bytes > self._limit:
            self.bytes -= _bytes(self._kept.popitem(last=False)[1])
        return made

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self.bytes = 0


def _bytes(made: Embeddings) -> int:
    return sum(each.numel() * each.element_size() for each in made)
