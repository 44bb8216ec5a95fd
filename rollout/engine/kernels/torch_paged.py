"""Paged attention in plain torch: the reference on every device, and the fallback for the faster kernels.

A step is cut into *tiles*, each of which is one call of `scaled_dot_product_attention`: a run of sequences that compute one
position each, or one sequence's chunk. Grouped query heads are packed as query rows, which reads each KV head once
(expanding K and V, or `enable_gqa` in bf16, costs 6 to 14 times as much on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable
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
"""The maximum number of query x key pairs in a tile of several sequences; bounds the mask and the gathered keys."""


def write_slots(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write K and V of every position into its slot; see `CacheWrite`."""
    # Cast to the cache's dtype: under the trainer's autocast, K and V may have another dtype than in the engine's
    # probe.
    key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))


CacheWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""A function that writes K and V of a step's positions into the paged cache, in the dtype of the cache. Its arguments:

- K and V: [P, Hkv, D], [P, Hkv, Dv], in any floating dtype; the last dimension contiguous;
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

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, **rules: Unpack[Rules]) -> Tensor:
        """Compute the attention output of every position.

        Args:
            query: [P, H, D] contiguous, the step's positions in packed order.
            key_cache, value_cache: [num_blocks, block_size, Hkv, D], [..., Dv].

        Returns:
            [P, H, Dv].
        """


@dataclass(frozen=True, eq=False)
class _Tile:
    """B consecutive sequences of T query positions each."""

    queries: slice
    """Places of the B*T queries among the step's positions."""
    blocks: Tensor
    """[B*N] int64, block ids, N per sequence."""
    positions: Tensor
    """[B, 1, T, 1] int64, position of each query in its sequence."""
    last: Tensor
    """[B, 1, T, 1] int64, last position that each query attends to."""
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, keys: int, window: int | None, groups: int) -> Tensor:
        """Return which keys each query row attends to, bool [B, 1, groups*T, keys]; one row for all groups if T is 1."""
        if (window, groups) not in self._masks:
            key_positions = torch.arange(keys, device=self.positions.device)
            mask = key_positions <= self.last
            if window is not None:
                mask &= self.positions - key_positions < window
            self._masks[window, groups] = mask.repeat(1, 1, groups if mask.shape[2] > 1 else 1, 1)
        return self._masks[window, groups]


class TorchPagedAttention:
    """`PagedAttention` of one step in plain torch.

    Args:
        rows: the step's positions.
    """

    def __init__(self, rows: PagedRows, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._tiles: list[_Tile] = []

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, **rules: Unpack[Rules]) -> Tensor:
        """Compute the attention output of every position; see `PagedAttention`."""
        if not self._tiles:
            self._tiles = _tiles(self._rows, self._device)
        out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
        for tile in self._tiles:
            out[tile.queries] = _attend(query[tile.queries], key_cache, value_cache, tile, rules)
        return out


def _tiles(rows: PagedRows, device: torch.device) -> list[_Tile]:
    counts, ends, tiles, first = rows.counts, rows.ends, list[_Tile](), 0
    while first < len(rows):
        behind, longest = first + 1, int(ends[first])
        while behind < len(rows) and counts[first] == counts[behind] == 1:
            longest = max(longest, int(ends[behind]))
            if (behind + 1 - first) * longest > MAX_TILE_SCORES:
                break
            behind += 1
        tiles.append(_tile(rows, slice(first, behind), ends[first:behind], device))
        first = behind
    return tiles


def _tile(rows: PagedRows, members: slice, ends: NDArray[np.int64], device: torch.device) -> _Tile:
    queries = slice(int(rows.offsets[members.start]), int(rows.offsets[members.stop]))
    shape = (len(ends), 1, -1, 1)
    positions = rows.positions[queries]
    used = -(-int(ends.max()) // rows.block_size)
    # Fill padding with a block of the same row: other blocks may hold NaN, and a masked NaN is still NaN.
    held = np.arange(used) < -(-ends[:, None] // rows.block_size)
    tables = rows.tables[members]
    return _Tile(
        queries,
        upload(np.where(held, tables[:, :used], tables[:, :1]).reshape(-1), device),
        upload(positions.reshape(shape), device),
        upload((positions if rows.seen is None else rows.seen[queries]).reshape(shape), device),
    )


def _attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, tile: _Tile, rules: Rules) -> Tensor:
    """Compute the attention output [B*T, H, Dv] of one tile."""
    softcap, sinks = rules.get("softcap"), rules.get("sinks")
    batch, length, kv_heads = tile.positions.shape[0], tile.positions.shape[2], key_cache.shape[2]
    groups = query.shape[1] // kv_heads
    # From here on, keys and values have the shape [B, Hkv, S, D].
    keys, values = (
        cache.index_select(0, tile.blocks).view(batch, -1, kv_heads, cache.shape[3]).transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    span = keys.shape[2]
    packed = query.view(batch, length, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = tile.mask(span, rules.get("window"), groups)
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=rules["scaling"])
    else:
        scores = torch.matmul(packed, keys.transpose(2, 3))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * rules["scaling"]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sinks = sinks.to(scores.dtype).view(kv_heads, groups).repeat_interleave(length, 1)
            scores = torch.cat([sinks[None, :, :, None].expand(batch, -1, -1, -1), scores], dim=-1)
        out = torch.matmul(scores.softmax(dim=-1)[..., -span:].to(values.dtype), values)
    out = out.view(batch, kv_heads, groups, length, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch * length, query.shape[1], -1)
