"""Host memory beside the KV cache: a flat pool kept between suspends, and slots for blocks that the device evicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from rollout.engine.memory.kv_transfer import STAGING_BYTES, StagingAllocator, pieces
from rollout.engine.memory.streams import Inline, Stream

CHUNK_BYTES = 2**30
"""Size of a pinned chunk. Torch rounds pinned memory up to a power of two and keeps what was outgrown: a pool in one
piece would take up to four times its size."""


class HostMemoryError(MemoryError):
    """The host has not so much (pinned) memory."""


class HostPool:
    """Elements of one dtype, numbered through over the chunks; as many as were ever asked for.

    Args:
        pinned: for asynchronous copies to and from a CUDA device; else there is one chunk, mapped when it is written.
    """

    def __init__(self, dtype: torch.dtype, *, pinned: bool) -> None:
        self._dtype = dtype
        self._pinned = pinned
        self.chunks: list[Tensor] = []
        self._growing: Thread | None = None

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self) * self._dtype.itemsize

    def prepare(self, numel: int, within: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Pin memory for `numel` elements in the background, so that `grow` does not take seconds.

        Args:
            within: entered by the thread that pins.
        """
        if not self._pinned or len(self) >= numel or (self._growing is not None and self._growing.is_alive()):
            return

        def work() -> None:
            # `grow` tries again and says what is missing.
            with suppress(RuntimeError, MemoryError), within():
                self._add_chunks(numel)

        self._growing = Thread(target=work, name="rollout-pin", daemon=True)
        self._growing.start()

    def grow(self, numel: int, most: int) -> None:
        """Have at least `numel` elements; the content is lost if there were fewer.

        Args:
            most: elements that will ever be asked for.

        Raises:
            HostMemoryError: the host has not so much memory.
        """
        if self._growing is not None:
            self._growing.join()
        if len(self) >= numel:
            return
        kept = len(self.chunks)
        try:
            if self._pinned:
                self._add_chunks(numel)
            else:
                # Geometrically: mapping pages costs more than copying into them.
                grown, kept = max(numel, min(2 * len(self), most)), 0
                self.chunks.clear()
                self.chunks.append(torch.empty(grown, dtype=self._dtype, device="cpu"))
        except (RuntimeError, MemoryError) as exc:
            del self.chunks[kept:]
            kind = "pinned host memory" if self._pinned else "host memory"
            reason = str(exc).partition("\n")[0]
            raise HostMemoryError(f"{numel * self._dtype.itemsize / 2**30:.2f} GiB of {kind} ({reason})") from exc

    def span(self, begin: int, end: int) -> Tensor:
        """Elements `begin` to `end`: a view if they are in one chunk, else a copy."""
        found = list(pieces(self.chunks, begin, end))
        return found[0] if len(found) == 1 else torch.cat([torch.empty(0, dtype=self._dtype, device="cpu"), *found])

    def _add_chunks(self, numel: int) -> None:
        while (missing := numel - len(self)) > 0:
            size = min(CHUNK_BYTES // self._dtype.itemsize, 1 << (missing - 1).bit_length())
            self.chunks.append(torch.empty(size, dtype=self._dtype, device="cpu", pin_memory=True))


class HostBlocks:
    """`num_blocks` slots of host memory, each with room for one block of a pool: the prefix cache's host tier.

    A slot holds all parts of a block, so that a block is one transfer; a staging buffer gathers them on the device. Gathers
    and scatters run on the model's stream, transfers beside it. A step waits for what it loads, not for what it offloads.

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
        self._rows = max(1, limit // max(1, self._width * dtype.itemsize))
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
        for some, chosen, buffer in self._staged(compute, blocks, slots):
            compute.run(partial(self._gather, parts, chosen, buffer))
            copies.after(compute.mark())
            copies.run(partial(self._transfer, buffer, some, to_host=True))
            self._leaving = buffer, copies.mark()

    def load(self, compute: Stream, parts: Sequence[Tensor], blocks: Tensor, slots: Sequence[int]) -> None:
        """Copy slots to distinct blocks of the device, before any later work of `compute`; arguments as of `offload`."""
        copies = self._copies
        for some, chosen, buffer in self._staged(compute, blocks, slots):
            copies.after(compute.mark())
            try:
                copies.run(partial(self._transfer, buffer, some, to_host=False))
            except BaseException:
                # A transfer that is still running would write into memory that has been reallocated.
                copies.finish()
                raise
            compute.after(copies.mark())
            compute.run(partial(self._scatter, parts, chosen, buffer))

    def release(self, compute: Stream) -> None:
        """Free the staging buffer, for later work of `compute`."""
        if self._leaving is not None:
            compute.after(self._leaving[1])
            self._leaving = None

    def _staged(
        self, compute: Stream, blocks: Tensor, slots: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
        """Slots, their blocks and a staging buffer [n, width], for as many at a time as a buffer holds."""
        for begin in range(0, len(slots), self._rows):
            some = slots[begin : begin + self._rows]
            self.release(compute)
            buffer = self._stage(len(some) * self._width).view(len(some), self._width)
            yield some, blocks[begin : begin + len(some)], buffer

    def _gather(self, parts: Sequence[Tensor], blocks: Tensor, buffer: Tensor) -> None:
        for part, rows in zip(parts, buffer.split_with_sizes(self._widths, 1), strict=True):
            rows.copy_(part.index_select(0, blocks))

    def _scatter(self, parts: Sequence[Tensor], blocks: Tensor, buffer: Tensor) -> None:
        for part, rows in zip(parts, buffer.split_with_sizes(self._widths, 1), strict=True):
            part.index_copy_(0, blocks, rows)

    def _transfer(self, buffer: Tensor, slots: Sequence[int], *, to_host: bool) -> None:
        for row, slot in zip(buffer, slots, strict=True):
            found = list(pieces(self._host.chunks, slot * self._width, (slot + 1) * self._width))
            for piece, staged in zip(found, row.split_with_sizes([len(each) for each in found]), strict=True):
                source, target = (staged, piece) if to_host else (piece, staged)
                target.copy_(source, non_blocking=True)
