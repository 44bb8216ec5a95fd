"""Tests of the host tier of the prefix cache: what the KV pool evicts is loaded again, and is what would be computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.memory.host_blocks import HostMemoryError
from rollout.engine.memory.kv_cache import KVCache
from rollout.errors import ConfigError, RequestError, UnsupportedModelError
from rollout.observe import recorder as tracing
from rollout.observe.timeline import timeline
from rollout.requests.request import DynamicInferenceRequest
from tests.configs import engine_config
from tests.engines import BLOCK, assert_greedy, greedily, make_engine, pass_suspended, token_ids
from tests.invariants import check_scheduler

NAMES = ["qwen3", "qwen3_moe", "gemma3"]
ROOM = 0.01
"""GiB: for all blocks of a test."""


def tiered(model: Any, **options: Any) -> DynamicInferenceEngine:
    """An engine whose pool holds one conversation of a test, and its host tier all of them."""
    return make_engine(model, **{"kv_cache_blocks": 14, "kv_cache_host_memory_gb": ROOM} | options)


def first_turns(engine: DynamicInferenceEngine, count: int = 4, **options: Any) -> list[list[int]]:
    """Return the first turns of conversations, the earliest of which the pool does not hold any more."""
    said = []
    for seed in range(count):
        (request,) = engine.generate([token_ids(17, seed)], greedily(6, **options))
        said.append([*request.prompt_tokens, *request.generated_tokens])
    assert engine.stats()["kv_blocks_offloaded"] > 3
    return said


def next_turn(engine: DynamicInferenceEngine, said: list[int], **options: Any) -> DynamicInferenceRequest:
    (request,) = engine.generate([[*said, *token_ids(3, 90)]], greedily(4, **options))
    check_scheduler(engine.context.scheduler)
    return request


@pytest.mark.parametrize("mode", [None, "persist", "offload"])
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_that_waited_computes_few_tokens_though_the_pool_had_no_room_for_it(
    name: str, mode: str | None
) -> None:
    engine = tiered(name, kv_cache_blocks=9 if name == "gemma3" else 14)
    said = first_turns(engine)
    if mode is not None:
        pass_suspended(engine, mode, keep_prefix_cache=True)
    for each in said:
        before = engine.stats()
        request = next_turn(engine, each)
        after = engine.stats()
        assert_greedy(name, request)
        # Complete blocks alone go to the host.
        assert len(each) - BLOCK <= request.num_cached_tokens < len(each)
        assert after["prefill_tokens_computed"] - before["prefill_tokens_computed"] <= 3 + BLOCK
    assert after["kv_blocks_loaded"] > 5
    assert after["prefix_host_tokens"] > 20
    assert after["kv_host_cache_bytes"] > 0
    assert after["kv_blocks_evicted_from_host"] == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda engine: engine.weights_updated(),
        lambda engine: engine.flush_prefix_cache(),
        lambda engine: pass_suspended(engine, "recompute"),
        lambda engine: pass_suspended(engine, "offload", keep_prefix_cache=False),
    ],
    ids=["update", "flush", "recompute", "dropped"],
)
def test_what_invalidates_or_drops_cached_prefixes_empties_the_tier(change: Callable[[Any], object]) -> None:
    engine = tiered("qwen3")
    said = first_turns(engine)
    assert engine.stats()["kv_host_cache_bytes"] > 0
    change(engine)
    assert engine.stats()["kv_host_cache_bytes"] == 0
    request = next_turn(engine, said[0])
    assert request.num_cached_tokens == 0
    assert_greedy("qwen3", request)


def test_the_tier_serves_no_other_salt_and_no_other_tokens() -> None:
    engine = tiered("qwen3")
    said = first_turns(engine, cache_salt="one")
    assert next_turn(engine, said[0]).num_cached_tokens == 0
    assert next_turn(engine, [*said[1][:9], 3, *said[1][10:]], cache_salt="one").num_cached_tokens in (8, 9)
    assert next_turn(engine, said[2], cache_salt="one").num_cached_tokens >= len(said[2]) - BLOCK


def test_a_full_tier_keeps_what_was_evicted_last() -> None:
    engine = tiered("qwen3", kv_cache_host_memory_gb=8 * make_engine("qwen3").cache.block_bytes / 2**30)
    said = first_turns(engine, 6)
    assert engine.stats()["kv_blocks_evicted_from_host"] > 0
    assert engine.stats()["kv_host_cache_bytes"] <= 8 * engine.cache.block_bytes
    assert next_turn(engine, said[0]).num_cached_tokens == 0
    engine = tiered("qwen3", kv_cache_host_memory_gb=8 * engine.cache.block_bytes / 2**30)
    said = first_turns(engine, 6)
    request = next_turn(engine, said[3])
    assert request.num_cached_tokens > 16
    assert_greedy("qwen3", request)


def test_a_trace_tells_what_each_step_offloads_and_loads() -> None:
    engine, recorder = tiered("qwen3"), tracing.start("host tier")
    try:
        next_turn(engine, first_turns(engine)[0])
    finally:
        tracing.stop(recorder)
    events = timeline(recorder)["traceEvents"]
    steps = [each["args"] for each in events if each.get("cat") == "step"]
    stats = engine.stats()
    assert sum(each["kv_blocks_offloaded"] for each in steps) == stats["kv_blocks_offloaded"]
    assert sum(each["kv_blocks_loaded"] for each in steps) == stats["kv_blocks_loaded"] > 0
    assert max(each["args"]["kept"] for each in events if each["name"] == "KV blocks on the host") > 0


def test_blocks_that_a_failed_step_was_to_load_are_not_taken_for_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiered("qwen3")
    said = first_turns(engine)
    with monkeypatch.context() as patched:
        patched.setattr(engine.cache, "copy_blocks", lambda pairs: (_ for _ in ()).throw(RuntimeError("no bus")))
        with pytest.raises(RequestError, match="no bus"):
            next_turn(engine, said[0])
    request = next_turn(engine, said[0])
    assert request.num_cached_tokens == 0
    assert_greedy("qwen3", request)


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_is_built_again_gives_its_tier_up_before_it_takes_another(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    engine = tiered("qwen3")
    (said, *_) = first_turns(engine)
    first, keep, held = engine.cache, KVCache.keep_host_blocks, []

    def watched(cache: KVCache, num_blocks: int) -> None:
        held.append(first.host_slots)
        if fails and cache is not first:
            raise HostMemoryError("0.01 GiB of host memory")
        keep(cache, num_blocks)

    monkeypatch.setattr(KVCache, "keep_host_blocks", watched)
    if fails:
        with pytest.raises(ConfigError, match=r"the host lacks 0\.01 GiB"):
            engine.rebuild()
        assert engine.cache is first
    else:
        engine.rebuild()
    assert held == [0] * (1 + fails)
    assert engine.cache.host_slots
    assert next_turn(engine, said).generated_tokens == next_turn(make_engine("qwen3"), said).generated_tokens
    assert first_turns(engine)[0] == said


def test_a_tier_without_effect_or_without_room_is_refused_by_name() -> None:
    for wrong in ({"enable_prefix_caching": False}, {"prefix_caching_eviction_policy": "ref_zero"}):
        with pytest.raises(ConfigError, match="kv_cache_host_memory_gb=1"):
            engine_config(kv_cache_host_memory_gb=1, **wrong)
    with pytest.raises(UnsupportedModelError, match="recurrent layers, whose states are not kept on the host"):
        tiered("qwen3_next")
    with pytest.raises(ConfigError, match="holds no block of"):
        tiered("qwen3", kv_cache_host_memory_gb=1e-9)
