"""The inputs and the attention of a decode step that is captured in a CUDA graph.

The inputs are in one buffer at a fixed address, which one copy per step fills. They are the token id, rotary position,
position and block table of each row, from which the graph computes the slot mapping on the device.
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
"""The multiple to which numbers of rows are rounded up, so that each array in the buffer is aligned to 64 bytes."""


@dataclass(frozen=True, eq=False)
class DecodeInputs:
    """The device tensors that a decode step of B rows reads, one position per row. Rows without a sequence are padding."""

    ids: Tensor
    """The token ids, int64 [B]; 0 in padding."""
    positions: Tensor
    """The rotary positions, int64 [B]; 0 in padding."""
    seen: Tensor
    """The last position that each row attends to, which is the row's own position, int32 [B]; -1 in padding."""
    slots: Tensor
    """The token slot in the KV cache to which each row writes, int32 [B]; -1 in padding."""
    tables: Tensor
    """The block tables, int32 [B, columns]."""
    parts: DecodeParts
    """The parts into which the Triton kernels split each row's keys."""


class DecodeState:
    """The buffers on the device that hold the rows of a decode step.

    Args:
        rows: maximum number of rows of a step. R is this number, rounded up to a multiple of 16.
        columns: number of columns of the block tables, a multiple of 16 (Triton recompiles a kernel for other strides).

    Attributes:
        ids: token id of each row, int32 [R]; 0 in padding.
        positions: rotary position of each row, int32 [R]; 0 in padding.
        seen: position of each row in its sequence, int32 [R]; -1 in padding.
        tables: block ids, int32 [R, columns].
    """

    def __init__(self, rows: int, columns: int, block_size: int, device: torch.device) -> None:
        self.rows, self.columns = -(-rows // _ALIGNED) * _ALIGNED, columns
        self._block_size = block_size
        self._device = device
        header = _FIELDS * self.rows
        # Leave inference mode, because a tensor created in inference mode cannot be written to outside it.
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
        """Make every row padding, for which a step writes no KV. The warm-up runs before a capture use this state."""
        self._flat.zero_()
        self.seen.fill_(-1)

    def send(self, ids: NDArray[np.int64], rows: PagedRows, rotary: NDArray[np.int64] | None = None) -> None:
        """Send the rows of the next step, with one position each, to the device in one asynchronous copy.

        Args:
            ids: token ids of the B rows, [B]; B is at most the maximum number of rows.
            rows: positions and block tables of the B rows.
            rotary: rotary positions [B], which differ from `rows.positions` after an image; None if they are equal.
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
        """Return the inputs of the first `count` rows, computed from the buffers. For `capacity`, see `DecodeParts`."""
        seen, size = self.seen[:count], self._block_size
        last = seen.clamp(min=0).long()
        tables = self.tables[:count]
        blocks = tables.gather(1, (last // size)[:, None])[:, 0]
        slots = torch.where(seen < 0, -1, blocks * size + (last % size).int())
        ids, positions = self.ids[:count].long(), self.positions[:count].long()
        return DecodeInputs(ids, positions, seen, slots, tables, DecodeParts(seen, capacity))


class CapturedBatch:
    """An `AttentionBatch` for captured forward passes: it computes attention with `TritonDecode` on `DecodeInputs`."""

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
    """Computes the attention of a captured decode step with the Triton kernels.

    Args:
        paged: the kernels. Only captured graphs may use their workspace, because the graphs contain its addresses.
    """

    def __init__(self, paged: TritonPaged, cache: KVCache) -> None:
        self._paged = paged
        self._cache = cache

    def __call__(
        self, layer: int, inputs: DecodeInputs, query: Tensor, key: Tensor, value: Tensor, **rules: Unpack[Rules]
    ) -> Tensor:
        """Write the keys and values of B rows into the cache, then compute their attention.

        Args:
            layer: index of the attention layer in the cache.
            query: [B, H, D] with H query heads of size D.
            key: [B, Hkv, D] with Hkv key-value heads.
            value: [B, Hkv, Dv].

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
        """The size of the workspace in bytes, including buffers that were too small and have been replaced."""
        return self._paged.nbytes

    def release(self) -> None:
        self._paged.clear()
