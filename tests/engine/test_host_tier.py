"""Tests of the host tier of the prefix cache: what the KV pool evicts is loaded again, and is what would be computed."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engine.engine import DynamicInferenceEngine
from rollout.requests.request import DynamicInferenceRequest
from tests.engines import assert_greedy, greedily, make_engine, token_ids

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

NAMES = ["qwen3", "qwen3_moe", "gemma3"]
ROOM = 0.01
"""GiB: for all blocks of a test."""


def tiered(model: Any, **options: Any) -> DynamicInferenceEngine:
    """An engine whose pool holds one conversation of a test, and its host tier all of them."""
    return make_engine(model, **{"kv_cache_blocks": 14, "kv_cache_host_memory_gb": ROOM} | options)


def first_turns(engine: DynamicInferenceEngine, count: int = 4, **options: Any) -> list[list[int]]:
    """What conversations said, whose first ones the pool does not hold any more."""
    said = []
    for seed in range(count):
        (request,) = engine.generate([token_ids(17, seed)], greedily(6, **options))
        said.append([*request.prompt_tokens, *request.generated_tokens])
    assert engine.stats()["kv_blocks_offloaded"] > 3
    return said


def next_turn(engine: DynamicInferenceEngine, said: list[int], **options: Any) -> DynamicInferenceRequest:
    (request,) = engine.generate([[*said, *token_ids(3, 90)]], greedily(4, **options))
    engine.context.scheduler.check()
    return request


@pytest.mark.parametrize("mode", [None, "persist", "offload"])
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_that_waited_computes_its_new_tokens_alone_though_the_pool_had_no_room_for_it(
    name: str, mode: str | None
) -> None:
    engine = tiered(name, kv_cache_blocks=9 if name == "gemma3" else 14)
    said = first_turns(engine)
    if mode is not None:
        engine.pause()
        engine.suspend(mode, keep_prefix_cache=True)
        engine.resume()
        engine.unpause()
    for each in said:
        before = engine.stats()
        request = next_turn(engine, each)
        after = engine.stats()
        assert_greedy(name, request)
        assert request.num_cached_tokens == len(each) - 1
        assert after["prefill_tokens_computed"] - before["prefill_tokens_computed"] == 4
    assert after["kv_blocks_loaded"] > 5
    assert after["prefix_host_tokens"] > 20
    assert after["kv_host_cache_bytes"] > 0
    assert after["kv_blocks_evicted_from_host"] == 0
