"""Tests of models with recurrent and convolutional layers: lives, snapshots and memory of their states."""

from __future__ import annotations

import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.memory.block_pool import zeros
from rollout.errors import ConfigError, EngineStateError, InvalidRequestError
from tests.engines import (
    BLOCK,
    assert_greedy,
    at_random,
    finish,
    greedily,
    in_one_piece,
    make_engine,
    shared_model,
    steps,
    token_ids,
)

RAGGED = [token_ids(length, seed) for seed, length in enumerate((1, 3, 4, 9, 17, 26))]


def computed(engine: DynamicInferenceEngine) -> int:
    """Prompt positions computed so far."""
    return int(engine.stats()["prefill_tokens_computed"])


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_prompt_goes_on_from_the_snapshot_at_the_end_of_an_earlier_one() -> None:
    name = "qwen3_next"
    engine = make_engine(name, kv_cache_blocks=256)
    base = token_ids(18, 5)
    for shared in range(len(base) + 1):
        engine.flush_prefix_cache()
        engine.generate([base], greedily(0))
        before = computed(engine)
        prompt = base[:shared] + token_ids(3, 100 + shared)
        (request,) = engine.generate([prompt], greedily(4))
        assert_greedy(name, request)
        # The state was kept after 16 tokens alone: a shorter prefix has K and V in the cache, and no state.
        assert request.num_cached_tokens == (16 if shared >= 16 else 0)
        assert computed(engine) - before == len(prompt) - request.num_cached_tokens


def test_the_next_turn_goes_on_from_the_last_block_boundary_of_the_turn_before() -> None:
    name = "qwen3_next"
    engine = make_engine(name, kv_cache_blocks=256)
    conversation = token_ids(6, 3)
    for turn in range(3):
        (request,) = engine.generate([conversation], greedily(9))
        assert_greedy(name, request)
        # Less what the user has just said, and the token sampled last.
        known = (len(conversation) - 3 - 1) // BLOCK * BLOCK
        assert request.num_cached_tokens == (known if turn else 0)
        conversation = conversation + request.generated_tokens + token_ids(3, turn)
    assert engine.stats()["state_hits"] == 2


def test_a_prompt_that_was_cached_whole_computes_its_last_block_again() -> None:
    engine = make_engine("qwen3_next")
    for length in (8, 9):
        prompt, before = token_ids(length, length), computed(engine)
        first, again = (engine.generate([prompt], greedily(5))[0] for _ in range(2))
        assert_greedy("qwen3_next", again)
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, (length - 1) // BLOCK * BLOCK)
        assert computed(engine) - before == 2 * length - again.num_cached_tokens


def test_snapshots_make_room_for_running_samples_least_recently_used_first() -> None:
    engine = make_engine("qwen3_next", state_slots=4, max_requests=3, kv_cache_blocks=256)
    old, recent = token_ids(9, 1), token_ids(9, 2)
    for prompt in (old, recent):
        engine.generate([prompt], greedily(0))
    engine.generate([old], greedily(0))
    for prompt in (token_ids(3, 3), token_ids(3, 4), token_ids(3, 5)):
        engine.add_request(prompt, greedily(0))
    finish(engine)
    assert engine.stats()["state_snapshots_evicted"] == 1
    assert [engine.generate([prompt], greedily(0))[0].num_cached_tokens for prompt in (old, recent)] == [8, 0]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_resume_without_memory_for_the_states_may_be_repeated() -> None:
    room = 10**9

    @in_one_piece
    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if dtype == torch.uint8 and numel > room:
            raise torch.OutOfMemoryError("taken")
        return zeros([numel], dtype, device)[0]

    engine = make_engine("qwen3_next", allocate=allocate, state_slots=12, max_requests=6)
    for prompt in RAGGED:
        engine.add_request(prompt, greedily(8))
    ended = steps(engine, 4)
    engine.pause()
    engine.suspend("offload")
    assert engine.controller.runner.states is not None
    assert engine.controller.runner.states.device_bytes == 0
    room = 3 * engine.controller.runner.states.block_bytes
    with pytest.raises(EngineStateError, match="no device memory for 12 recurrent states"):
        engine.resume()
    assert engine.cache.device_bytes == 0
    room = 10**9
    assert engine.resume().requests_given_up == 0
    engine.unpause()
    for request in finish(engine, ended).values():
        assert_greedy("qwen3_next", request)


def test_states_take_part_of_the_memory_budget_and_limit_what_runs() -> None:
    model = shared_model("qwen3_next")
    engine = make_engine(
        model, kv_cache_blocks=None, kv_cache_memory_gb=0.0003, max_requests=64, max_tokens_per_step=64
    )
    stats, budget = engine.stats(), 0.0003 * 2**30
    assert 0.4 * budget < stats["state_device_bytes"] <= 0.5 * budget
    assert stats["state_device_bytes"] + stats["kv_device_bytes"] <= budget
    assert engine.context.scheduler.num_places == stats["state_slots"] < 64
    with pytest.raises(InvalidRequestError, match=r"n=65 samples exceed state_slots=\d+"):
        engine.add_request([5], at_random(1, n=65))
    with pytest.raises(ConfigError, match="does not hold one state"):
        make_engine(model, kv_cache_blocks=None, kv_cache_memory_gb=1e-6)
