"""Asynchronous copies of KV blocks between a device and one host pool, flat and in chunks.

The blocks of all layers are gathered into a staging buffer, which goes to the host in one copy, and back the same way:
copies of many megabytes reach the bandwidth of the bus, those of single blocks do not. One of two staging buffers is filled
while the other is copied. Gathers and scatters run on the model's stream, copies beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory.buffers import upload
from rollout.engine.memory.streams import Stream

STAGING_BYTES = 64 * 2**20
"""Size of one staging buffer: its copy takes milliseconds, starting it microseconds."""

StagingAllocator = Callable[[int], Tensor]
"""Allocates a flat device tensor of n elements; raises `torch.OutOfMemoryError` when it cannot."""


def pieces(chunks: Sequence[Tensor], begin: int, end: int) -> Iterator[Tensor]:
    """Views of elements `begin` to `end` of flat tensors that are numbered through, in order."""
    start = 0
    for chunk in chunks:
        stop = start + len(chunk)
        if max(begin, start) < min(end, stop):
            yield chunk[max(begin, start) - start : min(end, stop) - start]
        start = stop


@dataclass(frozen=True)
class RowRange:
    """Rows `begin` to `end` (of the blocks that move) of one part of the pool."""

    part: int
    begin: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """One copy: elements `begin` to `end` of the host pool, and the rows that are stored there in this order."""

    begin: int
    end: int
    pieces: tuple[RowRange, ...]


def plan(widths: Sequence[int], rows: int, limit: int) -> list[Chunk]:
    """Split a host pool, in which `rows` rows of each part are contiguous and part follows part, into chunks.

    Args:
        widths: elements of one row of each part.
        limit: most elements of a chunk; at least the widest row.
    """
    chunks: list[Chunk] = []
    ranges: list[RowRange] = []
    begin = end = 0
    for part, width in enumerate(widths):
        row = 0
        while row < rows:
            count = min(rows - row, (limit - (end - begin)) // width)
            if count:
                ranges.append(RowRange(part, row, row + count))
                row, end = row + count, end + count * width
            else:
                chunks.append(Chunk(begin, end, tuple(ranges)))
                ranges, begin = [], end
    if ranges:
        chunks.append(Chunk(begin, end, tuple(ranges)))
    return chunks


class KVTransfer:
    """Moves blocks of one pool between device and host.

    Args:
        compute: the stream of the model, on which the pool was last written.
        copies: the stream of the copies.
        stage: allocates a staging buffer.
        limit: bytes of a staging buffer.
    """

    def __init__(self, compute: Stream, copies: Stream, stage: StagingAllocator, limit: int = STAGING_BYTES) -> None:
        self._compute = compute
        self._copies = copies
        self._stage = stage
        self._limit = limit

    def save(self, parts: Sequence[Tensor], blocks: Tensor, host: Sequence[Tensor]) -> None:
        """Copy `blocks` of every part to the host; blocks until they are there.

        Args:
            parts: [num_blocks, width] each.
            blocks: [n] int64, on the device.
            host: flat chunks, pinned; they get n rows of the first part, then n of the second, and so on.
        """
        compute, copies = self._compute, self._copies
        staging, chunks = self._staging(parts, len(blocks))
        free: list[Any] = [None, None]
        try:
            for turn, chunk in enumerate(chunks):
                buffer = staging[turn % 2]
                if turn > 1:
                    compute.after(free[turn % 2])
                compute.run(partial(_gather, parts, blocks, chunk, buffer))
                copies.after(compute.mark())
                copies.run(partial(_copy, buffer, list(pieces(host, chunk.begin, chunk.end)), to_host=True))
                free[turn % 2] = copies.mark()
        finally:
            # After this, pool and staging buffers can be freed: nothing reads them any more.
            copies.finish()

    def restore(self, parts: Sequence[Tensor], blocks: NDArray[np.int64], host: Sequence[Tensor]) -> None:
        """Copy the host's rows into the parts, before any later work of the compute stream; does not block the host.

        Args:
            parts: [num_blocks, width] each.
            blocks: [n], destination of each saved row; negative: dropped.
            host: as `save` left it; only the next `save` may write to it.
        """
        compute, copies = self._compute, self._copies
        staging, chunks = self._staging(parts, len(blocks))
        whole = upload(blocks, parts[0].device) if (blocks >= 0).all() else None
        free: list[Any] = [None, None]
        # The previous content of the staging memory may still be in use.
        copies.after(compute.mark())
        try:
            for turn, chunk in enumerate(chunks):
                buffer = staging[turn % 2]
                if turn > 1:
                    copies.after(free[turn % 2])
                copies.run(partial(_copy, buffer, list(pieces(host, chunk.begin, chunk.end)), to_host=False))
                compute.after(copies.mark())
                compute.run(partial(_scatter, parts, blocks, whole, chunk, buffer))
                free[turn % 2] = compute.mark()
        except BaseException:
            # A copy that is still running would write into memory that has been reallocated.
            copies.finish()
            raise

    def _staging(self, parts: Sequence[Tensor], rows: int) -> tuple[tuple[Tensor, Tensor], list[Chunk]]:
        """Two buffers, as large as memory allows, and the chunks that fit into one."""
        widths = [part.shape[1] for part in parts]
        limit = min(self._limit // parts[0].element_size(), rows * sum(widths))
        while True:
            limit = max(limit, *widths)
            try:
                return (self._stage(limit), self._stage(limit)), plan(widths, rows, limit)
            except torch.OutOfMemoryError:
                if limit == max(widths):
                    raise
                limit //= 2


def _gather(parts: Sequence[Tensor], blocks: Tensor, chunk: Chunk, buffer: Tensor) -> None:
    for piece, rows in _rows(parts, chunk, buffer):
        torch.index_select(parts[piece.part], 0, blocks[piece.begin : piece.end], out=rows)


def _scatter(
    parts: Sequence[Tensor], blocks: NDArray[np.int64], whole: Tensor | None, chunk: Chunk, buffer: Tensor
) -> None:
    """Copy the rows of a chunk to their blocks; `whole`: `blocks` on the device, if no row is dropped."""
    for piece, rows in _rows(parts, chunk, buffer):
        part, cut = parts[piece.part], slice(piece.begin, piece.end)
        if whole is not None:
            part.index_copy_(0, whole[cut], rows)
            continue
        kept = np.flatnonzero(blocks[cut] >= 0)
        part.index_copy_(0, upload(blocks[cut][kept], part.device), rows.index_select(0, upload(kept, part.device)))


def _copy(buffer: Tensor, host: Sequence[Tensor], *, to_host: bool) -> None:
    """Copy the begin of the buffer to or from pieces of the host."""
    sizes = [len(piece) for piece in host]
    for piece, staged in zip(host, buffer[: sum(sizes)].split_with_sizes(sizes), strict=True):
        source, target = (staged, piece) if to_host else (piece, staged)
        target.copy_(source, non_blocking=True)


def _rows(parts: Sequence[Tensor], chunk: Chunk, buffer: Tensor) -> list[tuple[RowRange, Tensor]]:
    """Row ranges of the chunk, each with its rows of the staging buffer."""
    sizes = [(piece.end - piece.begin) * parts[piece.part].shape[1] for piece in chunk.pieces]
    flat = buffer[: sum(sizes)].split_with_sizes(sizes)
    return [(piece, rows.view(-1, parts[piece.part].shape[1])) for piece, rows in zip(chunk.pieces, flat, strict=True)]
