"""Differentiable operations over the C++ kernels of exact mode.

The forward has the kernels' bits; the backward is torch's, of the same functions, so gradients differ from plain torch's by
rounding only. Each operation can be differentiated once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rollout.engine.kernels import cpu_exact
from rollout.engine.training.packing import Packing

Gradients = tuple[Tensor | None, ...]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, padded: tuple[Tensor, int] | None = None
) -> Tensor:
    """x [P, K] through nn.Linear's weight [N, K] and bias [N].

    Args:
        padded: places [P] int64 of the rows in the result, and its number of rows; other rows are 0. None: [P, N].
    """
    return _apply(_Linear, x, weight, bias, *(padded or (None, 0)))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv 1910.07467)."""
    return _apply(_RMSNorm, x, weight, epsilon)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of x [P, H, D]; positions [P] index the tables [positions, D]."""
    return _apply(_Rotate, x, cosines, sines, positions)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return _apply(_SiluTimes, gate, up)


def attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float, window: int | None
) -> Tensor:
    """Causal attention inside each sequence: query [P, H, D], key and value [P, Hkv, D] → [P, H, D]."""
    return _apply(_Attention, query, key, value, packing, scaling, window)


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor | None, total: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places = places
        return cpu_exact.linear(x, weight, bias, places, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        if ctx.places is not None:
            grad = grad[ctx.places]
        return (
            grad @ weight if wants_x else None,
            grad.T @ x if wants_weight else None,
            grad.sum(0) if wants_bias else None,
            None,
            None,
        )


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon = epsilon
        return cpu_exact.rms_norm(x, weight, epsilon)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        x, weight = ctx.saved_tensors
        wide, grad = x.float(), grad.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.epsilon)
        normed = wide * scale
        of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad = grad * weight
        of_x = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * scale
        return of_x.to(x.dtype), of_weight, None


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor) -> Tensor:
        ctx.tables = cosines, sines, positions
        return cpu_exact.rotate(x, cosines, sines, positions)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        cosines, sines, positions = ctx.tables
        cosine, sine = cosines[positions][:, None], sines[positions][:, None]
        low, high = (grad * sine).chunk(2, -1)
        return grad * cosine + torch.cat((high, -low), -1), None, None, None


class _SiluTimes(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return cpu_exact.silu_times(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), grad * torch.nn.functional.silu(gate)


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float, window: int | None
    ) -> Tensor:
        out, log_sums = cpu_exact.attention(query, key, value, packing.starts, packing.positions, scaling, window)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.how = packing, scaling, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        query, key, value, out, log_sums = ctx.saved_tensors
        packing, scaling, window = ctx.how
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for places, real in packing.rectangles():
            filled = bool(real.all())
            upstream = grad[places] if filled else grad[places] * real[..., None, None]
            # [b, L, H, D] to [b, H, L, D].
            parts = [part[places].transpose(1, 2) for part in (query, key, value, out, log_sums)]
            found = _attention_gradients(upstream.transpose(1, 2), parts, window, scaling)
            for whole, part in zip(grads, found, strict=True):
                part = part.transpose(1, 2)
                whole[places if filled else places[real]] = part if filled else part[real]
        return *grads, None, None, None


def _attention_gradients(
    upstream: Tensor, parts: list[Tensor], window: int | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value [b, H or Hkv, L, D], computed from them, the output and its log-sums."""
    query, key, value, *outputs = parts
    groups, mask = query.shape[1] // key.shape[1], None
    if window is not None:
        at = torch.arange(query.shape[2], device=query.device)
        distance = at[:, None] - at
        mask = torch.zeros_like(distance, dtype=query.dtype)
        mask.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
    # Each KV head is repeated for its query heads.
    wide = [part.repeat_interleave(groups, 1) if groups > 1 else part for part in (key, value)]
    of_query, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream, query, *wide, *outputs, 0.0, mask is None, attn_mask=mask, scale=scaling
    )
    if groups > 1:
        others = [part.reshape(len(part), -1, groups, *part.shape[2:]).sum(2) for part in others]
    return of_query, others[0], others[1]
