"""What the images of a step change in its forward, and its encoding for the other members of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import SerializationError
from rollout.requests import codec
from rollout.requests.codec import INT_ARRAY, TENSOR, refuse

_SEEN = codec.optional(INT_ARRAY)
_FIELDS = 4


@dataclass(frozen=True, eq=False)
class StepImages:
    """What the images of a step's sequences change in its forward; P packed positions.

    Attributes:
        index: [I] packed positions that an image's embedding stands at.
        embeddings: [I, hidden]; then those added behind the first decoder layers, if any. Empty: no position has one.
        positions: [P], or [4, P] (place in the sequence, time, height, width) where the last three differ.
        seen: [P] last position that each attends to; None: its own.
    """

    index: NDArray[np.int64]
    embeddings: list[Tensor]
    positions: NDArray[np.int64]
    seen: NDArray[np.int64] | None

    @property
    def only_shifts(self) -> bool:
        """Whether the step differs from one of text by its positions alone, one per row."""
        return not len(self.index) and self.positions.ndim == 1 and self.seen is None

    def part(self, chosen: NDArray[np.int64]) -> StepImages:
        """The same for a forward of some of the step's positions.

        Args:
            chosen: packed positions, in the order of that forward.
        """
        place = np.full(self.positions.shape[-1], -1, np.int64)
        place[chosen] = np.arange(len(chosen))
        index = place[self.index]
        kept = torch.from_numpy(np.flatnonzero(index >= 0))
        return StepImages(
            index[index >= 0],
            [layer.index_select(0, kept.to(layer.device)) for layer in self.embeddings],
            self.positions[..., chosen],
            None if self.seen is None else self.seen[chosen],
        )

    def serialize(self) -> list[Any]:
        """Plain values for msgpack."""
        embeddings = [TENSOR.encode(each) for each in self.embeddings]
        return [INT_ARRAY.encode(self.index), embeddings, INT_ARRAY.encode(self.positions), _SEEN.encode(self.seen)]

    @classmethod
    def deserialize(cls, plain: Any) -> StepImages:
        """The inverse of `serialize`; embeddings are on the CPU.

        Raises:
            SerializationError: not what `serialize` makes.
        """
        if not isinstance(plain, list) or len(plain) != _FIELDS or not isinstance(plain[1], list):
            refuse("StepImages", plain, "a list of four fields")
        index, positions, seen = INT_ARRAY.decode(plain[0]), INT_ARRAY.decode(plain[2]), _SEEN.decode(plain[3])
        embeddings = [TENSOR.decode(each) for each in plain[1]]
        if any(each.ndim != 2 or len(each) != len(index) for each in embeddings):
            raise SerializationError(f"StepImages: {len(index)} places and embeddings of another number")
        return cls(index, embeddings, positions, seen)
