"""Loads blocks of the prefix cache's host tier into fresh blocks of the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.blocks.host import NOWHERE, HostBlock


def load(allocator: BlockAllocator, blocks: Sequence[HostBlock], parent: int) -> list[int]:
    """Load a chain of blocks, perhaps with a tail; ask `can_allocate` first. They are registered and *pinned*.

    Args:
        parent: the registered block before the first, or `NO_BLOCK`.
    """
    host, index = allocator.host, allocator.index
    assert host is not None
    # Blocks that are evicted for these may take the place of others on the host, not theirs.
    host.take(blocks)
    loaded = allocator.allocate(len(blocks))
    for block, copy in zip(loaded, blocks, strict=True):
        places = zip(copy.slots, allocator.memory_of(block), strict=True)
        allocator.copies += [(~slot, place) for slot, place in places if slot != NOWHERE]
        host.release(copy)
        if len(copy.tokens) < allocator.block_size:
            index.add_tail(block, copy.block_hash, parent, copy.tokens)
        else:
            index.add(block, copy.block_hash, parent, copy.tokens)
        # Without its KV in layers with a window it gives back the memory there.
        allocator.unview(np.asarray([block], np.int32), verified=copy.slots[-1] != NOWHERE)
        parent = block
    return loaded
