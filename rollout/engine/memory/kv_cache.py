"""Paged KV cache: a pool whose blocks hold K and V of some token slots for every layer.

Recorded expert routes are one more part of every block, so they are copied, saved and shared with the block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory.block_pool import BlockPool, PoolMemory
from rollout.engine.memory.buffers import upload


@dataclass(frozen=True)
class LayerShape:
    """KV shape per token of one attention layer."""

    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class RouteShape:
    """Experts chosen per token by a mixture of experts."""

    num_layers: int
    """The number of layers with a router."""
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """uint8 if it holds every expert's index, else int16."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return bytes per block of `block_size` tokens, a multiple of the size of the cache's `dtype`."""
        used = block_size * self.num_layers * self.top_k * self.dtype.itemsize
        return -(-used // dtype.itemsize) * dtype.itemsize


class KVCache(BlockPool):
    """`num_blocks` blocks of `block_size` token slots for every layer, or none on the device after `drop` or `save`.

    Args:
        layers: KV shape per attention layer.
        memory: see `BlockPool`.
        routes: shape of the expert routes kept next to K and V; None: no routes.

    Attributes:
        addresses: addresses of K and V of each layer, K first, fixed in captured graphs; empty without a pool.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: PoolMemory = PoolMemory(),  # noqa: B008 - immutable
        routes: RouteShape | None = None,
    ) -> None:
        self.block_size = block_size
        self.routes = routes
        self._shapes = [(s.num_kv_heads, width) for s in layers for width in (s.head_dim, s.value_dim)]
        self._layers: list[tuple[Tensor, Tensor]] = []
        self.addresses: tuple[int, ...] = ()
        widths = [block_size * heads * width for heads, width in self._shapes]
        self._num_parts = len(widths)
        if routes is not None:
            widths.append(routes.block_bytes(block_size, dtype) // dtype.itemsize)
        super().__init__(widths, num_blocks, dtype, device, memory)

    @property
    def route_device_bytes(self) -> int:
        """Bytes of expert routes on the device now."""
        if self.routes is None or not self.on_device:
            return 0
        return self.num_blocks * self.routes.block_bytes(self.block_size, self.dtype)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a layer's K [num_blocks, block_size, Hkv, D] and V [num_blocks, block_size, Hkv, Dv], contiguous."""
        return self._layers[index]

    def materialize(self, num_blocks: int) -> None:
        super().materialize(num_blocks)
        shaped = [
            part.view(num_blocks, self.block_size, heads, width)
            for part, (heads, width) in zip(self._parts[: self._num_parts], self._shapes, strict=True)
        ]
        self._layers = list(zip(shaped[::2], shaped[1::2], strict=True))
        self.addresses = tuple(part.data_ptr() for part in shaped)

    def drop(self) -> int:
        self._layers, self.addresses = [], ()
        return super().drop()

    def write_routes(self, slots: Tensor, layer: int, experts: Tensor) -> None:
        """Store the chosen experts [P, k] of one router for the token slots [P] int64 (block * block_size + offset)."""
        routes = self._routes(self._parts[-1])
        routes[slots // self.block_size, slots % self.block_size, layer] = experts.to(routes.dtype)

    def read_routes(self, blocks: NDArray[np.int32], start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Return routes [stop - start, layers, k] of positions `start` … `stop` - 1 of the sequence that holds `blocks`.

        Between `save` and `restore` they are read from the host.
        """
        assert self.routes is not None
        low, high = start // self.block_size, -(-stop // self.block_size)
        wanted = blocks[low:high].astype(np.int64)
        if self._saved is None:
            chosen = self._routes(self._parts[-1]).index_select(0, upload(wanted, self.device))
        else:
            order = np.argsort(self._saved, kind="stable")
            rows = order[np.searchsorted(self._saved, wanted, sorter=order)]
            chosen = self._routes(self._host.read(rows, len(self._widths) - 1))
        first = low * self.block_size
        read: NDArray[np.integer[Any]] = chosen.flatten(0, 1)[start - first : stop - first].cpu().numpy()
        return read

    def _routes(self, part: Tensor) -> Tensor:
        """Return the routes as [blocks, block_size, layers, k]."""
        assert self.routes is not None
        shape = (self.block_size, self.routes.num_layers, self.routes.top_k)
        return part.view(self.routes.dtype)[:, : math.prod(shape)].view(-1, *shape)

    def zero_slots(self, slots: NDArray[np.int64]) -> None:
        """Fill token slots (block * block_size + offset) with zeros."""
        index = upload(slots, self.device)
        for part in self._parts[: self._num_parts]:
            part.view(self.num_blocks * self.block_size, -1).index_fill_(0, index, 0)
