"""The invariants of a scheduler, its blocks and its prefix cache; visits everything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.blocks.host import HostCache
from rollout.engine.blocks.index import NO_BLOCK, PrefixIndex
from rollout.engine.blocks.pages import NO_PAGE, BlockPages
from rollout.engine.blocks.states import NO_SLOT
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.scheduling.sequences import rank


def check_scheduler(scheduler: Scheduler) -> None:
    table, rows = scheduler.table, scheduler.by_row
    check_allocator(scheduler.allocator, [table.held(row).tolist() for row in rows])
    states = scheduler.allocator.states
    held = [slot for row in rows if (slot := table.state.item(row)) != NO_SLOT]
    slots = sorted([*states._free, *states.snapshots.values(), *held])
    assert slots == list(range(states.num_slots)), f"slots {slots} are not each free, held or a snapshot, once"
    assert not states._sources, f"moves {states._sources} were not executed"
    for queue in (scheduler.waiting, scheduler.parked, scheduler.decoding, scheduler.prefilling):
        assert queue == sorted(queue, key=rank), "a queue is out of order"
    for sequence in (*scheduler.waiting, *scheduler.parked):
        assert not sequence.active, f"{sequence.key} waits and owns a row"
        assert sequence in scheduler.queue_of(sequence), f"{sequence.key} waits for another variant"
    active = (*scheduler.decoding, *scheduler.prefilling)
    for sequence in active:
        assert sequence.variant == scheduler.variant, f"{sequence.key} runs under another variant"
    owners = [each for leader in active for each in (leader, *leader.siblings)]
    assert {each.row: each for each in owners} == rows, "rows and queues disagree"
    for sequence in scheduler.decoding:
        row = sequence.row
        assert table.length[row] == table.computed[row] + 1, f"{sequence.key} decodes from a gap"


def check_allocator(allocator: BlockAllocator, holders: Sequence[Sequence[int]]) -> None:
    """`holders`: the block table of each holder."""
    expected = np.zeros_like(allocator.ref_count)
    for table in holders:
        np.add.at(expected, np.asarray(table, np.int32), 1)
    wrong = np.flatnonzero(expected != allocator.ref_count)
    assert not len(wrong), f"blocks {wrong.tolist()}: counts {allocator.ref_count[wrong]} != {expected[wrong]}"
    free, cached = allocator._free, [*allocator._lru]
    places = sorted([*free, *cached, *np.flatnonzero(expected).tolist()])
    assert places == list(range(len(expected))), f"{places}: blocks are not exactly one of free/held/cached"
    assert not allocator.index.registered[free].any(), "a free block is registered"
    assert allocator.index.registered[cached].all(), "a cached block is not registered"
    _check_index(allocator.index, holders)
    _check_host(allocator.host)
    _check_pages(allocator.pages, (expected > 0) | allocator.index.registered)


def _check_index(index: PrefixIndex, holders: Iterable[Sequence[int]]) -> None:
    for table in holders:
        for child, parent in zip(table[1:], table, strict=False):
            if index.registered[child]:
                assert index._parent[child] == parent, f"block {child} is held without its parent"
    assert sorted(index.current.values()) == np.flatnonzero(index.registered).tolist(), "the index names other blocks"
    for block_hash, block in index.current.items():
        assert index._hash[block] == block_hash, f"block {block} is found under a foreign hash"


def _check_host(host: HostCache) -> None:
    slots = [block.slot for block in host.blocks.values()]
    assert sorted([*host._free, *slots]) == list(range(host.num_slots)), "a slot is not free or of one block"
    for key, block in host.blocks.items():
        assert key == block.block_hash, "a block is found under a foreign hash"


def _check_pages(pages: BlockPages, used: np.ndarray) -> None:
    given = pages.page_of[pages.page_of != NO_PAGE].tolist()
    assert sorted([*pages._free, *given]) == list(range(pages.num_pages)), "a page is not one of free and some block's"
    assert sorted(pages._free) == np.flatnonzero(~pages._used).tolist(), "a free page is marked as used"
    assert pages.page_of[NO_BLOCK] == NO_PAGE, "no block has a page"
    wrong = np.flatnonzero((pages.page_of[:-1] != NO_PAGE) != used)
    assert not len(wrong), f"blocks {wrong.tolist()} are in use and lack pages, or the other way about"
