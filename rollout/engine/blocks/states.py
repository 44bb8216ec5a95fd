"""Slots for a model's recurrent states. Each running sequence holds one slot; other slots are snapshots in the prefix cache.

A snapshot is the state after the last token of a registered KV block. It is found through this block, and dropped when the
block is unregistered. If a sequence needs a slot and none is free, the least recently used snapshot is dropped. Models
without recurrent states have no slots.

Always true: a slot is exactly one of *free*, *held* by a sequence, or a *snapshot*.

This module handles slot and block ids, no tensors. It collects copies between slots as moves. The caller executes the moves
before the next forward pass and after each update, reading all sources before writing any destination.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from rollout.engine.blocks.index import IntArray

NO_SLOT = -1
ZERO = -1
"""The source slot of a move that fills its destination with zeros."""

Move = tuple[int, int]
"""A copy between slots: (source slot or `ZERO`, destination slot)."""


class StateSlots:
    """The allocator of `num_slots` state slots. If there are none, sequences hold none and can continue every cached prefix.

    Attributes:
        hits: the number of prefixes that were continued from a snapshot.
        evictions: the number of snapshots that were dropped to make room.
        snapshots: the slot of each snapshot, by block, least recently used first.
    """

    def __init__(self, num_slots: int) -> None:
        self.hits = 0
        self.evictions = 0
        self.num_slots = num_slots
        self.start_over()

    def start_over(self) -> None:
        """Free every slot."""
        self._free: list[int] = list(range(self.num_slots - 1, -1, -1))
        self.snapshots: OrderedDict[int, int] = OrderedDict()
        self._sources: dict[int, int] = {}

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_snapshots(self) -> int:
        """The number of slots that hold a snapshot."""
        return len(self.snapshots)

    @property
    def num_held(self) -> int:
        """The number of slots that running sequences hold."""
        return self.num_slots - len(self._free) - len(self.snapshots)

    def deepest(self, blocks: Sequence[int], most: int) -> int:
        """Return the number of leading `blocks` of a cached chain that a sequence can reuse.

        If the model has recurrent states, the number is at most `most`, and the last reusable block has a snapshot.
        """
        if not self.num_slots:
            return len(blocks)
        return next((count for count in range(min(most, len(blocks)), 0, -1) if blocks[count - 1] in self.snapshots), 0)

    # --- slots of sequences -------------------------------------------------------------------------------------

    def allocate(self, source: int = ZERO) -> int:
        """Allocate a slot that starts as a copy of slot `source`, or as zeros. Return `NO_SLOT` if the model has no states.

        Raises:
            RuntimeError: running sequences hold all slots.
        """
        if not self.num_slots:
            return NO_SLOT
        slot = self._take()
        if slot is None:
            raise RuntimeError(f"running sequences hold all {self.num_slots} state slots")
        self._move(source, slot)
        return slot

    def allocate_at(self, blocks: Sequence[int]) -> int:
        """Allocate a slot that starts as a copy of the snapshot of the last of `blocks`, or as zeros if there are none."""
        if not blocks or not self.num_slots:
            return self.allocate()
        self.snapshots.move_to_end(blocks[-1])
        self.hits += 1
        return self.allocate(self.snapshots[blocks[-1]])

    def release(self, slot: int) -> None:
        """Free the slot of a sequence or of a dropped snapshot. Do nothing for `NO_SLOT`."""
        if slot != NO_SLOT:
            self._sources.pop(slot, None)
            self._free.append(slot)

    # --- snapshots ----------------------------------------------------------------------------------------------

    def keep(self, block: int, slot: int) -> None:
        """Keep a copy of the state in `slot` as the snapshot of `block`, if there is room."""
        if block in self.snapshots:
            self.snapshots.move_to_end(block)
        elif (taken := self._take()) is not None:
            self.snapshots[block] = taken
            self._move(slot, taken)

    def forget(self, block: int) -> None:
        """Drop the snapshot of a block, if the block has one."""
        self.release(self.snapshots.pop(block, NO_SLOT))

    def forget_all(self) -> None:
        """Drop every snapshot."""
        for block in list(self.snapshots):
            self.forget(block)

    # --- copies between slots -----------------------------------------------------------------------------------

    def take_moves(self) -> tuple[Move, ...]:
        """Return and clear the pending copies between slots. Read all sources before writing any destination."""
        moves = tuple((source, target) for target, source in self._sources.items())
        self._sources.clear()
        return moves

    def _move(self, source: int, target: int) -> None:
        # If a pending move is to fill the source slot, copy from that move's source: all sources are read before any write.
        self._sources[target] = self._sources.get(source, source)

    def _take(self) -> int | None:
        if not self._free:
            if not self.snapshots:
                return None
            self.forget(next(iter(self.snapshots)))
            self.evictions += 1
        return self._free.pop()

    # --- suspend and resume -------------------------------------------------------------------------------------

    def live_slots(self) -> IntArray:
        """Return the ids of all held slots and snapshots, ascending. A suspend must keep their content."""
        live = np.ones(self.num_slots, np.bool_)
        live[self._free] = False
        return np.flatnonzero(live).astype(np.int32)
