"""Memory of equal blocks on a device, and host memory next to it.

The layout is part-major: the blocks of one part (K of one layer, a state of one layer) are contiguous, because gathering
contiguous rows is many times faster than strided ones (13 times, for 8 kB rows on a CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory.buffers import upload
from rollout.engine.memory.host_blocks import HostBlocks

Allocate = Callable[[Sequence[int], torch.dtype, torch.device], list[Tensor]]
"""A function that makes a flat device tensor of each given size; raises `torch.OutOfMemoryError` when it cannot."""


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Allocate zeros of each size. A masked position has weight 0, and 0 x NaN from uninitialised memory would be NaN.

    On a CPU the pages are only mapped when first written.
    """
    numel = sum(sizes)
    if device.type == "cpu" and numel:
        whole = torch.from_numpy(np.zeros(numel * dtype.itemsize, np.uint8)).view(dtype)
    else:
        whole = torch.zeros(numel, dtype=dtype, device=device)
    return list(whole.split_with_sizes(list(sizes)))


def _nothing() -> None: ...


@dataclass(frozen=True)
class PoolMemory:
    """Functions that allocate and return one pool's device memory."""

    allocate: Allocate = zeros
    release: Callable[[], object] = _nothing
    """The function to call after the tensors were dropped."""


class BlockPool:
    """`num_blocks` blocks of several parts, or none on the device after `drop` or `save`.

    Args:
        widths: elements of one block in each part.
        memory: makes the parts.
    """

    def __init__(
        self,
        widths: Sequence[int],
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: PoolMemory = PoolMemory(),
    ) -> None:
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        self._widths = list(widths)
        self._allocate, self._release = memory.allocate, memory.release
        self._parts: list[Tensor] = []
        self._held = False
        self._host, self._tier = self._host_blocks(), self._host_blocks()
        self._saved: NDArray[np.int32] | None = None
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
        """Bytes on the host: the pool's copy, kept for the next suspend, and the slots for evicted blocks."""
        return self._host.nbytes + self._tier.nbytes

    @property
    def host_slots(self) -> int:
        """Slots on the host for single blocks (`keep_host_blocks`)."""
        return self._tier.num_slots

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
        # Allocate empty tensors for a model without attention layers, whose blocks hold nothing.
        flat = self._allocate(sizes, self.dtype, self.device) if any(sizes) else zeros(sizes, self.dtype, self.device)
        self._parts = [part.view(num_blocks, width) for part, width in zip(flat, self._widths, strict=True)]
        self.num_blocks, self._held = num_blocks, True

    def drop(self) -> int:
        """Free the device memory, losing its content; returns the bytes freed."""
        freed = self.device_bytes
        self._parts, self._held = [], False
        self._release()
        return freed

    def keep_host_blocks(self, num_blocks: int) -> None:
        """Allocate `num_blocks` slots on the host, for single blocks that `copy_blocks` moves.

        Raises:
            HostMemoryError: the host lacks the (pinned) memory.
        """
        self._tier.grow(num_blocks, num_blocks)

    def release_host_blocks(self) -> None:
        """Free the slots on the host and their content; call `drop` first."""
        self._tier = self._host_blocks()

    def _host_blocks(self) -> HostBlocks:
        cuda = self.device.type == "cuda"
        stage = partial(torch.empty, dtype=self.dtype, device=self.device) if cuda else None
        return HostBlocks(self._widths, self.dtype, pinned=cuda, stage=stage)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy block `source` to block `destination` for each pair, in this order; `~s` is slot s on the host.

        Consecutive pairs within the device are all read before any is written.
        """
        for (from_host, to_host), run in groupby(pairs, lambda pair: (pair[0] < 0, pair[1] < 0)):
            # Keep only the last write to each block.
            last = dict(pair[::-1] for pair in run)
            sources, targets = list(last.values()), list(last)
            if from_host or to_host:
                blocks, slots = (targets, sources) if from_host else (sources, targets)
                move = self._tier.load if from_host else self._tier.offload
                index = upload(np.array(blocks, np.int64), self.device)
                move(self._parts, index, [~slot for slot in slots])
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

    def save(self, blocks: NDArray[np.int32]) -> int:
        """Copy `blocks` to the host and free the device memory; returns the bytes copied.

        Raises:
            HostMemoryError: the host lacks the memory; nothing has changed.
        """
        self._host.grow(len(blocks), self.num_blocks)
        index = upload(blocks.astype(np.int64), self.device)
        self._host.offload(self._parts, index, range(len(blocks)))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._saved = blocks.copy()
        self.drop()
        return len(blocks) * self.block_bytes

    def restore(self, blocks: NDArray[np.int32] | None, mapping: NDArray[np.int32] | None = None) -> int:
        """Copy the saved blocks into the (materialised) pool; returns the bytes copied.

        Args:
            blocks: ids to restore, a subset of the saved ones; None: all that `mapping` keeps.
            mapping: [old num_blocks] new id of each old block, negative for dropped ones; None: ids are unchanged.
        """
        if self._saved is None:
            raise RuntimeError("restore() without save(): nothing was copied to the host")
        targets = self._saved.copy() if mapping is None else mapping[self._saved]
        if blocks is not None:
            targets[~np.isin(self._saved, blocks)] = -1
        kept = np.flatnonzero(targets >= 0)
        # Store the new ids before the copy. They are valid from now on, even if the copy fails and routes are still
        # read from the host.
        self._saved = targets
        index = upload(targets[kept].astype(np.int64), self.device)
        self._host.load(self._parts, index, kept)
        self._saved = None
        return len(kept) * self.block_bytes

    def discard_saved(self) -> None:
        """Drop the saved blocks, which are no longer needed."""
        self._saved = None
