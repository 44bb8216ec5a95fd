"""Tests of where a completion ends: stop tokens, stop strings, budgets, and its text."""

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
    assert_greedy,
    expected,
    finish,
    greedily,
    make_engine,
    token_ids,
)
from tests.models import make_model, make_tokenizer

PROMPT = token_ids(6, 8)


def continuation() -> list[int]:
    """The greedy one of the prompt: some token in it will be made the end."""
    return expected("qwen3", PROMPT, 12)


def first_with_predecessors(tokens: list[int], least: int) -> int:
    """The first index from `least` on whose token has not come before."""
    return next(index for index in range(least, len(tokens)) if tokens[index] not in tokens[:index])


def test_a_stop_token_ends_a_completion_and_stays_in_it() -> None:
    tokens = continuation()
    at = first_with_predecessors(tokens, 2)
    (request,) = make_engine("qwen3").generate([PROMPT], greedily(12, stop_token_ids=[96, tokens[at]]))
    assert request.generated_tokens == tokens[: at + 1]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, tokens[at])
    assert len(request.generated_log_probs) == at + 1


def test_end_of_sequence_ends_a_completion_unless_it_is_ignored() -> None:
    tokens = continuation()
    at = first_with_predecessors(tokens, 2)
    engine = make_engine("qwen3")
    engine.controller.eos_token_ids = (tokens[at],)
    (stopped,) = engine.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12))
    assert (stopped.generated_tokens, stopped.finish_reason) == (tokens[: at + 1], FinishReason.STOP)
    (ignored,) = engine.generate([PROMPT], greedily(12))
    assert (ignored.generated_tokens, ignored.finish_reason) == (tokens, FinishReason.LENGTH)
    assert ignored.stop_reason is None


def test_the_end_of_sequence_ids_are_the_generation_configs_the_configs_and_the_tokenizers() -> None:
    model = make_model("qwen3")
    model.generation_config.eos_token_id = [5, 6]
    engine = make_engine(model, make_tokenizer())
    assert sorted(engine.controller.eos_token_ids) == [2, 5, 6]


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


@pytest.mark.parametrize("cut", ["chunks", "recompute", "offload", "restarts"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_spans_tokens_and_checkpoints_is_found(cut: str, include: bool) -> None:
    tokens = continuation()
    text = text_of(tokens)
    assert len(text) == 12
    at = next(index for index in range(3, 9) if text.find(text[index : index + 3]) == index)
    stop = text[at : at + 3]
    params = greedily(12, stop=["never", stop], include_stop_str_in_output=include)
    make = partial(make_engine, "qwen3", make_tokenizer())
    done, _ = lived(make, lambda engine: engine.add_request(PROMPT, params), CUTS[cut])
    request = done[0, 0]
    assert request.generated_tokens == tokens[: at + 3]
    assert request.generated_text == text[: at + 3 if include else at]
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, stop)


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
    other, tokens = token_ids(6, 9), continuation()[:8]
    unreadable = next(token for token in tokens if token not in expected("qwen3", other, 8))
    engine = make_engine("qwen3", Illiterate(unreadable))
    engine.add_request(PROMPT, greedily(8, stop=stop))
    engine.add_request(other, greedily(8, stop=stop))
    if stop:
        done = finish(engine)
        assert (done[0, 0].finish_reason, done[0, 0].error) == (
            FinishReason.ERROR,
            "IndexError: piece id is out of range",
        )
        assert done[0, 0].generated_tokens == tokens[: tokens.index(unreadable) + 1]
    else:
        with pytest.warns(UserWarning, match="request 0 sample 0 has tokens and no text.*IndexError: piece id"):
            done = finish(engine)
        assert (done[0, 0].generated_tokens, done[0, 0].generated_text) == (tokens, None)
    assert_greedy("qwen3", done[1, 0])
    assert done[1, 0].generated_text == text_of(done[1, 0].generated_tokens)
