"""Paged attention for one step on CUDA: Triton kernels for decoding rows and for chunks, plain torch as the fallback."""

from __future__ import annotations

from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels import decode_parts
from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import Rules, TorchPagedAttention
from rollout.engine.kernels.triton_paged import TritonPaged, serves
from rollout.engine.memory.buffers import upload_together

TABLE_STEP = 16
"""The divisor of the number of block table columns: Triton compiles a second kernel if a stride is not a multiple of 16."""


class TritonPagedAttention:
    """Computes the attention of one step. The constructor copies all index tensors to the device in one transfer.

    Args:
        paged: the kernels.
        rows: the step's sequences. The leading sequences with one position each are *decoding*; all later ones are chunks.
        device: device of the KV cache.
        fallback: attention for inputs that the kernels do not support (see `serves`).
    """

    def __init__(
        self, paged: TritonPaged, rows: PagedRows, device: torch.device, fallback: TorchPagedAttention
    ) -> None:
        self._paged = paged
        self._fallback = fallback
        counts, ends = rows.counts, rows.ends
        self._decodes = decodes = _leading(counts == 1)
        self._width = table_columns(int(ends[:decodes].max(initial=1)), rows.block_size)
        tables = np.zeros((len(rows), table_columns(int(ends.max(initial=1)), rows.block_size)), np.int32)
        tables[:, : rows.tables.shape[1]] = rows.tables[:, : tables.shape[1]]
        begins = rows.offsets[decodes:] - rows.offsets[decodes]
        arrays = (tables, rows.positions[:decodes], begins, (ends - counts)[decodes:])
        self._tables, positions, self._begins, self._starts = upload_together(
            [array.astype(np.int32, copy=False) for array in arrays], device
        )
        self._parts = DecodeParts(positions, num_parts(rows.positions[:decodes]))
        self._causal = rows.seen is None

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, **rules: Unpack[Rules]) -> Tensor:
        if query.dtype != key_cache.dtype:
            # Cast the query to the cache's dtype. The dtypes differ if the autocast setting has changed since the engine
            # was built.
            return self(query.to(key_cache.dtype), key_cache, value_cache, **rules).to(query.dtype)
        if not self._causal or not serves(query, key_cache, value_cache):
            return self._fallback(query, key_cache, value_cache, **rules)
        decodes, parts = self._decodes, []
        if decodes:
            out = self._paged.decode(
                query[:decodes], key_cache, value_cache, self._tables[:decodes, : self._width], self._parts, **rules
            )
            parts.append(out)
        if decodes < len(query):
            out = self._paged.prefill(
                query[decodes:], key_cache, value_cache, self._tables[decodes:], self._begins, self._starts, **rules
            )
            parts.append(out)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def table_columns(tokens: int, block_size: int) -> int:
    """Return the number of block table columns, a multiple of `TABLE_STEP`, for sequences of up to `tokens` tokens."""
    return -(-tokens // (block_size * TABLE_STEP)) * TABLE_STEP


def num_parts(positions: NDArray[np.int64]) -> int:
    """Return the total number of parts into which decoding rows' keys are split. Row r has keys up to positions[r]."""
    return int((positions // decode_parts.SPLIT + 1).sum())


def _leading(flags: NDArray[np.bool_]) -> int:
    return int(np.append(flags, False).argmin())
