"""The paged KV cache: a pool whose blocks each hold K and V of `block_size` tokens for every layer.

Recorded expert *routes* (which experts were chosen per token) are one more part of every block, copied along with it.
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
    """The shape of one attention layer's K and V per token."""

    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class RouteShape:
    """The shape of a mixture of experts' *routes*: the indices of the experts that each router chose for a token."""

    num_layers: int
    """The number of layers with a router."""
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of stored expert indices: uint8 if it can hold every index, else int16."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return how many bytes `block_size` tokens' expert routes take, rounded up to a multiple of `dtype`'s size."""
        used = block_size * self.num_layers * self.top_k * self.dtype.itemsize
        return -(-used // dtype.itemsize) * dtype.itemsize


class KVCache(BlockPool):
    """A pool of `num_blocks` blocks of `block_size` token slots. After `drop` or `save` it has no device memory.

    Args:
        layers: shapes of each attention layer's K and V.
        dtype: dtype of K and V.
        memory: functions that allocate and release the device memory.
        routes: shape of the expert routes to store next to K and V; None if no routes are stored.

    Attributes:
        addresses: addresses of each layer's K and V, K first, which captured graphs contain; empty without device memory.
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
        """The device memory that expert routes currently take, in bytes."""
        if self.routes is None or not self.on_device:
            return 0
        return self.num_blocks * self.routes.block_bytes(self.block_size, self.dtype)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the K and V tensors of a layer, both contiguous.

        Their shapes are [num_blocks, block_size, Hkv, D] and [num_blocks, block_size, Hkv, Dv] for Hkv key-value heads.
        """
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
        """Store the experts that one router chose for P positions.

        Args:
            slots: token slot of each position, which is block * block_size + offset, int64 [P].
            layer: index of the router among the layers with a router.
            experts: the k experts chosen at each position, [P, k].
        """
        routes = self._routes(self._parts[-1])
        routes[slots // self.block_size, slots % self.block_size, layer] = experts.to(routes.dtype)

    def read_routes(self, blocks: NDArray[np.int32], start: int, stop: int) -> NDArray[np.integer[Any]]:
        """Return the expert routes of a sequence's positions `start` to `stop` - 1, as integers [stop - start, layers, k].

        They are the k experts that each router chose per position. Between `save` and `restore`, they are on the host.

        Args:
            blocks: block ids of the sequence, in order.
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
        """Return a view [N, block_size, layers, k] of `part`, a tensor [N, width] with the expert routes of N blocks."""
        assert self.routes is not None
        shape = (self.block_size, self.routes.num_layers, self.routes.top_k)
        return part.view(self.routes.dtype)[:, : math.prod(shape)].view(-1, *shape)

    def zero_slots(self, slots: NDArray[np.int64]) -> None:
        """Fill the K and V of token slots (block * block_size + offset) with zeros."""
        index = upload(slots, self.device)
        for part in self._parts[: self._num_parts]:
            part.view(self.num_blocks * self.block_size, -1).index_fill_(0, index, 0)
