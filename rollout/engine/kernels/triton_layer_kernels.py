"""Device code between the matrix products of a decoder layer, in Triton's language.

Imported by `triton_layers`, which compiles and launches these functions, and only once Triton is needed. Every value is
rounded where the modules of transformers round it: to the dtype of the tensor that they would have stored. No result is
stored over its operand, which another thread of the program may still have to read.

Norms are root-mean-square norms, or with `centred` layer norms. `twice`: rounded before the weight, too; `plus_one`: the
weight is one more than what is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _weighted(
    x: tl.tensor, weight: tl.tensor, kind: tl.constexpr, twice: tl.constexpr, plus_one: tl.constexpr
) -> tl.tensor:
    """Normalised values of dtype `kind` times the weight of their norm, as float32."""
    wide = weight.to(tl.float32)
    if twice:
        x = (x.to(kind).to(tl.float32) * wide).to(weight.dtype)
    elif plus_one:
        x = (x * (wide + 1.0)).to(kind)
    else:
        x = (x * wide).to(kind)
    return x.to(tl.float32)


def add_norm(
    hidden: tl.tensor,
    delta: tl.tensor,
    delta_weight: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    adds: tl.constexpr,
    delta_normed: tl.constexpr,
    normed: tl.constexpr,
    centred: tl.constexpr,
    biased: tl.constexpr,
    twice: tl.constexpr,
    plus_one: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
) -> None:
    """total = hidden + delta, or + the norm of delta; out = norm of total if `normed`. Grid: P.

    `adds` False: total is `hidden`, and is not stored. The norm of delta is not `centred`.
    """
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, padded_width)
    mask = at < width
    x = tl.load(hidden + row + at, mask=mask, other=0.0).to(tl.float32)
    if adds:
        more = tl.load(delta + row + at, mask=mask, other=0.0).to(tl.float32)
        if delta_normed:
            more = more * tl.rsqrt(tl.sum(more * more, 0) / width + epsilon)
            loaded = tl.load(delta_weight + at, mask=mask, other=0.0)
            more = _weighted(more, loaded, delta.dtype.element_ty, twice, plus_one)
        stored = (x + more).to(total.dtype.element_ty)
        tl.store(total + row + at, stored, mask=mask)
        x = stored.to(tl.float32)
    if normed:
        loaded = tl.load(weight + at, mask=mask, other=0.0)
        if centred:
            x = tl.where(mask, x - tl.sum(x, 0) / width, 0.0)
            x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon) * loaded.to(tl.float32)
            if biased:
                x += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
        else:
            x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
            x = _weighted(x, loaded, hidden.dtype.element_ty, twice, plus_one)
        tl.store(out + row + at, x.to(out.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _elements(
    source: tl.tensor,
    rows: tl.tensor,
    lines: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor,
    norm: tl.tensor,
    scale: tl.tensor,
    normed: tl.constexpr,
    twice: tl.constexpr,
    plus_one: tl.constexpr,
) -> tl.tensor:
    """Elements `at` of the heads that begin at `rows`, times `scale` and weight of their norm if `normed`, as float32."""
    x = tl.load(source + rows[:, None] + at[None, :], mask=lines[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if normed:
        weight = tl.load(norm + at, mask=inside, other=0.0)[None, :]
        x = _weighted(x * scale, weight, source.dtype.element_ty, twice, plus_one)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    source: tl.tensor,
    rows: tl.tensor,
    lines: tl.tensor,
    out: tl.tensor,
    out_rows: tl.tensor,
    norm: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    epsilon: tl.tensor,
    normed: tl.constexpr,
    twice: tl.constexpr,
    plus_one: tl.constexpr,
    pairs: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rotary: tl.constexpr,
    padded_half: tl.constexpr,
) -> None:
    """Heads from `rows` of `source` to `out_rows` of `out`: the norm if `normed`, and the first `rotary` elements rotated
    in the dtype of the cosines."""
    scale = epsilon
    whole = tl.arange(0, padded_dim)
    if normed:
        mask = lines[:, None] & (whole < dim)[None, :]
        x = tl.load(source + rows[:, None] + whole[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 1) / dim + epsilon)[:, None]
    if rotary > 0:
        wide = cosines.dtype.element_ty
        at = tl.arange(0, padded_half)
        inside = at < rotary // 2
        if pairs:
            low_at = 2 * at
            high_at = 2 * at + 1
            second = at
        else:
            low_at = at
            high_at = at + rotary // 2
            second = high_at
        low = _elements(source, rows, lines, low_at, inside, norm, scale, normed, twice, plus_one)
        high = _elements(source, rows, lines, high_at, inside, norm, scale, normed, twice, plus_one)
        cosine_low = tl.load(cosines + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        cosine_high = tl.load(cosines + second, mask=inside, other=0.0).to(tl.float32)[None, :]
        sine_low = tl.load(sines + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        sine_high = tl.load(sines + second, mask=inside, other=0.0).to(tl.float32)[None, :]
        out_low = (low * cosine_low).to(wide).to(tl.float32) - (high * sine_low).to(wide).to(tl.float32)
        out_high = (high * cosine_high).to(wide).to(tl.float32) + (low * sine_high).to(wide).to(tl.float32)
        mask = lines[:, None] & inside[None, :]
        target = out + out_rows[:, None]
        tl.store(target + low_at[None, :], out_low.to(wide).to(out.dtype.element_ty), mask=mask)
        tl.store(target + high_at[None, :], out_high.to(wide).to(out.dtype.element_ty), mask=mask)
    if rotary < dim:
        inside = (whole >= rotary) & (whole < dim)
        x = _elements(source, rows, lines, whole, inside, norm, scale, normed, twice, plus_one)
        mask = lines[:, None] & inside[None, :]
        tl.store(out + out_rows[:, None] + whole[None, :], x.to(out.dtype.element_ty), mask=mask)


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
    query_stride: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    moves: tl.constexpr,
    normed: tl.constexpr,
    twice: tl.constexpr,
    plus_one: tl.constexpr,
    pairs: tl.constexpr,
    block_size: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    rotary: tl.constexpr,
    padded_half: tl.constexpr,
) -> None:
    """Norms of queries and keys if `normed`, rotary embedding, K and V into their slot. Grid: P x KV heads.

    A program has one KV head of one position and the `group` query heads that share it. The heads of a position are
    contiguous; `moves`: the caches lie at the addresses in `cells`.
    """
    position = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    cosines += position * rotary
    sines += position * rotary

    line = tl.arange(0, padded_group)
    heads = head * group + line
    _rotate(
        query, position * query_stride + heads * dim, line < group, query_out,
        (position * kv_heads * group + heads) * dim, query_norm, cosines, sines, epsilon,
        normed, twice, plus_one, pairs, dim, padded_dim, rotary, padded_half,
    )  # fmt: skip
    one = tl.arange(0, 1)
    row = position * key_stride + head * dim + one
    _rotate(
        key, row, one < 1, key_out, (position * kv_heads + head) * dim + one, key_norm, cosines, sines, epsilon,
        normed, twice, plus_one, pairs, dim, padded_dim, rotary, padded_half,
    )  # fmt: skip

    index = tl.load(slots + position).to(tl.int64)
    if index < 0:
        return
    if moves:
        # The hint is on the pointer: on the integer it would be lost, and with it the 16-byte stores.
        key_cache = tl.multiple_of(tl.load(cells).to(key_cache.dtype), 16)
        value_cache = tl.multiple_of(tl.load(cells + 1).to(value_cache.dtype), 16)
    block = index // block_size
    slot = index % block_size
    target = block * key_block_stride + slot * key_slot_stride + head * key_head_stride + one
    # Once more from its source: what has just been stored, another thread may not see yet.
    _rotate(
        key, row, one < 1, key_cache, target, key_norm, cosines, sines, epsilon,
        normed, twice, plus_one, pairs, dim, padded_dim, rotary, padded_half,
    )  # fmt: skip
    at = tl.arange(0, padded_dim)
    x = tl.load(value + position * value_stride + head * dim + at, mask=at < dim, other=0.0)
    target = block * value_block_stride + slot * value_slot_stride + head * value_head_stride
    tl.store(value_cache + target + at, x.to(value_cache.dtype.element_ty), mask=at < dim)


@triton.jit  # type: ignore[untyped-decorator]
def activated(x: tl.tensor, gelu: tl.constexpr) -> tl.tensor:
    """silu(x), or the GELU that is approximated by a hyperbolic tangent."""
    # Of the GELU: x * (1 + tanh(y)) / 2 = x * sigmoid(2 y)
    exponent = 1.5957691216057308 * (x + 0.044715 * x * x * x) if gelu else x
    return x / (1.0 + tl.exp(-exponent))


def activate(
    gate: tl.tensor,
    up: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.tensor,
    up_stride: tl.tensor,
    gelu: tl.constexpr,
    gated: tl.constexpr,
    width: tl.constexpr,
    span: tl.constexpr,
) -> None:
    """activation(gate) * up if `gated`, else activation(gate). Grid: P x width / span, rounded up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * span + tl.arange(0, span)
    # A width that is known when this is compiled leaves loads of 16 bytes.
    mask = column < width
    x = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0)
    made = activated(x.to(tl.float32), gelu).to(x.dtype)
    if gated:
        made = made.to(tl.float32) * tl.load(up + row * up_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, made.to(out.dtype.element_ty), mask=mask)


def add_scaled(
    base: tl.tensor, more: tl.tensor, out: tl.tensor, factor: tl.tensor, width: tl.constexpr, span: tl.constexpr
) -> None:
    """base + factor * more. Grid: P x width / span, rounded up."""
    column = tl.program_id(1) * span + tl.arange(0, span)
    mask = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    scaled = (tl.load(more + at, mask=mask, other=0.0).to(tl.float32) * factor).to(more.dtype.element_ty)
    found = tl.load(base + at, mask=mask, other=0.0).to(tl.float32) + scaled.to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)
