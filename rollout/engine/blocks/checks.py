"""Checks the invariants of a block allocator, its prefix index, pages and host tier (for tests; visits everything)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rollout.engine.blocks.allocator import BlockAllocator


def check_blocks(allocator: BlockAllocator, holders: Iterable[Sequence[int]], seen: Iterable[list[int]] = ()) -> None:
    """Check against the block tables of all holders, and what of them each sees through a window.

    Raises:
        AssertionError: names the blocks that disagree.
    """
    tables, count, held = list(holders), allocator.num_blocks, allocator.ref_count
    expected = np.zeros(count, np.int32)
    for table in tables:
        np.add.at(expected, np.asarray(table, np.int32), 1)
    wrong = np.flatnonzero(expected != held)
    assert not len(wrong), f"blocks {wrong.tolist()}: reference counts {held[wrong]} != {expected[wrong]}"
    free, cached = allocator.free_and_cached()
    states = np.zeros(count, np.int32)
    np.add.at(states, np.asarray(free, np.int32), 1)
    np.add.at(states, np.asarray(cached, np.int32), 1)
    states += held > 0
    assert (states == 1).all(), f"blocks {np.flatnonzero(states != 1).tolist()} are not exactly one of free/held/cached"
    assert not allocator.index.registered[free].any(), "a free block is registered"
    assert allocator.index.registered[cached].all(), "a cached block is not registered"
    allocator.index.check(tables)
    if allocator.host is not None:
        allocator.host.check()
    if allocator.pages is not None:
        allocator.pages.check((held > 0) | allocator.index.registered, seen)
