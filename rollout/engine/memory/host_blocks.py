"""Copies of single KV blocks in host memory: where the prefix cache's host tier keeps what the device evicts.

Block-major, so that a block is one transfer, beside the part-major pool of the device: a staging buffer is in between. On
CUDA the gathers and scatters run on the model's stream and the transfers on one beside it. A step waits for what it loads,
and not for what it offloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.engine.memory.host_pool import HostPool, pieces
from rollout.engine.memory.kv_transfer import STAGING_BYTES, StagingAllocator, Stream


class Inline:
    """A `Stream` that runs work at once, where there are none."""

    def run(self, work: Callable[[], object]) -> None:
        """Run `work`."""
        work()

    def mark(self) -> None:
        """Nothing: all work is done."""

    def after(self, mark: Any) -> None:
        """Without effect."""

    def finish(self) -> None:
        """Without effect."""


class HostBlocks:
    """`num_blocks` slots of host memory, each with room for one block of a pool.

    Args:
        widths: elements of one block in each part.
        pinned: for asynchronous copies to and from a CUDA device.
        stage: allocates a flat tensor of n elements on the device.
        copies: the stream of the transfers.
        limit: bytes of a staging buffer, at least those of one block.

    Raises:
        HostMemoryError: the host has not so much memory.
    """

    def __init__(
        self,
        num_blocks: int,
        widths: Sequence[int],
        dtype: torch.dtype,
        *,
        pinned: bool,
        stage: StagingAllocator,
        copies: Stream | None = None,
        limit: int = STAGING_BYTES,
    ) -> None:
        self.num_blocks = num_blocks
        self._widths = list(widths)
        self._width = sum(widths)
        self._host = HostPool(dtype, pinned=pinned)
        self._host.grow(num_blocks * self._width, num_blocks * self._width)
        self._stage = stage
        self._copies = copies or Inline()
        self._rows = max(1, limit // (self._width * dtype.itemsize))
        self._leaving: tuple[Tensor, Any] | None = None
        """A staging buffer that is still being read, and when it no longer is."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self._host.nbytes

    def offload(self, compute: Stream, parts: Sequence[Tensor], blocks: Tensor, slots: Sequence[int]) -> None:
        """Copy blocks of the device to distinct slots; later work of `compute` may overwrite the blocks.

        Args:
            compute: the stream that has written the blocks.
            parts: [number of blocks, width] each.
            blocks: [n] int64, on the device.
        """
        copies = self._copies
        for begin in range(0, len(slots), self._rows):
            some = slots[begin : begin + self._rows]
            buffer = self._buffer(compute, len(some))
            compute.run(partial(self._gather, parts, blocks[begin : begin + len(some)], buffer))
            copies.after(compute.mark())
            copies.run(partial(self._transfer, buffer, some, to_host=True))
            self._leaving = buffer, copies.mark()

    def load(self, compute: Stream, parts: Sequence[Tensor], blocks: Tensor, slots: Sequence[int]) -> None:
        """Copy slots to distinct blocks of the device, before any later work of `compute`; arguments as of `offload`."""
        copies = self._copies
        for begin in range(0, len(slots), self._rows):
            some = slots[begin : begin + self._rows]
            buffer = self._buffer(compute, len(some))
            copies.after(compute.mark())
            try:
                copies.run(partial(self._transfer, buffer, some, to_host=False))
            except BaseException:
                # A transfer that is still running would write into memory that has been reallocated.
                copies.finish()
                raise
            compute.after(copies.mark())
            compute.run(partial(self._scatter, parts, blocks[begin : begin + len(some)], buffer))

    def release(self, compute: Stream) -> None:
        """Free the staging buffer, for later work of `compute`."""
        if self._leaving is not None:
            compute.after(self._leaving[1])
            self._leaving = None

    def _buffer(self, compute: Stream, rows: int) -> Tensor:
        self.release(compute)
        return self._stage(rows * self._width).view(rows, self._width)

    def _gather(self, parts: Sequence[Tensor], blocks: Tensor, buffer: Tensor) -> None:
        for part, rows in zip(parts, buffer.split_with_sizes(self._widths, 1), strict=True):
            rows.copy_(part.index_select(0, blocks))

    def _scatter(self, parts: Sequence[Tensor], blocks: Tensor, buffer: Tensor) -> None:
        for part, rows in zip(parts, buffer.split_with_sizes(self._widths, 1), strict=True):
            part.index_copy_(0, blocks, rows)

    def _transfer(self, buffer: Tensor, slots: Sequence[int], *, to_host: bool) -> None:
        for row, slot in zip(buffer, slots, strict=True):
            begin = 0
            for piece in pieces(self._host.chunks, slot * self._width, (slot + 1) * self._width):
                staged = row[begin : begin + len(piece)]
                source, target = (staged, piece) if to_host else (piece, staged)
                target.copy_(source, non_blocking=True)
                begin += len(piece)
