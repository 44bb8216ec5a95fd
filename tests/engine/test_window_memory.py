"""Tests of layers with sliding windows beside layers that see everything: what KV they keep, and the model's tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

from rollout.engine.blocks.pages import LayerGroups, layer_groups, one_group
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import InvalidRequestError
from tests.engines import (
    BLOCK,
    assert_greedy,
    finish,
    greedily,
    make_engine,
    steps,
    token_ids,
)
from tests.invariants import check_scheduler
from tests.models import make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

SLIDING, FULL = "sliding_attention", "full_attention"
MIXED: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 7, "layer_types": [*[SLIDING] * 5, FULL, SLIDING]},
    "gpt_oss": {},
    "qwen2": {"layer_types": [FULL, SLIDING, FULL], "use_sliding_window": True, "sliding_window": 8},
}
"""Models of `tests.models` with both kinds of layers, the first and the last served by the fused forward. Windows are
of 8 tokens."""
mixed = pytest.mark.parametrize("name", MIXED)
SEEN = -(-8 // BLOCK) + 1
"""Most blocks that a decoding sequence sees through a window of 8."""


@cache
def mixed_model(name: str) -> PreTrainedModel:
    return make_model(name, **MIXED[name])


def pages_in_use(engine: DynamicInferenceEngine) -> int:
    pages = engine.context.allocator.pages
    assert pages.limited, "the layers are not split into groups"
    return len(pages.live())


@mixed
def test_a_long_sequence_keeps_whole_only_the_layers_that_see_it_whole(name):
    model = mixed_model(name)
    engine = make_engine(model, enable_prefix_caching=False, verify_model=True)
    assert (engine.controller.runner.why_not_fused() is None) == (name in ("gemma3", "qwen2"))
    pages = engine.context.allocator.pages
    for seed in range(3):
        engine.add_request(token_ids(30, seed), greedily(60))
    ended = steps(engine, 2)
    while engine.has_unfinished:
        ended += engine.step()
        check_scheduler(engine.context.scheduler)
        blocks, seen = engine.context.allocator.num_used, engine.stats()["kv_blocks_in_window"]
        assert seen <= 3 * SEEN
        assert pages_in_use(engine) == pages.whole * blocks + pages.limited * seen
    assert engine.stats()["kv_blocks_out_of_window"] >= 3 * (90 // BLOCK - SEEN)
    for request in finish(engine, ended).values():
        assert_greedy(model, request)


@mixed
def test_what_would_not_fit_with_all_layers_runs_without_preemption(name):
    model = mixed_model(name)
    pages = make_engine(model).context.allocator.pages
    needed = 3 * pages.shape.needed(-(-92 // BLOCK), 3, BLOCK)
    engine = make_engine(model, kv_cache_blocks=-(-needed // pages.groups) + 1, max_tokens_per_step=12)
    assert engine.context.allocator.pages.num_pages < 3 * pages.groups * (92 // BLOCK)
    for seed in range(3):
        engine.add_request(token_ids(12, seed), greedily(80))
    done = finish(engine)
    assert engine.stats()["preemptions"] == 0
    for request in done.values():
        assert_greedy(model, request)


@mixed
def test_a_prompt_longer_than_the_pool_with_all_layers_is_prefilled_in_chunks(name):
    model, prompt = mixed_model(name), token_ids(200)
    pages = make_engine(model).context.allocator.pages
    needed = pages.shape.needed(-(-204 // BLOCK), 16, BLOCK)
    engine = make_engine(model, kv_cache_blocks=-(-needed // pages.groups), max_tokens_per_step=16)
    assert needed < pages.groups * 204 // BLOCK
    assert engine.context.scheduler.longest >= 204
    engine.add_request(prompt, greedily(5))
    (request,) = finish(engine).values()
    assert_greedy(model, request)
    with pytest.raises(InvalidRequestError, match=r"need \d+ KV pages and the pool has"):
        engine.add_request(token_ids(engine.context.scheduler.longest + 2), greedily(5))


@mixed
def test_samples_share_their_prompt_and_a_later_request_finds_what_its_window_sees(name):
    model, prompt = mixed_model(name), token_ids(24)
    engine = make_engine(model, kv_cache_blocks=100)
    engine.add_request(prompt, greedily(40, n=3))
    ended = steps(engine, 25)
    # No sequence sees the prompt's last blocks any more in layers with a window, and they are still there.
    late = engine.add_request(prompt, greedily(30))
    done = finish(engine, ended)
    assert done[late, 0].num_cached_tokens == 23
    for request in done.values():
        assert_greedy(model, request)


@mixed
def test_a_prefix_whose_window_was_evicted_is_used_as_far_as_its_kv_goes(name):
    model, prompt = mixed_model(name), token_ids(40)
    engine = make_engine(model, kv_cache_blocks=100)
    engine.add_request(prompt, greedily(1))
    first = finish(engine)
    pages, index = engine.context.allocator.pages, engine.context.allocator.index
    chain = index.find(list(index.current), np.asarray(prompt, np.int32).reshape(-1, BLOCK))
    assert len(chain) == 10
    pages.strip(chain[5])
    # After 28 tokens the window begins in the block that is gone; after 20, and at the end, it does not reach it.
    short, whole = (engine.add_request(tokens, greedily(12)) for tokens in (prompt[:30], prompt))
    done = finish(engine)
    assert [done[each, 0].num_cached_tokens for each in (short, whole)] == [20, 39]
    for request in (*first.values(), *done.values()):
        assert_greedy(model, request)


def test_a_pool_sized_by_what_can_run_is_smaller_by_what_windows_do_not_keep():
    sizes = {}
    for name, changes in (("mixed", {}), ("whole", {"layer_types": [FULL] * 7})):
        model = make_model("gemma3", **(MIXED["gemma3"] | changes))
        engine = make_engine(model, kv_cache_blocks=None, kv_cache_memory_gb=1, max_requests=4, max_tokens_per_step=8)
        sizes[name] = engine.cache.device_bytes
        pages = engine.context.allocator.pages
        assert pages.num_pages // pages.shape.needed(512 // BLOCK, 1, BLOCK) >= 4
    # One of seven layers keeps all of the 512 tokens that a sequence may have.
    assert sizes["mixed"] < 0.25 * sizes["whole"]


def test_explain_tells_what_is_kept_behind_the_window():
    engine = make_engine(mixed_model("gemma3"))
    cache, page = engine.cache, str(engine.explain())
    per_token = cache.num_groups * cache.block_bytes // BLOCK
    assert f"{per_token:,} bytes per token, {per_token // 7:,} behind a window of 8 tokens" in page


def test_expert_routes_are_kept_of_every_token():
    model = mixed_model("gpt_oss")
    engine = make_engine(model, record_routes=True)
    engine.add_request(token_ids(20), greedily(40))
    (request,) = finish(engine).values()
    assert engine.stats()["kv_blocks_out_of_window"] > 0
    # In another engine the same tokens are a prompt of one chunk, nothing of which is given back before its end.
    other = make_engine(model, record_routes=True, kv_cache_blocks=100)
    other.add_request([*request.prompt_tokens, *request.generated_tokens], greedily(1))
    (again,) = finish(other).values()
    np.testing.assert_array_equal(request.routing_indices, again.routing_indices[: len(request.routing_indices)])
    assert_greedy(model, request)


def test_pages_that_a_prefill_gives_back_are_zeroed_before_their_next_use():
    engine = make_engine(mixed_model("gpt_oss"), max_tokens_per_step=8)
    engine.add_request(token_ids(40), greedily(4))
    steps(engine, 3)
    scheduler, zeroed = engine.context.scheduler, []
    scheduler.schedule()
    unverified, runner = list(scheduler.allocator.pages.poisoned), engine.controller.runner
    assert unverified, "a window has passed blocks whose logits were never looked at"
    runner.zero_blocks, zero = lambda pages: (zeroed.extend(pages), zero(pages)), runner.zero_blocks
    engine.context.scheduler.preemption.checkpoint_all()
    finish(engine)
    assert set(unverified) <= set(zeroed)


@pytest.mark.parametrize(
    ("full", "every", "expected"),
    [
        ([5, 11, 17, 23], 26, (4, 1, 6)),  # Gemma 3 1B
        ([5, 11, 17], 18, (3, 1, 5)),  # Gemma 3 270M
        (range(1, 24, 2), 24, (12, 1, 1)),  # gpt-oss 20B
        (range(28), 36, (4, 7, 2)),  # Qwen2 with a window in its last layers
    ],
)
def test_layers_are_split_into_groups_of_equal_size(full, every, expected):
    groups = layer_groups([(64, 64)] * every, [None if index in full else 512 for index in range(every)], 4096)
    assert (groups.places, groups.whole, groups.limited) == expected
    places = list(zip(groups.group_of, groups.place_of, strict=True))
    assert len(set(places)) == every, "two layers share a place"
    assert all((groups.group_of[index] < groups.whole) == (index in full) for index in range(every))
    # At most an eighth of the memory is empty places.
    assert groups.count * groups.places <= every * 1.125


@pytest.mark.parametrize("reaches", [[None, None], [8, 8], [None, 4096]])
def test_layers_of_one_kind_are_not_split(reaches):
    assert layer_groups([(64, 64)] * 2, reaches, 4096) == one_group(2)


def test_layers_of_different_size_keep_whole_blocks():
    assert layer_groups([(64, 64), (128, 64)], [None, 8], 4096) == one_group(2)


@pytest.mark.parametrize("pages", range(3, 60))
def test_the_longest_sequence_is_the_last_one_that_fits(pages):
    shape = LayerGroups((), (), 1, whole=1, limited=2, reach=9)
    most = shape.most_blocks(pages, 5, 4)
    assert shape.needed(most, 5, 4) <= pages < shape.needed(most + 1, 5, 4)
