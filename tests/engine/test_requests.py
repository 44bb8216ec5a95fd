"""Tests of requests: results are independent of other requests and of their failures."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.failures import MAX_FAILED_STEPS
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.errors import ConfigError, EngineDeadError, EngineStateError, InvalidRequestError, RequestError
from rollout.requests.events import DynamicInferenceEventType
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest, VLMInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState, FinishReason, Status
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
    shared_model,
    steps,
    token_ids,
)
from tests.models import VOCAB, make_model, make_tokenizer, trainer_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

both = pytest.mark.parametrize("name", ["qwen3", "gemma3"])


def logits_of(name: str, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] logits of the trainer's own forward."""
    model = shared_model(name)
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


# --- one random stream per sample -------------------------------------------------------------------------------------

ODD = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


def alone(name: str, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    engine = make_engine(name)
    engine.add_request(prompt, params, request_id=7)
    return [request.generated_tokens for request in finish(engine).values()]


@both
@pytest.mark.parametrize(
    "options",
    [{}, {"max_requests": 3}, {"max_tokens_per_step": 8}, {"kv_cache_blocks": 14, "max_requests": 6}],
    ids=["many", "three at a time", "in chunks", "evicted"],
)
@pytest.mark.parametrize("suspend", [None, "offload", "recompute"])
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


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    engine = make_engine("qwen3")
    for number in range(6):
        engine.add_request(token_ids(4 + number, number), greedily(8) if number % 2 else at_random(8, seed=number))
    for (number, _), request in finish(engine).items():
        if number % 2:
            assert_greedy("qwen3", request)
        else:
            assert [request.generated_tokens] == alone("qwen3", request.prompt_tokens, at_random(8, seed=number))


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
@pytest.mark.parametrize("how", ["plain", "chunked", "prefix hit", "evicted", "suspended", "one of a group"])
def test_top_logprobs_of_prompt_and_completion_are_the_trainers(name: str, how: str) -> None:
    options = {"chunked": {"max_tokens_per_step": 5, "max_requests": 4},
               "evicted": {"kv_cache_blocks": 9, "max_requests": 4}}.get(how, {})  # fmt: skip
    engine = make_engine(name, **options)
    prompt = token_ids(13, 5)
    if how == "prefix hit":
        engine.generate([[*prompt, 5, 6, 7]], greedily(2))
    for seed in range(2 if how == "evicted" else 0):
        engine.add_request(token_ids(6, 60 + seed), at_random(14))
    number = engine.add_request(
        prompt, at_random(9, logprobs=3, prompt_logprobs=2, n=3 if how == "one of a group" else 1)
    )
    ended = []
    while engine.has_unfinished:
        ended += steps(engine, 1)
        if how == "suspended":
            pass_suspended(engine, "recompute")
    if how == "evicted":
        assert engine.stats()["preemptions"] > 0
    for (owner, _), request in finish(engine, ended).items():
        if owner != number:
            continue
        assert request.num_cached_tokens == 0, "logits are needed at every position of the prompt"
        tokens = prompt + request.generated_tokens
        logits = logits_of(name, tokens)
        reference = trainer_logprobs(shared_model(name), tokens)
        assert np.allclose(request.prompt_log_probs, reference[:12], atol=1e-5)
        assert np.allclose(request.generated_log_probs, reference[12:], atol=1e-5)
        assert request.prompt_top_n_logprobs is not None
        assert_top(request.prompt_top_n_logprobs, logits[:12], 2)
        assert_top(request.generated_top_n_logprobs, logits[12:-1], 3)


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


# --- where a completion ends ------------------------------------------------------------------------------------------


def eos_model() -> tuple[PreTrainedModel, list[int], list[int]]:
    """A model, a prompt, and its greedy continuation: some token in it will be made the end."""
    prompt = token_ids(6, 8)
    return shared_model("qwen3"), prompt, expected("qwen3", prompt, 12)


def first_with_predecessors(tokens: list[int], least: int) -> int:
    """The first index from `least` on whose token has not come before."""
    return next(index for index in range(least, len(tokens)) if tokens[index] not in tokens[:index])


def test_a_stop_token_ends_a_completion_and_stays_in_it() -> None:
    _, prompt, tokens = eos_model()
    at = first_with_predecessors(tokens, 2)
    engine = make_engine("qwen3")
    (request,) = engine.generate([prompt], greedily(12, stop_token_ids=[96, tokens[at]]))
    assert request.generated_tokens == tokens[: at + 1]
    assert request.finish_reason is FinishReason.STOP
    assert request.stop_reason == tokens[at]
    assert len(request.generated_log_probs) == at + 1


def test_end_of_sequence_ends_a_completion_unless_it_is_ignored() -> None:
    model = make_model("qwen3")
    _, prompt, tokens = eos_model()
    at = first_with_predecessors(tokens, 2)
    engine = make_engine(model)
    engine.controller.eos_token_ids = (tokens[at],)
    (stopped,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=12))
    assert stopped.generated_tokens == tokens[: at + 1]
    assert stopped.finish_reason is FinishReason.STOP
    (ignored,) = engine.generate([prompt], greedily(12))
    assert ignored.generated_tokens == tokens
    assert ignored.finish_reason is FinishReason.LENGTH
    assert ignored.stop_reason is None


def test_the_end_of_sequence_ids_are_the_generation_configs_the_configs_and_the_tokenizers() -> None:
    model = make_model("qwen3")
    model.generation_config.eos_token_id = [5, 6]
    engine = make_engine(model, make_tokenizer())
    assert sorted(engine.controller.eos_token_ids) == [2, 5, 6]


@pytest.mark.parametrize("chunk", [None, "recompute"])
def test_no_stop_token_before_min_tokens(chunk: str | None) -> None:
    _, prompt, tokens = eos_model()
    engine = make_engine("qwen3")
    engine.add_request(prompt, greedily(9, min_tokens=5, stop_token_ids=tokens[:4]))
    ended = []
    while engine.has_unfinished:
        ended += steps(engine, 1)
        if chunk is not None:
            pass_suspended(engine, chunk)
    (request,) = finish(engine, ended).values()
    made = request.generated_tokens
    assert len(made) >= 5
    assert not set(made[:5]) & set(tokens[:4])
    history = list(prompt)
    for token in made[:5]:
        logits = logits_of("qwen3", history)[-1]
        logits[tokens[:4]] = -torch.inf
        assert token == int(logits.argmax())
        history.append(token)


def test_a_budget_of_no_tokens_computes_the_prompt_and_ends() -> None:
    engine = make_engine("qwen3")
    prompt = token_ids(9, 1)
    (request,) = engine.generate([prompt], SamplingParams(max_tokens=0))
    assert request.generated_tokens == []
    assert request.finish_reason is FinishReason.LENGTH
    assert request.succeeded()
    assert engine.stats()["prefill_tokens_computed"] == 9
    samples = engine.generate([prompt], SamplingParams(max_tokens=0, n=3))
    assert [sample.generated_tokens for sample in samples] == [[], [], []]
    (again,) = engine.generate([prompt], greedily(3))
    assert again.num_cached_tokens == 8
    assert_greedy("qwen3", again)


def text_of(tokens: list[int]) -> str:
    return str(make_tokenizer().decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("suspend", [None, "recompute", "offload", "snapshot"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_spans_tokens_and_checkpoints_is_found(suspend: str | None, include: bool) -> None:
    _, prompt, tokens = eos_model()
    text = text_of(tokens)
    assert len(text) == 12
    at = next(index for index in range(3, 9) if text.find(text[index : index + 3]) == index)
    stop = text[at : at + 3]
    engine = make_engine("qwen3", make_tokenizer())
    engine.add_request(prompt, greedily(12, stop=["never", stop], include_stop_str_in_output=include))
    ended = []
    while engine.has_unfinished:
        ended += steps(engine, 1)
        if suspend == "snapshot":
            again = make_engine("qwen3", make_tokenizer())
            for record in engine.snapshot():
                again.add_record(record)
            engine = again
        elif suspend is not None:
            pass_suspended(engine, suspend)
    (request,) = finish(engine, ended).values()
    assert request.generated_tokens == tokens[: at + 3]
    assert request.generated_text == text[: at + 3 if include else at]
    assert request.finish_reason is FinishReason.STOP
    assert request.stop_reason == stop


def test_text_prompts_chats_and_texts_back() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    engine = make_engine("qwen3", tokenizer)
    prompts: list[Any] = [
        "Hello 1",
        [{"role": "user", "content": "Hello 1"}],
        np.array([5, 6, 7]),
        torch.tensor([5, 6, 7]),
    ]
    texts, chats, arrays, tensors = engine.generate(prompts, greedily(5))
    assert texts.prompt == "Hello 1"
    assert text_of(texts.prompt_tokens) == "Hello 1"
    assert text_of(chats.prompt_tokens) == "Hello 1:"
    assert arrays.prompt_tokens == tensors.prompt_tokens == [5, 6, 7]
    for request in (texts, chats, arrays, tensors):
        assert_greedy("qwen3", request)
        assert request.generated_text == text_of(request.generated_tokens)


class Illiterate:
    """A tokenizer that cannot read some ids of the model's vocabulary, as sentencepiece cannot those that are padding."""

    def __init__(self, unreadable: int) -> None:
        self._inner, self._unreadable = make_tokenizer(), unreadable

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        if self._unreadable in ids:
            raise IndexError("piece id is out of range")
        return str(self._inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def convert_ids_to_tokens(self, token: int) -> str | None:
        return self._inner.convert_ids_to_tokens(token)


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_a_token_that_the_tokenizer_cannot_read_harms_one_request_alone(stop: list[str]) -> None:
    prompt, other = token_ids(6, 8), token_ids(6, 9)
    tokens = expected("qwen3", prompt, 8)
    unreadable = next(token for token in tokens if token not in expected("qwen3", other, 8))
    engine = make_engine("qwen3", Illiterate(unreadable))
    engine.add_request(prompt, greedily(8, stop=stop))
    engine.add_request(other, greedily(8, stop=stop))
    if stop:
        done = finish(engine)
        assert done[0, 0].finish_reason is FinishReason.ERROR
        assert done[0, 0].error == "IndexError: piece id is out of range"
        assert done[0, 0].generated_tokens == tokens[: tokens.index(unreadable) + 1]
    else:
        with pytest.warns(UserWarning, match="request 0 sample 0 has tokens and no text.*IndexError: piece id"):
            done = finish(engine)
        assert done[0, 0].generated_tokens == tokens
        assert done[0, 0].generated_text is None
    assert_greedy("qwen3", done[1, 0])
    assert done[1, 0].generated_text == text_of(done[1, 0].generated_tokens)


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


# --- refused at admission ---------------------------------------------------------------------------------------------


def test_a_budget_beyond_the_maximum_length_is_clamped_with_a_warning() -> None:
    engine = make_engine("qwen3", max_sequence_length=12)
    with pytest.warns(UserWarning, match=r"max_tokens=20 is clamped to 7.*max_sequence_length=12"):
        engine.add_request(token_ids(5), greedily(20, min_tokens=9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.add_request(token_ids(5, 1), greedily(7))
    clamped, fitting = finish(engine).values()
    assert len(clamped.generated_tokens) == len(fitting.generated_tokens) == 7
    assert clamped.generated_tokens[:5] == expected("qwen3", clamped.prompt_tokens, 5)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], greedily(3), InvalidRequestError, "prompt is empty"),
        ([5, VOCAB], greedily(3), InvalidRequestError, rf"prompt token {VOCAB}: must lie in \[0, {VOCAB}\)"),
        ([5, -1], greedily(3), InvalidRequestError, "prompt token -1"),
        (token_ids(40), greedily(3), InvalidRequestError, "prompt of 40 tokens.*max_sequence_length=40"),
        (token_ids(41), greedily(0), InvalidRequestError, "prompt of 41 tokens.*max_sequence_length=40"),
        (token_ids(5), greedily(3, n=9), InvalidRequestError, "n=9 samples exceed max_requests=8"),
        (token_ids(20), greedily(14), InvalidRequestError, "34 tokens need 9 KV blocks and the pool has 8"),
        (token_ids(33), greedily(0), InvalidRequestError, "33 tokens need 9 KV blocks and the pool has 8"),
        (token_ids(5), greedily(3, logit_bias={VOCAB: 1.0}), InvalidRequestError, f"logit_bias of token {VOCAB}"),
        ("text", greedily(3), ValueError, "a text prompt needs a tokenizer"),
        ([{"role": "user", "content": "text"}], greedily(3), ValueError, "chat messages needs a tokenizer"),
        (token_ids(5), greedily(3, stop=["x"]), ValueError, r"stop=\['x'\] needs a tokenizer"),
        ([1.5, 2.0], greedily(3), TypeError, r"prompt\[0\]=1.5"),
        ([5, True], greedily(3), TypeError, r"prompt\[1\]=True"),
        ([5, "x"], greedily(3), TypeError, r"prompt\[1\]='x'"),
        (7, greedily(3), TypeError, "prompt of type int"),
        (b"bytes", greedily(3), TypeError, "prompt of type bytes"),
    ],
)  # fmt: skip
def test_what_can_never_be_served_is_refused_by_name_and_harms_nobody(
    prompt: Any, params: SamplingParams, error: type[Exception], message: str
) -> None:
    engine = make_engine("qwen3", max_sequence_length=40, kv_cache_blocks=8)
    engine.add_request(token_ids(6), greedily(6))
    steps(engine, 2)
    before = engine.stats()
    with pytest.raises(error, match=message) as caught:
        engine.add_request(prompt, params)
    if isinstance(caught.value, InvalidRequestError):
        assert caught.value.request_id == 1
    assert engine.stats() == before
    assert engine.add_request(token_ids(6, 2), greedily(6)) == 1
    for request in finish(engine).values():
        assert_greedy("qwen3", request)


def test_a_prompt_that_just_fits_the_pool_is_served() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=8)
    for length, budget in ((32, 0), (32, 1), (20, 13), (1, 32)):
        (request,) = engine.generate([token_ids(length, length)], greedily(budget))
        assert len(request.generated_tokens) == budget
        assert engine.context.allocator.num_used == 0


def test_an_id_in_use_is_refused_and_free_again_when_its_request_has_ended() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(5), greedily(3), request_id=4)
    with pytest.raises(InvalidRequestError, match="request_id=4 is in use"):
        engine.add_request(token_ids(5), greedily(3), request_id=4)
    (record,) = engine.snapshot()
    with pytest.raises(InvalidRequestError, match="request 4 sample 0 is here already"):
        engine.add_record(record)
    assert engine.add_request(token_ids(5), greedily(3)) == 5
    assert len(finish(engine)) == 2
    assert engine.add_request(token_ids(5), greedily(3), request_id=4) == 4
    assert len(finish(engine)) == 1


def test_a_record_that_does_not_fit_here_is_refused_or_clamped_as_a_request_is() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(10), greedily(30))
    steps(engine, 5)
    (record,) = engine.snapshot()
    with pytest.raises(InvalidRequestError, match=r"40 tokens need 10 KV blocks"):
        make_engine("qwen3", kv_cache_blocks=9).add_record(record)
    (record,) = engine.snapshot()
    with pytest.raises(InvalidRequestError, match=r"prompt of 15 tokens"):
        make_engine("qwen3", max_sequence_length=12).add_record(record)
    (record,) = engine.snapshot()
    shorter = make_engine("qwen3", max_sequence_length=20)
    with pytest.warns(UserWarning, match="max_tokens=25 is clamped to 5"):
        shorter.add_record(record)
    (request,) = finish(shorter).values()
    assert request.generated_tokens == expected("qwen3", token_ids(10), 10)


def test_a_generate_call_with_one_bad_prompt_queues_nothing() -> None:
    engine = make_engine("qwen3")
    with pytest.raises(InvalidRequestError):
        engine.generate([token_ids(5), []], greedily(3))
    assert not engine.has_unfinished
    engine.pause()
    with pytest.raises(EngineStateError):
        engine.generate([token_ids(5)], greedily(3))
    assert not engine.has_unfinished


# --- a step that raises -----------------------------------------------------------------------------------------------


class BoomError(Exception):
    """Raised inside the model."""


class Fuse:
    """Makes the forward of one layer raise, so many times."""

    def __init__(self, engine: DynamicInferenceEngine, layer: int = 1) -> None:
        self.error: BaseException = BoomError("inside the model")
        self.left = 0
        engine.model.model.layers[layer].register_forward_pre_hook(self._burn)

    def _burn(self, *_: Any) -> None:
        if self.left:
            self.left -= 1
            raise self.error


def test_an_exception_in_a_step_fails_the_requests_of_that_step_with_its_cause_and_no_other() -> None:
    engine = make_engine(make_model("qwen3"), max_requests=2)
    fuse = Fuse(engine)
    for seed in range(2):
        engine.add_request(token_ids(5, seed), greedily(8))
    steps(engine, 2)
    engine.add_request(token_ids(5, 2), greedily(8))
    fuse.left = 1
    failed = steps(engine, 1)
    assert [record.request_id for record in failed] == [0, 1]
    for record in failed:
        request = record.merge()
        assert request.status is Status.FAILED
        assert request.finish_reason is FinishReason.ERROR
        assert request.error == "BoomError: inside the model"
        assert request.events[-2].type is DynamicInferenceEventType.ERROR_NONTRANSIENT
        assert request.events[-2].payload is fuse.error
        assert request.generated_tokens == expected("qwen3", request.prompt_tokens, 2), "what it had is not lost"
    assert engine.state is EngineState.RUNNING
    assert engine.stats()["requests_failed"] == 2
    (request,) = finish(engine).values()
    assert_greedy("qwen3", request)


def test_generate_raises_with_the_name_of_the_request_that_failed() -> None:
    engine = make_engine(make_model("qwen3"))
    Fuse(engine).left = 1
    with pytest.raises(RequestError, match=r"request 0: BoomError: inside the model") as caught:
        engine.generate([token_ids(5)], greedily(3))
    assert caught.value.request_id == 0
    assert_greedy("qwen3", engine.generate([token_ids(5)], greedily(3))[0])


def test_after_three_failed_steps_in_a_row_the_engine_is_dead_and_says_of_what() -> None:
    engine = make_engine(make_model("qwen3"), max_requests=1)
    fuse = Fuse(engine)
    for seed in range(5):
        engine.add_request(token_ids(5, seed), greedily(8))
    fuse.left = MAX_FAILED_STEPS
    ended = []
    for _ in range(MAX_FAILED_STEPS):
        ended += engine.step()
    assert sorted(record.request_id for record in ended) == list(range(5)), "nobody is left hanging"
    assert all(record[-1].error == "BoomError: inside the model" for record in ended)
    assert engine.state is EngineState.STOPPED
    assert engine.cache.device_bytes == 0
    for call in (engine.step, engine.pause, lambda: engine.add_request(token_ids(5)), engine.weights_updated):
        with pytest.raises(EngineDeadError, match="BoomError: inside the model; build another") as caught:
            call()
        assert caught.value.__cause__ is fuse.error


def test_failed_steps_count_only_in_a_row() -> None:
    engine = make_engine(make_model("qwen3"), max_requests=1)
    fuse = Fuse(engine)
    for round_ in range(2 * MAX_FAILED_STEPS):
        engine.add_request(token_ids(5, round_), greedily(2))
        fuse.left = 1
        assert engine.step()[0][-1].failed()
        assert_greedy("qwen3", engine.generate([token_ids(5, round_)], greedily(2))[0])
    assert engine.state is EngineState.RUNNING


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("after", range(4))
def test_ctrl_c_inside_a_step_loses_nothing(layer: int, after: int) -> None:
    engine = make_engine(make_model("qwen3"), max_tokens_per_step=8)
    fuse = Fuse(engine, layer)
    fuse.error = KeyboardInterrupt()
    prompts = [token_ids(3 + 2 * seed, seed) for seed in range(5)]
    for prompt in prompts:
        engine.add_request(prompt, greedily(7))
    ended = steps(engine, after)
    for _ in range(3):
        fuse.left = 1
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        engine.context.scheduler.check()
        ended += steps(engine, 2)
    done = finish(engine, ended)
    assert len(done) == 5
    for request in done.values():
        assert_greedy("qwen3", request)


def test_ctrl_c_inside_generate_loses_neither_what_has_ended_nor_what_has_not() -> None:
    engine = make_engine(make_model("qwen3"))
    fuse = Fuse(engine)
    fuse.error = KeyboardInterrupt()
    engine.add_request(token_ids(5, 9), greedily(1))
    calls = 0
    step = engine.context.scheduler.schedule

    def count() -> Any:
        nonlocal calls
        calls += 1
        fuse.left = int(calls == 4)
        return step()

    engine.context.scheduler.schedule = count  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.generate([token_ids(5, seed) for seed in range(3)], greedily(6))
    done = finish(engine)
    assert sorted(done) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for request in done.values():
        assert_greedy("qwen3", request)


@contextmanager
def ctrl_c_at_line(number: int) -> Iterator[None]:
    """The person at the keyboard presses Ctrl-C while the engine is at its so-manyth line."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if f"rollout{os.sep}engine" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("line", [*range(3, 1500, 149), *range(1500, 11000, 977)])
def test_ctrl_c_at_any_line_of_the_engine_loses_nothing(line: int) -> None:
    engine = make_engine("qwen3", kv_cache_blocks=14, max_tokens_per_step=16)
    ended = []
    with suppress(KeyboardInterrupt), ctrl_c_at_line(line):
        for seed in range(4):
            engine.add_request(token_ids(3 + 2 * seed, seed), greedily(6), request_id=seed)
        engine.add_request(token_ids(6, 7), at_random(5, n=2), request_id=9)
        ended += engine.step()
        pass_suspended(engine, "offload")
        while engine.has_unfinished:
            ended += engine.step()
    if engine.state is EngineState.SUSPENDED:
        engine.resume()
    if engine.state is EngineState.PAUSED:
        engine.unpause()
    added = {sample.key for sample in engine.context.scheduler}
    added |= {(record.request_id, record.sample_index) for record in (*ended, *engine._ledger.ended)}
    done = finish(engine, ended)
    assert set(done) == added
    for (number, _), request in done.items():
        if number < 4:
            assert_greedy("qwen3", request)
    assert_greedy("qwen3", engine.generate([token_ids(9, 5)], greedily(4))[0])


# --- NaN --------------------------------------------------------------------------------------------------------------


def with_a_bad_token() -> PreTrainedModel:
    """Token 7 has no finite embedding."""
    model = make_model("qwen3")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = torch.nan
    return model


def good(length: int, seed: int) -> list[int]:
    return [8 if token == 7 else token for token in token_ids(length, seed)]


@pytest.mark.parametrize("bad_length", [1, 6, 14])
@pytest.mark.parametrize("budget", [8, 64])
def test_nan_of_one_request_harms_neither_its_neighbours_nor_who_gets_its_blocks(bad_length: int, budget: int) -> None:
    model = with_a_bad_token()
    engine = make_engine(model, kv_cache_blocks=16, max_tokens_per_step=budget)
    engine.add_request([7, *good(bad_length - 1, 1)], greedily(5, n=2))
    neighbours = [good(length, 30 + length) for length in (2, 5, 7)]
    for prompt in neighbours:
        engine.add_request(prompt, greedily(3, logit_bias={7: -1e9}))
    done = finish(engine)
    for index in range(2):
        assert done[0, index].finish_reason is FinishReason.ERROR
        assert "no finite value" in str(done[0, index].error)
        assert done[0, index].generated_tokens == []
    for number, prompt in enumerate(neighbours, 1):
        assert done[number, 0].generated_tokens == expected(model, prompt, 3)
    for seed in range(6):
        prompt = good(3 + 7 * seed, 40 + seed)
        (request,) = engine.generate([prompt], greedily(3, logit_bias={7: -1e9}))
        assert request.generated_tokens == expected(model, prompt, 3)


@pytest.mark.parametrize("extreme", [
    {"logit_bias": {9: 3e38}, "temperature": 0.5}, {"repetition_penalty": 2e-38, "temperature": 0.01},
    {"logit_bias": {9: 1e34}, "temperature": 1e-6},
])  # fmt: skip
def test_parameters_that_lead_beyond_float32_fail_alone_and_are_named(extreme: dict[str, Any]) -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(5, 1), at_random(3, **extreme))
    engine.add_request(token_ids(5, 1), greedily(3))
    done = finish(engine)
    assert done[0, 0].finish_reason is FinishReason.ERROR
    assert all(name in str(done[0, 0].error) for name in extreme)
    assert "weights" not in str(done[0, 0].error)
    assert_greedy("qwen3", done[1, 0])


def test_a_request_that_may_draw_no_token_before_min_tokens_is_refused() -> None:
    engine = make_engine("qwen3")
    with pytest.raises(InvalidRequestError, match="min_tokens=2: every one of"):
        engine.add_request(token_ids(5, 1), greedily(3, min_tokens=2, stop_token_ids=range(VOCAB)))
    (request,) = engine.generate([token_ids(5, 1)], greedily(3, min_tokens=2, stop_token_ids=range(1, VOCAB)))
    assert request.generated_tokens[:2] == [0, 0]


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the decode kernel, which never looks behind the end of a sequence."""
    monkeypatch.setattr("rollout.engine.forward.model_runner.cpu_library.load", lambda: None)


@pytest.mark.usefixtures("plain_torch")
def test_nan_written_by_a_step_that_then_raises_harms_nobody_later() -> None:
    model = make_model("qwen3")
    engine = make_engine(model, kv_cache_blocks=8)
    fuse = Fuse(engine)
    poison = model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *args: args[2] * torch.nan)
    fuse.left = 1
    engine.add_request(token_ids(30, 3), greedily(2))
    assert steps(engine, 1)[0][-1].failed()
    poison.remove()
    assert_greedy(model, engine.generate([token_ids(6, 4)], greedily(5))[0])


@pytest.mark.usefixtures("plain_torch")
def test_nan_of_an_aborted_prefill_harms_nobody_later() -> None:
    model = with_a_bad_token()
    engine = make_engine(model, kv_cache_blocks=8, max_tokens_per_step=8)
    engine.add_request([8, 9, 7, *good(20, 1)], greedily(2))
    steps(engine, 1)
    engine.abort_request(0)
    finish(engine)
    prompt = good(6, 2)
    (request,) = engine.generate([prompt], greedily(3, logit_bias={7: -1e9}))
    assert request.generated_tokens == expected(model, prompt, 3)


# --- order ------------------------------------------------------------------------------------------------------------


def admissions(requests: list[DynamicInferenceRequest]) -> list[int]:
    def first(request: DynamicInferenceRequest) -> float:
        kind = DynamicInferenceEventType.ADD_CONTEXT
        return next(event.timestamp for event in request.events if event.type is kind)

    return [request.request_id for request in sorted(requests, key=first)]


def test_requests_are_admitted_in_order_of_arrival_and_of_priority_before_that() -> None:
    engine = make_engine("qwen3", max_requests=2)
    priorities = [0, 0, 0, 5, -1, 5, 0]
    for seed, priority in enumerate(priorities):
        engine.add_request(token_ids(12 - seed, seed), greedily(3), priority=priority)
    requests = list(finish(engine).values())
    assert admissions(requests) == [3, 5, 0, 1, 2, 6, 4]
    for request in requests:
        assert_greedy("qwen3", request)
        assert request.priority == priorities[request.request_id]


def test_a_big_request_at_the_head_is_not_overtaken_by_small_ones() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=12)
    engine.add_request(token_ids(20, 0), greedily(12))
    steps(engine, 1)
    engine.add_request(token_ids(40, 1), greedily(2))
    for seed in range(2, 5):
        engine.add_request(token_ids(2, seed), greedily(2))
    assert admissions(list(finish(engine).values())) == [0, 1, 2, 3, 4]


def test_who_waits_for_anothers_prefix_lets_others_pass_and_keeps_its_slot() -> None:
    engine = make_engine("qwen3", max_requests=3, max_tokens_per_step=40)
    prompt = token_ids(12, 0)
    engine.add_request(prompt, greedily(4))
    engine.add_request([*prompt, 5], greedily(4))
    engine.add_request(token_ids(6, 1), greedily(4))
    engine.add_request(token_ids(6, 2), greedily(4))
    ended = steps(engine, 1)
    assert [sample.record.request_id for sample in engine.context.scheduler.active()] == [0, 2]
    ended += steps(engine, 1)
    assert [sample.record.request_id for sample in engine.context.scheduler.active()] == [0, 1, 2]
    done = finish(engine, ended)
    assert done[1, 0].num_cached_tokens == 12
    for request in done.values():
        assert_greedy("qwen3", request)


def test_who_passes_takes_no_blocks_that_the_one_it_passes_needs() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=9, max_tokens_per_step=60)
    prompt = token_ids(12, 0)
    engine.add_request(prompt, greedily(2))
    engine.add_request([*prompt, 5], greedily(2))
    engine.add_request(token_ids(16, 1), greedily(2))
    assert admissions(list(finish(engine).values())) == [0, 1, 2]


def test_a_group_that_can_never_run_is_refused_before_its_samples_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen3")
    monkeypatch.setattr(engine._admission, "family", None)
    with pytest.raises(InvalidRequestError, match="n=2147483647 samples exceed max_requests=8"):
        engine.add_request(token_ids(4), greedily(2, n=2**31 - 1))
    assert not engine.has_unfinished


def test_every_sample_that_gives_up_its_kv_or_is_paused_says_so() -> None:
    engine = make_engine("qwen3", max_requests=2, max_tokens_per_step=BLOCK)
    engine.add_request(token_ids(6, 1), greedily(3, n=2))
    ended = steps(engine, 1)
    engine.pause()
    engine.pause()
    engine.suspend("recompute")
    engine.resume()
    engine.unpause()
    for request in finish(engine, ended).values():
        kinds = [event.type.name for event in request.events]
        assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", "PAUSE", "EVICT", "ADD_CONTEXT", "FINISH"]
        assert_greedy("qwen3", request)


def test_an_interrupted_step_is_a_transient_error_of_its_requests() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(5, 1), greedily(3))

    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = shared_model("qwen3").register_forward_pre_hook(press)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    handle.remove()
    (request,) = finish(engine).values()
    (event,) = [event for event in request.events if event.type.name == "ERROR_TRANSIENT"]
    assert isinstance(event.payload, KeyboardInterrupt)
    assert DynamicInferenceRequest.deserialize(request.serialize()).events[2].type is event.type
    assert_greedy("qwen3", request)


def test_of_an_evicted_and_a_newer_request_the_evicted_one_comes_back_first() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=8, max_requests=3)
    for seed in range(2):
        engine.add_request(token_ids(6, seed), greedily(16))
    ended = []
    while not engine.stats()["preemptions"]:
        ended += steps(engine, 1)
    engine.add_request(token_ids(3, 2), greedily(2))
    assert [sample.record.request_id for sample in engine.context.scheduler.waiting] == [1, 2]
    done = finish(engine, ended)
    assert admissions(list(done.values())) == [0, 1, 2]
    kinds = [event.type.name for event in done[1, 0].events]
    assert kinds.index("EVICT") < len(kinds) - 1
    assert kinds.count("ADD_CONTEXT") == kinds.count("EVICT") + 1
    for request in done.values():
        assert_greedy("qwen3", request)


@pytest.mark.parametrize("track", [False, True])
def test_events_come_in_order_and_once(track: bool) -> None:
    engine = make_engine("qwen3", track_generated_token_events=track)
    engine.add_request(token_ids(5, 1), greedily(3, n=2))
    for request in finish(engine).values():
        kinds = [event.type.name for event in request.events]
        assert kinds == ["ADD_ENGINE", "ADD_CONTEXT", *["GENERATED_TOKEN"] * (3 * track), "FINISH"]
        stamps = [event.timestamp for event in request.events]
        assert stamps == sorted(stamps)
        if track:
            payloads = [event.payload for event in request.events[2:5]]
            assert [payload["token_id"] for payload in payloads] == request.generated_tokens
            last = payloads[-1]
            assert last["blocks_total"] == 64
            assert last["blocks_hashed_total"] == last["blocks_hashed_active"] == 1, "the prompt's only complete block"
            assert 3 <= last["blocks_ref_count"] <= 4, "of both samples: it is shared"


def test_times_are_kept() -> None:
    now = 100.0

    def clock() -> float:
        nonlocal now
        now += 0.25
        return now

    engine = make_engine("qwen3")
    engine = DynamicInferenceEngine(engine.model, None, engine.config, clock=clock)
    engine.add_request(token_ids(5, 1), greedily(4))
    (request,) = finish(engine).values()
    assert request.ttft is not None
    assert request.ttft > 0
    assert len(request.tpot) == 3
    assert all(gap > 0 for gap in request.tpot)
    assert request.latency is not None
    assert request.latency >= request.ttft + sum(request.tpot)


def test_metadata_comes_back_untouched() -> None:
    engine = make_engine("qwen3")
    extra = {"answer": 42, "path": ["a", None]}
    engine.add_request(token_ids(5, 1), greedily(4, n=2), metadata=extra)
    steps(engine, 1)
    pass_suspended(engine, "recompute")
    assert [request.metadata for request in finish(engine).values()] == [extra, extra]


def test_results_of_generate_stand_in_the_order_of_the_prompts_and_other_requests_are_kept() -> None:
    engine = make_engine("qwen3", max_requests=3)
    other = engine.add_request(token_ids(3, 9), greedily(2))
    prompts = [token_ids(14 - 3 * seed, seed) for seed in range(4)]
    results = engine.generate(prompts, at_random(4, n=2))
    assert [result.prompt_tokens for result in results] == [prompt for prompt in prompts for _ in range(2)]
    assert [result.sample_index for result in results] == [0, 1] * 4
    assert list(finish(engine)) == [(other, 0)]
    assert engine.generate([], greedily(3)) == []


def test_blocks_are_sized_by_the_block_size_the_tests_count_with() -> None:
    assert make_engine("qwen3").config.block_size_tokens == BLOCK


# --- accepted is served, and what is not is refused by name -----------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"imgs": torch.zeros(1, 3, 2, 2), "num_tiles": [1]}, r"VLMInferenceRequest\.imgs: .* send the text alone"),
        ({"num_tiles": [2]}, r"VLMInferenceRequest\.imgs"),
        ({"routing_indices": np.zeros((3, 3, 2), np.int16)}, "this engine cannot replay routing_indices"),
        ({"encoder_prompt": "text"}, "encoder_prompt: only decoder models are supported"),
        ({"stop_word_ids": [[5, 6]]}, "stop_word_ids: give SamplingParams.stop"),
    ],
)
def test_a_record_that_asks_for_what_nobody_here_does_is_refused_by_the_fields_name(fields, words) -> None:
    engine = make_engine("qwen3")
    kind = VLMInferenceRequest if "num_tiles" in fields else DynamicInferenceRequest
    record = DynamicInferenceRequestRecord.from_request(kind(request_id=4, prompt_tokens=token_ids(5), **fields))
    for take in (engine.add_record, engine.check_record):
        with pytest.raises(InvalidRequestError, match=words) as caught:
            take(record)
        assert caught.value.request_id == 4
    assert not engine.has_unfinished


def test_a_request_of_the_other_kind_that_brings_no_image_is_served() -> None:
    engine = make_engine("qwen3")
    request = VLMInferenceRequest(request_id=4, prompt_tokens=token_ids(5), sampling_params=greedily(3))
    engine.add_record(DynamicInferenceRequestRecord.from_request(request))
    assert_greedy("qwen3", finish(engine)[4, 0])


def test_a_stop_token_that_can_never_come_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=rf"stop_token_ids of token {VOCAB}: must lie in \[0, {VOCAB}\)"):
        make_engine("qwen3").add_request([5], SamplingParams(stop_token_ids=[3, VOCAB]))


def test_a_request_has_its_text_token_by_token_once_somebody_asks() -> None:
    engine = make_engine("qwen3", make_tokenizer())
    (request,) = engine.generate(["a b"], at_random(9))
    assert (request.segments, request.generated_segments, request.generated_sequence_lengths) == (None, None, None)
    engine.controller.fill_segments(request)
    assert request.segments == ["a", " ", "b"]
    assert (len(request.generated_segments), request.generated_sequence_lengths) == (9, [9])
    assert "".join(request.generated_segments) == request.generated_text
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        make_engine("qwen3").controller.fill_segments(request)


def test_the_metadata_types_are_those_of_the_rows_the_sampler_reads() -> None:
    table = SamplingTable("cpu")
    table.set(0, SamplingParams(temperature=0.5, top_k=7, top_p=0.5), key=1)
    rows = table.select(np.zeros(1, np.int64))
    for name, dtype, on_device in DynamicInferenceRequest.get_metadata_types():
        if on_device:
            assert getattr(rows, "key" if name == "seed" else name).dtype == dtype, name
