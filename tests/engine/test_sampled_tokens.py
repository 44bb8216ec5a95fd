"""Tests of sampled tokens: one random stream per sample, log-probs, penalties and biases."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason
from tests.engine.cuts import CUTS, lived
from tests.engines import (
    at_random,
    finish,
    greedily,
    logits_of,
    make_engine,
    shared_model,
    token_ids,
)
from tests.models import VOCAB, trainer_logprobs

both = pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
"""Through the fused forward; through the module."""


# --- one random stream per sample -------------------------------------------------------------------------------------

ODD = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def alone(name: str, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    engine = make_engine(name)
    engine.add_request(prompt, params, request_id=7)
    return [request.generated_tokens for request in finish(engine).values()]


@both
@pytest.mark.parametrize("cut", ["chunks", "runs", "little memory in chunks", "offload", "recompute"])
def test_a_requests_tokens_depend_on_its_seed_alone(name: str, cut: str) -> None:
    prompt, params = token_ids(6, 3), at_random(8, seed=42, n=2, **ODD)

    def ask(engine: Any) -> None:
        for number in range(20):
            others = at_random(3 + number % 8, temperature=[0.0, 0.7, 1.5][number % 3], seed=number)
            chosen = (prompt, params) if number == 7 else (token_ids(1 + number, number), others)
            engine.add_request(*chosen, request_id=number)

    done, _ = lived(partial(make_engine, name), ask, CUTS[cut])
    assert [done[7, 0].generated_tokens, done[7, 1].generated_tokens] == alone(name, prompt, params)
    assert len(done) == 21


@both
def test_samples_differ_from_each_other_and_equal_themselves_in_another_run(name: str) -> None:
    prompt = token_ids(5, 4)
    runs = [alone(name, prompt, at_random(12, n=4, seed=9)) for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(map(tuple, runs[0]))) == 4
    assert alone(name, prompt, at_random(12, n=2, seed=9)) == runs[0][:2], "sample i of any n is the same"
    assert alone(name, prompt, at_random(12, n=4, seed=10)) != runs[0]


def test_requests_without_a_seed_differ_and_the_engines_seed_decides_them() -> None:
    def run(seed: int) -> list[list[int]]:
        engine = make_engine("qwen3", seed=seed)
        for _ in range(3):
            engine.add_request(token_ids(5, 4), at_random(8, seed=None))
        return [request.generated_tokens for request in finish(engine).values()]

    assert run(1) == run(1) != run(2)
    assert len(set(map(tuple, run(1)))) == 3


def test_sampling_leaves_the_processes_random_numbers_alone() -> None:
    torch.manual_seed(3)
    np.random.seed(3)
    before, drawn = torch.get_rng_state(), np.random.get_state()[1].copy()
    make_engine("qwen3", verify_model=True).generate([token_ids(5)], at_random(6, n=3))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(drawn, np.random.get_state()[1])


# --- log-probs --------------------------------------------------------------------------------------------------------


def assert_top(rows: list[list[tuple[int, float]]], logits: torch.Tensor, k: int) -> None:
    values, ids = logits.log_softmax(-1).topk(k)
    assert [[token for token, _ in row] for row in rows] == ids.tolist()
    assert np.allclose([[value for _, value in row] for row in rows], values.numpy(), atol=1e-5)


@both
@pytest.mark.parametrize("cut", ["chunks", "little memory", "prefix hits", "recompute"])
def test_top_logprobs_of_prompt_and_completion_are_the_trainers(name: str, cut: str) -> None:
    prompt = token_ids(13, 5)

    def ask(engine: Any) -> None:
        engine.add_request([*prompt, 5, 6, 7], at_random(16))
        engine.add_request(prompt, at_random(16, logprobs=3, prompt_logprobs=2))
        engine.add_request(token_ids(6), at_random(16, logprobs=3, prompt_logprobs=2, n=2))

    done, engine = lived(partial(make_engine, name), ask, CUTS[cut])
    assert engine.stats()[CUTS[cut].counter] > 0
    for request in done.values():
        if request.sampling_params.prompt_logprobs is None:
            continue
        assert request.num_cached_tokens == 0, "logits are needed at every position of the prompt"
        tokens, last = request.prompt_tokens + request.generated_tokens, len(request.prompt_tokens) - 1
        logits = logits_of(name, tokens)
        reference = trainer_logprobs(shared_model(name), tokens)
        assert np.allclose(request.prompt_log_probs, reference[:last], atol=1e-5)
        assert np.allclose(request.generated_log_probs, reference[last:], atol=1e-5)
        assert request.prompt_top_n_logprobs is not None
        assert_top(request.prompt_top_n_logprobs, logits[:last], 2)
        assert_top(request.generated_top_n_logprobs, logits[last:-1], 3)


@both
def test_prompt_logprobs_can_be_had_without_a_completion(name: str) -> None:
    engine = make_engine(name, max_tokens_per_step=8)
    prompts = [token_ids(length, length) for length in (1, 5, 16, 17)]
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))
    for request in finish(engine).values():
        assert request.generated_tokens == request.generated_log_probs == []
        assert request.finish_reason is FinishReason.LENGTH
        assert request.prompt_log_probs is not None
        reference = trainer_logprobs(shared_model(name), request.prompt_tokens)
        assert np.allclose(request.prompt_log_probs, reference, atol=1e-5)


def test_more_top_logprobs_than_there_are_tokens_are_all_there_are() -> None:
    engine = make_engine("qwen3")
    (request,) = engine.generate([token_ids(4)], greedily(3, logprobs=VOCAB + 5, prompt_logprobs=VOCAB + 5))
    assert [len(row) for row in request.generated_top_n_logprobs] == [VOCAB] * 3
    assert request.prompt_top_n_logprobs is not None
    assert [len(row) for row in request.prompt_top_n_logprobs] == [VOCAB] * 3
