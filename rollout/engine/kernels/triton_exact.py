"""The operations of exact mode on CUDA one at a time, in Triton: same bits per row, whatever the other rows are.

The twin of `cpu_exact`; why the bits are the same stands in `triton_exact_kernels`. All tensors are on one CUDA device and
of one dtype, float32 or bfloat16. Nothing here records a gradient or waits for the device.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory.buffers import upload_together
from rollout.errors import UnsupportedModelError

SPLIT = 256
"""Keys per part of attention; a decode step computes the parts of a long sequence in parallel."""
SPREAD_BYTES = 2**26
"""Most device memory of attention's parts; where they would take more, there are queries enough to keep a GPU busy."""
_BAND = 8
_ELEMENTS = 1024
_LINES = 32
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, eq=False)
class AttendedRows:
    """Keys that each query of a batch attends to: R rows with P queries packed one row after the other, on the device."""

    table: Tensor
    """[R, width] int32, block ids."""
    begins: Tensor
    """[R + 1] int32, offset of each row's queries."""
    positions: Tensor
    """[P] int32, last position that a query sees, its own; negative: it sees none and its output is 0."""
    longest: int
    """At least the tokens of the longest row."""
    block_size: int
    block_tokens: int
    """Tokens from the begin of one block to that of the next."""


def require(device: torch.device, vocabulary: int) -> None:
    """Compile a kernel on `device` and run it.

    Raises:
        UnsupportedModelError: that failed; or torch's log-softmax of `vocabulary` numbers depends on where they lie in
            memory: on CUDA a block of threads sums a row of more than 1,024 in packs of 16 bytes.
    """
    if vocabulary > 1024 and vocabulary % 4:
        raise UnsupportedModelError(
            f"exact mode on {device}: the vocabulary of {vocabulary:,} is not divisible by 4, and torch's log-softmax of "
            "such a row depends on its place in memory; pad it: model.resize_token_embeddings(n, pad_to_multiple_of=4)"
        )
    try:
        _try_out(device)
    except Exception as exc:
        reason = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        raise UnsupportedModelError(
            f"exact mode on {device} runs on Triton's kernels, which do not work here ({reason})"
        ) from exc


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor | None = None, total: int = 0) -> Tensor:
    """x [P, K] times weight [N, K] transposed, plus bias [N]: [P, N].

    With `places` [P] int64, row p of the result is row places[p] of [total, N], whose other rows are 0.
    """
    x, weight = _aligned(x), weight.detach().contiguous()
    count, depth, columns = *x.shape, weight.shape[0]
    out = x.new_empty(count, columns) if places is None else x.new_zeros(total, columns)
    if not out.numel() or not count:
        return out
    tile = _tile(x.dtype)
    with _on(x):
        _kernels().product[(-(-count // tile.rows) * -(-columns // tile.columns),)](
            x, weight, weight if bias is None else bias.detach(), x if places is None else places, out,
            count, depth, columns, biased=bias is not None, placed=places is not None, widen=_widens(x),
            band=_BAND, block_rows=tile.rows, block_columns=tile.columns, block_depth=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Normalised rows of x [..., W], times weight [W]."""
    x = _aligned(x)
    out, width = torch.empty_like(x), x.shape[-1]
    padded = _power_of_two(width)
    count, rows = x.numel() // width, max(1, 512 // padded)
    if count:
        with _on(x):
            _kernels().rms_norm[(-(-count // rows),)](
                x, weight.detach(), out, count, epsilon, width=width, padded_width=padded, rows=rows,
                num_warps=min(8, max(1, padded // 512)),
            )  # fmt: skip
    return out


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [P, H, D] at positions [P] int64 of the tables [positions, D]."""
    x = _aligned(x)
    out = torch.empty_like(x)
    count, heads, width = x.shape
    if count:
        with _on(x):
            _kernels().rotate[(-(-count * heads // _LINES),)](
                x, cosines, sines, positions, out, count * heads, heads=heads, lines=_LINES,
                half=width // 2, padded_half=_power_of_two(width // 2),
            )  # fmt: skip
    return out


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, [P, W] each."""
    gate, up = _aligned(gate), _aligned(up)
    out = torch.empty_like(gate)
    if gate.numel():
        with _on(gate):
            _kernels().silu_times[(-(-gate.numel() // _ELEMENTS),)](
                gate, up, out, gate.numel() // gate.shape[-1], width=gate.shape[-1], block=_ELEMENTS
            )  # fmt: skip
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: NDArray[np.int64],
    positions: Tensor,
    scaling: float,
    window: int | None,
) -> tuple[Tensor, None]:
    """Causal attention of packed sequences, the keys of each read in place as one block.

    Args:
        query, key, value: [P, H, D], [P, Hkv, D], [P, Hkv, D].
        starts: [R + 1], offset of each sequence.
        positions: [P] int64 in its sequence.
        window: number of positions that a query attends to; None: all.

    Returns:
        Output [P, H, D]; None, where `cpu_exact.attention` returns what its backward needs.
    """
    key, value = _aligned(key), _aligned(value)
    longest = int(np.diff(starts).max(initial=0))
    # "Block" b begins at token b, and is longer than any sequence.
    begins, table = upload_together([starts.astype(np.int32), starts[:-1].astype(np.int32)], query.device)
    rows = AttendedRows(table[:, None], begins, positions.int(), longest, 1 << 30, 1)
    return paged_attention(query, key, value, rows, scaling, window), None


def paged_attention(
    query: Tensor, keys: Tensor, values: Tensor, rows: AttendedRows, scaling: float, window: int | None
) -> Tensor:
    """Attention over blocks of K and V, [P, H, D].

    Args:
        query: [P, H, D].
        keys, values: contiguous [..., Hkv, D], from a multiple of 16 bytes on.
    """
    query = _aligned(query)
    count, heads, dim = query.shape
    out = torch.empty_like(query)
    if not count:
        return out
    kv_heads = keys.shape[-2]
    group, padded = heads // kv_heads, _power_of_two(dim)
    plan = _plan(group, padded, query.dtype)
    tokens = plan.rows // group
    parts = max(1, -(-rows.longest // SPLIT))
    # One program folds all parts, or each computes one and `fold` folds them: the same operations in the same order.
    run = 1 if parts * query.numel() * 4 <= SPREAD_BYTES else parts
    runs = -(-parts // run)
    # Three tensors: a slice of one might begin at no multiple of 16 bytes, and select another compiled kernel.
    peaks, totals = (query.new_empty(runs, count, heads, dtype=torch.float32) for _ in range(2))
    sums = query.new_empty(runs, count, heads, dim, dtype=torch.float32)
    kernels, batch = _kernels(), len(rows.begins) - 1
    with _on(query):
        kernels.attend[(count // tokens + batch, kv_heads, runs)](
            query, keys, values, rows.table, rows.begins, rows.positions, peaks, totals, sums,
            batch, count, run, scaling * _LOG2_E, rows.table.stride(0), rows.block_size, rows.block_tokens,
            group=group, kv_heads=kv_heads, tokens=tokens, rows=plan.rows, span=plan.span, split=SPLIT, window=window or 0,
            dim=dim, padded_dim=padded, widen=_widens(query), num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
        kernels.fold[(-(-count * heads // _LINES),)](
            rows.positions, peaks, totals, sums, out, count, run,
            split=SPLIT, heads=heads, lines=_LINES, dim=dim, padded_dim=padded,
        )  # fmt: skip
    return out


class _Tile(NamedTuple):
    """Sizes of a product's tile."""

    rows: int
    columns: int
    depth: int
    """Steps of the depth; their order is that of the sum."""
    warps: int
    stages: int


class _Plan(NamedTuple):
    """Sizes of attention's tile."""

    rows: int
    """Queries times query heads per KV head."""
    span: int
    """Keys per turn; divides SPLIT."""
    warps: int
    stages: int


def _tile(dtype: torch.dtype) -> _Tile:
    """One for all numbers of rows. Float32 runs without tensor cores (TF32 is not float32), from registers."""
    return _Tile(64, 64, 32, 4, 1) if dtype == torch.float32 else _Tile(128, 64, 64, 4, 3)


def _plan(group: int, padded_dim: int, dtype: torch.dtype) -> _Plan:
    """One for decoding, chunks and training. 64 rows are the least that a Hopper's tensor cores take at once."""
    heads, narrow = _power_of_two(group), padded_dim <= 128
    if dtype == torch.float32:
        return _Plan(max(16, heads), 32 if narrow else 16, 4, 1)
    return _Plan(max(64, heads), 64 if narrow else 32, 4 if narrow else 8, 2)


@dataclass(frozen=True, eq=False)
class _Kernels:
    product: Any
    rms_norm: Any
    rotate: Any
    silu_times: Any
    attend: Any
    fold: Any
    interpreted: bool


@cache
def _kernels() -> _Kernels:
    jit = import_module("triton").jit
    code = import_module("rollout.engine.kernels.triton_exact_kernels")

    def compiled(function: Any, *moving: str, anywhere: tuple[str, ...] = ()) -> Any:
        # What changes between steps, or between the engine and the trainer, must not select another compiled kernel.
        return jit(function, do_not_specialize=list(moving), do_not_specialize_on_alignment=list(anywhere))

    attend = compiled(
        code.attend, "num_rows", "num_queries", "run", "table_stride", "block_size", "block_tokens",
        anywhere=("table", "begins", "positions"),
    )  # fmt: skip
    return _Kernels(
        compiled(code.product, "num_rows", anywhere=("places",)),
        compiled(code.rms_norm, "num_rows", "epsilon"),
        compiled(code.rotate, "count", anywhere=("positions",)),
        compiled(code.silu_times, "num_rows"),
        attend,
        compiled(code.fold, "num_queries", "run", anywhere=("positions",)),
        type(attend).__name__ == "InterpretedFunction",
    )


@cache
def _try_out(device: torch.device) -> None:
    ones = torch.ones(3, 8, device=device)
    if not silu_times(ones, ones).allclose(torch.nn.functional.silu(ones)):
        raise RuntimeError("a kernel that computes silu did not")


def _widens(x: Tensor) -> bool:
    # Triton's interpreter multiplies the bits of bfloat16 as integers.
    return _kernels().interpreted and x.dtype == torch.bfloat16


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, from a multiple of 16 bytes on, as every new tensor is: Triton compiles another kernel for others."""
    x = x.detach().contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _on(x: Tensor) -> AbstractContextManager[object]:
    # Triton launches on the current device, whatever the device of the tensors.
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
