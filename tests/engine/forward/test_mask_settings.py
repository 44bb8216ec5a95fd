"""Tests that windows and masks that change after the engine was built are followed or refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout import LLM, Advanced, InferenceConfig, RolloutManager, UnsupportedModelError
from tests.engines import expected, finish, greedily, logprob_error, make_engine, steps, token_ids
from tests.models import SMALL, make_model, trainer_logprobs

PROMPT = token_ids(40, 3)


def mixed() -> Qwen3ForCausalLM:
    """A Qwen3 whose first layer sees everything and whose others have a window."""
    torch.manual_seed(0)
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    config = Qwen3Config(**SMALL, head_dim=16, use_sliding_window=True, sliding_window=6, layer_types=types)
    return Qwen3ForCausalLM(config).eval()


def all_windows(model: Any) -> None:
    model.config.layer_types = ["sliding_attention"] * 3


def wider(model: Any) -> None:
    model.config.sliding_window = 20


def narrower(model: Any) -> None:
    model.config.sliding_window = 3


def narrower_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 4


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "gemma3, a narrower window": (lambda: make_model("gemma3"), narrower),
    "qwen3, a window in every layer": (mixed, all_windows),
    "qwen3, windows of its layers": (lambda: make_model("qwen3"), narrower_layers),
    "mistral, a wider window": (lambda: make_model("mistral"), wider),
}


@pytest.mark.parametrize("name", CHANGES)
def test_masks_are_followed_between_two_calls_and_by_requests_in_flight(name: str) -> None:
    make, change = CHANGES[name]
    model = make()
    engine = make_engine(model)
    (before,) = engine.generate([PROMPT], greedily(8))
    assert logprob_error(model, before) < 1e-5
    number = engine.add_request(PROMPT, greedily(12))
    ended = steps(engine, 4)
    change(model)
    (after,) = engine.generate([PROMPT], greedily(8))
    assert logprob_error(model, after) < 1e-5
    assert engine.policy_version == 0
    request = finish(engine, ended)[number, 0]
    exact = trainer_logprobs(model, request.prompt_tokens + request.generated_tokens)[-8:].tolist()
    assert request.generated_log_probs[-8:] == pytest.approx(exact, abs=1e-5)


def test_bidirectional_attention_is_refused_until_it_is_undone() -> None:
    model = make_model("qwen3")
    with RolloutManager(
        model, config=InferenceConfig(kv_cache_blocks=32, advanced=Advanced(block_size_tokens=4))
    ) as manager:
        manager.generate([PROMPT], greedily(2))
        for layer in model.model.layers:
            layer.self_attn.is_causal = False
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match=r"is_causal changed after the rollout was built; undo it"):
                manager.generate([PROMPT], greedily(2))
            assert not manager.engine.has_unfinished
        for layer in model.model.layers:
            layer.self_attn.is_causal = True
        batch = manager.generate([PROMPT], greedily(6))
        assert batch.input_ids[0].tolist() == PROMPT + expected(model, PROMPT, 6)


def test_scores_of_a_batch_are_under_the_masks_of_now() -> None:
    model = make_model("mistral")
    with RolloutManager(
        model, config=InferenceConfig(kv_cache_blocks=64, advanced=Advanced(block_size_tokens=4))
    ) as manager:
        batch = manager.generate([PROMPT], greedily(6))
        wider(model)
        exact = trainer_logprobs(model, batch.input_ids[0].tolist())[len(PROMPT) - 1 :]
        torch.testing.assert_close(manager.score(batch).logprobs[0, len(PROMPT) :], exact, atol=1e-5, rtol=0)


def test_an_llm_follows_masks_when_it_is_idle() -> None:
    model = make_model("gemma3")
    with LLM(model, None, InferenceConfig(kv_cache_blocks=64, advanced=Advanced(block_size_tokens=4))) as llm:
        llm.generate([PROMPT], greedily(4))
        narrower(model)
        output = llm.generate([PROMPT], greedily(8))[0]
        assert output.generated_tokens == expected(model, PROMPT, 8)


def test_what_no_mask_depends_on_builds_nothing_again() -> None:
    model = make_model("gemma3")
    engine = make_engine(model)
    engine.generate([PROMPT], greedily(2))
    cache = engine.cache
    model.config.use_cache, model.config.pad_token_id, model.config.initializer_range = False, 5, 0.5
    engine.generate([PROMPT], greedily(2))
    assert engine.cache is cache
