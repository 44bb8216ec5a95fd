"""Tests of the lists of parts that a decode step computes: every part once, and a place for its result."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.kernels.decode_parts import SPLIT, DecodeParts, PartList, SharedPrefixes


def items_of(listed: PartList) -> list[tuple[int, int]]:
    """(owner, part) of every item."""
    begins, owners = listed.begins.tolist(), listed.owners.tolist()
    return [(owners[item], item - begins[owners[item]]) for item in range(begins[-1])]


@settings(max_examples=60, deadline=None)
@given(
    positions=st.lists(st.integers(-1, 1500), min_size=1, max_size=7),
    window=st.sampled_from([None, 1, 200, 700]),
    chunk=st.sampled_from([None, 300]),
    spare=st.integers(0, 9),
)
def test_every_part_that_a_row_sees_is_listed_once(positions, window, chunk, spare) -> None:
    expected = []
    for row, last in enumerate(positions):
        first = max(0, last + 1 - (window or last + 1), last // chunk * chunk if chunk else 0)
        parts = range(first // SPLIT, last // SPLIT + 1) if last >= 0 else ()
        expected += [(row, part) for part in range(len(parts))]
    made = DecodeParts(torch.tensor(positions)[:, None], len(expected) + spare)
    own, slots = made.rows(shares=False, window=window, chunk=chunk)
    assert items_of(own) == expected
    assert torch.equal(slots, own.begins)
    assert len(own.owners) == len(expected) + spare
    assert made.rows(shares=False, window=window, chunk=chunk).own is own, "made once for all layers"


@settings(max_examples=60, deadline=None)
@given(
    ends=st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 700)), min_size=8, max_size=8),
    sizes=st.sampled_from([(2, 3), (8, 0), (0, 0), (2, 2, 2, 2), (5, 0, 2)]),
    lengths=st.lists(st.sampled_from([SPLIT, 2 * SPLIT, SPLIT + 40]), min_size=4, max_size=4),
    tokens=st.sampled_from([1, 3, 16]),
)
def test_parts_of_a_prefix_are_listed_once_for_each_tile_of_its_rows(ends, sizes, lengths, tokens) -> None:
    begins = [0]
    for size in sizes:
        begins.append(begins[-1] + size)
    of_row = [0] * 8
    for group, (low, high) in enumerate(pairwise(begins)):
        of_row[low:high] = [lengths[group]] * (high - low)
    # Rows of a group lie behind its prefix, but for padding.
    positions = [-1 if parts < 0 else prefix + more for (parts, more), prefix in zip(ends, of_row, strict=True)]
    shared = SharedPrefixes(*(torch.tensor(each, dtype=torch.int32) for each in (range(8), begins, of_row)))
    made = DecodeParts(torch.tensor(positions), 200, shared)
    expected, slots = [], [0]
    for row, (last, prefix) in enumerate(zip(positions, of_row, strict=True)):
        own = -(-(last + 1 - prefix) // SPLIT) if last >= 0 else 0
        expected += [(row, part) for part in range(own)]
        slots.append(slots[-1] + own + (-(-prefix // SPLIT) if last >= 0 else 0))
    found = made.rows(shares=True)
    assert items_of(found.own) == expected
    assert found.slots.tolist() == slots
    tiles = [
        (group, item)
        for group, size in enumerate(sizes)
        for item in range(-(-size // tokens) * -(-lengths[group] // SPLIT) if size else 0)
    ]
    assert items_of(made.tiles(tokens)) == tiles
    assert made.tiles(tokens) is made.tiles(tokens)


def test_lists_follow_positions_that_are_advanced_where_they_lie() -> None:
    positions = torch.tensor([SPLIT - 1, -1], dtype=torch.int32)
    for parts in ([(0, 0)], [(0, 0), (0, 1)]):
        assert items_of(DecodeParts(positions, 4).rows(shares=False).own) == parts
        positions[0] += 1
