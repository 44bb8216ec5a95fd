"""Device code between the matrix products of a Llama-like decoder layer, in Triton's language.

Imported by `triton_layers`, which compiles and launches these functions, and only once Triton is needed. Every value is
rounded where the modules of transformers round it: to the dtype of the tensor that they would have stored. No result is
stored over its operand, which another thread of the program may still have to read.
"""

from __future__ import annotations

import triton
import triton.language as tl


def add_norm(
    hidden: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    adds: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
) -> None:
    """total = hidden + delta, out = RMSNorm(total) * weight; `adds` False: of `hidden` alone. Grid: P."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, padded_width)
    mask = at < width
    x = tl.load(hidden + row + at, mask=mask, other=0.0).to(tl.float32)
    if adds:
        x += tl.load(delta + row + at, mask=mask, other=0.0).to(tl.float32)
        stored = x.to(total.dtype.element_ty)
        tl.store(total + row + at, stored, mask=mask)
        x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    normed = (x * scale).to(hidden.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + at, scaled.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _rotated(
    source: tl.tensor,
    places: tl.tensor,
    mask: tl.tensor,
    norm: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    epsilon: tl.tensor,
    normed: tl.constexpr,
    dim: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Halves [rows, D / 2] of heads at `places`, after RMSNorm if `normed`, rotated; in the dtype of the cosines."""
    half: tl.constexpr = dim // 2
    wide = cosines.dtype.element_ty
    low = tl.load(source + places, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + places + half, mask=mask, other=0.0).to(tl.float32)
    if normed:
        kind = source.dtype.element_ty
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / dim + epsilon)[:, None]
        weight_low = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        weight_high = tl.load(norm + at + half, mask=inside, other=0.0).to(tl.float32)[None, :]
        low = ((low * scale).to(kind).to(tl.float32) * weight_low).to(wide).to(tl.float32)
        high = ((high * scale).to(kind).to(tl.float32) * weight_high).to(wide).to(tl.float32)
    cosine_low = tl.load(cosines + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    cosine_high = tl.load(cosines + at + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine_low = tl.load(sines + at, mask=inside, other=0.0).to(tl.float32)[None, :]
    sine_high = tl.load(sines + at + half, mask=inside, other=0.0).to(tl.float32)[None, :]
    out_low = (low * cosine_low).to(wide).to(tl.float32) - (high * sine_low).to(wide).to(tl.float32)
    out_high = (high * cosine_high).to(wide).to(tl.float32) + (low * sine_high).to(wide).to(tl.float32)
    return out_low.to(wide), out_high.to(wide)


def rotate_and_write(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    query_out: tl.tensor,
    key_out: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    cells: tl.tensor,
    slots: tl.tensor,
    epsilon: tl.tensor,
    key_block_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    moves: tl.constexpr,
    normed: tl.constexpr,
    block_size: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_half: tl.constexpr,
) -> None:
    """Norms of queries and keys if `normed`, rotary embedding, K and V into their slot. Grid: P x KV heads.

    A program has one KV head of one position and the `group` query heads that share it. Query, key and value are
    contiguous [P, heads, D]; `moves`: the caches lie at the addresses in `cells`.
    """
    position = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    half: tl.constexpr = dim // 2
    at = tl.arange(0, padded_half)
    inside = at < half
    cosines += position * dim
    sines += position * dim

    line = tl.arange(0, padded_group)
    places = ((position * kv_heads + head) * group + line[:, None]) * dim + at[None, :]
    mask = (line < group)[:, None] & inside[None, :]
    low, high = _rotated(query, places, mask, query_norm, cosines, sines, at, inside, epsilon, normed, dim)
    tl.store(query_out + places, low.to(query_out.dtype.element_ty), mask=mask)
    tl.store(query_out + places + half, high.to(query_out.dtype.element_ty), mask=mask)

    one = tl.arange(0, 1)
    places = (position * kv_heads + head + one[:, None]) * dim + at[None, :]
    mask = (one < 1)[:, None] & inside[None, :]
    low, high = _rotated(key, places, mask, key_norm, cosines, sines, at, inside, epsilon, normed, dim)
    low = low.to(key_out.dtype.element_ty)
    high = high.to(key_out.dtype.element_ty)
    tl.store(key_out + places, low, mask=mask)
    tl.store(key_out + places + half, high, mask=mask)

    index = tl.load(slots + position).to(tl.int64)
    if index < 0:
        return
    if moves:
        # The hint is on the pointer: on the integer it would be lost, and with it the 16-byte stores.
        key_cache = tl.multiple_of(tl.load(cells).to(key_cache.dtype), 16)
        value_cache = tl.multiple_of(tl.load(cells + 1).to(value_cache.dtype), 16)
    block = index // block_size
    slot = index % block_size
    target = block * key_block_stride + slot * key_slot_stride + head * key_head_stride + at[None, :] + one[:, None]
    tl.store(key_cache + target, low.to(key_cache.dtype.element_ty), mask=mask)
    tl.store(key_cache + target + half, high.to(key_cache.dtype.element_ty), mask=mask)
    target = (
        block * value_block_stride + slot * value_slot_stride + head * value_head_stride + at[None, :] + one[:, None]
    )
    low = tl.load(value + places, mask=mask, other=0.0)
    high = tl.load(value + places + half, mask=mask, other=0.0)
    tl.store(value_cache + target, low.to(value_cache.dtype.element_ty), mask=mask)
    tl.store(value_cache + target + half, high.to(value_cache.dtype.element_ty), mask=mask)


def silu_times(gate: tl.tensor, up: tl.tensor, out: tl.tensor, width: tl.constexpr, span: tl.constexpr) -> None:
    """silu(gate) * up. Grid: P x width / span, rounded up."""
    column = tl.program_id(1) * span + tl.arange(0, span)
    # A width that is known when this is compiled leaves loads of 16 bytes.
    mask = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    x = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    activated = (x / (1.0 + tl.exp(-x))).to(gate.dtype.element_ty).to(tl.float32)
    product = activated * tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)
