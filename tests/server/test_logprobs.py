"""Tests of log-probs in OpenAI's two formats: token texts and text offsets."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.server.openai.logprobs import LOWEST, CompletionLogprobs, TokenTexts, chat_logprobs
from tests.server.chat_templates import byte_level, sentencepiece

TEXTS = ["the weather", " in Paris: 7 €\n", "naïve 🙂🙂 日本", "a  b"]


@pytest.fixture(scope="module", params=[byte_level, sentencepiece], ids=["byte_level", "sentencepiece"])
def tokenizer(request: Any) -> Any:
    return request.param("qwen3")


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_the_tokens_joined_are_the_text(text: str):
    tokenizer = byte_level("qwen3")
    texts = TokenTexts(tokenizer)
    assert b"".join(texts.bytes_of(token) for token in ids_of(tokenizer, text)) == text.encode()


def test_a_special_token_reads_as_its_name_and_adds_nothing_to_a_text(tokenizer: Any):
    texts = TokenTexts(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert texts.text_of(end) == "<|im_end|>"
    assert texts.bytes_of(end) == b"<|im_end|>"
    assert texts.shown(end, first=False) == b""


@pytest.mark.parametrize("text", ["the weather in Oslo", "7 € and 🙂!"])
def test_a_token_is_where_its_text_begins(text: str):
    tokenizer = byte_level("qwen3")
    tokens = ids_of(tokenizer, text)
    columns = CompletionLogprobs(TokenTexts(tokenizer)).take(tokens, [-1.0] * len(tokens), None)
    for token, offset in zip(tokens, columns["text_offset"], strict=True):
        shown = tokenizer.decode([token])
        assert "\ufffd" in shown or text[offset:].startswith(shown)
    assert columns["text_offset"][0] == 0


def test_a_leading_space_that_decoding_drops_counts_not():
    tokenizer = sentencepiece("qwen3")
    text = "the weather in Oslo"
    tokens = ids_of(tokenizer, text)
    columns = CompletionLogprobs(TokenTexts(tokenizer)).take(tokens, [-1.0] * len(tokens), None)
    for name, offset in list(zip(columns["tokens"], columns["text_offset"], strict=True))[1:]:
        assert text[offset:].startswith(name)


def test_chunks_add_up_to_the_whole():
    tokenizer = byte_level("qwen3")
    tokens = ids_of(tokenizer, "7 € and 🙂!")
    whole = CompletionLogprobs(TokenTexts(tokenizer)).take(tokens, [-1.0] * len(tokens), None)
    piecewise = CompletionLogprobs(TokenTexts(tokenizer))
    pieces = [piecewise.take([token], [-1.0], None) for token in tokens]
    assert {name: [entry for piece in pieces for entry in piece[name]] for name in whole} == whole


def test_a_completion_has_the_token_itself_beside_the_likeliest():
    tokenizer = byte_level("qwen3")
    a, b, c = ids_of(tokenizer, "a=b")
    columns = CompletionLogprobs(TokenTexts(tokenizer)).take([a], [-3.0], [[(b, -0.5), (c, -float("inf"))]])
    (likeliest,) = columns["top_logprobs"]
    assert likeliest == {"=": -0.5, "b": LOWEST, "a": -3.0}
    columns = CompletionLogprobs(TokenTexts(tokenizer)).take([a], [None], None)
    assert (columns["token_logprobs"], columns["top_logprobs"]) == ([None], [None])


def test_a_chat_has_an_entry_per_token_with_exactly_the_likeliest_asked_for():
    tokenizer = byte_level("qwen3")
    tokens = ids_of(tokenizer, "a=")
    content = chat_logprobs(TokenTexts(tokenizer), tokens, [-1.0, -2.0], [[(tokens[1], -float("inf"))], []])
    assert content == [
        {"token": "a", "logprob": -1.0, "bytes": [97],
         "top_logprobs": [{"token": "=", "logprob": LOWEST, "bytes": [61]}]},
        {"token": "=", "logprob": -2.0, "bytes": [61], "top_logprobs": []},
    ]  # fmt: skip


def test_without_a_tokenizer_tokens_are_named_by_their_ids():
    content = chat_logprobs(TokenTexts(None), [7], [-1.0], None)
    assert content == [{"token": "token_id:7", "logprob": -1.0, "bytes": [], "top_logprobs": []}]
    assert CompletionLogprobs(TokenTexts(None)).take([7], [-1.0], None)["text_offset"] == [0]


def test_an_id_that_the_tokenizer_has_not_reads_as_nothing(tokenizer: Any):
    texts = TokenTexts(tokenizer)
    assert texts.text_of(len(tokenizer) + 5) == ""
