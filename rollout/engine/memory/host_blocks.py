"""Host memory for blocks that leave the device: all of them in a suspend, or blocks that the prefix cache evicts.

A slot holds all parts of one block. On CUDA a staging buffer gathers many blocks on the device, and adjacent slots are one
transfer: copies of many megabytes reach the bandwidth of the bus, copies of single blocks do not. Gathers and scatters run
on the model's stream, transfers on their own stream. A step waits for the blocks it loads, not for offloads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory.streams import HostStream, Stream

CHUNK_BYTES = 2**30
"""Size of a pinned chunk. Torch rounds pinned memory up to a power of two and keeps outgrown buffers, so a pool in one piece
would take up to four times its size."""
STAGING_BYTES = 64 * 2**20
"""Size of a staging buffer. Its copy takes milliseconds, starting it takes microseconds."""

Slots = Sequence[int] | NDArray[np.integer[Any]]


class HostMemoryError(MemoryError):
    """The host lacks the (pinned) memory."""


class HostBlocks:
    """Slots of host memory, each with room for one block of a pool. Their number never falls.

    Args:
        widths: elements of one block in each part.
        pinned: whether to pin the memory, for asynchronous copies to and from a CUDA device.
        stage: allocates a flat tensor of n elements on the device; raises `torch.OutOfMemoryError` when it cannot.
        copies: the stream of the transfers. `HostStream`: blocks are in host memory too, and copied at once.
        limit: bytes of a staging buffer, at least those of one block.
    """

    def __init__(
        self,
        widths: Sequence[int],
        dtype: torch.dtype,
        *,
        pinned: bool,
        stage: Callable[[int], Tensor],
        copies: Stream,
        limit: int = STAGING_BYTES,
    ) -> None:
        self._widths = list(widths)
        self._width = sum(widths)
        self._dtype = dtype
        self._block_bytes = max(1, self._width * dtype.itemsize)
        self._pinned = pinned
        self._stage = stage
        self._copies = copies
        self._rows = max(1, limit // self._block_bytes)
        self._chunks: list[Tensor] = []
        """Chunks [slots, width]."""
        self._leaving: tuple[Tensor, Any] | None = None
        """A staging buffer that is still being read, and the event after which it is free."""

    @property
    def num_slots(self) -> int:
        """Number of slots."""
        return sum(map(len, self._chunks))

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(each.nbytes for each in self._chunks)

    def grow(self, num_slots: int, most: int) -> None:
        """Grow to at least `num_slots` slots.

        Args:
            most: maximum that will ever be needed.

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
                # Many small chunks would lead to many small copies.
                size = max(missing, min(self.num_slots, most - self.num_slots))
            shape = size, self._width
            self._chunks.append(torch.empty(shape, dtype=self._dtype, device="cpu", pin_memory=self._pinned))

    def offload(self, compute: Stream, parts: Sequence[Tensor], blocks: Tensor, slots: Slots) -> None:
        """Copy blocks of the device to distinct slots; later work of `compute` may overwrite the blocks.

        Args:
            compute: the stream that has written the blocks.
            parts: [number of blocks, width] each.
            blocks: [n] int64, on the device.
        """
        if isinstance(self._copies, HostStream):
            for rows, some in self._in_place(blocks, slots):
                self._gather(parts, some, rows)
            return
        with self._settled_if_it_fails():
            for some, views, buffer in self._staged(compute, blocks, slots):
                compute.run(partial(self._gather, parts, some, buffer))
                self._copies.after(compute.mark())
                self._copies.run(partial(_transfer, buffer, views, to_host=True))
                self._leaving = buffer, self._copies.mark()

    def load(self, compute: Stream, parts: Sequence[Tensor], blocks: Tensor, slots: Slots) -> None:
        """Copy slots to distinct blocks of the device, before any later work of `compute`; arguments as in `offload`."""
        if isinstance(self._copies, HostStream):
            for rows, some in self._in_place(blocks, slots):
                self._scatter(parts, some, rows)
            return
        with self._settled_if_it_fails():
            for some, views, buffer in self._staged(compute, blocks, slots):
                # The previous content of the staging memory may still be in use.
                self._copies.after(compute.mark())
                self._copies.run(partial(_transfer, buffer, views, to_host=False))
                compute.after(self._copies.mark())
                compute.run(partial(self._scatter, parts, some, buffer))

    def release(self, compute: Stream) -> None:
        """Free the staging buffer, for later work of `compute`."""
        if self._leaving is not None:
            compute.after(self._leaving[1])
            self._leaving = None

    def finish(self) -> None:
        """Block the host until all copies are done, and free the staging buffer."""
        self._copies.finish()
        self._leaving = None

    def read(self, slots: Slots, part: int) -> Tensor:
        """Copy [n, width] of one part in these slots."""
        begin = sum(self._widths[:part])
        empty = torch.empty(0, self._widths[part], dtype=self._dtype, device="cpu")
        return torch.cat([empty, *(rows[:, begin : begin + self._widths[part]] for rows in self._views(slots))])

    @contextmanager
    def _settled_if_it_fails(self) -> Iterator[None]:
        """Context manager that lets no transfer use memory that an exception frees."""
        try:
            yield
        except BaseException:
            self.finish()
            raise

    def _staged(self, compute: Stream, blocks: Tensor, slots: Slots) -> Iterator[tuple[Tensor, list[Tensor], Tensor]]:
        """Yield blocks, views of their slots and a staging buffer [n, width], as many at a time as the buffer holds."""
        begin, most = 0, self._rows
        while begin < len(slots):
            self.release(compute)
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

    def _in_place(self, blocks: Tensor, slots: Slots) -> Iterator[tuple[Tensor, Tensor]]:
        views = self._views(slots)
        return zip(views, blocks.split_with_sizes([len(each) for each in views]), strict=True)

    def _views(self, slots: Slots) -> list[Tensor]:
        """Return views [n, width] of the host memory, in the order of `slots`; adjacent slots are one view."""
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

    def _gather(self, parts: Sequence[Tensor], blocks: Tensor, rows: Tensor) -> None:
        for part, columns in zip(parts, rows.split_with_sizes(self._widths, 1), strict=True):
            torch.index_select(part, 0, blocks, out=columns)

    def _scatter(self, parts: Sequence[Tensor], blocks: Tensor, rows: Tensor) -> None:
        for part, columns in zip(parts, rows.split_with_sizes(self._widths, 1), strict=True):
            part.index_copy_(0, blocks, columns)


def _transfer(buffer: Tensor, views: list[Tensor], *, to_host: bool) -> None:
    for view, staged in zip(views, buffer.split_with_sizes([len(each) for each in views]), strict=True):
        source, target = (staged, view) if to_host else (view, staged)
        target.copy_(source, non_blocking=True)
