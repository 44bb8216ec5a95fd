"""Paged attention on a CPU for models that run their own forward pass: a C++ kernel, with plain torch as the fallback."""

from __future__ import annotations

import ctypes
from typing import Unpack

import torch
from torch import Tensor

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import Rules, TorchPagedAttention

MAX_GROUP = 96
"""The maximum number of query heads per KV head that the kernel supports (`ROWS` in cpu_attention_plan.h)."""


class Attention(ctypes.Structure):
    """The mirror of the C++ struct `Attention` in cpu_attention.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "keys", "values", "out", "offsets", "positions", "tables")),
        *((name, ctypes.c_int64) for name in (
            "sequences", "width", "block_size", "heads", "kv_heads", "head_dim", "value_dim", "query_stride", "out_stride",
            "window",
        )),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
        ("log_sums", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
    )  # fmt: skip


class CpuPagedAttention:
    """Computes the attention of one step. The bits of a row's result do not depend on the step's other rows.

    Args:
        library: the C++ library; see `cpu_library.load`.
        rows: the step's positions and block tables.
        fallback: attention for inputs that the kernel does not support (see `serves`).
    """

    def __init__(self, library: ctypes.CDLL, rows: PagedRows, fallback: TorchPagedAttention) -> None:
        self._attend = library.rollout_attention
        self._attend.argtypes = (ctypes.POINTER(Attention), ctypes.c_int64, ctypes.c_int)
        self._attend.restype = ctypes.c_int64
        self._rows = rows
        self._fallback = fallback
        self.tasks = 0
        """The number of parallel tasks in the last call. Sequences that read shared blocks together are one task."""

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, **rules: Unpack[Rules]) -> Tensor:
        if self._rows.seen is not None or not serves(query, key_cache, value_cache):
            return self._fallback(query, key_cache, value_cache, **rules)
        sinks = rules.get("sinks")
        if sinks is not None:
            sinks = sinks.float().contiguous()
        heads, kv_heads = query.shape[1], key_cache.shape[2]
        rows, out = self._rows, query.new_empty(query.shape[0], heads, value_cache.shape[3])
        self.tasks = self._attend(
            Attention(
                query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr(), out.data_ptr(),
                rows.offsets.ctypes.data, rows.positions.ctypes.data, rows.tables.ctypes.data,
                len(rows), rows.tables.shape[1], rows.block_size, heads, kv_heads, query.shape[2], value_cache.shape[3],
                query.stride(0), out.stride(0), rules.get("window") or 0, rules["scaling"],
                rules.get("softcap") or 0.0,
                None, None if sinks is None else sinks.data_ptr(),
            ),
            torch.get_num_threads(),
            int(query.dtype == torch.bfloat16),
        )  # fmt: skip
        return out


def serves(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Return whether the kernel can run: contiguous tensors, float32 or bfloat16, at most `MAX_GROUP` heads per KV head."""
    return (
        query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype == key_cache.dtype == value_cache.dtype
        and query.shape[1] <= MAX_GROUP * key_cache.shape[2]
        and query.is_contiguous()
        and key_cache.is_contiguous()
        and value_cache.is_contiguous()
    )
