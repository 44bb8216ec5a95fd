"""The pool of recurrent and convolutional states. A slot holds all states of one sequence at one position.

A slot belongs to a running sequence, or is a snapshot of the states at the end of a cached prefix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.memory.block_pool import BlockPool, PoolMemory
from rollout.engine.memory.buffers import ALIGNMENT


@dataclass(frozen=True)
class StateKey:
    """The key of one recurrent or convolutional state: layer, kind and index, as in transformers' cache."""

    layer: int
    kind: str
    """The kind of state: `conv`, the last inputs of a convolution, or `recurrent`, the state of a recurrence."""
    index: int = 0


@dataclass(frozen=True)
class StateShape:
    """The key, shape and dtype of one state of one sequence."""

    key: StateKey
    shape: tuple[int, ...]
    """The shape for one sequence: [channels, kernel size] for `conv`, [heads, ...] for `recurrent`."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The size of the state in bytes, rounded up to a multiple of `ALIGNMENT`."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _shaped(flat: Tensor, state: StateShape) -> Tensor:
    """Return a view [slots, *shape] of `flat` [slots, elements]. In a `conv` state, channels are contiguous in memory."""
    if state.key.kind != "conv":
        return flat.view(-1, *state.shape)
    return flat.view(-1, state.shape[-1], *state.shape[:-1]).movedim(1, -1)


class StatePool(BlockPool):
    """A pool of slots, each of which holds one state of each of the `shapes`. A slot is a block of the pool."""

    def __init__(
        self,
        shapes: Sequence[StateShape],
        num_slots: int,
        device: torch.device,
        memory: PoolMemory = PoolMemory(),  # noqa: B008 - immutable
    ) -> None:
        self.shapes = tuple(shapes)
        self._states: dict[StateKey, Tensor] = {}
        super().__init__([each.num_bytes for each in shapes], num_slots, torch.uint8, device, memory)

    def state(self, key: StateKey) -> Tensor:
        """Return the tensor [num_blocks, *shape] that holds the state `key` of every slot, in this state's dtype."""
        return self._states[key]

    def materialize(self, num_blocks: int) -> None:
        super().materialize(num_blocks)
        self._states = {
            each.key: _shaped(part.view(each.dtype)[:, : math.prod(each.shape)], each)
            for part, each in zip(self._parts, self.shapes, strict=True)
        }

    def drop(self) -> int:
        self._states = {}
        return super().drop()

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy a slot for each pair (source, destination). A negative source fills the destination with zeros.

        All sources are read before any destination is written.
        """
        if copies := [pair for pair in moves if pair[0] >= 0]:
            self.copy_blocks(copies)
        if fresh := [target for source, target in moves if source < 0]:
            self.zero_blocks(fresh)
