"""Groups of attention layers that share one pool of equal pages: some see a whole sequence, others only a window of it.

A page holds K and V of `block_size` tokens for one group of layers, and any page can serve any group. Groups have the same
number of layers, the last one of each kind perhaps fewer, so that one of their places stays empty (as vLLM's hybrid KV cache
manager does it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PER_GROUP = 0.02
"""What a further group costs, as a share of the pool: every step makes a block table for each."""


@dataclass(frozen=True)
class LayerGroups:
    """Where the KV of each layer lies.

    Attributes:
        group_of: group of each layer; those that see everything come first.
        place_of: place of each layer in the pages of its group.
        places: layers of a group.
        whole: groups whose pages are kept as long as the sequence.
        limited: groups whose pages can be given back once no query sees them.
        reach: positions, its own included, that a query sees in any layer of the latter.
    """

    group_of: tuple[int, ...]
    place_of: tuple[int, ...]
    places: int
    whole: int
    limited: int
    reach: int

    @property
    def count(self) -> int:
        """Number of groups, which is the pages of a block that can still be seen in every layer."""
        return self.whole + self.limited


def layer_groups(widths: Sequence[tuple[int, int]], reaches: Sequence[int | None], length: int) -> LayerGroups | None:
    """Split a model's layers; None: all see whole sequences, none does, or their KV differs in size.

    Args:
        widths: elements of K and of V of one token, of each layer.
        reaches: how many positions, its own included, a query sees in each layer; None: all.
        length: of the longest sequence.
    """
    if len(set(widths)) != 1:
        return None
    limited = [index for index, reach in enumerate(reaches) if reach is not None and reach < length]
    whole = [index for index in range(len(widths)) if index not in limited]
    if not limited or not whole:
        return None

    def cost(places: int) -> float:
        kept, passing = -(-len(whole) // places), -(-len(limited) // places)
        memory = (kept + passing) * places / len(widths) + kept * places / len(whole)
        return memory + PER_GROUP * (kept + passing)

    places = min(range(1, max(len(whole), len(limited)) + 1), key=cost)
    group_of, place_of = [0] * len(widths), [0] * len(widths)
    kept = -(-len(whole) // places)
    for first, layers in ((0, whole), (kept, limited)):
        for order, layer in enumerate(layers):
            group_of[layer], place_of[layer] = first + order // places, order % places
    return LayerGroups(
        tuple(group_of), tuple(place_of), places, kept, -(-len(limited) // places),
        max(reach for reach in (reaches[index] for index in limited) if reach is not None),
    )  # fmt: skip
