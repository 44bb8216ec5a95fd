"""Device code of sampling, in Triton's language: integer weights, their sums, and inverse-CDF draws.

Imported by `triton_draw`, which compiles and launches these functions, and only once Triton is needed. The arithmetic is
that of `sampling/sampler.py`, operation by operation, launched so that no product and sum become one; sums are of
integers. So a row's token follows from its logits, parameters and counter alone, in whatever order they are made.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit  # type: ignore[untyped-decorator]
def _loaded(
    scores: tl.tensor,
    row: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    warmth: tl.tensor,
    precise: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The scores as they are and over the temperature, -inf outside."""
    raw = tl.load(scores + row.to(tl.int64) * stride + column, mask=inside, other=float("-inf"))
    return raw, _over(raw, tl.zeros_like(column).to(tl.float32) + warmth, precise)


@triton.jit  # type: ignore[untyped-decorator]
def _over(raw: tl.tensor, warmth: tl.tensor, precise: tl.constexpr) -> tl.tensor:
    """As `over_temperature`: on CUDA times the reciprocal, which is given there in place of the temperature."""
    if precise:
        return raw.to(tl.float32) * warmth
    return tl.div_rn(raw.to(tl.float32), warmth)


@triton.jit  # type: ignore[untyped-decorator]
def _relative(tempered: tl.tensor, peak: tl.tensor, precise: tl.constexpr) -> tl.tensor:
    """Probabilities relative to the likeliest token's."""
    shifted = tl.maximum(tempered - peak, -50.0)
    # Triton's own is an approximation, and torch's is this.
    if precise:
        return libdevice.exp(shifted)
    return tl.exp(shifted)


@triton.jit  # type: ignore[untyped-decorator]
def _weights(relative: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Integer weights, 2^42 for the likeliest token."""
    return tl.where(inside, (relative * 4398046511104.0).to(tl.int64), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _keys(raw: tl.tensor, tempered: tl.tensor, inside: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """Scores as int64 in [0, 2^bits) that order as they do; -1 outside. Of 16 bits, a division leaves different ones so."""
    if bits == 16:
        signed = raw.to(tl.int16, bitcast=True).to(tl.int32)
        ordered = signed ^ ((signed >> 15) & 0x7FFF)
    else:
        signed = tempered.to(tl.int32, bitcast=True)
        ordered = signed ^ ((signed >> 31) & 0x7FFFFFFF)
    # Two zeros are equal.
    ordered = tl.where(tempered == 0.0, 0, ordered)
    half: tl.constexpr = 1 << (bits - 1)
    return tl.where(inside, ordered.to(tl.int64) + half, -1)


@triton.jit  # type: ignore[untyped-decorator]
def _kept(
    raw: tl.tensor,
    tempered: tl.tensor,
    relative: tl.tensor,
    inside: tl.tensor,
    least: tl.tensor,
    edge: tl.tensor,
    room: tl.tensor,
    before: tl.tensor,
    bits: tl.constexpr,
    cut: tl.constexpr,
    floored: tl.constexpr,
) -> tl.tensor:
    """Which tokens pass the filters.

    `floored`: those at least `least` times as likely as the likeliest; `cut`: those above the key `edge`, and of those at it
    the first `room` of the row, of which `before` lie before these.
    """
    kept = inside
    if floored:
        kept = kept & (relative >= least)
    if cut:
        key = _keys(raw, tempered, inside, bits)
        rank = before + tl.cumsum((key == edge).to(tl.int32), 0) - 1
        kept = kept & ((key > edge) | ((key == edge) & (rank < room)))
    return kept


def peaks(
    scores: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    best: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    precise: tl.constexpr,
    span: tl.constexpr,
) -> None:
    """Largest tempered score of `span` tokens, NaN where one is, and the first token that has it. Grid: R x C."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    column = chunk * span + tl.arange(0, span)
    inside = column < vocabulary
    _, tempered = _loaded(scores, row, stride, column, inside, tl.load(temperature + row), precise)
    broken = tl.max((tempered != tempered).to(tl.int32), 0)
    largest = tl.max(tempered, 0)
    first = tl.min(tl.where(inside & (tempered == largest), column, vocabulary - 1), 0)
    place = row * tl.num_programs(1) + chunk
    tl.store(peak + place, tl.where(broken > 0, float("nan"), largest))
    tl.store(best + place, first)


def sums(
    scores: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    least: tl.tensor,
    edge: tl.tensor,
    room: tl.tensor,
    ties_before: tl.tensor,
    total: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    bits: tl.constexpr,
    cut: tl.constexpr,
    floored: tl.constexpr,
    precise: tl.constexpr,
    span: tl.constexpr,
) -> None:
    """Sum of the weights of those of `span` tokens that pass the filters. Grid: R x C."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    column = chunk * span + tl.arange(0, span)
    inside = column < vocabulary
    raw, tempered = _loaded(scores, row, stride, column, inside, tl.load(temperature + row), precise)
    relative = _relative(tempered, tl.load(peak + row), precise)
    place = row * tl.num_programs(1) + chunk
    kept = _kept(
        raw, tempered, relative, inside, tl.load(least + row), tl.load(edge + row), tl.load(room + row),
        tl.load(ties_before + place), bits, cut, floored,
    )  # fmt: skip
    tl.store(total + place, tl.sum(_weights(relative, kept), 0))


def narrow(
    scores: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    wanted: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    low: tl.tensor,
    low_out: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    shift: tl.tensor,
    bits: tl.constexpr,
    counts: tl.constexpr,
    precise: tl.constexpr,
    span: tl.constexpr,
) -> None:
    """One round of the search for the largest key such that those from it on weigh `wanted`, four bits of it. Grid: R x C.

    `before` [R, 16] holds what keys from `low` + (j << (shift + 4)) on weigh, from the round before, which makes `low_out`;
    what those from `low_out` + (j << shift) on weigh is added to `after`. `counts`: every token weighs 1.
    """
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    need = tl.load(wanted + row)
    start = tl.load(low + row)
    if shift + 4 < bits:
        digits = tl.arange(0, 16)
        reached = (tl.load(before + row * 16 + digits) >= need) | (digits == 0)
        start += tl.max(tl.where(reached, digits, 0), 0).to(tl.int64) << (shift + 4)
    if chunk == 0:
        tl.store(low_out + row, start)
    column = chunk * span + tl.arange(0, span)
    inside = column < vocabulary
    raw, tempered = _loaded(scores, row, stride, column, inside, tl.load(temperature + row), precise)
    key = _keys(raw, tempered, inside, bits)
    if counts:  # noqa: SIM108 - decided when it is compiled
        weight = inside.to(tl.int64)
    else:
        weight = _weights(_relative(tempered, tl.load(peak + row), precise), inside)
    unit = tl.cast(1, tl.int64) << shift
    for digit in tl.static_range(1, 16):
        pivot = start + digit * unit
        tl.atomic_add(after + row * 16 + digit, tl.sum(tl.where(key >= pivot, weight, 0), 0), sem="relaxed")


def ties(
    scores: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    wanted: tl.tensor,
    before: tl.tensor,
    low: tl.tensor,
    edge: tl.tensor,
    above: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    bits: tl.constexpr,
    precise: tl.constexpr,
    span: tl.constexpr,
) -> None:
    """End of the search: the key `edge` [R]; `above` [4, R, C] int64: tokens above it and their weight, ties and theirs.
    Grid: R x C."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    digits = tl.arange(0, 16)
    reached = (tl.load(before + row * 16 + digits) >= tl.load(wanted + row)) | (digits == 0)
    level = tl.load(low + row) + tl.max(tl.where(reached, digits, 0), 0).to(tl.int64)
    if chunk == 0:
        tl.store(edge + row, level)
    column = chunk * span + tl.arange(0, span)
    inside = column < vocabulary
    raw, tempered = _loaded(scores, row, stride, column, inside, tl.load(temperature + row), precise)
    key = _keys(raw, tempered, inside, bits)
    weight = _weights(_relative(tempered, tl.load(peak + row), precise), inside)
    place = row * tl.num_programs(1) + chunk
    size = tl.num_programs(0) * tl.num_programs(1)
    tl.store(above + place, tl.sum((key > level).to(tl.int64), 0))
    tl.store(above + size + place, tl.sum(tl.where(key > level, weight, 0), 0))
    tl.store(above + 2 * size + place, tl.sum((key == level).to(tl.int64), 0))
    tl.store(above + 3 * size + place, tl.sum(tl.where(key == level, weight, 0), 0))


def choose(
    scores: tl.tensor,
    temperature: tl.tensor,
    peak: tl.tensor,
    least: tl.tensor,
    edge: tl.tensor,
    room: tl.tensor,
    ties_before: tl.tensor,
    total: tl.tensor,
    chunk_peak: tl.tensor,
    best: tl.tensor,
    greedy: tl.tensor,
    keys: tl.tensor,
    positions: tl.tensor,
    token: tl.tensor,
    score: tl.tensor,
    weight: tl.tensor,
    stride: tl.tensor,
    vocabulary: tl.tensor,
    chunks: tl.tensor,
    golden: tl.constexpr,
    shift_1: tl.constexpr,
    factor_1: tl.constexpr,
    shift_2: tl.constexpr,
    factor_2: tl.constexpr,
    shift_3: tl.constexpr,
    bits: tl.constexpr,
    cut: tl.constexpr,
    floored: tl.constexpr,
    precise: tl.constexpr,
    span: tl.constexpr,
    padded_chunks: tl.constexpr,
) -> None:
    """Draw a token from the sums of the chunks: the first whose running sum exceeds the draw, or the likeliest. Grid: R.

    The uniform number is that of `random_stream.uniforms`, splitmix64 at counter `positions`.
    """
    row = tl.program_id(0)
    index = tl.arange(0, padded_chunks)
    known = index < chunks
    parts = tl.load(total + row * chunks + index, mask=known, other=0)
    whole = tl.sum(parts, 0)

    state = (tl.load(positions + row) + 1) * golden + tl.load(keys + row)
    state = (state ^ ((state >> shift_1) & ((1 << (64 - shift_1)) - 1))) * factor_1
    state = (state ^ ((state >> shift_2) & ((1 << (64 - shift_2)) - 1))) * factor_2
    state = state ^ ((state >> shift_3) & ((1 << (64 - shift_3)) - 1))
    uniform = ((state >> 11) & ((1 << 53) - 1)).to(tl.float64) * 1.1102230246251565e-16
    draw = tl.minimum((uniform * whole.to(tl.float64)).to(tl.int64), whole - 1)

    ends = tl.cumsum(parts, 0)
    chunk = tl.minimum(tl.sum(((ends <= draw) & known).to(tl.int32), 0), chunks - 1)
    level = draw - tl.sum(tl.where(index < chunk, parts, 0), 0)
    column = chunk * span + tl.arange(0, span)
    inside = column < vocabulary
    warmth = tl.load(temperature + row)
    raw, tempered = _loaded(scores, row, stride, column, inside, warmth, precise)
    relative = _relative(tempered, tl.load(peak + row), precise)
    kept = _kept(
        raw, tempered, relative, inside, tl.load(least + row), tl.load(edge + row), tl.load(room + row),
        tl.load(ties_before + row * chunks + chunk), bits, cut, floored,
    )  # fmt: skip
    running = tl.cumsum(_weights(relative, kept), 0)
    drawn = chunk * span + tl.sum((running <= level).to(tl.int32), 0)

    heights = tl.load(chunk_peak + row * chunks + index, mask=known, other=float("-inf"))
    leader = tl.min(tl.where(known & (heights == tl.max(heights, 0)), index, chunks - 1), 0)
    drawn = tl.where(tl.load(greedy + row) != 0, tl.load(best + row * chunks + leader), drawn)
    drawn = tl.minimum(tl.maximum(drawn, 0), vocabulary - 1)
    tl.store(token + row, drawn.to(tl.int64))
    tl.store(weight + row, whole)
    own = tl.load(scores + row.to(tl.int64) * stride + drawn).to(tl.float32)
    tl.store(score + row, _over(own, warmth, precise))
