"""Paged attention in plain torch: the reference on every device, and the fallback for the faster kernels.

A step is split into *tiles*, and each tile is one call of `scaled_dot_product_attention`. A tile is either one sequence's
chunk, or several consecutive sequences with one position each. The query heads that share a KV head are packed as query
rows, so each KV head is read once. Expanding K and V, or `enable_gqa` in bf16, costs 6 to 14 times as much on a CPU.
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
"""The maximum number of query-key pairs in a tile of several sequences. It limits the size of mask and copied keys."""


def write_slots(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write K and V of every position into its slot; see `CacheWrite`."""
    # Cast to the cache's dtype: under the trainer's autocast, K and V may have a different dtype from the one found
    # when the engine probed the model.
    key_cache.flatten(0, 1).index_copy_(0, slots, key.to(key_cache.dtype))
    value_cache.flatten(0, 1).index_copy_(0, slots, value.to(value_cache.dtype))


CacheWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""A function that writes K and V of a step's P positions into the paged cache, in the dtype of the cache.

Its arguments, with Hkv key-value heads of sizes D and Dv:
- K [P, Hkv, D] and V [P, Hkv, Dv], in any floating dtype, with a contiguous last dimension;
- the key cache [num_blocks, block_size, Hkv, D] and the value cache [num_blocks, block_size, Hkv, Dv];
- the slot of each position, int64 [P]: block * block_size + offset, all different.
"""


class Rules(TypedDict, total=False):
    """The rules that determine which keys a query attends to, and how their scores are computed."""

    scaling: Required[float]
    """The factor by which products of queries and keys are multiplied."""
    window: int | None
    """The number of last positions, including its own, that a query attends to. None, the default, means all positions."""
    softcap: float | None
    """The cap of scores, which become softcap * tanh(scores / softcap) (arXiv 2408.00118); by default no cap."""
    sinks: Tensor | None
    """The attention sinks, one unscaled score per query head, [H] (arXiv 2309.17453). A sink is one more score in the
    softmax, without a value. None, the default, means no sinks."""


class PagedAttention(Protocol):
    """A function that computes the attention of a step's queries, whose K and V are already in the paged cache."""

    def __call__(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, **rules: Unpack[Rules]) -> Tensor:
        """Compute the attention output of each of the step's P positions.

        Args:
            query: [P, H, D], contiguous, in packed order, with H query heads of size D.
            key_cache: [num_blocks, block_size, Hkv, D] with Hkv key-value heads.
            value_cache: [num_blocks, block_size, Hkv, Dv].

        Returns:
            [P, H, Dv].
        """


@dataclass(frozen=True, eq=False)
class _Tile:
    """A tile: B consecutive sequences with T query positions each."""

    queries: slice
    """The indices of the tile's queries among the step's packed positions."""
    blocks: Tensor
    """The ids of the KV blocks of the tile's B sequences, N blocks per sequence, int64 [B*N]."""
    positions: Tensor
    """The position in its sequence of each of the T queries of B sequences, int64 [B, 1, T, 1]."""
    last: Tensor
    """The last position that each of the T queries of B sequences attends to, int64 [B, 1, T, 1]."""
    _masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)

    def mask(self, keys: int, window: int | None, groups: int) -> Tensor:
        """Return whether each query row attends to each key, bool [B, 1, groups*T, keys].

        If each sequence has one position (T = 1), the mask has a single row for all groups.

        Args:
            keys: number of keys per sequence.
            window: see `Rules`.
            groups: number of query heads per KV head.
        """
        if (window, groups) not in self._masks:
            key_positions = torch.arange(keys, device=self.positions.device)
            mask = key_positions <= self.last
            if window is not None:
                mask &= self.positions - key_positions < window
            self._masks[window, groups] = mask.repeat(1, 1, groups if mask.shape[2] > 1 else 1, 1)
        return self._masks[window, groups]


class TorchPagedAttention:
    """The `PagedAttention` of one step in plain torch.

    Args:
        rows: the step's positions and block tables.
        device: device of the KV cache.
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
    # Fill padding with the row's own first block: other blocks may hold NaN, and masking does not remove a NaN.
    held = np.arange(used) < -(-ends[:, None] // rows.block_size)
    tables = rows.tables[members]
    return _Tile(
        queries,
        upload(np.where(held, tables[:, :used], tables[:, :1]).reshape(-1), device),
        upload(positions.reshape(shape), device),
        upload((positions if rows.seen is None else rows.seen[queries]).reshape(shape), device),
    )


def _attend(query: Tensor, key_cache: Tensor, value_cache: Tensor, tile: _Tile, rules: Rules) -> Tensor:
    """Compute the attention output [B*T, H, Dv] of a tile of B sequences with T positions each."""
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
