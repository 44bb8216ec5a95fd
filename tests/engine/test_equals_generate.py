"""Tests that tokens equal `model.generate` and log-probs the trainer's forward, however the work is scheduled.

`test_cuts.py` has the table of what may happen to requests before they end.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rollout.requests.request import DynamicInferenceRequest
from rollout.state import KVCacheManagementMode
from tests.engines import (
    BLOCK,
    assert_greedy,
    at_random,
    expected,
    finish,
    greedily,
    logprob_error,
    make_engine,
    pass_suspended,
    steps,
    token_ids,
)
from tests.models import CONFIGS, make_model, trainer_logprobs

both = pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
"""Through the fused forward; through the module, with windows, sinks and experts."""
modes = pytest.mark.parametrize("mode", [mode.value for mode in KVCacheManagementMode])


def serve(engine: Any, prompts: list[list[int]], length: int) -> list[DynamicInferenceRequest]:
    for prompt in prompts:
        engine.add_request(prompt, greedily(length))
    return list(finish(engine).values())


RAGGED = [token_ids(length, seed) for seed, length in enumerate((1, 3, 4, 9, 17, 26))]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_and_logprobs_are_the_trainers_for_every_architecture(name: str) -> None:
    for request in serve(make_engine(name, verify_model=True), RAGGED, 12):
        assert_greedy(name, request)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_modules_own_forward_gives_the_same(name: str) -> None:
    for request in serve(make_engine(name, fused_forward=False), RAGGED, 12):
        assert_greedy(name, request)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_compiler_plain_torch_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.engine.forward.module_forward.cpu_library.load", lambda: None)
    for request in serve(make_engine(name), RAGGED, 12):
        assert_greedy(name, request)


@both
@pytest.mark.parametrize(
    "options",
    [{"enable_prefix_caching": False}, {"prefix_caching_eviction_policy": "ref_zero"}],
    ids=["off", "ref_zero"],
)
@pytest.mark.parametrize("blocks", [16, 64])
def test_other_ways_to_keep_prefixes_change_nothing(name: str, options: dict[str, Any], blocks: int) -> None:
    engine = make_engine(name, kv_cache_blocks=blocks, **options)
    prefix = token_ids(9, 4)
    for _ in range(2):
        for request in serve(engine, [prefix + token_ids(length, length) for length in (1, 4, 6)], 8):
            assert_greedy(name, request)
        engine.add_request(prefix, at_random(6, n=3))
        pass_suspended(engine, "offload")
        assert max(logprob_error(name, request) for request in finish(engine).values()) <= 1e-5
    assert engine.stats()["kv_blocks_cached"] == 0


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "qwen3_next", "falcon_h1", "lfm2"])
@pytest.mark.parametrize(("budget", "requests"), [(1, 1), (3, 2), (11, 8)])
def test_chunked_prefill_changes_nothing(name: str, budget: int, requests: int) -> None:
    engine = make_engine(name, max_tokens_per_step=budget, max_requests=requests)
    for request in serve(engine, RAGGED, 6):
        assert_greedy(name, request)
    assert engine.stats()["prefill_tokens_computed"] == sum(map(len, RAGGED))


@both
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_block_size_changes_nothing(name: str, block_size: int) -> None:
    engine = make_engine(name, block_size_tokens=block_size, max_tokens_per_step=13)
    for request in serve(engine, RAGGED, 6):
        assert_greedy(name, request)


@both
def test_a_prefix_hit_at_any_offset_changes_nothing_and_computes_only_the_rest(name: str) -> None:
    engine = make_engine(name, kv_cache_blocks=256)
    base = token_ids(17, 5)
    engine.generate([base], greedily(0))
    for shared in range(len(base) + 1):
        for own in (0, 3):
            prompt = base[:shared] + token_ids(own, 100 + 8 * shared + own)
            if not prompt:
                continue
            engine.flush_prefix_cache()
            engine.generate([base], greedily(0))
            before = engine.stats()["prefill_tokens_computed"]
            (request,) = engine.generate([prompt], greedily(4))
            assert_greedy(name, request)
            cached = min(shared // BLOCK * BLOCK, len(prompt) - 1)
            assert engine.stats()["prefill_tokens_computed"] - before == len(prompt) - cached
            assert request.num_cached_tokens == cached


@both
def test_a_prompt_that_is_cached_whole_is_served_even_when_no_block_is_spare(name: str) -> None:
    prompt = token_ids(8, 6)
    engine = make_engine(name, kv_cache_blocks=2, max_requests=1)
    for _ in range(3):
        (request,) = engine.generate([prompt], greedily(1))
        assert_greedy(name, request)


@both
def test_chunks_of_equal_size_at_unequal_depths_share_one_tile_in_the_right_order(name: str) -> None:
    # The tile [0, 2, 1, 3] once passed for the positions in order, because its first and last rows were in place.
    starts = [token_ids(length, seed) for seed, length in enumerate((36, 24, 28, 20))]
    engine = make_engine(name)
    engine.generate(starts, greedily(0))
    for request in serve(engine, [start + token_ids(4, 50 + index) for index, start in enumerate(starts)], 6):
        assert_greedy(name, request)


@both
@pytest.mark.parametrize("length", [3, 8, 10], ids=["shorter than a block", "whole blocks", "inside a block"])
@pytest.mark.parametrize("budget", [8, 64])
def test_n_samples_are_one_prefill_and_each_writes_only_its_own_blocks(name: str, length: int, budget: int) -> None:
    engine = make_engine(name, max_tokens_per_step=budget)
    engine.add_request(token_ids(length, 7), at_random(10, n=4))
    samples = finish(engine)
    assert len({tuple(request.generated_tokens) for request in samples.values()}) == 4
    assert max(logprob_error(name, request) for request in samples.values()) <= 1e-5
    assert engine.stats()["prefill_tokens_computed"] == length
    assert engine.stats()["prefill_tokens_saved"] == 3 * length


@both
@pytest.mark.parametrize("budget", [8, 64])
def test_requests_that_arrive_together_compute_their_common_prefix_once(name: str, budget: int) -> None:
    # Blocks can be found only after the step that computes them: admitted in one step, all would compute the prefix.
    prefix = token_ids(12, 8)
    tails = [token_ids(length, 30 + length) for length in (1, 2, 3, 5)]
    engine = make_engine(name, max_tokens_per_step=budget)
    for request in serve(engine, [prefix + tail for tail in tails], 6):
        assert_greedy(name, request)
    assert engine.stats()["prefill_tokens_computed"] == len(prefix) + sum(map(len, tails))


@both
def test_groups_with_a_common_prefix_compute_each_distinct_token_once(name: str) -> None:
    prefix = token_ids(8, 9)
    engine = make_engine(name, kv_cache_blocks=128)
    for seed in range(4):
        engine.add_request(prefix + token_ids(3, 40 + seed), at_random(5, n=2))
    assert max(logprob_error(name, request) for request in finish(engine).values()) <= 1e-5
    assert engine.stats()["prefill_tokens_computed"] == 8 + 4 * 3


@both
@modes
def test_suspend_and_resume_at_any_step_changes_nothing(name: str, mode: str) -> None:
    prompts = RAGGED[1:5]
    last = 1
    at = 0
    while at < last:
        engine = make_engine(name, max_tokens_per_step=12)
        for prompt in prompts:
            engine.add_request(prompt, greedily(6))
        ended = steps(engine, at)
        pass_suspended(engine, mode, keep_prefix_cache=at % 2 == 0)
        for request in finish(engine, ended).values():
            assert_greedy(name, request)
        last = engine.stats()["steps"]
        at += 1
    assert at >= 6


@both
def test_a_record_that_is_checkpointed_after_every_step_merges_into_the_whole(name: str) -> None:
    engine = make_engine(name)
    engine.add_request(RAGGED[4], at_random(9, n=2))
    whole = finish(engine)
    engine = make_engine(name)
    engine.add_request(RAGGED[4], at_random(9, n=2))
    ended = []
    while engine.has_unfinished:
        ended += engine.step()
        again = make_engine(name)
        for record in engine.snapshot():
            again.add_record(record)
        engine = again
    merged = finish(engine, ended)
    for key, request in merged.items():
        assert request.generated_tokens == whole[key].generated_tokens
        assert np.allclose(request.generated_log_probs, whole[key].generated_log_probs, atol=1e-5)
    assert max(len(record) for record in ended) == 9


@both
def test_the_next_turn_of_a_conversation_computes_only_what_follows_its_complete_blocks(name: str) -> None:
    engine = make_engine(name, kv_cache_blocks=256)
    history = token_ids(7, 12)
    computed = known = 0
    for turn in range(4):
        (request,) = engine.generate([history], greedily(6))
        assert_greedy(name, request)
        total = engine.stats()["prefill_tokens_computed"]
        assert total - computed == len(history) - known
        computed = total
        history = history + request.generated_tokens
        # The KV of the last token was never written.
        known = (len(history) - 1) // BLOCK * BLOCK
        history = history + token_ids(5, 20 + turn)


def test_generated_blocks_are_shared_by_those_who_wrote_the_same() -> None:
    engine = make_engine("qwen3")
    engine.add_request(RAGGED[3], greedily(11, n=4))
    steps(engine, 8)
    held = engine.stats()["kv_blocks_used"]
    assert held <= 4 + 4, "equal samples hold equal blocks once"
    for request in finish(engine).values():
        assert_greedy("qwen3", request)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma2"])
def test_bfloat16_is_as_near_to_the_trainers_forward_as_bfloat16_is(name: str) -> None:
    model = make_model(name, dtype=torch.bfloat16)
    engine = make_engine(model, max_tokens_per_step=16, verify_model=True)
    for prompt in RAGGED:
        engine.add_request(prompt, greedily(8))
    exact = copy.deepcopy(model).float()
    for request in finish(engine).values():
        reference = trainer_logprobs(exact, request.prompt_tokens + request.generated_tokens)
        difference = np.abs(reference[len(request.prompt_tokens) - 1 :].numpy() - request.generated_log_probs)
        own = logprob_error(model, request)
        assert own <= 0.5
        assert difference.mean() <= 0.2


def test_long_prompts_and_many_requests_stay_exact() -> None:
    prompts = [token_ids(20 + 13 * seed % 90, 200 + seed) for seed in range(24)]
    engine = make_engine("qwen3", kv_cache_blocks=200, max_requests=12, max_tokens_per_step=70, block_size_tokens=8)
    for prompt in prompts:
        engine.add_request(prompt, greedily(20))
    for request in finish(engine).values():
        assert_greedy("qwen3", request)
    assert expected("qwen3", prompts[0], 3) == expected("qwen3", prompts[0], 20)[:3]
