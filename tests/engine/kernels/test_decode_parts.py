"""Tests of the lists of parts that a decode step computes: every part once, and a place for its result."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.kernels.decode_parts import SPLIT, DecodeParts, PartList


def items_of(listed: PartList) -> list[tuple[int, int]]:
    """(owner, part) of every item."""
    begins, owners = listed.begins.tolist(), listed.owners.tolist()
    return [(owners[item], item - begins[owners[item]]) for item in range(begins[-1])]


@settings(max_examples=60, deadline=None)
@given(
    positions=st.lists(st.integers(-1, 1500), min_size=1, max_size=7),
    window=st.sampled_from([None, 1, 200, 700]),
    spare=st.integers(0, 9),
)
def test_every_part_that_a_row_sees_is_listed_once(positions, window, spare) -> None:
    expected = []
    for row, last in enumerate(positions):
        first = max(0, last + 1 - (window or last + 1))
        parts = range(first // SPLIT, last // SPLIT + 1) if last >= 0 else ()
        expected += [(row, part) for part in range(len(parts))]
    made = DecodeParts(torch.tensor(positions)[:, None], len(expected) + spare)
    own = made.of(window=window)
    assert items_of(own) == expected
    assert len(own.owners) == len(expected) + spare
    assert made.of(window=window) is own, "made once for all layers"


def test_lists_follow_positions_that_are_advanced_where_they_lie() -> None:
    positions = torch.tensor([SPLIT - 1, -1], dtype=torch.int32)
    for parts in ([(0, 0)], [(0, 0), (0, 1)]):
        assert items_of(DecodeParts(positions, 4).of()) == parts
        positions[0] += 1
