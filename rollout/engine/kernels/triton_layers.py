"""Triton kernels for what lies between the matrix products of a Llama-like decoder layer, on CUDA.

Three kernels stand for some forty of the module's: residual add with RMSNorm; head norms, rotary embedding and the cache
write; SiLU and product of an MLP. They read the module's own parameters and round where the module rounds. Grids depend on
shapes alone and nothing waits for the device: every call can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from rollout.engine.kernels.triton_paged import device_of, power_of_two
from rollout.engine.kernels.triton_trial import TOLERANCES

_SPAN = 1024
"""Elements per program of `silu_times`."""


@dataclass(frozen=True, eq=False)
class Place:
    """K and V of one layer in the cache, as the attention kernels take them."""

    keys: Tensor
    values: Tensor
    """[num_blocks, block_size, Hkv, D] each, with a contiguous last dimension."""
    cells: Tensor | None
    """See `TritonPaged.decode_with_lse`."""


class HeadNorms(NamedTuple):
    """Weights [D] of the RMSNorms of each query and each key head."""

    query: Tensor
    key: Tensor


class TritonLayers:
    """The compiled kernels. Inputs are contiguous, outputs new tensors."""

    def __init__(self, kernels: _Kernels) -> None:
        self._kernels = kernels

    def add_norm(
        self, hidden: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """`hidden` + `delta` and its root-mean-square norm (arXiv 1910.07467), scaled by `weight`.

        Args:
            hidden: [P, H].
            delta: [P, H]; None: the norm is of `hidden` alone, which is returned.
            weight: [H].
            dtype: of the norm.
        """
        total = hidden if delta is None else torch.empty_like(hidden)
        out = torch.empty_like(hidden, dtype=dtype)
        count, width = hidden.shape
        padded = power_of_two(width)
        if count:
            with device_of(hidden):
                self._kernels.add_norm[(count,)](
                    hidden, hidden if delta is None else delta, weight, total, out, epsilon, adds=delta is not None,
                    width=width, padded_width=padded, num_warps=4 if padded <= 2048 else 8 if padded <= 8192 else 16,
                    enable_fp_fusion=False,
                )  # fmt: skip
        return total, out

    def rotate_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: HeadNorms | None,
        epsilon: float,
        cosines: Tensor,
        sines: Tensor,
        place: Place,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed and rotated (arXiv 2104.09864), in the dtype of the cache; K and V into the cache.

        Args:
            query, key, value: [P, H, D], [P, Hkv, D], [P, Hkv, D].
            norms: of each head, before the rotation; None: there are none.
            cosines, sines: [P, D]; the arithmetic is rounded to their dtype.
            slots: [P] int32 or int64 slot mapping; negative: not written.
        """
        query_out, key_out = (torch.empty_like(each, dtype=place.keys.dtype) for each in (query, key))
        count, heads, dim = query.shape
        kv_heads, keys, values = key.shape[1], place.keys, place.values
        group = heads // kv_heads
        query_norm, key_norm = (query, key) if norms is None else norms
        if count:
            with device_of(query):
                self._kernels.rotate_and_write[(count, kv_heads)](
                    query, key, value, query_norm, key_norm, cosines, sines, query_out, key_out, keys, values,
                    slots if place.cells is None else place.cells, slots, epsilon, *keys.stride()[:3], *values.stride()[:3],
                    moves=place.cells is not None, normed=norms is not None, block_size=keys.shape[1], group=group,
                    padded_group=power_of_two(group), dim=dim, padded_half=power_of_two(dim // 2), num_warps=4,
                    enable_fp_fusion=False,
                )  # fmt: skip
        return query_out, key_out

    def silu_times(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up, all [P, I]."""
        out = torch.empty_like(gate)
        if gate.numel():
            with device_of(gate):
                count, width = gate.shape
                self._kernels.silu_times[(count, -(-width // _SPAN))](gate, up, out, width=width, span=_SPAN)
        return out


@dataclass(frozen=True, eq=False)
class _Kernels:
    add_norm: Any
    rotate_and_write: Any
    silu_times: Any


@cache
def load() -> TritonLayers:
    """The kernels, not compiled yet.

    Raises:
        ImportError: there is no Triton.
    """
    jit = import_module("triton").jit
    device_code = import_module("rollout.engine.kernels.triton_layer_kernels")
    return TritonLayers(
        _Kernels(
            jit(device_code.add_norm),
            jit(device_code.rotate_and_write),
            jit(device_code.silu_times),
        )
    )


# --- trial ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerSizes:
    """What the kernels are compiled for."""

    width: int
    inner: int
    """Of the MLP."""
    heads: int
    kv_heads: int
    dim: int
    normed: bool
    dtype: torch.dtype
    device: torch.device


@cache
def failure(sizes: LayerSizes) -> str | None:
    """The first kernel that raises or differs from plain torch, and how; None: all work."""
    for name, run in _trials(sizes):
        try:
            found, expected = run()
            error = max(
                float((one.float() - other.float()).abs().max()) for one, other in zip(found, expected, strict=True)
            )
        except Exception as exc:  # noqa: BLE001 - compiler, driver or arithmetic may fail in any way
            return f"Triton's {name} does not work: {type(exc).__name__}: {exc}".partition("\n")[0]
        if not error <= 2 * TOLERANCES[sizes.dtype]:
            return f"Triton's {name} differs from plain torch by {error:.3g}"
    return None


Compared = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def _trials(sizes: LayerSizes) -> Iterator[tuple[str, Callable[[], Compared]]]:
    generator = torch.Generator().manual_seed(0)
    epsilon, block_size, count = 1e-6, 16, 3

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(sizes.device, sizes.dtype)

    def add_norm() -> Compared:
        hidden, delta, weight = drawn(count, sizes.width), drawn(count, sizes.width), drawn(sizes.width)
        found = load().add_norm(hidden, delta, weight, epsilon, sizes.dtype)
        return found, (hidden + delta, rms_norm(hidden + delta, weight, epsilon))

    def rotate_and_write() -> Compared:
        dim = sizes.dim
        query, key, value = (drawn(count, heads, dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
        norms = HeadNorms(drawn(dim), drawn(dim)) if sizes.normed else None
        cosines, sines = drawn(count, dim), drawn(count, dim)
        keys, values = (torch.zeros(2, block_size, sizes.kv_heads, dim).to(query) for _ in range(2))
        slots = torch.tensor([17, -1, 3], device=sizes.device, dtype=torch.int32)
        place = Place(keys, values, None)
        found = load().rotate_and_write(query, key, value, norms, epsilon, cosines, sines, place, slots)
        if norms is not None:
            query, key = rms_norm(query, norms.query, epsilon), rms_norm(key, norms.key, epsilon)
        query, key = rotated(query, cosines, sines), rotated(key, cosines, sines)
        written = torch.zeros_like(keys), torch.zeros_like(values)
        for cache_, own in zip(written, (key, value), strict=True):
            cache_.flatten(0, 1)[[17, 3]] = own[[0, 2]]
        return (*found, keys, values), (query, key, *written)

    def silu_times() -> Compared:
        gate, up = drawn(count, sizes.inner), drawn(count, sizes.inner)
        return (load().silu_times(gate, up),), (silu(gate) * up,)

    yield from (("add_norm", add_norm), ("rotate_and_write", rotate_and_write), ("silu_times", silu_times))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension, rounded as transformers' Llama does: the reference for the kernels."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of x [P, H, D] by cosines, sines [P, D]: the reference for the kernels."""
    low, high = x.chunk(2, -1)
    return x * cosines[:, None] + torch.cat((-high, low), -1) * sines[:, None]
