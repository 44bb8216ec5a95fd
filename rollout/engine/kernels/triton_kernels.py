"""The device code of paged attention, in Triton: attention of chunks and of decoding rows, `merge` and the cache write.

K and V are read in place: position j of a sequence is slot j % block_size of block table[j // block_size]. Strides count
elements. Triton compiles a kernel for each combination of `constexpr` arguments. `triton_paged` imports this module only
when Triton is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _tile(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    blocks: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    places: tl.tensor,
    head: tl.tensor,
    position: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    target: tl.tensor,
    scale: tl.tensor,
    key_block_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    rows: tl.constexpr,
    span: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    sunk: tl.constexpr,
    parted: tl.constexpr,
    cap: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value_dim: tl.constexpr,
) -> None:
    """Compute the attention of `rows` queries of one KV head to keys `start` to `stop` of one sequence, by online softmax.

    query + places: address of each query [D].
    position: position of each query in the sequence, negative for a row without a query.
    target: index of each query's output in out [., Dv] and, if `parted`, of its log-sum-exp in lse.
    sunk: whether the softmax includes the sink of each head.
    scale: scaling times log2(e), because the hardware has exp2 but not exp.
    """
    live = position >= 0
    visible = 0
    low = start
    oldest = tl.min(tl.where(live, position, tl.max(position, 0)), 0)
    if window > 0:
        visible = oldest + 1 - window
        # Start at a multiple of `span`, so that every tile adds the same keys in the same order.
        low = start + tl.maximum(visible - start, 0) // span * span

    dims = tl.arange(0, padded_dim)
    value_dims = tl.arange(0, padded_value_dim)
    q = tl.load(query + places[:, None] + dims[None, :], mask=live[:, None] & (dims[None, :] < dim), other=0.0)
    peak = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    if sunk:
        # Add the sink to the softmax's denominator, but not to the output. The factor 1.44… is log2(e), as in `scale`.
        peak = tl.where(live, tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, peak)
        total = tl.where(live, 1.0, total)
    sums = tl.zeros((rows, padded_value_dim), tl.float32)
    for turn in range(low, stop, span):
        key = turn + tl.arange(0, span)
        inside = (key < stop) & (key >= visible)
        block = tl.load(blocks + key // block_size, mask=inside, other=0).to(tl.int64)
        slot = key % block_size
        key_places = block * key_block_stride + slot * key_slot_stride
        k = tl.load(keys + key_places[None, :] + dims[:, None], mask=inside[None, :] & (dims[:, None] < dim), other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        if cap > 0.0:
            # Compute cap * tanh(x). exp2(scores) is exp(2x), because `scale` includes 2 / cap. Near 0 a polynomial
            # (tanhf of the Cephes library) replaces it, because the difference of two numbers close to 1 would lose
            # precision.
            x = scores * 0.34657359028
            z = x * x
            near = -5.70498872745e-3 * z + 2.06390887954e-2
            near = ((near * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z - 3.33332819422e-1
            far = 1.0 - 2.0 / (tl.exp2(scores) + 1.0)
            scores = cap * tl.where(tl.abs(x) < 0.625, near * z * x + x, far)
        seen = inside[None, :] & (key[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # Use base 0 for a row without a visible key so far: its peak is -inf, and -inf minus -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        fading = tl.exp2(peak - base)
        total = total * fading + tl.sum(weights, 1)
        value_places = block * value_block_stride + slot * value_slot_stride
        v = tl.load(
            values + value_places[:, None] + value_dims[None, :],
            mask=inside[:, None] & (value_dims[None, :] < value_dim),
            other=0.0,
        )
        sums = sums * fading[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        peak = higher

    divisor = tl.where(total == 0.0, 1.0, total)
    sums = sums / divisor[:, None]
    if parted:
        # Convert to the natural logarithm, which `merge` uses: ln(x) = log2(x) * ln(2).
        tl.store(lse + target, (peak + tl.log2(divisor)) * 0.6931471805599453, mask=live)
    tl.store(
        out + target[:, None] * value_dim + value_dims[None, :],
        sums,
        mask=live[:, None] & (value_dims[None, :] < value_dim),
    )


def attend_chunks(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    starts: tl.tensor,
    begins: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    table_stride: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    tokens: tl.constexpr,
    rows: tl.constexpr,
    span: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    sunk: tl.constexpr,
    cap: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value_dim: tl.constexpr,
) -> None:
    """Compute attention for a tile of up to `tokens` queries of a chunk and one KV head. Programs without a tile return."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    # Find the tile's chunk by binary search: the last chunk whose tiles begin at or before this one (see
    # `TritonPaged.prefill`).
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

    # Each row of the left matrix is the query of one token for one of the heads that share this KV head.
    line = tl.arange(0, rows)
    index = first + line // group
    head = kv_head * group + line % group
    live = (line < tokens * group) & (index < end)
    position = tl.where(live, tl.load(starts + row).to(tl.int32) + index - begin, -1)
    _tile(
        query, keys + kv_head.to(tl.int64) * key_head_stride, values + kv_head.to(tl.int64) * value_head_stride,
        table + row.to(tl.int64) * table_stride, sinks, out, out,
        index.to(tl.int64) * query_stride + head.to(tl.int64) * query_head_stride, head, position,
        tile * 0, tl.max(position, 0) + 1, index.to(tl.int64) * (kv_heads * group) + head, scale,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        rows, span, block_size, window, sunk, False, cap, dim, value_dim, padded_dim, padded_value_dim,
    )  # fmt: skip


def attend_parts(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    begins: tl.tensor,
    owners: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_owners: tl.tensor,
    capacity: tl.tensor,
    scale: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_head_stride: tl.tensor,
    table_stride: tl.tensor,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    span: tl.constexpr,
    split: tl.constexpr,
    block_size: tl.constexpr,
    window: tl.constexpr,
    cap: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value_dim: tl.constexpr,
) -> None:
    """Compute the attention of decoding rows to the parts of their keys that a `PartList` lists. Grid: any size.

    Item i of the list is a part of row owners[i], whose first item is begins[owners[i]]. The programs divide the pairs of
    an item and a KV head among themselves. The result of item i for H query heads goes to out[i, H, Dv] and lse[i, H].
    """
    line = tl.arange(0, rows)
    items = tl.minimum(tl.load(begins + num_owners), capacity)
    for work in range(tl.program_id(0), items * kv_heads, tl.num_programs(0)):
        item = work // kv_heads
        kv_head = work % kv_heads
        owner = tl.load(owners + item)
        part = item - tl.load(begins + owner)
        last = tl.load(positions + owner).to(tl.int32)
        visible = last * 0
        if window > 0:
            visible = tl.maximum(last + 1 - window, visible)
        start = (visible // split + part) * split
        index = owner + line * 0
        position = tl.where(line < group, last, -1)
        head = kv_head * group + line % group
        _tile(
            query, keys + kv_head.to(tl.int64) * key_head_stride, values + kv_head.to(tl.int64) * value_head_stride,
            table + owner.to(tl.int64) * table_stride, query, out, lse,
            index.to(tl.int64) * query_stride + head.to(tl.int64) * query_head_stride, head, position,
            start, tl.minimum(start + split, last + 1), item.to(tl.int64) * (kv_heads * group) + head, scale,
            key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
            rows, span, block_size, window, False, True, cap, dim, value_dim, padded_dim, padded_value_dim,
        )  # fmt: skip


def merge(
    part_out: tl.tensor,
    part_lse: tl.tensor,
    positions: tl.tensor,
    begins: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    capacity: tl.tensor,
    sunk: tl.constexpr,
    at_once: tl.constexpr,
    value_dim: tl.constexpr,
    padded_value_dim: tl.constexpr,
) -> None:
    """Combine the results of the parts of row b for one head, and add the head's sink if `sunk`. Grid: B rows x H heads.

    The parts of row b are items begins[b] to begins[b + 1], in this order.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    first = tl.load(begins + row)
    parts = tl.minimum(tl.load(begins + row + 1), capacity) - first
    dims = tl.arange(0, padded_value_dim)
    peak = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    if sunk:
        seen = tl.load(positions + row) >= 0
        peak = tl.where(seen, tl.load(sinks + head).to(tl.float32), peak)
        total = tl.where(seen, 1.0, total)
    sums = tl.zeros((padded_value_dim,), tl.float32)
    for turn in range(0, parts, at_once):
        part = turn + tl.arange(0, at_once)
        place = (first + part).to(tl.int64) * heads + head
        logs = tl.load(part_lse + place, mask=part < parts, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(logs, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(logs - base)
        fading = tl.exp(peak - base)
        total = total * fading + tl.sum(weights, 0)
        mask = (part < parts)[:, None] & (dims[None, :] < value_dim)
        rows = tl.load(part_out + place[:, None] * value_dim + dims[None, :], mask=mask, other=0.0)
        sums = sums * fading + tl.sum(weights[:, None] * rows, 0)
        peak = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    place = row.to(tl.int64) * heads + head
    tl.store(out + place * value_dim + dims, sums / divisor, mask=dims < value_dim)


def write(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    write_index: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    key_block_stride: tl.tensor,
    key_slot_stride: tl.tensor,
    key_cache_head_stride: tl.tensor,
    value_block_stride: tl.tensor,
    value_slot_stride: tl.tensor,
    value_cache_head_stride: tl.tensor,
    block_size: tl.constexpr,
    heads: tl.constexpr,
    padded_heads: tl.constexpr,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    padded_value_dim: tl.constexpr,
) -> None:
    """Write K and V of one position into the position's slot. The grid has one program for each of the P positions."""
    position = tl.program_id(0).to(tl.int64)
    index = tl.load(write_index + position).to(tl.int64)
    if index < 0:
        return
    block = index // block_size
    slot = index % block_size
    head = tl.arange(0, padded_heads)[:, None].to(tl.int64)
    dims = tl.arange(0, padded_dim)[None, :]
    mask = (head < heads) & (dims < dim)
    k = tl.load(key + position * key_stride + head * key_head_stride + dims, mask=mask)
    place = block * key_block_stride + slot * key_slot_stride + head * key_cache_head_stride
    tl.store(key_cache + place + dims, k, mask=mask)
    value_dims = tl.arange(0, padded_value_dim)[None, :]
    value_mask = (head < heads) & (value_dims < value_dim)
    v = tl.load(value + position * value_stride + head * value_head_stride + value_dims, mask=value_mask)
    value_place = block * value_block_stride + slot * value_slot_stride + head * value_cache_head_stride
    tl.store(value_cache + value_place + value_dims, v, mask=value_mask)
