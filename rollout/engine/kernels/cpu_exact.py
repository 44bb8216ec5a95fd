"""The operations of the fused forward one at a time, on tensors: same C++, same bits per row, independent of the other rows.

All tensors are contiguous, on the CPU, and of one dtype, float32 or bfloat16; nothing here records a gradient.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.kernels import cpu_library
from rollout.engine.kernels.cpu_attention import Attention
from rollout.errors import UnsupportedModelError


class _Product(ctypes.Structure):
    """`Product` in cpu_exact.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("in", "weight", "bias", "places", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "depth", "columns")),
    )


class _RowWise(ctypes.Structure):
    """`RowWise` in cpu_exact.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("in", "other", "out", "cosines", "sines", "positions")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "heads")),
        ("epsilon", ctypes.c_float),
    )


def library() -> ctypes.CDLL:
    """The compiled library.

    Raises:
        UnsupportedModelError: it cannot be built here.
    """
    found = cpu_library.load()
    if found is None:
        raise UnsupportedModelError("exact mode runs on the C++ kernels, which could not be built: install g++")
    return found


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor | None = None, total: int = 0) -> Tensor:
    """x [P, K] times weight [N, K] transposed, plus bias [N]: [P, N].

    With `places` [P] int64, row p of the result is row places[p] of [total, N], whose other rows are 0.
    """
    x, weight = _contiguous(x), _contiguous(weight)
    rows, depth, columns = *x.shape, weight.shape[0]
    out = x.new_empty(rows, columns) if places is None else x.new_zeros(total, columns)
    call = _Product(
        x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        None if places is None else places.data_ptr(), out.data_ptr(), rows, depth, columns,
    )  # fmt: skip
    library().rollout_linear(ctypes.byref(call), *_how(x))
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalised rows of x [..., W], times weight [W]."""
    x = _contiguous(x)
    out = torch.empty_like(x)
    width = x.shape[-1]
    call = _RowWise(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), None, None, None, x.numel() // width, width, 1, epsilon
    )
    library().rollout_rms_norm(ctypes.byref(call), *_how(x))
    return out


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [P, H, D] at positions [P] int64 of the tables [positions, D]."""
    x = _contiguous(x)
    out = torch.empty_like(x)
    count, heads, width = x.shape
    call = _RowWise(
        x.data_ptr(), None, out.data_ptr(), cosines.data_ptr(), sines.data_ptr(), positions.data_ptr(),
        count * heads, width, heads, 0.0,
    )  # fmt: skip
    library().rollout_rotate(ctypes.byref(call), *_how(x))
    return out


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [P, W] each."""
    gate, up = _contiguous(gate), _contiguous(up)
    out = torch.empty_like(gate)
    call = _RowWise(gate.data_ptr(), up.data_ptr(), out.data_ptr(), None, None, None, *gate.shape, 1, 0.0)
    library().rollout_activate(ctypes.byref(call), *_how(gate))
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: NDArray[np.int64],
    positions: Tensor,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed sequences, the keys of each read in place as blocks of one token.

    Args:
        query, key, value: [P, H, D], [P, Hkv, D], [P, Hkv, D].
        starts: [R + 1], offset of each sequence.
        positions: [P] int64 in its sequence.
        window: number of positions that a query attends to; None: all.

    Returns:
        Output [P, H, D]; logarithm of the summed exponentials of the scores [P, H] float32.
    """
    query, key, value = _contiguous(query), _contiguous(key), _contiguous(value)
    count, heads, width = query.shape
    out, log_sums = torch.empty_like(query), query.new_empty(count, heads, dtype=torch.float32)
    lengths = np.diff(starts)
    tables = np.ascontiguousarray(starts[:-1, None] + np.arange(int(lengths.max(initial=0)), dtype=np.int64))
    call = Attention(
        query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), starts.ctypes.data, positions.data_ptr(),
        tables.ctypes.data, len(lengths), tables.shape[1], 1, heads, key.shape[1], width, width,
        query.stride(0), out.stride(0), window or 0, scaling, 0.0, log_sums.data_ptr(), None,
    )  # fmt: skip
    library().rollout_attention(ctypes.byref(call), *_how(query))
    return out, log_sums


def _contiguous(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def _how(x: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int]:
    return ctypes.c_int64(torch.get_num_threads()), ctypes.c_int(int(x.dtype == torch.bfloat16))
