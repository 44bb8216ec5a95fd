"""Tests of tails: the partly filled last block of an ended sequence, continued by the next turn of its conversation."""

from __future__ import annotations

import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.sampling_params import SamplingParams
from tests.engines import BLOCK, assert_greedy, greedily, make_engine, token_ids
from tests.models import make_model

NAMES = ["qwen3", "qwen3_next", "qwen3_moe", "gemma3"]


def conversations(engine: DynamicInferenceEngine, n: int = 3, length: int = 8) -> list[list[int]]:
    """What the samples of one group said, each with a last block that is partly filled."""
    ended = engine.generate([token_ids(7, 12)], SamplingParams(n=n, max_tokens=length, seed=1))
    assert len({tuple(each.generated_tokens) for each in ended}) == n
    assert (ended[0].total_length - 1) % BLOCK
    return [[*each.prompt_tokens, *each.generated_tokens] for each in ended]


@pytest.mark.parametrize("mode", [None, "persist", "offload"])
@pytest.mark.parametrize("name", NAMES)
def test_branches_of_every_sample_of_a_group_compute_only_their_new_tokens(name: str, mode: str | None) -> None:
    engine = make_engine(name, kv_cache_blocks=128)
    said = conversations(engine)
    if mode is not None:
        engine.pause()
        engine.suspend(mode, keep_prefix_cache=True)
        engine.resume()
        engine.unpause()
    before = engine.stats()
    branches = [[*each, *token_ids(3, 30 + branch)] for each in said for branch in range(2)]
    for prompt, request in zip(branches, engine.generate(branches, greedily(4)), strict=True):
        assert request.num_cached_tokens == len(prompt) - 4
        assert_greedy(name, request)
    after = engine.stats()
    assert after["prefill_tokens_computed"] - before["prefill_tokens_computed"] == 4 * len(branches)
    assert after["prefix_tail_tokens"] - before["prefix_tail_tokens"] == 2 * len(branches)
    assert after["kv_blocks_used"] == 0


def test_a_shortened_history_goes_on_inside_the_tail() -> None:
    engine = make_engine("qwen3")
    said = conversations(engine)[0]
    kept = (len(said) - 1) // BLOCK * BLOCK + 1
    (request,) = engine.generate([[*said[:kept], *token_ids(2, 5)]], greedily(3))
    assert request.num_cached_tokens == kept
    assert_greedy("qwen3", request)


@pytest.mark.parametrize("name", NAMES)
def test_a_tail_of_older_weights_or_of_another_salt_is_not_continued(name: str) -> None:
    model = make_model(name)
    engine = make_engine(model)
    short = token_ids(BLOCK - 2, 3)
    (first,) = engine.generate([short], greedily(2, cache_salt="one"))
    said = [*short, *first.generated_tokens]
    cached = [
        engine.generate([[*said, 5]], greedily(1, cache_salt=salt))[0].num_cached_tokens for salt in ("two", "one")
    ]
    assert cached == [0, BLOCK - 1]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    engine.weights_updated()
    (request,) = engine.generate([[*said, 6]], greedily(4, cache_salt="one"))
    assert request.num_cached_tokens == 0
    assert_greedy(model, request)


def test_a_tail_is_not_continued_where_the_prompts_log_probs_are_wanted_and_none_is_kept_without_a_prefix_cache() -> (
    None
):
    engine = make_engine("qwen3")
    said = conversations(engine)[0]
    (request,) = engine.generate([[*said, 5]], greedily(1, prompt_logprobs=1))
    assert request.num_cached_tokens == 0
    for options in ({"enable_prefix_caching": False}, {"prefix_caching_eviction_policy": "ref_zero"}):
        engine = make_engine("qwen3", **options)
        conversations(engine)
        assert engine.stats()["kv_blocks_cached"] == 0


def test_a_tail_that_was_continued_is_the_first_to_make_room() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=16)
    one, two = token_ids(5, 1), token_ids(5, 2)
    said = [[*each.prompt_tokens, *each.generated_tokens] for each in engine.generate([one, two], greedily(2))]
    engine.generate([[*said[1], 5]], greedily(1))
    # Eleven blocks are free, and two tails among the cached ones.
    engine.generate([token_ids(12 * BLOCK, 9)], greedily(1))
    (request,) = engine.generate([[*said[0], 6]], greedily(1))
    assert request.num_cached_tokens == 6


def test_the_conversation_that_waits_longest_gives_up_its_blocks_first() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=16)
    older, newer = (
        [*each.prompt_tokens, *each.generated_tokens]
        for seed in range(2)
        for each in engine.generate([token_ids(5, seed)], greedily(2))
    )
    # Twelve blocks are free; a block and a tail of each conversation are cached.
    engine.generate([token_ids(14 * BLOCK, 9)], greedily(1))
    cached = [engine.generate([[*said, 6]], greedily(1))[0].num_cached_tokens for said in (newer, older)]
    assert cached == [6, 0]
