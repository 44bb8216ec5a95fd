"""Trial runs of the kernels between matrix products, in the sizes and dtype of a model, compared with plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, silu

from rollout.engine.kernels.cpu_forward import Activation, NormKind, RotaryKind
from rollout.engine.kernels.triton_layers import HeadNorms, Norms, NormWeights, Place, load
from rollout.engine.kernels.triton_trial import TOLERANCES


@dataclass(frozen=True)
class LayerSizes:
    """What the kernels are compiled for."""

    width: int
    inner: int
    """Of the MLP."""
    heads: int
    kv_heads: int
    dim: int
    norm: NormKind
    after: bool
    """Whether there are norms before the residual is added."""
    head_norms: bool
    rotary: int
    """Elements of a head that are rotated."""
    rotary_wide: bool
    """Whether they are so in float32."""
    rotary_kind: RotaryKind
    activation: Activation
    gated: bool
    """Whether the MLP has a gate."""
    adapted: bool
    """Whether projections have adapters."""
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
    block_size, count = 16, 3
    norms = Norms(sizes.norm, 1e-6)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(sizes.device, sizes.dtype)

    def add_norm() -> Compared:
        hidden, delta = drawn(count, sizes.width), drawn(count, sizes.width)
        norm = NormWeights(drawn(sizes.width), drawn(sizes.width) if sizes.norm is NormKind.LAYER_NORM else None)
        after = NormWeights(drawn(sizes.width)) if sizes.after else None
        found = load().add_norm(hidden, delta, after, norm, norms, sizes.dtype)
        total = hidden + (delta if after is None else normed(delta, after, norms))
        return found, (total, normed(total, norm, norms))

    def rotate_and_write() -> Compared:
        dim = sizes.dim
        query, key, value = (drawn(count, heads, dim) for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads))
        head_norms = HeadNorms(drawn(dim), drawn(dim)) if sizes.head_norms else None
        tables = (drawn(count, sizes.rotary), drawn(count, sizes.rotary))
        if sizes.rotary_wide:
            tables = (tables[0].float(), tables[1].float())
        rotary = tables if sizes.rotary else None
        keys, values = (torch.zeros(2, block_size, sizes.kv_heads, dim).to(query) for _ in range(2))
        slots = torch.tensor([17, -1, 3], device=sizes.device, dtype=torch.int32)
        place = Place(keys, values, None)
        found = load().rotate_and_write(query, key, value, head_norms, norms, rotary, sizes.rotary_kind, place, slots)
        if head_norms is not None:
            query, key = (
                normed(each, NormWeights(weight), norms) for each, weight in zip((query, key), head_norms, strict=True)
            )
        if rotary is not None:
            query, key = (rotated(each, *rotary, sizes.rotary_kind).to(sizes.dtype) for each in (query, key))
        written = torch.zeros_like(keys), torch.zeros_like(values)
        for cache_, own in zip(written, (key, value), strict=True):
            cache_.flatten(0, 1)[[17, 3]] = own[[0, 2]]
        return (*found, keys, values), (query, key, *written)

    def activate() -> Compared:
        gate, up = drawn(count, sizes.inner), drawn(count, sizes.inner) if sizes.gated else None
        made = gelu(gate, approximate="tanh") if sizes.activation is Activation.GELU_TANH else silu(gate)
        return (load().activate(gate, up, sizes.activation),), (made if up is None else made * up,)

    def add_scaled() -> Compared:
        base, more = drawn(count, sizes.inner), drawn(count, sizes.inner)
        return (load().add_scaled(base, more, 0.3),), (base + more * 0.3,)

    yield from (("add_norm", add_norm), ("rotate_and_write", rotate_and_write), ("activate", activate))
    if sizes.adapted:
        yield "add_scaled", add_scaled


def normed(x: Tensor, norm: NormWeights, norms: Norms) -> Tensor:
    """A norm over the last dimension, rounded as transformers' modules do: the reference for the kernels."""
    weight, bias = norm
    if norms.kind is NormKind.LAYER_NORM:
        return layer_norm(x, weight.shape, weight, bias, norms.epsilon)
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norms.epsilon)
    if norms.kind is NormKind.RMS:
        return weight * scaled.to(x.dtype)
    return (scaled * (weight.float() + (norms.kind is NormKind.RMS_OF_ONE_PLUS_WEIGHT))).to(x.dtype)


def rotated(x: Tensor, cosines: Tensor, sines: Tensor, kind: RotaryKind) -> Tensor:
    """Rotary embedding of the first R elements of x [P, H, D] by cosines, sines [P, R]: the reference for the kernels."""
    size = cosines.shape[1]
    turned, rest = x[..., :size], x[..., size:]
    if kind is RotaryKind.PAIRS:
        cosines, sines = (each[:, : size // 2].repeat_interleave(2, -1) for each in (cosines, sines))
        crossed = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    else:
        low, high = turned.chunk(2, -1)
        crossed = torch.cat((-high, low), -1)
    return torch.cat((turned * cosines[:, None] + crossed * sines[:, None], rest), -1)
