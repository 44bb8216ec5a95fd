"""A trial run of the Triton kernels with a model's dtype and head sizes, compared with plain torch.

A kernel is compiled for one dtype and shape when it is first launched. Compilation may fail because shared memory is too
small, or because the compiler does not support the dtype on this device. If the trial fails, the engine uses plain torch.
Without the trial, the failure would occur in a step and fail its requests.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.engine.kernels.decode_parts import SPLIT
from rollout.engine.kernels.rows import PagedRows
from rollout.engine.kernels.torch_paged import TorchPagedAttention, write_slots
from rollout.engine.kernels.triton_attention import TritonPagedAttention
from rollout.engine.kernels.triton_paged import TritonPaged

TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""The maximum difference from plain torch, by dtype, for inputs drawn from a standard normal distribution."""
_CHUNK = 5
"""The number of tokens in the trial's chunk."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heads:
    """The head counts and head sizes that the kernels are compiled for."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int


def tried_out(
    paged: TritonPaged, kinds: Iterable[Heads], dtype: torch.dtype, block_size: int, device: torch.device
) -> TritonPaged | None:
    """Return the kernels if they work for all head shapes in `kinds`; otherwise log a warning and return None."""
    for heads in kinds:
        try:
            error = _error(paged, heads, dtype, block_size, device)
            if not error <= TOLERANCES[dtype]:
                raise RuntimeError(f"differs from plain torch by {error:.3g}")
        except Exception as exc:  # noqa: BLE001 - compiler, driver or arithmetic may fail in any way
            reason = f"{type(exc).__name__}: {exc}".partition("\n")[0]
            _log.warning(
                "attention of %d heads of %d in %s on %s runs on plain torch: Triton's kernels do not work (%s)",
                heads.heads, heads.dim, dtype, device, reason,
            )  # fmt: skip
            return None
        finally:
            paged.clear()
    return paged


def _error(paged: TritonPaged, heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device) -> float:
    """Return the largest error of a step with a decoding row and a chunk, each of which attends to several parts of keys."""
    tokens, generator = SPLIT + 9, torch.Generator().manual_seed(0)
    width = -(-tokens // block_size)
    tables = np.arange(2 * width).reshape(2, width)
    whole = PagedRows(np.array([0, tokens, 2 * tokens]), np.tile(np.arange(tokens), 2), tables, block_size)
    last = np.array([tokens - 1, *range(tokens - _CHUNK, tokens)])
    rows = PagedRows(np.array([0, 1, 1 + _CHUNK]), last, tables, block_size)

    def drawn(count: int, of: int, size: int) -> Tensor:
        return torch.randn(count, of, size, generator=generator).to(device, dtype)

    keys, values = (drawn(2 * tokens, heads.kv_heads, size) for size in (heads.dim, heads.value_dim))
    pool = [torch.zeros(2 * width, block_size, *each.shape[1:], dtype=dtype, device=device) for each in (keys, values)]
    exact = [each.double() for each in pool]
    slots = torch.from_numpy(whole.slots).to(device)
    paged.write(keys, values, pool[0], pool[1], slots)
    write_slots(keys, values, exact[0], exact[1], slots)
    # Compute the reference in float64: the precision of float32 products depends on the user's TF32 setting.
    query, plain = drawn(len(last), heads.heads, heads.dim), TorchPagedAttention(rows, device)
    found = TritonPagedAttention(paged, rows, device, plain)(query, *pool, scaling=heads.dim**-0.5)
    expected = plain(query.double(), *exact, scaling=heads.dim**-0.5)
    pairs = zip((found, *pool), (expected, *exact), strict=True)
    return max(float((one.double() - other).abs().max()) for one, other in pairs)
