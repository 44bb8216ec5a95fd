"""Paged attention in Triton, for CUDA: decode over split keys, ragged prefill, and the cache write.

Triton comes with torch on CUDA. `load` imports it; each kernel of `triton_kernels` is compiled when it is first launched. If
Triton is missing, `load` warns once and plain torch is used.

K and V are read in place, once for all the query heads that share them. Decode and prefill share one function: a matrix
product with one row for each token of a chunk and each query head of the KV head. The keys of a decoding sequence are
split into parts (`decode_parts`), and `merge` combines the parts' results by their log-sum-exp. The split does not depend on
the batch, so neither do the bits of a row's result. Grids depend only on shapes, and the host never waits for the device.
Every method can therefore be captured in a CUDA graph.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Unpack

import torch
from torch import Tensor

from rollout.engine.kernels import decode_parts
from rollout.engine.kernels.decode_parts import DecodeParts
from rollout.engine.kernels.torch_paged import Rules

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
MIN_HEAD_DIM, MAX_HEAD_DIM, MAX_GROUP = 16, 512, 64
"""The limits on head sizes, and on the number of query heads per KV head."""
PROGRAMS = 32
"""The number of programs of a decode launch per multiprocessor.

It is a multiple of the number of programs that run at once, so that all multiprocessors finish at nearly the same time. It
is small enough that starting programs without work costs little.
"""
_MERGED_AT_ONCE = 8
_LOG2_E = math.log2(math.e)
_log = logging.getLogger(__name__)


def serves(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether the kernels support these tensors.

    Args:
        query: [P, H, D] for P positions and H query heads of size D.
        keys: key cache [num_blocks, block_size, Hkv, D] with Hkv key-value heads.
        values: value cache [num_blocks, block_size, Hkv, Dv].
    """
    heads, kv_heads = query.shape[1], keys.shape[2]
    return (
        query.dtype in DTYPES
        and query.dtype == keys.dtype == values.dtype
        and query.shape[2] == keys.shape[3]
        and keys.shape[:3] == values.shape[:3]
        and all(MIN_HEAD_DIM <= part.shape[3] <= MAX_HEAD_DIM for part in (keys, values))
        and heads % kv_heads == 0
        and heads // kv_heads <= MAX_GROUP
        and all(part.stride(-1) == 1 for part in (query, keys, values))
    )


def load(device: torch.device) -> TritonPaged | None:
    """Return the kernels with a new workspace, or None if Triton cannot be imported."""
    kernels = _kernels(device)
    return None if kernels is None else TritonPaged(kernels)


class TritonPaged:
    """The kernels and the workspace of one engine. All calls share the workspace, so they must use the same stream.

    Queries [P, H, D] and caches [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv] may be views whose
    last dimension is contiguous. Here P counts positions, H query heads, Hkv key-value heads; D and Dv are head sizes. Block
    tables are int32 or int64 with contiguous rows; entries after a row's last block are never read. All other index tensors
    are contiguous. Sinks are contiguous, of any floating dtype, and read again by every launch. Sums are always float32.
    """

    def __init__(self, kernels: _Kernels) -> None:
        self._kernels = kernels
        self._buffers: list[Tensor] = []

    def with_own_workspace(self) -> TritonPaged:
        """Return the same kernels with a new workspace, for calls on another stream or in graphs."""
        return TritonPaged(self._kernels)

    def write(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, write_index: Tensor) -> None:
        """Write K and V into their slots, in the dtype of the cache.

        Args:
            key: [P, Hkv, D] for P positions and Hkv key-value heads, in any floating dtype.
            value: [P, Hkv, Dv], in any floating dtype.
            write_index: slot mapping, int32 or int64 [P]: block * block_size + offset, all different. A position with a
                negative entry is not written.
        """
        # Make the last dimension contiguous: the kernels assume that its stride is 1.
        key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (key, value))
        count, kv_heads, dim = key.shape
        value_dim = value.shape[2]
        if not count:
            return
        with device_of(key):
            self._kernels.write[(count,)](
                key, value, key_cache, value_cache, write_index,
                *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
                block_size=key_cache.shape[1], heads=kv_heads, padded_heads=power_of_two(kv_heads),
                dim=dim, value_dim=value_dim, padded_dim=power_of_two(dim), padded_value_dim=power_of_two(value_dim),
            )  # fmt: skip

    def decode(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        table: Tensor,
        parts: DecodeParts,
        **rules: Unpack[Rules],
    ) -> Tensor:
        """Compute the attention of one query position in each of B sequences.

        Args:
            query: [B, H, D] with H query heads of size D.
            table: block ids, [B, width].
            parts: the parts of each row's keys, computed once for all layers. A padding row has no parts.

        Returns:
            [B, H, Dv] in the dtype of the query; zeros in padding rows.
        """
        batch, heads, _ = query.shape
        value_dim = value_cache.shape[3]
        out = query.new_empty(batch, heads, value_dim)
        if not batch:
            return out
        listed = parts.of(window=rules.get("window"))
        part_out, part_lse = self._workspace(parts.capacity, heads, value_dim, query.device)
        call, sinks = _Call(query, key_cache, value_cache, table, rules), rules.get("sinks")
        kv_heads, plan = key_cache.shape[2], call.plan("decode")
        with device_of(query):
            self._kernels.attend_parts[(min(parts.capacity * kv_heads, _programs(query.device)),)](
                query, key_cache, value_cache, table, parts.positions, listed.begins, listed.owners, part_out, part_lse,
                batch, parts.capacity, call.scale, *call.strides, split=decode_parts.SPLIT, rows=plan.rows, span=plan.span,
                **call.constants, num_warps=plan.warps, num_stages=plan.stages,
            )  # fmt: skip
            self._kernels.merge[(batch, heads)](
                part_out, part_lse, parts.positions, listed.begins, parts.positions if sinks is None else sinks, out,
                parts.capacity, sunk=sinks is not None, at_once=_MERGED_AT_ONCE, value_dim=value_dim,
                padded_value_dim=power_of_two(value_dim),
            )  # fmt: skip
        return out

    def prefill(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        table: Tensor,
        begins: Tensor,
        starts: Tensor,
        **rules: Unpack[Rules],
    ) -> Tensor:
        """Compute the attention of one chunk in each of R sequences. The K and V of the chunks are already in the cache.

        The grid has P // tokens + R programs per KV head. This is an upper bound on the number of tiles of `tokens` queries
        in R chunks with P queries in total. The tiles of row r start at program begins[r] // tokens + r, so each program
        finds its row by a search in `begins`. Surplus programs return at once. An exact map from the host would cost a copy
        per step, and would not fit the fixed shapes of a captured graph.

        Args:
            query: [P, H, D] with H query heads of size D, the chunks packed one after the other.
            table: block ids, [R, width].
            begins: index of each chunk's first query, followed by the end of the last chunk, int32 or int64 [R + 1]. Empty
                chunks are padding.
            starts: position of each chunk's first query in its sequence, int32 or int64 [R].

        Returns:
            [P, H, Dv] in the dtype of the query; rows from begins[-1] on are undefined.
        """
        out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
        if len(query) and len(starts):
            call, sinks = _Call(query, key_cache, value_cache, table, rules), rules.get("sinks")
            plan = call.plan("prefill")
            tokens = plan.rows // call.group
            with device_of(query):
                self._kernels.attend_chunks[(len(query) // tokens + len(starts), key_cache.shape[2])](
                    query, key_cache, value_cache, table, starts, begins,
                    begins if sinks is None else sinks, out, len(starts), call.scale, *call.strides,
                    tokens=tokens, sunk=sinks is not None,
                    rows=plan.rows, span=plan.span, **call.constants, num_warps=plan.warps, num_stages=plan.stages,
                )  # fmt: skip
        return out

    @property
    def nbytes(self) -> int:
        """The size of the workspace in bytes."""
        return sum(each.nbytes for each in self._buffers)

    def clear(self) -> None:
        """Free the workspace. CUDA graphs captured with this workspace must not be replayed afterwards."""
        self._buffers.clear()

    def _workspace(self, slots: int, heads: int, value_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return float32 buffers for the outputs [slots, H, Dv] and the log-sum-exps [slots, H] of key parts."""
        # Keep the buffers that have become too small: captured CUDA graphs still use them.
        count = slots * heads
        if not self._buffers or self._buffers[-1].numel() < count * (value_dim + 1):
            size = max(count * (value_dim + 1), 2 * self._buffers[-1].numel() if self._buffers else 0)
            self._buffers.append(torch.empty(size, dtype=torch.float32, device=device))
        outs, lses = self._buffers[-1][: count * (value_dim + 1)].split_with_sizes([count * value_dim, count])
        return outs.view(slots, heads, value_dim), lses.view(slots, heads)


@dataclass(frozen=True, eq=False)
class _Call:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    table: Tensor
    rules: Rules

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.key_cache.shape[2]

    def plan(self, mode: str) -> _Plan:
        return _plan(mode, self.group, max(self.key_cache.shape[3], self.value_cache.shape[3]), self.query.dtype)

    @property
    def scale(self) -> float:
        # Include log2(e), because the kernels compute exp(x) as exp2(x * log2(e)). With a softcap, scores first pass
        # through tanh, which is computed from exp(2x), so also include the 2 and divide by the cap.
        return self.rules["scaling"] * _LOG2_E * 2.0 / (self.rules.get("softcap") or 2.0)

    @property
    def strides(self) -> tuple[int, ...]:
        caches = (self.key_cache.stride()[:3], self.value_cache.stride()[:3])
        return (*self.query.stride()[:2], *caches[0], *caches[1], self.table.stride(0))

    @property
    def constants(self) -> dict[str, object]:
        dim, value_dim = self.key_cache.shape[3], self.value_cache.shape[3]
        return {
            "kv_heads": self.key_cache.shape[2], "group": self.group, "block_size": self.key_cache.shape[1],
            "window": self.rules.get("window") or 0, "cap": (self.rules.get("softcap") or 0.0) * _LOG2_E,
            "dim": dim, "value_dim": value_dim, "padded_dim": power_of_two(dim), "padded_value_dim": power_of_two(value_dim),
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Kernels:
    attend_chunks: Any
    attend_parts: Any
    merge: Any
    write: Any


@cache
def _programs(device: torch.device) -> int:
    """Return the maximum number of programs of a decode launch: few in Triton's interpreter, which runs them serially."""
    if device.type != "cuda":
        return 3
    return PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _kernels(device: torch.device) -> _Kernels | None:
    try:
        jit = import_module("triton").jit
        device_code = import_module("rollout.engine.kernels.triton_kernels")
        # Do not specialise numbers that change between steps: otherwise Triton would compile a second kernel for
        # multiples of 16.
        kernels = _Kernels(
            jit(device_code.attend_chunks, do_not_specialize=("num_rows",)),
            jit(device_code.attend_parts, do_not_specialize=("num_owners", "capacity")),
            jit(device_code.merge, do_not_specialize=("capacity",)),
            jit(device_code.write),
        )
    except Exception as exc:  # noqa: BLE001 - a broken installation may fail in any way; plain torch works without it
        reason = f"{type(exc).__name__}: {exc}".partition("\n")[0]
        _log.warning(
            "attention on %s runs on plain torch (%s); with a working triton it would be faster", device, reason
        )
        return None
    return kernels


@dataclass(frozen=True)
class _Plan:
    rows: int
    """The number of rows of the matrix product: tokens times query heads per KV head."""
    span: int
    """The number of keys per iteration of the kernel's loop, a divisor of `SPLIT`."""
    warps: int
    stages: int
    """The depth of the compiler's software pipeline over the loop's iterations."""


def _plan(mode: str, group: int, dim: int, dtype: torch.dtype) -> _Plan:
    """Return the tile sizes for a head size. Auto-tuning them would make start-up slower and results less repeatable.

    An H200 multiprocessor has 228 KB of shared memory and 65,536 registers. Shared memory holds Q and one iteration's K and
    V: 2 x 64 x 128 x 2 B = 32 KB for a head size of 128 in 16 bits.
    - Decode: 128 threads with 120 registers each leave room for four programs, whose loads hide the memory latency.
    - Prefill reuses K for many rows of Q: 128 rows over 8 warps, with 64 registers per thread for the float32 sums. Three
      pipeline stages also prefetch the block ids.
    - Float32 runs without tensor cores (TF32 is not float32), and its K and V take registers too. Tiles are therefore
      smaller; otherwise the sums spill to memory (7 KB per thread at a head size of 256 in 4 warps).
    - Above a head size of 256, tiles take less than 99 KB, which smaller devices also have.
    """
    whole = dtype.itemsize == 4
    width, heads = power_of_two(dim), power_of_two(group)
    narrow, wide = width <= 128, width > 256
    if mode == "decode":
        if wide:
            return _Plan(max(16, heads), 16 if whole else 32, 8, 2)
        return _Plan(max(16, heads), 64 if narrow and not whole else 32, 4, 2 if whole else 3)
    if whole:
        return _Plan(max(16 if wide else 32, heads), 32 if narrow else 16, 8, 1)
    if wide:
        return _Plan(max(32, heads), 32, 8, 2)
    if not narrow:
        return _Plan(max(64, heads), 32, 8, 3)
    return _Plan(128, 64, 8, 3)


def device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context manager that makes the tensor's device current, because Triton launches on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
