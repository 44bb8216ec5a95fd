"""Memory of equal blocks on a device, one host pool next to it, and the copies between them.

Part-major: the blocks of one part (K of one layer, a state of one layer) are contiguous, because gathering contiguous rows
is many times faster than strided ones (13 times, for 8 kB rows on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory.buffers import upload
from rollout.engine.memory.host_pool import HostBlocks, HostPool
from rollout.engine.memory.kv_transfer import KVTransfer
from rollout.engine.memory.streams import CudaStream, current_stream

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], list[Tensor]]
"""Makes a flat device tensor of each of these sizes; raises `torch.OutOfMemoryError` when it cannot."""


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Zeros of each of these sizes: a masked position has weight 0, and 0 x NaN of uninitialised memory would be NaN.

    On a CPU the pages are only mapped when first written.
    """
    numel = sum(sizes)
    if device.type == "cpu" and numel:
        whole = torch.from_numpy(np.zeros(numel * dtype.itemsize, np.uint8)).view(dtype)
    else:
        whole = torch.zeros(numel, dtype=dtype, device=device)
    return list(whole.split_with_sizes(list(sizes)))


class BlockPool:
    """`num_blocks` blocks of several parts, or none on the device after `drop` or `save`.

    Args:
        widths: elements of one block in each part.
        allocate: makes the parts.
        release: gives their memory back, after they were dropped; None: dropping them does.
    """

    def __init__(
        self,
        widths: Sequence[int],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate = zeros,
        release: Callable[[], object] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        self._widths = list(widths)
        self._allocate, self._release = allocate, release
        self._parts: list[Tensor] = []
        self._held = False
        self._host = HostPool(dtype, pinned=device.type == "cuda")
        self._saved: NDArray[np.int32] | None = None
        self._stage = partial(torch.empty, dtype=dtype, device=device)
        self._copies = CudaStream(torch.cuda.Stream(device)) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._tier = self._host_blocks(0)
        self.materialize(num_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all parts."""
        return sum(self._widths) * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """Bytes held on the device now."""
        return self.num_blocks * self.block_bytes if self._held else 0

    @property
    def host_bytes(self) -> int:
        """Bytes on the host: of the pool that is kept for the next suspend, and of the slots for evicted blocks."""
        return self._host.nbytes + self._tier.nbytes

    @property
    def host_slots(self) -> int:
        """Slots on the host for single blocks (`keep_host_blocks`)."""
        return self._tier.num_blocks

    @property
    def on_device(self) -> bool:
        """Whether the pool can be read and written."""
        return self._held

    def materialize(self, num_blocks: int) -> None:
        """Allocate device memory for `num_blocks` blocks, content undefined, after `drop` or `save`.

        Raises:
            torch.OutOfMemoryError: not enough device memory; nothing has changed.
        """
        sizes = [num_blocks * width for width in self._widths]
        # The blocks of a model without attention layers have no content.
        flat = self._allocate(sizes, self.dtype, self.device) if any(sizes) else zeros(sizes, self.dtype, self.device)
        self._parts = [part.view(num_blocks, width) for part, width in zip(flat, self._widths, strict=True)]
        self.num_blocks, self._held = num_blocks, True

    def drop(self) -> int:
        """Free the device memory, losing its content; returns the bytes freed."""
        freed = self.device_bytes
        self._tier.release(current_stream(self.device))
        self._parts, self._held = [], False
        if self._release is not None:
            self._release()
        return freed

    def keep_host_blocks(self, num_blocks: int) -> None:
        """Have `num_blocks` slots on the host, for single blocks that `copy_blocks` moves.

        Raises:
            HostMemoryError: the host has not so much (pinned) memory.
        """
        self._tier = self._host_blocks(num_blocks)

    def release_host_blocks(self) -> None:
        """Give up the slots on the host and what they hold, after `drop`."""
        self._tier = self._host_blocks(0)

    def _host_blocks(self, num_blocks: int) -> HostBlocks:
        on_cuda = self.device.type == "cuda"
        copies = CudaStream(torch.cuda.Stream(self.device)) if on_cuda and num_blocks else None  # type: ignore[no-untyped-call]
        return HostBlocks(num_blocks, self._widths, self.dtype, pinned=on_cuda, stage=self._stage, copies=copies)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `source` to block `destination` for each pair, in this order; `~s` is slot s on the host.

        Of pairs side by side that stay on the device, all are read before any is written.
        """
        for (from_host, to_host), run in groupby(pairs, lambda pair: (pair[0] < 0, pair[1] < 0)):
            # What is written twice keeps the last.
            last = dict(pair[::-1] for pair in run)
            sources, targets = list(last.values()), list(last)
            if from_host or to_host:
                blocks, slots = (targets, sources) if from_host else (sources, targets)
                move = self._tier.load if from_host else self._tier.offload
                index = upload(np.array(blocks, np.int64), self.device)
                move(current_stream(self.device), self._parts, index, [~slot for slot in slots])
            else:
                index, to = (upload(np.array(each, np.int64), self.device) for each in (sources, targets))
                for part in self._parts:
                    part.index_copy_(0, to, part.index_select(0, index))

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Fill `blocks` with zeros."""
        index = upload(np.array(blocks, np.int64), self.device)
        for part in self._parts:
            part.index_fill_(0, index, 0)

    # --- suspend and resume -------------------------------------------------------------------------------------

    def prepare_save(self, num_blocks: int) -> None:
        """Have host memory for so many blocks pinned in the background, for CUDA; `save` waits for it."""
        self._host.prepare(num_blocks * sum(self._widths), partial(torch.cuda.device, self.device))

    def save(self, blocks: NDArray[np.int32]) -> int:
        """Copy `blocks` into the host pool and free the device memory; returns the bytes copied.

        Raises:
            HostMemoryError: the host has no room for them; nothing has changed.
        """
        self._host.grow(len(blocks) * sum(self._widths), self.num_blocks * sum(self._widths))
        index = upload(blocks.astype(np.int64), self.device)
        if (transfer := self._transfer()) is not None:
            transfer.save(self._parts, index, self._host.chunks)
        else:
            for part, rows in zip(self._parts, self._on_host(len(blocks)), strict=True):
                torch.index_select(part, 0, index, out=rows)
        self._saved = blocks.copy()
        self.drop()
        return len(blocks) * self.block_bytes

    def restore(self, blocks: NDArray[np.int32] | None, mapping: NDArray[np.int32] | None = None) -> int:
        """Copy the saved blocks into the (materialised) pool; returns the bytes copied.

        Args:
            blocks: ids still wanted, a subset of the saved ones; None: those that `mapping` keeps.
            mapping: [old num_blocks] new id of each old block, negative for dropped ones; None: ids are unchanged.
        """
        if self._saved is None:
            raise RuntimeError("restore() without save(): there is nothing in the host pool")
        targets = self._saved.copy() if mapping is None else mapping[self._saved]
        if blocks is not None:
            targets[~np.isin(self._saved, blocks)] = -1
        kept = np.flatnonzero(targets >= 0)
        # From here on blocks have their new ids, even if a copy fails and routes are still read from the host.
        self._saved = targets
        if (transfer := self._transfer()) is not None:
            transfer.restore(self._parts, targets.astype(np.int64), self._host.chunks)
        else:
            index = torch.from_numpy(targets[kept].astype(np.int64))
            rows = None if len(kept) == len(self._saved) else torch.from_numpy(kept)
            for part, saved in zip(self._parts, self._on_host(len(self._saved)), strict=True):
                part.index_copy_(0, index, saved if rows is None else saved[rows])
        self._saved = None
        return len(kept) * self.block_bytes

    def discard_saved(self) -> None:
        """Forget what `save` copied: its blocks have been given up."""
        self._saved = None

    def _transfer(self) -> KVTransfer | None:
        """Moves blocks by streams; None: the device has none."""
        return None if self._copies is None else KVTransfer(current_stream(self.device), self._copies, self._stage)

    def _on_host(self, num_blocks: int) -> Iterator[Tensor]:
        """The parts of `num_blocks` saved blocks in the host pool of a CPU, which is in one piece."""
        flat = self._host.span(0, num_blocks * sum(self._widths))
        for part, width in zip(
            flat.split_with_sizes([num_blocks * width for width in self._widths]), self._widths, strict=True
        ):
            yield part.view(num_blocks, width)
