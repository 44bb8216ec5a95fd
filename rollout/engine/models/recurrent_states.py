"""Gives a model's recurrent and convolutional layers their states, through transformers' cache protocol.

A layer that keeps a state per sequence reads the state from the cache object that the model received (`get_conv_state`,
`get_recurrent_state`). It passes the next state back to the cache or changes the state in place. `StateRows` is a cache
whose states are rows of the engine's state pool. A new sequence starts from a state of zeros, so layers always find a
previous state. The cache stores no keys and values: the layers' paged attention writes them to the engine's KV cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from rollout.engine.memory.buffers import upload
from rollout.engine.memory.state_pool import StateKey, StatePool, StateShape


class _NoKV(Cache):  # type: ignore[misc]
    """A cache that is always empty, so the model's masks cover only the positions of the current forward pass."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's convolution states [B, channels, kernel size], writable in place; None if there are none."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a layer's recurrent states [B, heads, ...] of B sequences, writable in place; None if there are none."""
        return None


class ProbedStates(_NoKV):
    """Records the shapes of the states that a model creates in its first forward pass over a new sequence."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[StateKey, StateShape] = {}

    @property
    def shapes(self) -> tuple[StateShape, ...]:
        """The shape and dtype of each recorded state, in layer order."""
        return tuple(self._found.values())

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._record(StateKey(layer_idx, "conv", state_idx), (*conv_states.shape[1:-1], width), conv_states.dtype)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        key = StateKey(layer_idx, "recurrent", state_idx)
        self._record(key, tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        return recurrent_states

    def _record(self, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._found[key] = StateShape(key, shape, dtype)


class StateRows(_NoKV):
    """A cache that gives one forward pass the states of its B sequences. Call `flush` after the pass.

    Args:
        pool: the state pool.
        slots: slot of each sequence in the state pool, [B], all different.
    """

    def __init__(self, pool: StatePool, slots: NDArray[np.int32]) -> None:
        super().__init__()
        self._pool = pool
        self._rows: dict[StateKey, Tensor] = {}
        first = int(slots[0])
        # If the slots are consecutive, use a view of them. Otherwise gather them into a copy, which `flush` writes back.
        neighbours = np.array_equal(slots, np.arange(first, first + len(slots)))
        self._place = slice(first, first + len(slots)) if neighbours else None
        self._index = None if neighbours else upload(slots.astype(np.int64), pool.device)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._row(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._row(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Append the L new inputs `conv_states` [B, channels, L], and keep the last K (the kernel size) as the state.

        Returns:
            The K previous inputs followed by the new ones, [B, channels, K + L].
        """
        state = self._row(StateKey(layer_idx, "conv", state_idx))
        full = torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)
        state.copy_(full[..., -state.shape[-1] :])
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        return self._row(StateKey(layer_idx, "recurrent", state_idx)).copy_(recurrent_states)

    def flush(self) -> None:
        """Write the states back into the state pool if they are copies. If they are views of the pool, do nothing."""
        if self._index is not None:
            for key, row in self._rows.items():
                self._pool.state(key).index_copy_(0, self._index, row)

    def _row(self, key: StateKey) -> Tensor:
        row = self._rows.get(key)
        if row is None:
            state = self._pool.state(key)
            row = state[self._place] if self._index is None else state.index_select(0, self._index)
            self._rows[key] = row
        return row
