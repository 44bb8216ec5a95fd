"""Tests of prefix-tree packing: every prefix once, for rows, groups, turns and both paddings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.manager.batch.batch import equal_parts
from rollout.manager.batch.tree import PackedTree, pack_tree
from tests.manager.test_batch import build, failed, request


def pack(rows: list[list[int]], left: bool = False) -> PackedTree:
    """Rows padded on a side; all tokens but the first are wanted."""
    width = max(map(len, rows), default=0)
    ids, real, wanted = (torch.zeros(len(rows), width, dtype=kind) for kind in (torch.long, torch.bool, torch.bool))
    for row, tokens in enumerate(rows):
        start = width - len(tokens) if left else 0
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        real[row, start : start + len(tokens)] = True
        wanted[row, start + 1 : start + len(tokens)] = True
    return pack_tree(ids, real, wanted)


def prefixes(rows: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}


def path(packed: PackedTree, token: int) -> tuple[int, ...]:
    """Token ids of what `token` attends to, in order."""
    ends = packed.attention_mask[0, 0, 0].tolist()
    ids = packed.input_ids[0].tolist()
    return tuple(ids[k] for k in range(token + 1) if token < ends[k])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=8), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_tree_holds_every_prefix_once_and_a_token_attends_to_its_own_prefix(rows, left):
    packed = pack(rows, left)
    paths = [path(packed, token) for token in range(len(packed))]
    assert len(paths) == len(set(paths))
    assert set(paths) == prefixes(rows)
    positions = packed.position_ids[0].tolist()
    assert positions == [len(each) - 1 for each in paths]
    assert packed.attention_mask[0, 0, 1].tolist() == positions
    for row, every, before in zip(rows, packed.nodes, packed.predictors, strict=True):
        nodes = every[every >= 0].tolist()
        assert [paths[node] for node in nodes] == [tuple(row[: end + 1]) for end in range(len(row))]
        assert before[every >= 0][1:].tolist() == nodes[:-1]


def test_a_batch_packs_each_prompt_once_and_the_turns_of_a_conversation_too():
    """The third row continues the first: its prompt is that row's prompt and completion, and what was said then."""
    batch = build(
        request(0, 0, [1, 2, 3], [4, 5]),
        request(0, 1, [1, 2, 3], [6]),
        request(1, 0, [1, 2, 3, 4, 5, 7], [8, 9]),
        failed(2, prompt=[4], completion=[]),
    )
    packed = batch.tree()
    assert len(packed) == 5 + 1 + 3 + 1
    assert repr(packed) == "PackedTree(4 rows of 18 tokens in 10)"
    assert (
        packed.wanted.tolist()
        == (batch.attention_mask.bool() & (torch.arange(8) >= batch.prompt_lengths[:, None])).tolist()
    )


def test_part_of_a_batch_keeps_the_numbers_of_its_rows():
    batch = build(*(request(group, sample, [group, 2], [3 + sample]) for group in range(3) for sample in range(2)))
    packed = batch.tree(torch.tensor([5, 0]))
    assert packed.rows.tolist() == [5, 0]
    assert packed.nodes.shape == (2, 3)
    ids = packed.input_ids[0][packed.nodes]
    assert torch.equal(ids, batch.input_ids[packed.rows])


@pytest.mark.parametrize(
    ("limit", "parts"), [(1, [[0, 1], [2, 3], [4, 5]]), (8, [[0, 1, 4, 5], [2, 3]]), (99, [[*range(6)]])]
)
def test_trees_of_bounded_size_hold_whole_groups_and_every_row_once(limit, parts):
    batch = build(*(request(group, sample, [group, 2], [3 + sample]) for group in range(3) for sample in range(2)))
    trees = list(batch.trees(limit))
    assert [packed.rows.tolist() for packed in trees] == parts
    assert all(len(packed) <= max(limit, 4) for packed in trees)


def test_what_all_groups_begin_with_counts_once_in_every_tree():
    """Ten tokens in common and two of its own per group: four groups fit into 18."""
    batch = build(*(request(group, 0, [*range(1, 11), 20 + group], [3]) for group in range(6)))
    assert [len(packed) for packed in batch.trees(18)] == [16, 16]


@given(st.lists(st.integers(1, 40), max_size=24), st.integers(20, 60))
@settings(max_examples=100, deadline=None)
def test_parts_hold_every_item_once_within_the_limit_and_are_about_equal(sizes, limit):
    parts = equal_parts(sizes, limit)
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    totals = [sum(sizes[item] for item in part) for part in parts]
    assert all(total <= limit or len(part) == 1 for total, part in zip(totals, parts, strict=True))
    shared = [total for total, part in zip(totals, parts, strict=True) if total <= limit]
    largest = max((size for size in sizes if size <= limit), default=0)
    assert max(shared, default=0) - min(shared, default=0) <= largest


def test_nothing_to_pack_is_an_empty_tree_and_no_trees():
    assert len(build().tree()) == 0
    assert list(build().trees(8)) == []


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="max_tokens=0: must be at least 1"):
        list(build(request()).trees(0))
