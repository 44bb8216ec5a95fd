"""The differentiable operations of exact mode, one for each operation of the fused forward pass.

They call the same C++ functions as the fused forward pass, and return the same bits. Their backward passes use torch, so
gradients differ from plain torch's by rounding only. Each operation can be differentiated once. All tensors are on the CPU
and have the same dtype, float32 or bfloat16.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from rollout.engine.kernels import cpu_library
from rollout.engine.kernels.cpu_attention import Attention
from rollout.engine.training.packing import Packing
from rollout.errors import UnsupportedModelError

Gradients = tuple[Tensor | None, ...]


class _Product(ctypes.Structure):
    """The mirror of the C++ struct `Product` in cpu_exact.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("in", "weight", "bias", "places", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "depth", "columns")),
    )


class _RowWise(ctypes.Structure):
    """The mirror of the C++ struct `RowWise` in cpu_exact.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("in", "other", "out", "cosines", "sines", "positions")),
        *((name, ctypes.c_int64) for name in ("rows", "width", "heads")),
        ("epsilon", ctypes.c_float),
    )


def library() -> ctypes.CDLL:
    """Return the compiled library.

    Raises:
        UnsupportedModelError: the library cannot be built.
    """
    found = cpu_library.load()
    if found is None:
        raise UnsupportedModelError("exact mode runs on the C++ kernels, which could not be built: install g++")
    return found


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, padded: tuple[Tensor, int] | None = None
) -> Tensor:
    """Apply a linear layer with weight [N, K] and bias [N] to x [P, K].

    Args:
        padded: (index of each of the P rows in the result, int64 [P]; number of rows of the result). The other rows of the
            result are 0. If None, the result is [P, N].
    """
    return _apply(_Linear, x, weight, bias, *(padded or (None, 0)))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Apply a root-mean-square norm over the last dimension of x (arXiv 1910.07467)."""
    return _apply(_RMSNorm, x, weight, epsilon)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor) -> Tensor:
    """Apply a rotary embedding (arXiv 2104.09864) to x [P, H, D] for P tokens and H heads.

    Args:
        cosines: table [number of positions, D].
        sines: table [number of positions, D].
        positions: position of each token, an index into the tables, [P].
    """
    return _apply(_Rotate, x, cosines, sines, positions)


def silu_times(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    return _apply(_SiluTimes, gate, up)


def attention(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float, window: int | None
) -> Tensor:
    """Compute causal attention inside each packed sequence.

    Args:
        query: [P, H, D] for P tokens and H query heads.
        key: [P, Hkv, D] for Hkv key-value heads.
        value: [P, Hkv, D].
        packing: the sequences.
        scaling: factor by which the products of queries and keys are multiplied.
        window: number of last positions, including its own, that a query attends to; None means all.

    Returns:
        [P, H, D].
    """
    return _apply(_Attention, query, key, value, packing, scaling, window)


def _call(name: str, call: ctypes.Structure, like: Tensor) -> None:
    bits16, threads = int(like.dtype == torch.bfloat16), torch.get_num_threads()
    getattr(library(), name)(ctypes.byref(call), ctypes.c_int64(threads), ctypes.c_int(bits16))


def _contiguous(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor | None, total: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places = places
        x, weight = _contiguous(x), _contiguous(weight)
        rows, depth, columns = *x.shape, weight.shape[0]
        out = x.new_empty(rows, columns) if places is None else x.new_zeros(total, columns)
        addresses = (None if each is None else each.data_ptr() for each in (bias, places))
        call = _Product(x.data_ptr(), weight.data_ptr(), *addresses, out.data_ptr(), rows, depth, columns)
        _call("rollout_linear", call, x)
        return out

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
        x = _contiguous(x)
        out, width = torch.empty_like(x), x.shape[-1]
        call = _RowWise(
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), None, None, None, x.numel() // width, width, 1, epsilon
        )
        _call("rollout_rms_norm", call, x)
        return out

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
        x = _contiguous(x)
        out = torch.empty_like(x)
        count, heads, width = x.shape
        call = _RowWise(
            x.data_ptr(), None, out.data_ptr(), cosines.data_ptr(), sines.data_ptr(), positions.data_ptr(),
            count * heads, width, heads, 0.0,
        )  # fmt: skip
        _call("rollout_rotate", call, x)
        return out

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
        gate, up = _contiguous(gate), _contiguous(up)
        out = torch.empty_like(gate)
        call = _RowWise(gate.data_ptr(), up.data_ptr(), out.data_ptr(), None, None, None, *gate.shape, 1, 0.0)
        _call("rollout_activate", call, gate)
        return out

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
        query, key, value = _contiguous(query), _contiguous(key), _contiguous(value)
        count, heads, width = query.shape
        out, log_sums = torch.empty_like(query), query.new_empty(count, heads, dtype=torch.float32)
        # Describe the keys of each sequence to the paged kernel as cache blocks of one token, so that nothing is copied.
        starts = packing.starts
        lengths = np.diff(starts)
        tables = np.ascontiguousarray(starts[:-1, None] + np.arange(int(lengths.max(initial=0)), dtype=np.int64))
        call = Attention(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(), starts.ctypes.data,
            packing.positions.data_ptr(), tables.ctypes.data, len(lengths), tables.shape[1], 1, heads, key.shape[1], width,
            width, query.stride(0), out.stride(0), window or 0, scaling, 0.0, log_sums.data_ptr(), None,
        )  # fmt: skip
        _call("rollout_attention", call, query)
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
            # Transpose [b, L, H, D] to [b, H, L, D], the layout of torch's attention.
            parts = [part[places].transpose(1, 2) for part in (query, key, value, out, log_sums)]
            found = _attention_gradients(upstream.transpose(1, 2), parts, window, scaling)
            for whole, part in zip(grads, found, strict=True):
                part = part.transpose(1, 2)
                whole[places if filled else places[real]] = part if filled else part[real]
        return *grads, None, None, None


def _attention_gradients(
    upstream: Tensor, parts: list[Tensor], window: int | None, scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value.

    Args:
        upstream: gradient of the output, [b, H, L, D], for b sequences of length L.
        parts: query [b, H, L, D], key and value [b, Hkv, L, D], output [b, H, L, D], and its log-sum-exps [b, H, L].
        window: see `attention`.
        scaling: see `attention`.
    """
    query, key, value, *outputs = parts
    groups, mask = query.shape[1] // key.shape[1], None
    if window is not None:
        at = torch.arange(query.shape[2], device=query.device)
        distance = at[:, None] - at
        mask = torch.zeros_like(distance, dtype=query.dtype)
        mask.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
    # Repeat each KV head for its query heads: this operator requires equal numbers of heads.
    wide = [part.repeat_interleave(groups, 1) if groups > 1 else part for part in (key, value)]
    of_query, *others = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        upstream, query, *wide, *outputs, 0.0, mask is None, attn_mask=mask, scale=scaling
    )
    if groups > 1:
        others = [part.reshape(len(part), -1, groups, *part.shape[2:]).sum(2) for part in others]
    return of_query, others[0], others[1]
