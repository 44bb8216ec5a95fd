"""Paged attention in plain torch: the reference on every device, and the fallback for the faster kernels.

Queries of one step are cut into *tiles*: sequences of similar length, padded to a rectangle, so that a tile is one call of
`scaled_dot_product_attention`, for any number of sequences. Grouped query heads are packed as query rows, which reads each
KV head once (expanding K and V, or `enable_gqa` in bf16, costs 6 to 14 times as much on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Required, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rollout.engine.kernels.rows import PagedRows
from rollout.engine.memory.buffers import upload

MAX_TILE_SCORES = 1 << 22
"""Maximum query x key pairs in one tile; bounds the mask."""


@dataclass(eq=False)
class Tile:
    """Sequences processed by one attention call: B sequences, T query positions each (padded), S key positions (padded)."""

    query_index: Tensor | None
    """[B*T] int64 into the step's positions; None when the tile is its first B*T positions in order."""
    valid: Tensor | None
    """[n] int64 into the flattened [B*T]: the rows that are not padding; None without padding."""
    positions: Tensor
    """[B, T] int64, position of each query in its sequence (padding: 0)."""
    blocks: Tensor
    """[B*N] int64, block ids, N per sequence (padding: any valid id)."""
    fresh: bool
    """A single sequence that starts at 0. Its keys are the step's own, so plain causal attention suffices."""
    seen: Tensor | None = None
    """[B, T] int64, last position that each query attends to; None: its own."""
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        return self.positions.shape[0], self.positions.shape[1]

    def mask(self, keys: int, window: int | None, groups: int) -> Tensor:
        """[B, 1, groups*T, S] bool: keys that a query row attends to, up to its own position or `seen`."""
        cached = self._masks.get((window, groups))
        if cached is None:
            key_positions = torch.arange(keys, device=self.positions.device)
            distance = self.positions[:, None, :, None] - key_positions
            cached = distance >= 0 if self.seen is None else key_positions <= self.seen[:, None, :, None]
            if window is not None:
                cached &= distance < window
            if groups > 1:
                cached = cached.repeat(1, 1, groups, 1)
            self._masks[window, groups] = cached
        return cached


class Workspace:
    """Reused buffers for gathered keys and values. New buffers would cost page faults in every layer."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def gather(self, name: str, part: Tensor, blocks: Tensor) -> Tensor:
        """Rows `blocks` of `part` [num_blocks, ...] -> [len(blocks), ...], in a reused buffer."""
        rows, width = blocks.shape[0], part[0].numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < rows * width or buffer.dtype != part.dtype:
            buffer = torch.empty(rows * width, dtype=part.dtype, device=part.device)
            self._buffers[name] = buffer
        out = buffer[: rows * width].view(rows, width)
        torch.index_select(part.flatten(1), 0, blocks, out=out)
        return out.view(rows, *part.shape[1:])

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


def write_slots(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write K and V of every position into its slot; see `CacheWrite`."""
    # A trainer under autocast may compute K in another dtype than at probing.
    key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))


CacheWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Function that writes K and V of a step's positions into the paged cache, in the dtype of the cache. Its arguments:

- K and V: [P, Hkv, D], [P, Hkv, Dv], of any floating dtype; the last dimension contiguous;
- their caches: [num_blocks, block_size, Hkv, D], [..., Dv];
- slots: [P] int64, block * block_size + offset, all different.
"""


class Rules(TypedDict, total=False):
    """Rules for the keys that a query attends to, and for the weights of their scores."""

    scaling: Required[float]
    window: int | None
    """A query attends to the last `window` positions up to its own. Default None: all."""
    softcap: float | None
    """Scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118, section 2). Default None: as they are."""
    sinks: Tensor | None
    """[H], a score per head that enters the softmax and has no value (gpt-oss; arXiv 2309.17453), not scaled. Default None:
    none."""


class PagedAttention(Protocol):
    """Attention of a step's queries over the paged cache, into which their own K and V are already written."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, **rules: Unpack[Rules]
    ) -> Tensor:
        """Attention output of every position.

        Args:
            query: [P, H, D] contiguous, the step's positions in packed order.
            key, value: [P, Hkv, D], [P, Hkv, Dv] of the same positions.
            key_cache, value_cache: [num_blocks, block_size, Hkv, D], [..., Dv].

        Returns:
            [P, H, Dv].
        """


class TorchPagedAttention:
    """`PagedAttention` of one step in plain torch.

    Args:
        rows: the step's positions.
    """

    def __init__(self, rows: PagedRows, device: torch.device, workspace: Workspace) -> None:
        self._rows = rows
        self._device = device
        self._workspace = workspace
        self._tiles: list[Tile] | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, **rules: Unpack[Rules]
    ) -> Tensor:
        """Attention output of every position; see `PagedAttention`."""
        if self._tiles is None:
            self._tiles = make_tiles(self._rows, self._device)
        return attend_tiles(query, key, value, key_cache, value_cache, self._tiles, self._workspace, **rules)


def make_tiles(rows: PagedRows, device: torch.device) -> list[Tile]:
    """Cut a step into tiles: rows of one position together, the others with rows of similar size."""
    counts, ends = rows.counts, rows.ends
    order = np.lexsort((ends, counts))[::-1]
    tiles, group = [], list[int]()
    for row in order.tolist():
        if group and not _fits(counts, ends, group, row):
            tiles.append(_tile(rows, np.sort(group), device))
            group = []
        group.append(row)
    if group:
        tiles.append(_tile(rows, np.sort(group), device))
    return tiles


def _fits(counts: NDArray[np.int64], ends: NDArray[np.int64], group: list[int], row: int) -> bool:
    """Whether `row` may join the tile: at least half its size, and a bounded number of scores."""
    longest, span = int(counts[group[0]]), int(max(ends[each] for each in (*group, row)))
    alike = 2 * int(counts[row]) >= longest and 2 * int(ends[row]) >= span
    return (alike or longest == 1) and (len(group) + 1) * longest * span <= MAX_TILE_SCORES


def _tile(rows: PagedRows, members: NDArray[np.int64], device: torch.device) -> Tile:
    counts, ends = rows.counts[members], rows.ends[members]
    batch, length = len(members), int(counts.max())
    steps = np.arange(length)
    inside = steps < counts[:, None]
    positions = np.where(inside, (ends - counts)[:, None] + steps, 0)
    index = np.where(inside, rows.offsets[members][:, None] + steps, 0).reshape(-1)
    used = -(-int(ends.max()) // rows.block_size)
    # Padding reads a block of its own row, because other blocks may hold NaN, and a masked NaN is still NaN.
    held = np.arange(used) < -(-ends[:, None] // rows.block_size)
    blocks = np.where(held, rows.tables[members, :used], rows.tables[members, :1]).reshape(-1)
    leading = bool((members == np.arange(batch)).all() and inside.all() and rows.offsets[members[0]] == 0)

    return Tile(
        query_index=None if leading else upload(index, device),
        valid=None if inside.all() else upload(np.flatnonzero(inside.reshape(-1)), device),
        positions=upload(positions, device),
        blocks=upload(blocks, device),
        fresh=batch == 1 and int(ends[0]) == length and rows.seen is None,
        seen=None if rows.seen is None else upload(np.where(inside, rows.seen[index.reshape(inside.shape)], 0), device),
    )


def attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    tiles: Sequence[Tile],
    workspace: Workspace,
    **rules: Unpack[Rules],
) -> Tensor:
    """Attention of the P positions, each covered by one of `tiles`; arguments as in `PagedAttention`."""
    caches = key_cache, value_cache
    if len(tiles) == 1 and tiles[0].query_index is None:
        return _attend_tile(query, key, value, caches, tiles[0], workspace, rules)
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    for tile in tiles:
        index = tile.query_index
        count = tile.shape[0] * tile.shape[1]
        q = query[:count] if index is None else query.index_select(0, index)
        k, v = key, value
        if tile.fresh and index is not None:
            k, v = key.index_select(0, index), value.index_select(0, index)
        # Under autocast its dtype differs from the queries'.
        part = _attend_tile(q, k, v, caches, tile, workspace, rules).to(out.dtype)
        if index is None:
            out[:count] = part
        elif tile.valid is None:
            out.index_copy_(0, index, part)
        else:
            out.index_copy_(0, index.index_select(0, tile.valid), part.index_select(0, tile.valid))
    return out


def _attend_tile(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    caches: tuple[Tensor, Tensor],
    tile: Tile,
    workspace: Workspace,
    rules: Rules,
) -> Tensor:
    key_cache, value_cache = caches
    scaling = rules["scaling"]
    window, softcap, sinks = rules.get("window"), rules.get("softcap"), rules.get("sinks")
    batch, length = tile.shape
    heads, kv_heads = query.shape[1], key_cache.shape[2]
    groups = heads // kv_heads
    if tile.fresh and softcap is None and sinks is None and (window is None or window >= length):
        return _causal(query[:length], key[:length], value[:length], groups, scaling)
    keys = workspace.gather("keys", key_cache, tile.blocks).view(batch, -1, kv_heads, key_cache.shape[3])
    values = workspace.gather("values", value_cache, tile.blocks).view(batch, -1, kv_heads, value_cache.shape[3])
    span = keys.shape[1]
    keys, values = keys.transpose(1, 2), values.transpose(1, 2)
    if length == 1:
        packed = query.view(batch, kv_heads, groups, -1)
    else:
        packed = query.view(batch, length, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    rows = groups if length > 1 else 1
    mask = tile.mask(span, window, rows)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scaling)
    else:
        scores = torch.matmul(packed, keys.transpose(2, 3))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sinks = sinks.to(scores.dtype).view(kv_heads, groups).repeat_interleave(scores.shape[2] // groups, 1)
            scores = torch.cat([sinks[None, :, :, None].expand(batch, -1, -1, -1), scores], dim=-1)
        weights = scores.softmax(dim=-1)[..., -span:]
        out = torch.matmul(weights.to(values.dtype), values)
    if length == 1:
        return out.reshape(batch, heads, -1)
    out = out.view(batch, kv_heads, groups, length, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch * length, heads, -1)


def _causal(query: Tensor, key: Tensor, value: Tensor, groups: int, scaling: float) -> Tensor:
    length, heads = query.shape[:2]
    packed = query.view(length, heads // groups, groups, -1).permute(1, 2, 0, 3)
    keys = key.permute(1, 0, 2)[:, None].expand(-1, groups, -1, -1)
    values = value.permute(1, 0, 2)[:, None].expand(-1, groups, -1, -1)
    out = scaled_dot_product_attention(packed, keys, values, is_causal=True, scale=scaling)
    return out.permute(2, 0, 1, 3).reshape(length, heads, -1)
