"""Tests of block hashes: equal for equal prefixes, different after any difference, incremental or at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout.errors import ConfigError
from rollout.requests.block_hash import (
    HASH_BASE,
    HASH_PRIME,
    chain_block_hashes,
    chain_root,
    compute_block_hashes_batched,
)

TOKENS = st.integers(0, 200_000)
PROMPTS = st.lists(TOKENS, max_size=60)
BLOCK_SIZES = st.integers(1, 8)


def by_the_formula(tokens: list[int], block_size: int) -> list[int]:
    """The formula in the module's docstring, in Python's unbounded integers."""
    word = 2**64 - 1

    def mix(value: int) -> int:
        value = (value + 0x9E3779B97F4A7C15) & word
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
        return value ^ (value >> 31)

    hashes, parent = [], 0
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        token_hash = mix(sum(mix(t) * HASH_BASE**j for j, t in enumerate(block)) & word) % HASH_PRIME
        parent = (parent * HASH_BASE + token_hash) % HASH_PRIME + 1
        hashes.append(parent)
    return hashes


@given(PROMPTS, BLOCK_SIZES)
def test_hashes_follow_the_formula_one_per_complete_block_in_range(tokens, block_size):
    hashes = compute_block_hashes_batched(tokens, block_size)
    assert hashes == by_the_formula(tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    assert all(type(value) is int and 1 <= value <= HASH_PRIME for value in hashes)


@given(st.lists(TOKENS, min_size=1, max_size=60), st.data(), BLOCK_SIZES)
def test_every_hash_after_a_difference_differs(tokens, data, block_size):
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = tokens.copy()
    other[place] = data.draw(TOKENS.filter(lambda token: token != tokens[place]))
    left, right = (compute_block_hashes_batched(each, block_size) for each in (tokens, other))
    for index, (a, b) in enumerate(zip(left, right, strict=True)):
        assert (a == b) == (index < place // block_size)


@given(st.lists(st.lists(TOKENS, min_size=12, max_size=12), max_size=5), st.sampled_from([1, 2, 3, 4, 6]))
def test_many_chains_grown_link_by_link_equal_their_prompts_hashed_whole(prompts, block_size):
    grid = np.array(prompts, np.int64).reshape(len(prompts), 12 // block_size, block_size)
    parents = np.zeros(len(prompts), np.int64)
    links = []
    for index in range(12 // block_size):
        parents = chain_block_hashes(parents, grid[:, index])
        links.append(parents)
    assert parents.dtype == np.int64
    assert np.array(links).T.tolist() == [compute_block_hashes_batched(prompt, block_size) for prompt in prompts]


@example(HASH_PRIME, [1, 2, 3, 4])
@given(st.integers(1, HASH_PRIME), st.lists(TOKENS, min_size=4, max_size=4))
def test_a_link_is_right_for_every_parent_up_to_the_prime(parent, block):
    token_hash = by_the_formula(block, 4)[0] - 1
    link = chain_block_hashes(np.array([parent]), np.array([block]))
    assert link.tolist() == [(parent * HASH_BASE + token_hash) % HASH_PRIME + 1]


@pytest.mark.parametrize("tokens", [[1.5, 2.0], [[1, 2]], ["a"], [True, False], [None], [[1], [2, 3]]])
def test_what_is_no_row_of_integers_is_refused_by_name(tokens):
    with pytest.raises(ConfigError, match="prompt_tokens"):
        compute_block_hashes_batched(tokens, 1)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 50_000), min_size=4, max_size=24), st.text(max_size=8), st.text(max_size=8))
def test_prompts_of_different_salts_share_no_hash_and_grow_link_by_link(tokens, salt, other):
    hashes = compute_block_hashes_batched(tokens, 4, salt)
    grown, parent = [], np.array([chain_root(salt)])
    for block in range(len(hashes)):
        parent = chain_block_hashes(parent, np.array([tokens[4 * block : 4 * block + 4]], np.int64))
        grown += parent.tolist()
    assert grown == hashes
    assert not set(hashes) & set(compute_block_hashes_batched(tokens, 4))
    if other != salt:
        assert not set(hashes) & set(compute_block_hashes_batched(tokens, 4, other))
