"""Tests of where a completion ends: stop tokens, stop strings, budgets, and its text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason
from tests.engines import (
    assert_greedy,
    expected,
    finish,
    greedily,
    logits_of,
    make_engine,
    pass_suspended,
    shared_model,
    steps,
    token_ids,
)
from tests.models import make_model, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


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
