"""Recurrent and convolutional states of a model through transformers' cache protocol.

Layers that keep a state per sequence ask the forward's cache for it (`get_conv_state`, `get_recurrent_state`) and hand back
the next one, or change it in place. `StateRows` answers with rows of the engine's state pool. A sequence without tokens has
a state of zeros, so every forward continues one; `PackedStates` takes those that the model's own kernels make of several
sequences in one row. K and V of attention layers pass through: the paged attention keeps them.

MiniMax's lightning attention asks by names of its own (`get_linear_cache`, `set_linear_cache`); given a state it computes
position by position, and a prompt in blocks only where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache

from rollout.engine.memory.buffers import upload
from rollout.engine.memory.state_pool import StateKey, StatePool, StateShape


class _NoKV(Cache):  # type: ignore[misc]
    """A cache whose attention layers get back what they give it.

    Attributes:
        arguments: of the forward, beside the cache.
    """

    arguments: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """K and V of this forward alone."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions before this forward as masks count them: none, as masks are the paged attention's."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys, offset) of a mask over this forward alone."""
        return query_length, 0

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether earlier states are kept, to go back to: no."""
        return False


class ProbedStates(_NoKV):
    """Records the states that one forward of a sequence without a past makes.

    Attributes:
        shapes: per state, in the order of the layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[StateKey, StateShape] = {}

    @property
    def shapes(self) -> tuple[StateShape, ...]:
        """One per state."""
        return tuple(self._found.values())

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """There is no state before the first token."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: there is no state before the first token."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: there is no state before the first token."""
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        """Record a convolution of `conv_states` [1, channels, L]."""
        width = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        self._record(StateKey(layer_idx, "conv", state_idx), (*conv_states.shape[1:-1], width), conv_states.dtype)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Record a recurrence of state `recurrent_states` [1, ...]."""
        self._record(
            StateKey(layer_idx, "recurrent", state_idx), tuple(recurrent_states.shape[1:]), recurrent_states.dtype
        )
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """None: there is no state before the first token."""
        return None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Record a recurrence of state `linear_cache` [1, heads, head size, head size]."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def _record(self, key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._found[key] = StateShape(key, shape, dtype)


class StateRows(_NoKV):
    """States of the B sequences of one forward; `flush()` after it.

    Args:
        slots: [B] their slots in the pool, all different.
        begins: none of them has a token before this forward.
    """

    def __init__(self, pool: StatePool, slots: NDArray[np.int32], *, begins: bool = False) -> None:
        super().__init__()
        self._pool = pool
        self._begins = begins
        self._rows: dict[StateKey, Tensor] = {}
        first = int(slots[0])
        # Neighbouring slots are used where they lie, others are gathered and scattered.
        neighbours = np.array_equal(slots, np.arange(first, first + len(slots)))
        self._place = slice(first, first + len(slots)) if neighbours else None
        self._index = None if neighbours else upload(slots.astype(np.int64), pool.device)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Every sequence has a state, of zeros before its first token."""
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """[B, channels, kernel size], may be changed in place."""
        return self._row(StateKey(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """[B, heads, ...], may be changed in place."""
        return self._row(StateKey(layer_idx, "recurrent", state_idx))

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Shift the inputs `conv_states` [B, channels, L] in; returns them behind those before, [B, channels, K + L]."""
        state = self._row(StateKey(layer_idx, "conv", state_idx))
        full = torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)
        state.copy_(full[..., -state.shape[-1] :])
        return full

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Replace the state [B, heads, ...]; returns it."""
        return self._row(StateKey(layer_idx, "recurrent", state_idx)).copy_(recurrent_states)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """[B, heads, head size, head size], may be changed in place; None where all sequences begin."""
        return None if self._begins else self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Replace the state [B, heads, head size, head size]."""
        self.update_recurrent_state(linear_cache, layer_idx)

    def flush(self) -> None:
        """Write gathered states back into the pool, after the forward."""
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


class PackedStates(_NoKV):
    """States that N sequences have after their first positions, which lie one after the other in the one row of a forward.

    The model's kernels keep them apart by `arguments`. No state is before them.

    Args:
        slots: [N] their slots in the pool, all different.
        offsets: [N + 1], where each begins in the row.
    """

    def __init__(self, pool: StatePool, slots: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        super().__init__()
        self._pool, self._offsets = pool, offsets
        owner = np.repeat(np.arange(len(slots)), np.diff(offsets)).astype(np.int32)
        self._index = upload(slots.astype(np.int64), pool.device)
        self.arguments = {
            "cu_seq_lens_q": upload(offsets, pool.device),
            "seq_idx": upload(owner[None], pool.device),
        }

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """There is no state before the first token."""
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: there is no state before the first token."""
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """None: there is no state before the first token."""
        return None

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the last inputs of each sequence of `conv_states` [1, channels, T]; returns these, as nothing is before."""
        state = self._pool.state(StateKey(layer_idx, "conv", state_idx))
        last = self._offsets[1:, None] + np.arange(-state.shape[-1], 0)
        before = upload(last < self._offsets[:-1, None], conv_states.device)
        inputs = conv_states[0][..., upload(np.maximum(last, 0), conv_states.device)].masked_fill(before, 0)
        state.index_copy_(0, self._index, inputs.movedim(-2, 0).to(state.dtype))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Keep the states [N, heads, ...]; returns them."""
        state = self._pool.state(StateKey(layer_idx, "recurrent", state_idx))
        state.index_copy_(0, self._index, recurrent_states.to(state.dtype))
        return recurrent_states

    def flush(self) -> None:
        """Nothing to do: all states are in the pool."""


States = StateRows | PackedStates
