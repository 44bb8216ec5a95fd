"""KV blocks between a device and one flat host pool, by asynchronous copies.

The blocks of all layers are gathered into a staging buffer, which goes to the host in one copy, and back the same way:
copies of many megabytes reach the speed of the bus, those of single blocks do not. There are two staging buffers, so that
one is filled while the other is copied, and never a second copy of the pool. Gathers and scatters run where the model
runs, copies in a queue beside it; who waits for whom is written here, the queues themselves come from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory.buffers import upload

STAGING_BYTES = 64 * 2**20
"""Of one staging buffer: a copy of so many bytes takes milliseconds, and starting it microseconds."""

Stage = Callable[[int], Tensor]
"""Makes a flat device tensor of so many elements; raises `torch.OutOfMemoryError` when it cannot."""


class Lane(Protocol):
    """A queue of work, done in order; the host does not wait for it."""

    def run(self, work: Callable[[], object]) -> None:
        """Queue what `work` does on the device."""
        ...

    def mark(self) -> Any:
        """The end of what has been queued so far."""
        ...

    def after(self, mark: Any) -> None:
        """What is queued from now on begins when `mark`, of any lane, has been reached."""
        ...

    def finish(self) -> None:
        """Have the host wait for all of it."""
        ...


class CudaLane:
    """A stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], object]) -> None:
        """See `Lane`."""
        with torch.cuda.stream(self._stream):
            work()

    def mark(self) -> torch.cuda.Event:
        """See `Lane`."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def after(self, mark: torch.cuda.Event) -> None:
        """See `Lane`."""
        self._stream.wait_event(mark)

    def finish(self) -> None:
        """See `Lane`."""
        self._stream.synchronize()


@dataclass(frozen=True)
class Piece:
    """Rows `begin` to `end` (of the blocks that move) of one part of the pool."""

    part: int
    begin: int
    end: int


@dataclass(frozen=True)
class Chunk:
    """What is copied at once: elements `begin` to `end` of the host pool, and the pieces that lie there in this order."""

    begin: int
    end: int
    pieces: tuple[Piece, ...]


def plan(widths: Sequence[int], rows: int, limit: int) -> list[Chunk]:
    """Cut a host pool, in which `rows` rows of each part lie together and part follows part, into chunks.

    Args:
        widths: elements of one row of each part.
        limit: most elements of a chunk; at least the widest row.
    """
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    begin = end = 0
    for part, width in enumerate(widths):
        row = 0
        while row < rows:
            count = min(rows - row, (limit - (end - begin)) // width)
            if count:
                pieces.append(Piece(part, row, row + count))
                row, end = row + count, end + count * width
            else:
                chunks.append(Chunk(begin, end, tuple(pieces)))
                pieces, begin = [], end
    if pieces:
        chunks.append(Chunk(begin, end, tuple(pieces)))
    return chunks


class KVTransfer:
    """Moves blocks of one pool.

    Args:
        compute: where the model runs, and so whatever last touched the pool.
        copies: runs beside it.
        stage: see `Stage`.
        limit: bytes of a staging buffer.
    """

    def __init__(self, compute: Lane, copies: Lane, stage: Stage, limit: int = STAGING_BYTES) -> None:
        self._compute = compute
        self._copies = copies
        self._stage = stage
        self._limit = limit

    def save(self, parts: Sequence[Tensor], blocks: Tensor, host: Tensor) -> None:
        """Copy `blocks` of every part to the host; when this returns, they are there.

        Args:
            parts: [num_blocks, width] each.
            blocks: [n] int64, on the device.
            host: flat, pinned: n rows of the first part, then n of the second, and so on.
        """
        compute, copies = self._compute, self._copies
        staging, chunks = self._staging(parts, len(blocks))
        free: list[Any] = [None, None]
        try:
            for turn, chunk in enumerate(chunks):
                buffer = staging[turn % 2]
                if free[turn % 2] is not None:
                    compute.after(free[turn % 2])
                compute.run(partial(_gather, parts, blocks, chunk, buffer))
                copies.after(compute.mark())
                copies.run(partial(_copy, buffer[: chunk.end - chunk.begin], host[chunk.begin : chunk.end]))
                free[turn % 2] = copies.mark()
        finally:
            # Whoever gives the pool or the staging buffers back does so after this: nothing reads them any more.
            copies.finish()

    def restore(self, parts: Sequence[Tensor], blocks: NDArray[np.int64], host: Tensor) -> None:
        """Copy the host's rows into the parts, in the order of what the model runs next; the host does not wait.

        Args:
            parts: [num_blocks, width] each.
            blocks: [n], where each saved row goes; negative: nowhere.
            host: as `save` left it, n rows of each part; it must not be written to but by the next `save`.
        """
        compute, copies = self._compute, self._copies
        staging, chunks = self._staging(parts, len(blocks))
        targets = _Targets(blocks, parts[0].device)
        free: list[Any] = [None, None]
        # What was in the staging memory before may still be read there.
        copies.after(compute.mark())
        try:
            for turn, chunk in enumerate(chunks):
                buffer = staging[turn % 2]
                if free[turn % 2] is not None:
                    copies.after(free[turn % 2])
                copies.run(partial(_copy, host[chunk.begin : chunk.end], buffer[: chunk.end - chunk.begin]))
                compute.after(copies.mark())
                compute.run(partial(_scatter, parts, targets, chunk, buffer))
                free[turn % 2] = compute.mark()
        except BaseException:
            # A copy that nothing waits for would write into memory that is somebody else's by then.
            copies.finish()
            raise

    def _staging(self, parts: Sequence[Tensor], rows: int) -> tuple[tuple[Tensor, Tensor], list[Chunk]]:
        """Two buffers, as large as there is room for, and the chunks that fit into one."""
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


class _Targets:
    """Where saved rows go, and which of them go anywhere."""

    def __init__(self, blocks: NDArray[np.int64], device: torch.device) -> None:
        self._blocks = blocks
        self._device = device
        self._all = upload(blocks, device)
        self._whole = bool((blocks >= 0).all())

    def of(self, piece: Piece) -> tuple[Tensor, Tensor | None]:
        """[m] blocks, and [m] the piece's rows that go there; None: every row."""
        if self._whole:
            return self._all[piece.begin : piece.end], None
        kept = upload(np.flatnonzero(self._blocks[piece.begin : piece.end] >= 0), self._device)
        return self._all[piece.begin : piece.end].index_select(0, kept), kept


def _gather(parts: Sequence[Tensor], blocks: Tensor, chunk: Chunk, buffer: Tensor) -> None:
    for piece, rows in _rows(parts, chunk, buffer):
        torch.index_select(parts[piece.part], 0, blocks[piece.begin : piece.end], out=rows)


def _scatter(parts: Sequence[Tensor], targets: _Targets, chunk: Chunk, buffer: Tensor) -> None:
    for piece, rows in _rows(parts, chunk, buffer):
        blocks, kept = targets.of(piece)
        parts[piece.part].index_copy_(0, blocks, rows if kept is None else rows.index_select(0, kept))


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _rows(parts: Sequence[Tensor], chunk: Chunk, buffer: Tensor) -> list[tuple[Piece, Tensor]]:
    """The chunk's pieces, each with its rows of the staging buffer."""
    found, begin = [], 0
    for piece in chunk.pieces:
        width = parts[piece.part].shape[1]
        end = begin + (piece.end - piece.begin) * width
        found.append((piece, buffer[begin:end].view(-1, width)))
        begin = end
    return found
