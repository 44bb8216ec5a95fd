"""Triton kernels for what lies between the matrix products of a decoder layer, on CUDA.

Few kernels stand for some forty of the module's: residual add with the norms before and behind it; head norms, rotary
embedding and the cache write; activation and product of an MLP; the sum of a projection and its LoRA adapter. They read the
module's own parameters and round where the module rounds. Grids depend on shapes alone and nothing waits for the device:
every call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.engine.kernels.cpu_forward import Activation, NormKind, RotaryKind
from rollout.engine.kernels.triton_paged import device_of, power_of_two

_SPAN = 1024
"""Elements per program of what is computed element by element."""


@dataclass(frozen=True, eq=False)
class Place:
    """K and V of one layer in the cache, as the attention kernels take them."""

    keys: Tensor
    values: Tensor
    """[num_blocks, block_size, Hkv, D] each, with a contiguous last dimension."""
    cells: Tensor | None
    """See `TritonPaged.decode_with_lse`."""


class NormWeights(NamedTuple):
    """Parameters [H] of a norm over H elements."""

    weight: Tensor
    bias: Tensor | None = None


class HeadNorms(NamedTuple):
    """Weights [D] of the norms of each query and each key head."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class Norms:
    """What all norms of a model have in common."""

    kind: NormKind
    epsilon: float

    @property
    def options(self) -> dict[str, bool]:
        """As the kernels take them."""
        return {"twice": self.kind is NormKind.RMS, "plus_one": self.kind is NormKind.RMS_OF_ONE_PLUS_WEIGHT}


class TritonLayers:
    """The compiled kernels. Inputs are contiguous unless said otherwise, outputs new tensors."""

    def __init__(self, kernels: _Kernels) -> None:
        self._kernels = kernels

    def add_norm(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        after: NormWeights | None,
        norm: NormWeights | None,
        norms: Norms,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """`hidden` + `delta`, and the norm of this sum (arXiv 1910.07467, 1607.06450).

        Args:
            hidden: [P, H].
            delta: [P, H]; None: the norm is of `hidden` alone, which is returned.
            after: norm of `delta` before it is added, no layer norm; None: it is added as it is.
            norm: None: the second value is the sum itself.
            dtype: of the second value.
        """
        total = hidden if delta is None else torch.empty_like(hidden)
        out = hidden if norm is None else torch.empty_like(hidden, dtype=dtype)
        count, width = hidden.shape
        padded = power_of_two(width)
        weight, bias = (hidden, None) if norm is None else norm
        if count:
            with device_of(hidden):
                self._kernels.add_norm[(count,)](
                    hidden, hidden if delta is None else delta, hidden if after is None else after.weight, weight,
                    weight if bias is None else bias, total, out, norms.epsilon, adds=delta is not None,
                    delta_normed=after is not None, normed=norm is not None, centred=norms.kind is NormKind.LAYER_NORM,
                    biased=bias is not None, **norms.options, width=width, padded_width=padded,
                    num_warps=4 if padded <= 2048 else 8 if padded <= 8192 else 16, enable_fp_fusion=False,
                )  # fmt: skip
        return total, total.to(dtype) if norm is None else out

    def rotate_and_write(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_norms: HeadNorms | None,
        norms: Norms,
        rotary: tuple[Tensor, Tensor] | None,
        kind: RotaryKind,
        place: Place,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys, normed and rotated (arXiv 2104.09864), in the dtype of the cache; K and V into the cache.

        Args:
            query, key, value: [P, H, D], [P, Hkv, D], [P, Hkv, D]; the heads of a position are contiguous.
            head_norms: before the rotation; None: there are none.
            rotary: cosines and sines [P, R] of the first R elements of a head, of whose dtype the arithmetic is; None: there
                is no rotation.
            slots: [P] int32 or int64 slot mapping; negative: not written.
        """
        query_out, key_out = (
            torch.empty(each.shape, dtype=place.keys.dtype, device=each.device) for each in (query, key)
        )
        count, heads, dim = query.shape
        kv_heads, keys, values = key.shape[1], place.keys, place.values
        group = heads // kv_heads
        query_norm, key_norm = (query, key) if head_norms is None else head_norms
        cosines, sines = (query, query) if rotary is None else rotary
        size = 0 if rotary is None else cosines.shape[1]
        if count:
            with device_of(query):
                self._kernels.rotate_and_write[(count, kv_heads)](
                    query, key, value, query_norm, key_norm, cosines, sines, query_out, key_out, keys, values,
                    slots if place.cells is None else place.cells, slots, norms.epsilon,
                    *(each.stride(0) for each in (query, key, value)), *keys.stride()[:3], *values.stride()[:3],
                    moves=place.cells is not None, normed=head_norms is not None, **norms.options,
                    pairs=kind is RotaryKind.PAIRS, block_size=keys.shape[1], group=group, padded_group=power_of_two(group),
                    dim=dim, padded_dim=power_of_two(dim), rotary=size, padded_half=power_of_two(max(1, size // 2)),
                    num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
        return query_out, key_out

    def activate(self, gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
        """activation(`gate`) * `up`, or without `up` activation(`gate`): [P, I].

        Args:
            gate, up: [P, I], with a contiguous last dimension.
        """
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        other = gate if up is None else up
        if gate.numel():
            with device_of(gate):
                count, width = gate.shape
                self._kernels.activate[(count, -(-width // _SPAN))](
                    gate, other, out, gate.stride(0), other.stride(0), gelu=activation is Activation.GELU_TANH,
                    gated=up is not None, width=width, span=_SPAN,
                )  # fmt: skip
        return out

    def add_scaled(self, base: Tensor, more: Tensor, factor: float) -> Tensor:
        """`base` + `factor` * `more` [P, H], in the dtype of `base`; the product is rounded to that of `more`."""
        out = torch.empty_like(base)
        if base.numel():
            with device_of(base):
                count, width = base.shape
                self._kernels.add_scaled[(count, -(-width // _SPAN))](
                    base, more, out, factor, width=width, span=_SPAN, enable_fp_fusion=False
                )
        return out


@dataclass(frozen=True, eq=False)
class _Kernels:
    add_norm: Any
    rotate_and_write: Any
    activate: Any
    add_scaled: Any


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
            jit(device_code.activate),
            jit(device_code.add_scaled),
        )
    )
