"""Host memory for blocks that leave the device: live blocks during a suspend, and blocks that the prefix cache evicts.

A slot holds all parts of one block. On CUDA, blocks are first gathered in a staging buffer on the device, and adjacent slots
are copied in one transfer. Only copies of many megabytes reach the bandwidth of the bus. All copies are queued on the
caller's stream, so later work on this stream may overwrite the memory that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK_BYTES = 2**30
"""The size of a chunk of pinned memory, in bytes.

Torch rounds pinned memory up to a power of two and keeps buffers that have been replaced by larger ones. A pool in a single
buffer would therefore take up to four times its size.
"""
STAGING_BYTES = 64 * 2**20
"""The size of a staging buffer, in bytes. Copying it takes milliseconds, while starting the copy takes microseconds."""

Slots = Sequence[int] | NDArray[np.integer[Any]]


class HostMemoryError(MemoryError):
    """The error raised if the host lacks memory for blocks. For CUDA, this memory must be pinned."""


class HostBlocks:
    """Slots of host memory, each with room for one block of a pool. The number of slots never falls.

    Args:
        widths: number of elements of one block in each part.
        pinned: whether to pin the memory, for asynchronous copies to and from a CUDA device.
        stage: function that allocates a flat device tensor with the given number of elements, or raises
            `torch.OutOfMemoryError`. None if the pool is also in host memory, so that no staging buffer is needed.
        limit: maximum size of a staging buffer, in bytes; it always has room for one block.
    """

    def __init__(
        self,
        widths: Sequence[int],
        dtype: torch.dtype,
        *,
        pinned: bool,
        stage: Callable[[int], Tensor] | None,
        limit: int = STAGING_BYTES,
    ) -> None:
        self._widths = list(widths)
        self._width = sum(widths)
        self._dtype = dtype
        self._block_bytes = max(1, self._width * dtype.itemsize)
        self._pinned = pinned
        self._stage = stage
        self._rows = max(1, limit // self._block_bytes)
        self._chunks: list[Tensor] = []
        """The chunks of host memory, each a tensor [slots, elements per slot]."""

    @property
    def num_slots(self) -> int:
        """The current number of slots."""
        return sum(map(len, self._chunks))

    @property
    def nbytes(self) -> int:
        """The size of the host memory, in bytes."""
        return sum(each.nbytes for each in self._chunks)

    def grow(self, num_slots: int, most: int) -> None:
        """Grow to at least `num_slots` slots.

        Args:
            most: maximum number of slots that will ever be needed.

        Raises:
            HostMemoryError: the host lacks the memory.
        """
        kept = len(self._chunks)
        try:
            self._add_chunks(num_slots, most)
        except (RuntimeError, MemoryError) as exc:
            del self._chunks[kept:]
            kind = "pinned host memory" if self._pinned else "host memory"
            reason = str(exc).partition("\n")[0]
            raise HostMemoryError(f"{num_slots * self._block_bytes / 2**30:.2f} GiB of {kind} ({reason})") from exc

    def _add_chunks(self, num_slots: int, most: int) -> None:
        while (missing := num_slots - self.num_slots) > 0:
            if self._pinned:
                rounded = 1 << (missing * self._block_bytes - 1).bit_length()
                size = max(1, min(CHUNK_BYTES, rounded) // self._block_bytes)
            else:
                # At least double the memory: with many small chunks, each transfer would need many small copies.
                size = max(missing, min(self.num_slots, most - self.num_slots))
            shape = size, self._width
            self._chunks.append(torch.empty(shape, dtype=self._dtype, device="cpu", pin_memory=self._pinned))

    def offload(self, parts: Sequence[Tensor], blocks: Tensor, slots: Slots) -> None:
        """Copy blocks from the device into slots.

        Args:
            parts: the parts of the pool, each [number of blocks, width].
            blocks: ids of the blocks, int64 on the device.
            slots: the slot for each block, all different.
        """
        for some, views, rows in self._staged(blocks, slots):
            for part, columns in zip(parts, rows.split_with_sizes(self._widths, 1), strict=True):
                torch.index_select(part, 0, some, out=columns)
            for view, staged in _transfers(views, rows):
                view.copy_(staged, non_blocking=True)

    def load(self, parts: Sequence[Tensor], blocks: Tensor, slots: Slots) -> None:
        """Copy slots into blocks on the device. The arguments are the same as for `offload`; all blocks must differ."""
        for some, views, rows in self._staged(blocks, slots):
            for view, staged in _transfers(views, rows):
                staged.copy_(view, non_blocking=True)
            for part, columns in zip(parts, rows.split_with_sizes(self._widths, 1), strict=True):
                part.index_copy_(0, some, columns)

    def read(self, slots: Slots, part: int) -> Tensor:
        """Return a copy [number of slots, width] of one part (by index) of the blocks in these slots."""
        begin = sum(self._widths[:part])
        empty = torch.empty(0, self._widths[part], dtype=self._dtype, device="cpu")
        return torch.cat([empty, *(rows[:, begin : begin + self._widths[part]] for rows in self._views(slots))])

    def _staged(self, blocks: Tensor, slots: Slots) -> Iterator[tuple[Tensor, list[Tensor], Tensor]]:
        """Split blocks and slots into groups that fit into a staging buffer.

        Yields:
            The ids of n blocks, the views of their slots, and the rows [n, width] of the buffer. Without a staging buffer,
            the rows are the slots themselves, and the list of views is empty.
        """
        if self._stage is None:
            views = self._views(slots)
            for rows, some in zip(views, blocks.split_with_sizes([len(each) for each in views]), strict=True):
                yield some, [], rows
            return
        begin, most = 0, self._rows
        while begin < len(slots):
            count = min(most, len(slots) - begin)
            try:
                buffer = self._stage(count * self._width).view(count, self._width)
            except torch.OutOfMemoryError:
                if count == 1:
                    raise
                most = count // 2
                continue
            end = begin + count
            yield blocks[begin:end], self._views(slots[begin:end]), buffer
            begin = end

    def _views(self, slots: Slots) -> list[Tensor]:
        """Return views [number of slots, width] of the host memory, in the order of `slots`; adjacent slots share a view."""
        wanted = np.asarray(slots, np.int64)
        if not len(wanted):
            return []
        begins = np.cumsum([0, *map(len, self._chunks)])
        chunk = np.searchsorted(begins, wanted, "right") - 1
        cuts = np.flatnonzero((np.diff(wanted) != 1) | (np.diff(chunk) != 0)) + 1
        row = wanted - begins[chunk]
        return [
            self._chunks[chunk[first]][row[first] : row[first] + last - first]
            for first, last in pairwise((0, *cuts, len(wanted)))
        ]


def _transfers(views: list[Tensor], rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each view of the host memory with the rows of the staging buffer that belong to the view."""
    return zip(views, rows.split_with_sizes([len(each) for each in views]) if views else (), strict=True)
