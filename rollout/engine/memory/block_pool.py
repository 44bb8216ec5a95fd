"""A pool of equally large blocks in device memory, with host memory to which blocks can be copied.

A block has several parts, such as K of one layer or a recurrent state of one layer. The blocks of one part are contiguous,
because gathering contiguous rows is faster than gathering strided rows (13 times as fast for 8 kB rows on a CPU).
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
"""A function that allocates one flat device tensor per given number of elements, or raises `torch.OutOfMemoryError`."""


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Allocate a tensor of zeros for each of `sizes`, which are numbers of elements.

    Uninitialised memory may hold NaN, and a masked position, which has weight 0, would contribute 0 x NaN = NaN. On a CPU,
    the zeros of numpy take memory only once they are overwritten.
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
    """The functions that allocate and release one pool's device memory."""

    allocate: Allocate = zeros
    release: Callable[[], object] = _nothing
    """A function that releases the memory, called after the pool has dropped its tensors."""


class BlockPool:
    """A pool of `num_blocks` blocks with several parts each. After `drop` or `save` it has no device memory.

    Args:
        widths: number of elements that one block has in each part.
        memory: functions that allocate and release the device memory.
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
        """The size of one block in bytes, over all parts."""
        return sum(self._widths) * self.dtype.itemsize

    @property
    def device_bytes(self) -> int:
        """The device memory that the pool currently takes, in bytes."""
        return self.num_blocks * self.block_bytes if self._held else 0

    @property
    def host_bytes(self) -> int:
        """The size in bytes of the host memory: the host slots, and the memory of saved blocks, which is kept for reuse."""
        return self._host.nbytes + self._tier.nbytes

    @property
    def host_slots(self) -> int:
        """The number of slots on the host for single blocks; see `keep_host_blocks`."""
        return self._tier.num_slots

    @property
    def on_device(self) -> bool:
        """Whether the pool has device memory, and can be read and written."""
        return self._held

    def materialize(self, num_blocks: int) -> None:
        """Allocate device memory for `num_blocks` blocks with undefined content, after `drop` or `save`.

        Raises:
            torch.OutOfMemoryError: the device lacks the memory; nothing has changed.
        """
        sizes = [num_blocks * width for width in self._widths]
        # Use `zeros` for a model without attention layers: its blocks are empty, so no device memory must be allocated.
        flat = self._allocate(sizes, self.dtype, self.device) if any(sizes) else zeros(sizes, self.dtype, self.device)
        self._parts = [part.view(num_blocks, width) for part, width in zip(flat, self._widths, strict=True)]
        self.num_blocks, self._held = num_blocks, True

    def drop(self) -> int:
        """Free the device memory and lose its content. Return the number of bytes freed."""
        freed = self.device_bytes
        self._parts, self._held = [], False
        self._release()
        return freed

    def keep_host_blocks(self, num_blocks: int) -> None:
        """Allocate `num_blocks` slots on the host, to and from which `copy_blocks` can copy single blocks.

        Raises:
            HostMemoryError: the host lacks the memory, which must be pinned for CUDA.
        """
        self._tier.grow(num_blocks, num_blocks)

    def release_host_blocks(self) -> None:
        """Free the host slots and lose their content. Call `drop` first."""
        self._tier = self._host_blocks()

    def _host_blocks(self) -> HostBlocks:
        cuda = self.device.type == "cuda"
        stage = partial(torch.empty, dtype=self.dtype, device=self.device) if cuda else None
        return HostBlocks(self._widths, self.dtype, pinned=cuda, stage=stage)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy a block for each pair (source, destination), in this order. A negative number `~s` is slot s on the host.

        In a run of consecutive pairs between device blocks, all sources are read before any destination is written.
        """
        for (from_host, to_host), run in groupby(pairs, lambda pair: (pair[0] < 0, pair[1] < 0)):
            # Keep only the last write to each block: with repeated indices, `index_copy_` would write them in any order.
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
        """Fill all parts of the given blocks with zeros."""
        index = upload(np.array(blocks, np.int64), self.device)
        for part in self._parts:
            part.index_fill_(0, index, 0)

    # --- suspend and resume -------------------------------------------------------------------------------------

    def save(self, blocks: NDArray[np.int32]) -> int:
        """Copy `blocks` to the host and free the device memory. Return the number of bytes copied.

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
        """Copy the saved blocks back into the pool, after `materialize`. Return the number of bytes copied.

        Args:
            blocks: old ids of the saved blocks to restore; None for all blocks that `mapping` keeps.
            mapping: new id of each old block, negative for a block to drop; None if ids do not change.
        """
        if self._saved is None:
            raise RuntimeError("restore() without save(): nothing was copied to the host")
        targets = self._saved.copy() if mapping is None else mapping[self._saved]
        if blocks is not None:
            targets[~np.isin(self._saved, blocks)] = -1
        kept = np.flatnonzero(targets >= 0)
        # Store the blocks' new ids before copying: if the copy fails, expert routes are read from the host by new ids.
        self._saved = targets
        index = upload(targets[kept].astype(np.int64), self.device)
        self._host.load(self._parts, index, kept)
        self._saved = None
        return len(kept) * self.block_bytes

    def discard_saved(self) -> None:
        """Drop the blocks that `save` has copied to the host, because they are no longer needed."""
        self._saved = None
