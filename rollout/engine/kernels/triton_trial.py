"""Trial runs of the Triton kernels in the dtype and head sizes of a model, compared with plain torch.

A kernel is compiled when it is first launched, for one dtype and shape: shared memory may be too small for it, or the
compiler may not know the dtype on this device. If that is found here, plain torch is used; in a step, requests would fail.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.engine.kernels.decode_parts import SPLIT
from rollout.engine.kernels.triton_paged import TritonPaged

TOLERANCES = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Maximum difference, for values of a normal distribution."""
_CHUNK = 5
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes that the kernels are compiled for."""

    heads: int
    kv_heads: int
    dim: int
    value_dim: int


def tried_out(
    paged: TritonPaged, kinds: Iterable[Heads], dtype: torch.dtype, block_size: int, device: torch.device
) -> TritonPaged | None:
    """The kernels if they work for all `kinds`; else None, and a warning says what fails, and why."""
    for heads in kinds:
        trial = _Trial(paged, heads, dtype, block_size, device)
        for mode, run in {"write": trial.write, "decode": trial.decode, "prefill": trial.prefill}.items():
            try:
                run()
            except Exception as exc:  # noqa: BLE001 - compiler, driver or arithmetic may fail in any way
                reason = f"{type(exc).__name__}: {exc}".partition("\n")[0]
                _log.warning(
                    "attention of %d heads of %d in %s on %s runs on plain torch: Triton's %s does not work (%s)",
                    heads.heads, heads.dim, dtype, device, mode, reason,
                )  # fmt: skip
                return None
            finally:
                paged.clear()
    return paged


class _Trial:
    """Two sequences of `SPLIT` + 9 tokens with a common beginning."""

    def __init__(
        self, paged: TritonPaged, heads: Heads, dtype: torch.dtype, block_size: int, device: torch.device
    ) -> None:
        self._paged = paged
        self._device = device
        self._tokens = SPLIT + 9
        # A few blocks less if SPLIT is not a multiple of the block size.
        self._prefix = SPLIT // block_size * block_size
        self._scale = heads.dim**-0.5
        self._tolerance = TOLERANCES[dtype]
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self._query = drawn(2, _CHUNK, heads.heads, heads.dim)
        self._keys = drawn(2, self._tokens, heads.kv_heads, heads.dim)
        self._values = drawn(2, self._tokens, heads.kv_heads, heads.value_dim)
        for part in (self._keys, self._values):
            part[1, : self._prefix] = part[0, : self._prefix]
        width = -(-self._tokens // block_size)
        self._tables = torch.arange(2 * width, dtype=torch.int32).view(2, width)
        self._tables[1, : self._prefix // block_size] = self._tables[0, : self._prefix // block_size]
        places = torch.arange(self._tokens)
        self._slots = (self._tables[:, places // block_size].long() * block_size + places % block_size).to(device)
        self._tables = self._tables.to(device)
        self._pool_keys, self._pool_values = (
            torch.zeros(2 * width, block_size, heads.kv_heads, size, dtype=dtype, device=device)
            for size in (heads.dim, heads.value_dim)
        )

    def write(self) -> None:
        # The common beginning belongs to the first sequence: all slots differ, as in a step.
        own = [(0, slice(None)), (1, slice(self._prefix, None))]
        keys, values, slots = (
            torch.cat([part[row, span] for row, span in own]) for part in (self._keys, self._values, self._slots)
        )
        self._paged.write(keys, values, self._pool_keys, self._pool_values, slots)
        for pool, part in ((self._pool_keys, keys), (self._pool_values, values)):
            self._compare(pool.flatten(0, 1)[slots], part)

    def decode(self) -> None:
        last = torch.full((2,), self._tokens - 1, dtype=torch.int32, device=self._device)
        found, _ = self._paged.decode_with_lse(
            self._query[:, 0].contiguous(), self._pool_keys, self._pool_values, self._tables, last, None, self._scale
        )
        self._compare(found, self._expected(0, 1)[:, 0])

    def prefill(self) -> None:
        begins = torch.tensor([0, _CHUNK, 2 * _CHUNK], dtype=torch.int32, device=self._device)
        starts = torch.full((2,), self._tokens - _CHUNK, dtype=torch.int32, device=self._device)
        out = self._paged.prefill(
            self._query.flatten(0, 1),
            self._pool_keys,
            self._pool_values,
            self._tables,
            begins,
            starts,
            None,
            self._scale,
        )
        self._compare(out, self._expected(_CHUNK - 1, _CHUNK).flatten(0, 1))

    def _expected(self, unseen: int, count: int) -> Tensor:
        """[2, count, H, Dv] of the first `count` queries, of which the first does not attend to the last `unseen` keys."""
        groups = self._query.shape[2] // self._keys.shape[2]
        # In float64, because products of float32 follow the user's TF32 setting.
        keys, values = (part.double().repeat_interleave(groups, 2) for part in (self._keys, self._values))
        scores = torch.einsum("rqhd,rkhd->rhqk", self._query[:, :count].double(), keys) * self._scale
        last = self._tokens - 1 - unseen + torch.arange(count, device=self._device)
        scores.masked_fill_(torch.arange(self._tokens, device=self._device) > last[:, None], -torch.inf)
        return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), values)

    def _compare(self, found: Tensor, expected: Tensor) -> None:
        error = float((found.double() - expected.double()).abs().max())
        if not error <= self._tolerance:
            raise RuntimeError(f"differs from plain torch by {error:.3g}")
