"""Device code of exact mode in Triton: products, norms, rotary embedding, activation, attention.

Imported by `triton_exact`, which compiles and launches these functions, and only once Triton is needed.

Why a row's bits depend on that row alone. Decoding, chunks and training launch the same compiled kernel: tile sizes follow
from dtype and widths of the model, never from the number of rows, and what does vary (rows, blocks, the block size,
addresses of the KV pool) is an argument that Triton does not specialise on. Inside of it
- a product runs over the depth in steps of one size, in order, without split-K; a row of a tensor core's tile is computed
  from its own row of the left matrix, whatever the other rows hold (absent ones are zeros);
- a norm sums its row in one tree, whose shape follows from the width;
- attention computes parts of `split` keys that begin at multiples of `split`, by an online softmax in turns of `span` keys,
  and folds the parts into the result one after the other, in order. It does not matter which program computes a part or
  folds it: a fold is elementwise, the sum in it that a compiler might fuse in two ways is written as `fma`, and a turn or
  part of which a row sees nothing leaves the row's state as it was (times 1, plus 0).
Only where a result is stored (`placed`) makes a second kernel of `product`; its sums are the same.
"""

from __future__ import annotations

import triton.language as tl


def product(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    places: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    depth: tl.tensor,
    columns: tl.tensor,
    biased: tl.constexpr,
    placed: tl.constexpr,
    widen: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
    band: tl.constexpr,
) -> None:
    """One tile of x [M, K] times weight [N, K] transposed, plus bias. Grid: tiles of rows x tiles of columns, flat.

    `placed`: row m is written to row places[m]. `widen`: multiply in float32, for the interpreter, which cannot in bfloat16.
    """
    # Bands of `band` tiles of rows: programs that run together share rows and columns in the L2 cache.
    tile = tl.program_id(0)
    row_tiles = (num_rows + block_rows - 1) // block_rows
    column_tiles = (columns + block_columns - 1) // block_columns
    first = tile // (band * column_tiles) * band
    height = tl.minimum(row_tiles - first, band)
    inside = tile % (band * column_tiles)
    row = ((first + inside % height) * block_rows + tl.arange(0, block_rows)).to(tl.int64)
    column = ((inside // height) * block_columns + tl.arange(0, block_columns)).to(tl.int64)
    steps = tl.arange(0, block_depth)
    lefts = x + row[:, None] * depth + steps[None, :]
    rights = weight + column[None, :] * depth + steps[:, None]
    sums = tl.zeros((block_rows, block_columns), tl.float32)
    for start in range(0, depth, block_depth):
        left = tl.load(lefts + start, mask=(row < num_rows)[:, None] & (steps < depth - start)[None, :], other=0.0)
        right = tl.load(rights + start, mask=(column < columns)[None, :] & (steps < depth - start)[:, None], other=0.0)
        if widen:
            left, right = left.to(tl.float32), right.to(tl.float32)
        sums = tl.dot(left, right, sums, input_precision="ieee")
    if biased:
        sums += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    target = row
    if placed:
        target = tl.load(places + row, mask=row < num_rows, other=0).to(tl.int64)
    mask = (row < num_rows)[:, None] & (column < columns)[None, :]
    tl.store(out + target[:, None] * columns + column[None, :], sums, mask=mask)


def rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    epsilon: tl.tensor,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    """Root-mean-square norm of `rows` rows of x [M, W]. Rounds where transformers' modules round."""
    row = (tl.program_id(0) * rows + tl.arange(0, rows)).to(tl.int64)
    at = tl.arange(0, padded_width)
    mask = (row < num_rows)[:, None] & (at < width)[None, :]
    places = row[:, None] * width + at[None, :]
    wide = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 1) / width + epsilon)
    factor = tl.load(weight + at, mask=at < width, other=0.0).to(tl.float32)
    normed = (wide * scale[:, None]).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + places, normed * factor[None, :], mask=mask)


def rotate(
    x: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    count: tl.tensor,
    heads: tl.constexpr,
    lines: tl.constexpr,
    half: tl.constexpr,
    padded_half: tl.constexpr,
) -> None:
    """Rotary embedding of `lines` of the P * H = `count` heads of x [P, H, 2 * half]. Rounds as modules do."""
    line = tl.program_id(0).to(tl.int64) * lines + tl.arange(0, lines)
    position = tl.load(positions + line // heads, mask=line < count, other=0).to(tl.int64)
    at = tl.arange(0, padded_half)[None, :]
    mask = (line < count)[:, None] & (at < half)
    places = line[:, None] * (2 * half) + at
    low = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(x + places + half, mask=mask, other=0.0).to(tl.float32)
    angles = position[:, None] * (2 * half) + at
    kind = out.dtype.element_ty
    one = (low * tl.load(cosines + angles, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    two = (high * tl.load(sines + angles, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + places, one - two, mask=mask)
    one = (high * tl.load(cosines + angles + half, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    two = (low * tl.load(sines + angles + half, mask=mask, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + places + half, one + two, mask=mask)


def silu_times(
    gate: tl.tensor, up: tl.tensor, out: tl.tensor, num_rows: tl.tensor, width: tl.constexpr, block: tl.constexpr
) -> None:
    """silu(gate) * up of `block` of the [M, W] elements. Rounds as modules do."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    # The compiler knows what divides the width, and loads 16 bytes at once.
    count = num_rows.to(tl.int64) * width
    wide = tl.load(gate + at, mask=at < count, other=0.0).to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, active * tl.load(up + at, mask=at < count, other=0.0).to(tl.float32), mask=at < count)


def attend(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    begins: tl.tensor,
    positions: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    num_rows: tl.tensor,
    num_queries: tl.tensor,
    run: tl.tensor,
    scale: tl.tensor,
    table_stride: tl.tensor,
    block_size: tl.tensor,
    block_tokens: tl.tensor,
    group: tl.constexpr,
    kv_heads: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    span: tl.constexpr,
    split: tl.constexpr,
    window: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
    widen: tl.constexpr,
) -> None:
    """One tile of query rows, one KV head, `run` parts of the keys. Grid: tiles x KV heads x runs.

    The tile is up to `tokens` queries of one row (sequence) of the batch, each with the `group` query heads that share the
    KV head. Row r has the queries begins[r] to begins[r + 1] and its blocks in table[r]; a query sees the positions up to
    its own, none if that is negative. Keys and values are [tokens, Hkv, D], with a block every `block_tokens` tokens. The
    state of run s goes to peaks and totals [S, P, H] and sums [S, P, H, D]; runs of which no query sees a key are not
    written.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2) * run

    # Row r's tiles begin at begins[r] // tokens + r.
    row = tile * 0
    behind = row + num_rows
    while behind - row > 1:
        middle = (row + behind) // 2
        reached = tl.load(begins + middle).to(tl.int32) // tokens + middle <= tile
        row = tl.where(reached, middle, row)
        behind = tl.where(reached, behind, middle)
    begin = tl.load(begins + row).to(tl.int32)
    end = tl.load(begins + row + 1).to(tl.int32)
    first = begin + (tile - begin // tokens - row) * tokens
    if first >= end:
        return

    line = tl.arange(0, rows)
    index = first + line // group
    head = kv_head * group + line % group
    live = (line < tokens * group) & (index < end)
    position = tl.load(positions + index, mask=live, other=-1).to(tl.int32)
    newest = tl.max(position, 0)
    stop = newest + 1
    last = tl.minimum(part + run, (stop + split - 1) // split)
    if part >= last:
        return
    low = 0
    if window > 0:
        oldest = tl.min(tl.where(position < 0, newest, position), 0)
        low = tl.maximum(oldest + 1 - window, 0)

    dims = tl.arange(0, padded_dim)
    places = (index.to(tl.int64) * kv_heads * group + head) * dim
    q = tl.load(query + places[:, None] + dims[None, :], mask=live[:, None] & (dims < dim)[None, :], other=0.0)
    keys += kv_head * dim
    values += kv_head * dim
    blocks = table + row.to(tl.int64) * table_stride
    if widen:
        q = q.to(tl.float32)
    peak = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    whole = tl.zeros((rows, padded_dim), tl.float32)
    for number in range(tl.maximum(part, low // split), last):
        part_peak = tl.full((rows,), float("-inf"), tl.float32)
        part_total = tl.zeros((rows,), tl.float32)
        part_sums = tl.zeros((rows, padded_dim), tl.float32)
        # Only whole turns are skipped, so the others are the same whatever else is in the tile.
        start = tl.maximum(number * split, low // span * span)
        for turn in range(start, tl.minimum(number * split + split, stop), span):
            key = turn + tl.arange(0, span)
            inside = (key < stop) & (key >= low)
            block = tl.load(blocks + key // block_size, mask=inside, other=0).to(tl.int64)
            key_places = (block * block_tokens + key % block_size) * (kv_heads * dim)
            k = tl.load(
                keys + key_places[None, :] + dims[:, None], mask=inside[None, :] & (dims < dim)[:, None], other=0.0
            )
            v = tl.load(
                values + key_places[:, None] + dims[None, :], mask=inside[:, None] & (dims < dim)[None, :], other=0.0
            )
            if widen:
                k, v = k.to(tl.float32), v.to(tl.float32)
            scores = tl.dot(q, k, input_precision="ieee") * scale
            seen = inside[None, :] & (key[None, :] <= position[:, None])
            if window > 0:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(part_peak, tl.max(scores, 1))
            # For a row without a key, minus infinity minus itself would be NaN.
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fading = tl.exp2(part_peak - base)
            weights = tl.exp2(scores - base[:, None])
            part_total = tl.fma(part_total, fading, tl.sum(weights, 1))
            if widen:
                weights = weights.to(query.dtype.element_ty).to(tl.float32)
            part_sums = tl.dot(weights.to(v.dtype), v, part_sums * fading[:, None], input_precision="ieee")
            part_peak = higher
        # The same as in `fold`.
        higher = tl.maximum(peak, part_peak)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fading = tl.exp2(peak - base)
        share = tl.exp2(part_peak - base)
        total = tl.fma(total, fading, part_total * share)
        whole = tl.fma(whole, tl.broadcast_to(fading[:, None], (rows, padded_dim)), part_sums * share[:, None])
        peak = higher

    target = (tl.program_id(2).to(tl.int64) * num_queries + index) * (kv_heads * group) + head
    tl.store(peaks + target, peak, mask=live)
    tl.store(totals + target, total, mask=live)
    tl.store(sums + target[:, None] * dim + dims[None, :], whole, mask=live[:, None] & (dims < dim)[None, :])


def fold(
    positions: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    sums: tl.tensor,
    out: tl.tensor,
    num_queries: tl.tensor,
    run: tl.tensor,
    split: tl.constexpr,
    heads: tl.constexpr,
    lines: tl.constexpr,
    dim: tl.constexpr,
    padded_dim: tl.constexpr,
) -> None:
    """Fold the runs that `attend` wrote, in order: out [P, H, D], 0 for a query that sees no key. Grid: P * H / `lines`."""
    line = tl.program_id(0).to(tl.int64) * lines + tl.arange(0, lines)
    live = line < num_queries * heads
    seen = tl.load(positions + line // heads, mask=live, other=-1).to(tl.int32) + 1
    runs = ((seen + split - 1) // split + run - 1) // run
    dims = tl.arange(0, padded_dim)
    peak = tl.full((lines,), float("-inf"), tl.float32)
    total = tl.zeros((lines,), tl.float32)
    whole = tl.zeros((lines, padded_dim), tl.float32)
    for number in range(0, tl.max(runs, 0)):
        place = line + tl.cast(number, tl.int64) * num_queries * heads
        written = live & (number < runs)
        part_peak = tl.load(peaks + place, mask=written, other=float("-inf"))
        part_total = tl.load(totals + place, mask=written, other=0.0)
        mask = written[:, None] & (dims < dim)[None, :]
        part_sums = tl.load(sums + place[:, None] * dim + dims[None, :], mask=mask, other=0.0)
        higher = tl.maximum(peak, part_peak)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fading = tl.exp2(peak - base)
        share = tl.exp2(part_peak - base)
        total = tl.fma(total, fading, part_total * share)
        whole = tl.fma(whole, tl.broadcast_to(fading[:, None], (lines, padded_dim)), part_sums * share[:, None])
        peak = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    mask = live[:, None] & (dims < dim)[None, :]
    tl.store(out + line[:, None] * dim + dims[None, :], whole / divisor[:, None], mask=mask)
