"""State pool and state slots of one engine, moved together on suspend and resume."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.engine.blocks.states import StateSlots
from rollout.engine.memory.block_pool import BlockMemory
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.errors import EngineStateError


class StateMemory:
    """The memory of `pool` and who holds which slot of it.

    Attributes:
        num_slots: as configured; `pool.num_blocks` is the present number.
    """

    def __init__(self, pool: BlockMemory) -> None:
        self.pool = pool
        self.slots = StateSlots(pool.num_blocks)
        self.num_slots = pool.num_blocks
        self._moved: NDArray[np.int32] | None = None

    def save(self) -> int:
        """Copy held slots and snapshots to the host and free the device memory; returns the bytes copied."""
        return self.pool.save(self.slots.live_slots())

    def materialize(self, least: int) -> None:
        """Allocate device memory for all slots, or for fewer, by halves, if it is short.

        Args:
            least: slots that the largest unfinished group needs.

        Raises:
            EngineStateError: no room for `least`.
        """
        size = self.num_slots
        while True:
            try:
                self.pool.materialize(size)
            except torch.OutOfMemoryError as exc:
                if size <= least:
                    raise EngineStateError(
                        f"no device memory for {least} state slots ({least * self.pool.block_bytes / 2**20:.1f} MiB), which "
                        "the largest unfinished group needs; free memory and call resume() again, or build another engine"
                    ) from exc
                size = max(least, size // 2)
            else:
                return

    def follow(self, scheduler: Scheduler) -> None:
        """Make slots and sequences agree with the pool's size; sequences hold no more than there are."""
        self._moved = self.slots.resize(self.pool.num_blocks)
        if self._moved is not None:
            scheduler.remap_states(self._moved)

    def restore(self) -> int:
        """Copy what was saved back into the pool, after `follow`; returns the bytes copied."""
        return self.pool.restore(self.slots.live_slots() if self._moved is None else None, self._moved)
