"""Slots for the recurrent states of a model: one per running sequence, the others hold snapshots for the prefix cache.

A snapshot is the state after the last token of a registered KV block, and belongs to that block: it is found by the
block's hash, under the same policy version and variant, and is forgotten with the block. Slots that no sequence needs hold
snapshots; the least recently used one makes room.

Always true here (`check()` proves it): a slot is exactly one of *free*, *held* by a sequence, or a *snapshot*.

Handles slot and block ids, no tensors. Copies are collected as moves, executed by the caller before the next forward and
after each update, all sources before any destination.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from rollout.engine.blocks.index import IntArray

NO_SLOT = -1
ZERO = -1
"""Source of a move that zeroes its destination."""

Move = tuple[int, int]
"""(source slot or `ZERO`, destination slot)."""


class StateSlots:
    """Owners of `num_slots` slots.

    Attributes:
        hits: prefixes whose snapshot was taken up.
        evictions: snapshots that made room.
    """

    def __init__(self, num_slots: int) -> None:
        self.hits = 0
        self.evictions = 0
        self._reset(num_slots)

    def _reset(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free: list[int] = list(range(num_slots - 1, -1, -1))
        self._snapshots: OrderedDict[int, int] = OrderedDict()
        self._sources: dict[int, int] = {}

    # --- queries ------------------------------------------------------------------------------------------------

    @property
    def num_snapshots(self) -> int:
        """Number of slots that hold a snapshot."""
        return len(self._snapshots)

    @property
    def num_held(self) -> int:
        """Number of slots that running sequences hold."""
        return self.num_slots - len(self._free) - len(self._snapshots)

    def snapshots(self) -> dict[int, int]:
        """Slot of each snapshot by its block, least recently used first."""
        return dict(self._snapshots)

    def deepest(self, blocks: Sequence[int], most: int) -> int:
        """How many of a chain of blocks, at most `most`, end at a snapshot: the longest such prefix of the chain."""
        return next(
            (count for count in range(min(most, len(blocks)), 0, -1) if blocks[count - 1] in self._snapshots), 0
        )

    # --- slots of sequences -------------------------------------------------------------------------------------

    def allocate(self, source: int = ZERO) -> int:
        """Hold a slot that starts as a copy of slot `source`, or as zeros.

        Raises:
            RuntimeError: sequences hold all slots.
        """
        slot = self._take()
        if slot is None:
            raise RuntimeError(f"running sequences hold all {self.num_slots} state slots")
        self._move(source, slot)
        return slot

    def allocate_at(self, block: int) -> int:
        """Hold a slot that starts as the snapshot of `block`, which becomes the most recently used."""
        self._snapshots.move_to_end(block)
        self.hits += 1
        return self.allocate(self._snapshots[block])

    def release(self, slot: int) -> None:
        """Free a slot that a sequence holds."""
        self._sources.pop(slot, None)
        self._free.append(slot)

    # --- snapshots ----------------------------------------------------------------------------------------------

    def keep(self, block: int, slot: int) -> None:
        """Keep the state in `slot` as that after `block`, if there is room for it."""
        if block in self._snapshots:
            self._snapshots.move_to_end(block)
        elif (taken := self._take()) is not None:
            self._snapshots[block] = taken
            self._move(slot, taken)

    def has(self, block: int) -> bool:
        """Whether there is a snapshot of this block."""
        return block in self._snapshots

    def evict_next(self, block: int) -> None:
        """Put the snapshot of a block in front of the others that make room; nothing to do where there is none."""
        if block in self._snapshots:
            self._snapshots.move_to_end(block, last=False)

    def forget(self, block: int) -> None:
        """Forget the snapshot of a block that is not found any more; nothing to do where there is none."""
        slot = self._snapshots.pop(block, None)
        if slot is not None:
            self.release(slot)

    def forget_all(self) -> None:
        """Forget every snapshot."""
        for block in list(self._snapshots):
            self.forget(block)

    # --- moves --------------------------------------------------------------------------------------------------

    def take_moves(self) -> tuple[Move, ...]:
        """Moves to execute now, in any order but all read before any is written; they are forgotten here."""
        moves = tuple((source, target) for target, source in self._sources.items())
        self._sources.clear()
        return moves

    def _move(self, source: int, target: int) -> None:
        # The content of a slot that is itself still to be written is that of its own source.
        self._sources[target] = self._sources.get(source, source)

    def _take(self) -> int | None:
        if not self._free:
            if not self._snapshots:
                return None
            self.forget(next(iter(self._snapshots)))
            self.evictions += 1
        return self._free.pop()

    # --- suspend and resume -------------------------------------------------------------------------------------

    def live_slots(self) -> IntArray:
        """Ids of all held slots and snapshots, ascending: those that a suspend has to keep."""
        live = np.ones(self.num_slots, np.bool_)
        live[self._free] = False
        return np.flatnonzero(live).astype(np.int32)

    def resize(self, num_slots: int) -> IntArray | None:
        """Change the number of slots, moving live ones to the lowest ids; forgets snapshots that do not fit.

        Returns:
            [old num_slots] int32, the new id of each old slot (`NO_SLOT` for those not kept); None if nothing moved.

        Raises:
            RuntimeError: sequences hold more than `num_slots`.
        """
        if num_slots == self.num_slots:
            return None
        while len(self.live_slots()) > num_slots:
            if not self._snapshots:
                raise RuntimeError(f"resize({num_slots}): sequences hold {self.num_held} state slots")
            self.forget(next(iter(self._snapshots)))
        live, snapshots = self.live_slots(), self._snapshots
        mapping = np.full(self.num_slots, NO_SLOT, np.int32)
        mapping[live] = np.arange(len(live), dtype=np.int32)
        self._reset(num_slots)
        self._free = list(range(num_slots - 1, len(live) - 1, -1))
        self._snapshots = OrderedDict((block, int(mapping[slot])) for block, slot in snapshots.items())
        return mapping

    def remap_blocks(self, mapping: IntArray) -> None:
        """Rewrite the blocks of the snapshots for new block ids."""
        self._snapshots = OrderedDict((int(mapping[block]), slot) for block, slot in self._snapshots.items())

    def start_over(self) -> None:
        """Free every slot."""
        self._reset(self.num_slots)

    def check(self, held: Iterable[int]) -> None:
        """Check the invariants against the slots of all running sequences.

        Raises:
            AssertionError: names the slots that disagree.
        """
        slots = sorted([*self._free, *self._snapshots.values(), *held])
        assert slots == list(range(self.num_slots)), f"slots {slots} are not each free, held or a snapshot, once"
        assert not self._sources, f"moves {self._sources} were not executed"
