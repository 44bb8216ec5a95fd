"""A captured decode step: its attention, and its inputs in one buffer at a fixed address, which one copy per step fills.

A step sends three numbers and the block tables of each row. The slot mapping follows from these on the device, inside the
graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import Rules
from rollout.engine.kernels.triton_paged import TritonPaged, serves
from rollout.engine.memory.buffers import staged
from rollout.engine.memory.kv_cache import KVCache
from rollout.engine.models.attention import SINKS
from rollout.engine.models.model_support import ModelLayout

_FIELDS = 3
_ALIGNED = 16
"""Rows are a multiple of this, so that every part of the buffer begins at a multiple of 64 bytes."""


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """Inputs of a decode step of B rows with one position each, on the device; rows without a sequence are padding."""

    ids: Tensor
    """[B] int64 token ids; 0 in padding."""
    positions: Tensor
    """[B] int64 rotary positions; 0 in padding."""
    seen: Tensor
    """[B] int32, the last position that a row attends to, which is its own; -1 in padding."""
    slots: Tensor
    """[B] int32 slot mapping; -1 in padding."""
    tables: Tensor
    """[B, columns] int32 block tables."""
    parts: DecodeParts
    """Parts of the keys of each row, for the Triton kernels."""


class DecodeState:
    """Rows of decode steps on the device.

    Args:
        rows: maximum number of rows of a step.
        columns: columns of the block tables; a multiple of 16, because Triton compiles another kernel for other strides.

    Attributes:
        ids, positions: [R] int32, token and rotary position of each row; 0 in padding.
        seen: [R] int32, position of each row in its sequence; -1 in padding.
        tables: [R, columns] int32 block ids.
    """

    def __init__(self, rows: int, columns: int, block_size: int, device: torch.device) -> None:
        self.rows, self.columns = -(-rows // _ALIGNED) * _ALIGNED, columns
        self._block_size = block_size
        self._device = device
        header = _FIELDS * self.rows
        # Leave inference mode: a tensor created in it could not be written outside it.
        with torch.inference_mode(False):
            self._flat = torch.zeros(header + self.rows * columns, dtype=torch.int32, device=device)
        self.ids, self.positions, self.seen = self._flat[:header].view(_FIELDS, self.rows)
        self.tables = self._flat[header:].view(self.rows, columns)
        self.clear()

    @property
    def nbytes(self) -> int:
        """The device memory of the buffers, in bytes."""
        return self._flat.nbytes

    def clear(self) -> None:
        """Make every row padding, which writes nothing; the warm-up of a capture runs on this state."""
        self._flat.zero_()
        self.seen.fill_(-1)

    def send(self, ids: NDArray[np.int64], rows: PagedRows, rotary: NDArray[np.int64] | None = None) -> None:
        """Send the rows of the next step, with one position each, in one asynchronous copy.

        Args:
            ids: [B] token ids, B at most `rows`.
            rotary: [B] rotary positions, which differ after an image; None: `rows.positions`.
        """
        count, header = len(ids), _FIELDS * self.rows
        message = np.zeros(header + self.tables[:count].numel(), np.int32)
        own_ids, positions, seen = message[:header].reshape(_FIELDS, self.rows)
        seen[count:] = -1
        own_ids[:count], positions[:count] = ids, rows.positions if rotary is None else rotary
        seen[:count] = rows.positions
        tables = message[header:].reshape(self.tables[:count].shape)
        width = min(rows.tables.shape[1], self.columns)
        tables[:, :width] = rows.tables[:, :width]
        self._flat[: len(message)].copy_(staged(message, self._device), non_blocking=True)

    def inputs(self, count: int, capacity: int = 0) -> DecodeInputs:
        """Return the inputs of the step's first `count` rows, computed by the first kernels of a graph.

        Args:
            capacity: see `DecodeParts`.
        """
        seen, size = self.seen[:count], self._block_size
        last = seen.clamp(min=0).long()
        tables = self.tables[:count]
        blocks = tables.gather(1, (last // size)[:, None])[:, 0]
        slots = torch.where(seen < 0, -1, blocks * size + (last % size).int())
        ids, positions = self.ids[:count].long(), self.positions[:count].long()
        return DecodeInputs(ids, positions, seen, slots, tables, DecodeParts(seen, capacity))


class CapturedBatch:
    """`AttentionBatch` of a captured forward."""

    def __init__(self, kernels: TritonDecode, layout: ModelLayout, inputs: DecodeInputs) -> None:
        self._kernels = kernels
        self._layout = layout
        self._inputs = inputs

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        arguments: dict[str, Any],
    ) -> Tensor:
        out = self._kernels(
            self._layout.layer_of[module], self._inputs, *(part[0].transpose(0, 1) for part in (query, key, value)),
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=self._layout.mask_windows.get(module, arguments.get("sliding_window")),
            softcap=arguments.get("softcap"), sinks=arguments.get(SINKS),
        )  # fmt: skip
        return out[None]


class TritonDecode:
    """Attention of a captured step by the Triton kernels.

    Args:
        paged: kernels with a workspace of their own, whose addresses are fixed in graphs.
    """

    def __init__(self, paged: TritonPaged, cache: KVCache) -> None:
        self._paged = paged
        self._cache = cache

    def __call__(
        self, layer: int, inputs: DecodeInputs, query: Tensor, key: Tensor, value: Tensor, **rules: Unpack[Rules]
    ) -> Tensor:
        """Write K and V of every row, then attend.

        Args:
            query, key, value: [B, H, D], [B, Hkv, D], [B, Hkv, Dv].

        Returns:
            [B, H, Dv].
        """
        keys, values = self._cache.layer(layer)
        # Cast the query to the cache's dtype, which differs if autocast was set differently when the engine was built.
        dtype, query = query.dtype, query.to(keys.dtype)
        if not serves(query, keys, values):
            raise RuntimeError(f"the Triton kernels do not take its heads ({query.dtype}, {tuple(query.shape[1:])})")
        self._paged.write(key, value, keys, values, inputs.slots)
        return self._paged.decode(query, keys, values, inputs.tables, inputs.parts, **rules).to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the workspace, including outgrown buffers."""
        return self._paged.nbytes

    def release(self) -> None:
        self._paged.clear()
