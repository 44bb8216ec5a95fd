"""Tests of sampled tokens: one random stream per sample, log-probs, penalties and biases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason
from tests.engine.cuts import CUTS, lived
from tests.engines import (
    at_random,
    finish,
    greedily,
    logits_of,
    logprob_error,
    make_engine,
    pass_suspended,
    shared_model,
    steps,
    token_ids,
)
from tests.models import VOCAB, trainer_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

both = pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
"""Through the fused forward; through the module."""


# --- one random stream per sample -------------------------------------------------------------------------------------

ODD = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def alone(name: str, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    engine = make_engine(name)
    engine.add_request(prompt, params, request_id=7)
    return [request.generated_tokens for request in finish(engine).values()]


@pytest.mark.parametrize(
    "options",
    [{}, {"max_requests": 3}, {"max_tokens_per_step": 8}, {"kv_cache_blocks": 14, "max_requests": 6}],
    ids=["many", "three at a time", "in chunks", "evicted"],
)
@pytest.mark.parametrize(
    ("name", "suspend"), [("qwen3", None), ("qwen3", "offload"), ("qwen3", "recompute"), ("gpt_oss", "recompute")]
)
def test_a_requests_tokens_depend_on_its_seed_alone(name: str, options: dict[str, Any], suspend: str | None) -> None:
    prompt, params = token_ids(6, 3), at_random(8, seed=42, n=2, **ODD)
    lonely = alone(name, prompt, params)
    engine = make_engine(name, **options)
    for number in range(20):
        if number == 7:
            engine.add_request(prompt, params, request_id=7)
        else:
            temperature = [0.0, 0.7, 1.5][number % 3]
            engine.add_request(
                token_ids(1 + number, number), at_random(3 + number % 8, temperature=temperature, seed=number)
            )
    ended = []
    while engine.has_unfinished:
        # A recompute more often than a prompt is done would never let it be done.
        ended += steps(engine, 40 if suspend == "recompute" else 3)
        if suspend is not None:
            pass_suspended(engine, suspend)
    done = finish(engine, ended)
    assert [done[7, 0].generated_tokens, done[7, 1].generated_tokens] == lonely
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


@both
def test_logprobs_are_of_the_distribution_sampled_from_or_raw_if_asked(name: str) -> None:
    prompt = token_ids(6, 6)
    options = {"temperature": 0.5, "top_k": 5, "logprobs": 0}
    engine = make_engine(name)
    engine.add_request(prompt, at_random(8, **options))
    engine.add_request(prompt, at_random(8, logprobs_mode="raw", **options))
    processed, raw = finish(engine).values()
    assert processed.generated_tokens == raw.generated_tokens
    assert processed.generated_top_n_logprobs == []
    assert logprob_error(name, raw) <= 1e-5
    logits = logits_of(name, prompt + processed.generated_tokens)[5:-1] / 0.5
    logits[logits < logits.topk(5).values[:, -1:]] = -torch.inf
    reference = logits.log_softmax(-1).gather(1, torch.tensor(processed.generated_tokens)[:, None])[:, 0]
    assert np.allclose(processed.generated_log_probs, reference, atol=2e-5)


# --- penalties and biases against Hugging Face's processors -----------------------------------------------------------


class OccurrencePenalty(LogitsProcessor):
    """Presence and frequency penalties as OpenAI's API documents them: over the completion alone."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        counts = torch.zeros_like(scores)
        for token in input_ids[0, self.prompt :].tolist():
            counts[0, token] += 1
        return scores - counts * self.frequency - (counts > 0) * self.presence


@both
@pytest.mark.parametrize("suspend", [None, "recompute"])
@pytest.mark.parametrize(
    ("options", "processors"),
    [
        ({"repetition_penalty": 1.7}, lambda prompt, stop: [RepetitionPenaltyLogitsProcessor(1.7)]),
        ({"presence_penalty": 1.5, "frequency_penalty": 0.7}, lambda prompt, stop: [OccurrencePenalty(prompt, 1.5, 0.7)]),
        ({"logit_bias": {9: 30.0, 10: -1e9, 96: 4.0}},
         lambda prompt, stop: [SequenceBiasLogitsProcessor([[[9], 30.0], [[10], -1e9], [[96], 4.0]])]),
        ({"logit_bias": {9: 20.0}, "repetition_penalty": 1.3, "frequency_penalty": 2.0, "min_tokens": 6},
         lambda prompt, stop: [SequenceBiasLogitsProcessor([[[9], 20.0]]),
                               MinNewTokensLengthLogitsProcessor(prompt, 6, stop),
                               RepetitionPenaltyLogitsProcessor(1.3), OccurrencePenalty(prompt, 0.0, 2.0)]),
    ],
    ids=["repetition", "occurrence", "bias", "all"],
)  # fmt: skip
def test_penalties_and_biases_are_hugging_faces(
    name: str,
    suspend: str | None,
    options: dict[str, Any],
    processors: Callable[[int, list[int]], list[LogitsProcessor]],
) -> None:
    prompt, stop = token_ids(7, 9), [9, 11]
    processor = LogitsProcessorList(processors(len(prompt), stop))
    engine = make_engine(name)
    engine.add_request(prompt, greedily(12, stop_token_ids=stop if "min_tokens" in options else [], **options))
    engine.add_request(token_ids(4, 3), at_random(12, temperature=0.9))
    ended = []
    while engine.has_unfinished:
        ended += steps(engine, 2)
        if suspend is not None:
            pass_suspended(engine, suspend)
    request = finish(engine, ended)[0, 0]
    history = list(prompt)
    for token, logprob in zip(request.generated_tokens, request.generated_log_probs, strict=True):
        scores = processor(torch.tensor([history]), logits_of(name, history)[-1:])
        assert token == int(scores.argmax())
        assert abs(float(scores.log_softmax(-1)[0, token]) - logprob) < 1e-4
        history.append(token)
