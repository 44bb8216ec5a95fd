"""A decode step that was one CUDA graph, and the steps that follow it through the same graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.forward.decode_state import DecodeState
from rollout.engine.kernels.triton_attention import num_parts


@dataclass(frozen=True, eq=False)
class GraphStep:
    """The step that was replayed last. Valid until another one is sent."""

    state: DecodeState
    """What the graph reads."""
    replay: Callable[[], Tensor]
    """Runs the graph; returns logits [B, V]."""
    positions: NDArray[np.int64]
    """[B], of the step."""
    columns: int
    """Of the graph's block tables."""
    block_size: int
    parts: int
    """Parts of keys that the graph has room for; 0: it does not need any."""

    def room(self, steps: int) -> int:
        """How many of `steps` further ones the graph has room for."""
        steps = min(steps, self.columns * self.block_size - 1 - int(self.positions.max()))
        while steps > 0 and 0 < self.parts < num_parts(self.positions + steps):
            steps -= 1
        return max(0, steps)

    def follow(self, tokens: Tensor) -> Tensor:
        """Logits [B, V] of the next step, which computes the tokens [B] that the rows have drawn; it is not waited for.

        The tables that were sent name the blocks of its positions, and there is `room` for it.
        """
        self.state.advance(tokens)
        return self.replay()
