"""Tests of padded prompts: what a tokenizer returned loses its padding; padding without a mask is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from rollout.errors import InvalidRequestError
from rollout.llm.llm import LLM
from rollout.manager.scoring import PromptTask
from rollout.requests.prompt import unpadded
from tests.models import make_model, make_tokenizer
from tests.rollouts import GREEDY, make_rollout

TEXTS = ["abc", "abcdefgh", "de"]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="module")
def manager(tokenizer):
    with make_rollout(make_model("qwen3"), tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def llm(tokenizer):
    made = LLM(make_model("qwen3"), tokenizer)
    yield made
    made.close()


def padded(tokenizer: Any, side: str, **options: Any) -> BatchEncoding:
    return tokenizer(TEXTS, padding=True, padding_side=side, **options)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("tensors", ["pt", "np", None])
def test_the_output_of_a_tokenizer_is_its_prompts_without_padding(manager, llm, tokenizer, side, tensors):
    """`padding=True` made padding part of the prompt, with attention_mask 1: raw log-prob -1.71 instead of -1.88."""
    asked = padded(tokenizer, side, return_tensors=tensors)
    ids = tokenizer(TEXTS)["input_ids"]
    expected = manager.generate(ids, GREEDY)
    for given in (asked, dict(asked)):
        batch = manager.generate(given, GREEDY)
        assert batch.prompt_lengths.tolist() == [len(each) for each in ids]
        assert [each.generated_tokens for each in batch] == [each.generated_tokens for each in expected]
    assert [each.prompt_tokens for each in llm.generate(asked, GREEDY)] == ids
    scored = manager.generate_scored(asked, lambda samples: [1.0], GREEDY, groups=3, keep=None)
    assert [each.prompt_tokens for each in scored] == ids
    assert torch.equal(manager.score(asked).logprobs, manager.score(ids).logprobs)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_tensor_without_its_mask_is_refused_everywhere_and_a_padded_list_is_warned_of(
    manager, llm, tokenizer, side
):
    asked = padded(tokenizer, side, return_tensors="pt")["input_ids"]
    verb = "begins" if side == "left" else "ends"
    words = rf"\[2\] {verb} with 6 times the padding token 0: .*pass the tokenizer's whole output"
    calls = [
        lambda given: manager.generate(given, GREEDY),
        manager.submit,
        lambda given: manager.generate_scored(given, lambda samples: [1.0], GREEDY, groups=3),
        manager.score,
        lambda given: llm.generate(given, GREEDY),
    ]
    for call in calls:
        for given in (asked, asked.numpy(), {"input_ids": asked}):
            with pytest.raises(InvalidRequestError, match=words):
                call(given)
    with pytest.raises(InvalidRequestError, match=rf"\[0\] {verb} with 6 times"):
        asyncio.run(manager.sample(asked[2:], GREEDY))
    with pytest.raises(InvalidRequestError, match=rf"\[0\] {verb} with 6 times"):
        llm.submit({"input_ids": asked[2:]}, GREEDY)
    for given in (asked.tolist(), list(asked)):
        with pytest.warns(UserWarning, match="^prompts: a row begins or ends with the padding token: .*whole output"):
            assert len(manager.generate(given, GREEDY)) == 3
    # The cures of the message.
    assert len(manager.generate(tokenizer(TEXTS, padding=True), GREEDY)) == 3
    assert len(manager.generate(tokenizer(TEXTS)["input_ids"], GREEDY)) == 3


EOS_PADS = SimpleNamespace(pad_token_id=2, eos_token_id=[2, 3], bos_token_id=None)
BOS_PADS = SimpleNamespace(pad_token_id=1, eos_token_id=2, bos_token_id=1)
NO_PAD = SimpleNamespace(pad_token_id=None, eos_token_id=2, bos_token_id=1)


@pytest.mark.parametrize(
    ("owner", "rows", "found"),
    [
        (EOS_PADS, [[5, 6, 2], [7, 8, 2]], None),  # each ends with eos, and the longest row has no padding
        (EOS_PADS, [[5, 2]], None),
        (EOS_PADS, [[5, 6, 2], [7, 8, 9]], r"\[0\] ends with 1 times the padding token 2"),
        (EOS_PADS, [[5, 6, 2], [7, 2, 2]], r"\[1\] ends with 2 times"),
        (EOS_PADS, [[5, 6, 7], [2, 2, 9]], r"\[1\] begins with 2 times"),
        (BOS_PADS, [[1, 6, 7], [1, 8, 9]], None),
        (BOS_PADS, [[1, 6, 7], [1, 1, 9]], r"\[1\] begins with 2 times"),
        (BOS_PADS, [[1, 1, 7], [1, 1, 9]], "begins with 2 times"),
        (NO_PAD, [[1, 1, 2], [2, 2, 2]], None),
    ],
)
def test_a_padding_token_that_is_also_bos_or_eos(owner, rows, found):
    array = np.array(rows)
    if found is None:
        assert unpadded(array, owner) == rows
    else:
        with pytest.raises(InvalidRequestError, match=found):
            unpadded(array, owner)


def test_a_mask_of_another_shape_and_one_prompt_instead_of_a_list_are_refused(manager, tokenizer):
    with pytest.raises(InvalidRequestError, match="another shape"):
        manager.generate({"input_ids": [[5, 6], [7]], "attention_mask": [[1, 1], [1, 1]]}, GREEDY)
    one = tokenizer("abc")
    messages = [{"role": "user", "content": "abc"}]
    for prompt, words in (
        (one, r"prompts is one BatchEncoding: pass a list of prompts, \[prompt\]"),
        ("abc", r"prompts is one str: .*\[prompt\]"),
        (torch.tensor([5, 6]), r"prompts is one sequence of token ids: .*\[prompt\]"),
    ):
        with pytest.raises(TypeError, match=words):
            manager.generate(prompt, GREEDY)
        assert len(manager.generate([prompt], GREEDY)) == 1
    for call in (manager.submit, lambda given: manager.generate_scored(given, lambda samples: [1.0], groups=1)):
        with pytest.raises(TypeError, match=r"is one list of chat messages: pass a list of prompts, \[prompt\]"):
            call(messages)
    task = PromptTask(torch.tensor([[5, 6]]))
    assert manager.generate_scored([task], lambda samples: [1.0], GREEDY, groups=1, keep=None)[0].prompt_tokens == [
        5,
        6,
    ]
