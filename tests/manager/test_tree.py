"""Tests of prefix-tree packing: every prefix once, for rows, groups, turns and both paddings; log-probs of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollout.manager.batch.columns import CHUNK_ELEMENTS, selected_logprobs, token_entropies
from rollout.manager.batch.tree import PackedTree, pack_tree
from tests.manager.test_batch import build, failed, request

VOCAB = 11


def pack(rows: list[list[int]], left: bool = False, wanted_from: int = 1) -> PackedTree:
    """Rows padded on a side; everything from token `wanted_from` on is wanted."""
    width = max(map(len, rows), default=0)
    ids, real, wanted = (torch.zeros(len(rows), width, dtype=kind) for kind in (torch.long, torch.bool, torch.bool))
    for row, tokens in enumerate(rows):
        start = width - len(tokens) if left else 0
        ids[row, start : start + len(tokens)] = torch.tensor(tokens)
        real[row, start : start + len(tokens)] = True
        wanted[row, start + wanted_from : start + len(tokens)] = True
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
    for row, nodes in zip(rows, packed.nodes.tolist(), strict=True):
        nodes = [node for node in nodes if node >= 0]
        assert [paths[node] for node in nodes] == [tuple(row[: end + 1]) for end in range(len(row))]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_log_probs_and_entropies_of_rows_come_from_the_token_before(rows, left):
    packed = pack(rows, left)
    everything = torch.randn(1, len(packed), VOCAB, generator=torch.Generator().manual_seed(0))
    kept = everything[:, packed.logits_to_keep]
    distribution = (everything[0] / 0.7).log_softmax(-1)
    logprobs, entropies = packed.logprobs_of(kept, 0.7), packed.entropies_of(kept, 0.7)
    assert torch.equal(logprobs, packed.logprobs_of(everything, 0.7))
    for row, tokens in enumerate(rows):
        nodes = [node for node in packed.nodes[row].tolist() if node >= 0]
        first = packed.nodes.shape[1] - len(tokens) if left else 0
        wanted = torch.zeros_like(logprobs[row]), torch.zeros_like(entropies[row])
        for index in range(1, len(tokens)):
            before = distribution[nodes[index - 1]]
            wanted[0][first + index] = before[tokens[index]]
            wanted[1][first + index] = -(before.exp() * before).sum()
        torch.testing.assert_close(logprobs[row], wanted[0])
        torch.testing.assert_close(entropies[row], wanted[1])


@pytest.mark.parametrize("rows", [4, 100])
def test_gradients_of_log_probs_and_entropies_are_autograds(monkeypatch, rows):
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", rows * VOCAB)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, VOCAB, dtype=torch.float64, generator=generator)
    logits[3, 4] = -torch.inf
    positions, tokens = torch.tensor([0, 0, 5, 8, 8, 3]), torch.tensor([1, 2, 0, 4, 4, 1])
    weights = torch.randn(15, dtype=torch.float64, generator=generator)

    def gradient(of: Any) -> tuple[Tensor, Tensor]:
        leaf = logits.clone().requires_grad_()
        out = torch.cat(of(leaf))
        (out * weights).sum().backward()
        return out.detach(), leaf.grad

    def plain(leaf: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = (leaf / 0.5).log_softmax(-1)
        return logprobs[positions, tokens], -(logprobs.exp() * logprobs.masked_fill(leaf.isneginf(), 0.0)).sum(-1)

    ours = gradient(lambda leaf: (selected_logprobs(leaf, positions, tokens, 0.5), token_entropies(leaf, 0.5)))
    for mine, theirs in zip(ours, gradient(plain), strict=True):
        torch.testing.assert_close(mine, theirs)


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
    logits = torch.randn(1, len(packed.logits_to_keep), VOCAB)
    logprobs = packed.logprobs_of(logits)
    assert logprobs.shape == batch.logprobs.shape
    assert ((logprobs != 0) == (batch.logprobs != 0)).all()


def test_part_of_a_batch_keeps_the_numbers_of_its_rows():
    batch = build(*(request(group, sample, [group, 2], [3 + sample]) for group in range(3) for sample in range(2)))
    packed = batch.tree(torch.tensor([5, 0]))
    assert packed.rows.tolist() == [5, 0]
    assert packed.nodes.shape == (2, 3)
    ids = packed.input_ids[0][packed.nodes]
    assert torch.equal(ids, batch.input_ids[packed.rows])


@pytest.mark.parametrize(
    ("limit", "parts"), [(1, [[0, 1], [2, 3], [4, 5]]), (8, [[0, 1, 2, 3], [4, 5]]), (99, [[*range(6)]])]
)
def test_trees_of_bounded_size_hold_whole_groups_and_every_row_once(limit, parts):
    batch = build(*(request(group, sample, [group, 2], [3 + sample]) for group in range(3) for sample in range(2)))
    trees = list(batch.trees(limit))
    assert [packed.rows.tolist() for packed in trees] == parts
    assert all(len(packed) <= max(limit, 4) for packed in trees)


def test_nothing_to_pack_is_an_empty_tree_and_no_trees():
    assert len(build().tree()) == 0
    assert list(build().trees(8)) == []


def test_what_does_not_fit_is_named():
    packed = pack([[1, 2, 3], [1, 2, 4]])
    with pytest.raises(ValueError, match=r"logits of shape \(1, 3, 11\): this tree's are \[1, 2, V\]"):
        packed.logprobs_of(torch.zeros(1, 3, VOCAB))
    with pytest.raises(ValueError, match="max_tokens=0: must be at least 1"):
        list(build(request()).trees(0))
