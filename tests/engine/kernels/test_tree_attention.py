"""Tests of tree attention and its gradients: C++ and plain torch against a dense mask in float64; FlexAttention's blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.engine.kernels import cpu_library
from rollout.engine.kernels import tree_attention as kernels
from rollout.engine.kernels.tree_attention import (
    FLEX_BLOCK,
    Scores,
    block_mask,
    flex_tree_attention,
    torch_tree_attention,
    tree_attention,
)
from rollout.manager.batch.tree import pack_tree
from tests.interpreter import on_a_gpu

CASES = {
    "grouped heads": (4, 2, 64, 64, Scores(0.125)),
    "window and softcap": (4, 2, 16, 16, Scores(0.25, window=9, softcap=2.0)),
    "odd widths": (3, 3, 12, 20, Scores(0.3)),
    "one kv head, wide": (4, 1, 136, 136, Scores(0.1, window=150)),
    "images": (4, 2, 16, 16, Scores(0.25)),
    "images in a window": (4, 2, 16, 16, Scores(0.25, window=9)),
    "images in a causal layer": (4, 2, 16, 16, Scores(0.25, causal=True)),
}


def a_tree(seed: int = 0) -> Tensor:
    """Two prompts of 90 and 70 tokens with six continuations each, some of which branch again; 500 to 600 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 3, (12, 140), generator=generator)
    ids[:6, :90], ids[6:, :70] = ids[0, :90], ids[6, :70]
    real = torch.arange(140) < torch.randint(95, 141, (12, 1), generator=generator)
    return pack_tree(ids, real, real).attention_mask


def tree_of(case: str) -> Tensor:
    return with_images(a_tree()) if "images" in case else a_tree()


def with_images(tree: Tensor) -> Tensor:
    """The same with images of tokens 3 to 9 of each prompt and 60 to 69 of the first, which see themselves both ways."""
    second = int(tree[0, 0, 0, 0])
    lasts = torch.arange(tree.shape[3], dtype=torch.int32)
    for start, stop in ((3, 10), (60, 70), (second + 3, second + 10)):
        lasts[start:stop] = stop - 1
    return torch.cat([tree, lasts[None, None, None]], dim=2)


def dense_mask(tree: Tensor, window: int | None, causal: bool = False) -> Tensor:
    ends, positions = tree[0, 0, :2].long()
    q, k = torch.arange(len(ends))[:, None], torch.arange(len(ends))
    lasts = q if causal or tree.shape[2] == 2 else tree[0, 0, 2].long()[:, None]
    return (k <= lasts) & (q < ends[k]) & (positions[:, None] - positions < (window or 10**6))


def dense(query: Tensor, key: Tensor, value: Tensor, tree: Tensor, scores: Scores) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    products = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scores.scaling
    if scores.softcap is not None:
        products = scores.softcap * (products / scores.softcap).tanh()
    weights = products.masked_fill(~dense_mask(tree, scores.window, scores.causal), -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2)


def outcome(function: Any, case: str, tree: Tensor, dtype: torch.dtype, rounded: torch.dtype) -> list[Tensor]:
    """Output and the three gradients, in float64; the inputs are first rounded to `rounded`."""
    heads, kv_heads, width, value_width, scores = CASES[case]
    generator, length = torch.Generator().manual_seed(1), tree.shape[3]

    def random(count: int, size: int) -> Tensor:
        return torch.randn(1, length, count, size, generator=generator).to(rounded).to(dtype)

    # As models lay them out: heads beside each other in a token.
    leaves = [random(heads, width), random(kv_heads, width), random(kv_heads, value_width)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = function(*(leaf.transpose(1, 2) for leaf in leaves), tree, scores)
    out.backward(random(heads, value_width))
    return [out.detach().double(), *(leaf.grad.double() for leaf in leaves)]


def distances(mine: list[Tensor], right: list[Tensor]) -> list[float]:
    return [float((a - b).norm() / b.norm()) for a, b in zip(mine, right, strict=True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)], ids=str)
def test_values_and_gradients_are_those_of_a_dense_mask(case, dtype, allowed):
    tree = tree_of(case)
    right = outcome(dense, case, tree, torch.float64, dtype)
    assert max(distances(outcome(tree_attention, case, tree, dtype, dtype), right)) < allowed
    assert max(distances(outcome(torch_tree_attention, case, tree, dtype, dtype), right)) < allowed


@pytest.mark.parametrize("case", CASES)
def test_float64_is_as_exact_as_it_can_be(case):
    tree = tree_of(case)
    right = outcome(dense, case, tree, torch.float64, torch.float64)
    assert max(distances(outcome(tree_attention, case, tree, torch.float64, torch.float64), right)) < 1e-14


def test_the_bits_do_not_depend_on_the_threads():
    tree, before = a_tree(), torch.get_num_threads()
    try:
        outcomes = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            outcomes.append(outcome(tree_attention, "grouped heads", tree, torch.float32, torch.float32))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, three) for one, three in zip(*outcomes, strict=True))


def test_mixed_dtypes_meet_in_the_widest():
    tree = a_tree()
    query, key, value = (torch.randn(1, 2, tree.shape[3], 16) for _ in range(3))
    assert tree_attention(query, key, value.bfloat16(), tree, Scores(0.25)).dtype == torch.float32


def test_without_a_compiler_plain_torch_serves(monkeypatch):
    monkeypatch.setattr(cpu_library, "load", lambda: None)
    called = []
    monkeypatch.setattr(kernels, "torch_tree_attention", lambda *args: called.append(args) or torch.zeros(()))
    tree = a_tree()
    query, key, value = (torch.zeros(1, 2, tree.shape[3], 16) for _ in range(3))
    tree_attention(query, key, value, tree, Scores(0.25))
    assert called


@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("window", [None, 40])
def test_flex_attentions_blocks_hold_what_is_seen_and_call_whole_what_is_seen_whole(window, images):
    tree = with_images(a_tree()) if images else a_tree()
    if images:
        tree[0, 0, 2, 120:136] = 135
    mask, seen = block_mask(tree, window, not images), dense_mask(tree, window)
    assert block_mask(tree, window, not images) is mask, "made once for all layers"
    length = tree.shape[3]
    for q in range(-(-length // FLEX_BLOCK)):
        rows = slice(q * FLEX_BLOCK, (q + 1) * FLEX_BLOCK)
        partly = mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist()
        whole = mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist()
        assert not {*partly} & {*whole}
        for k in range(-(-length // FLEX_BLOCK)):
            block = seen[rows, k * FLEX_BLOCK : (k + 1) * FLEX_BLOCK]
            assert k in partly or k in whole or not block.any()
            assert k not in whole or (block.all() and block.shape == (FLEX_BLOCK, FLEX_BLOCK))
        assert len(partly) + len(whole) < q + 1 + images or q < 3 or window is None


@pytest.mark.parametrize("case", ["grouped heads", "window and softcap", "images", "images in a causal layer"])
def test_flex_attention_is_asked_for_the_same_tree(case, monkeypatch):
    """In the place of FlexAttention, which needs a compiler, what its arguments say."""

    def flex(query, key, value, score_mod, block_mask, scale, enable_gqa):
        index = torch.arange(query.shape[2])
        seen = block_mask.mask_mod(None, None, index[:, None], index)
        groups = query.shape[1] // key.shape[1]
        assert enable_gqa == (groups > 1)
        products = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * scale
        products = products if score_mod is None else score_mod(products, *index[:4])
        return products.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(groups, 1)

    monkeypatch.setattr(kernels, "flex_attention", flex)
    tree = tree_of(case)
    right = outcome(dense, case, tree, torch.float64, torch.float64)
    assert max(distances(outcome(flex_tree_attention, case, tree, torch.float64, torch.float64), right)) < 1e-14


@on_a_gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 5e-3), (torch.bfloat16, 1e-2)], ids=str)
def test_on_cuda_values_and_gradients_are_those_of_a_dense_mask(case, dtype, allowed):
    def on_cuda(query: Tensor, key: Tensor, value: Tensor, tree: Tensor, scores: Scores) -> Tensor:
        return tree_attention(query.cuda(), key.cuda(), value.cuda(), tree.cuda(), scores).cpu()

    tree = tree_of(case)
    right = outcome(dense, case, tree, torch.float64, dtype)
    assert max(distances(outcome(on_cuda, case, tree, dtype, dtype), right)) < allowed
