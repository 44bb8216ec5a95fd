"""Tests of UTF-8 over HTTP: joined chunks equal the reply, with characters and stop strings across chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rollout import LLM, Advanced, InferenceConfig, ServerConfig
from tests.distributed.client.test_text_stream import MAKERS
from tests.engines import BLOCK
from tests.models import make_model
from tests.server.chat_templates import PLAIN

SEEDS = range(6)
HI = [{"role": "user", "content": "the cat sat"}]
LENGTH = 30


@pytest.fixture(scope="module", params=sorted(MAKERS))
def place(request: pytest.FixtureRequest) -> Iterator[tuple[httpx.Client, Any]]:
    """A client and the tokenizer."""
    tokenizer = MAKERS[request.param]()
    tokenizer.chat_template = PLAIN
    model = make_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=1)
    config = InferenceConfig(
        kv_cache_blocks=256,
        max_requests=8,
        max_tokens_per_step=64,
        advanced=Advanced(block_size_tokens=BLOCK, verify_model=False),
    )
    with LLM(model, tokenizer, config) as llm:
        server = llm.serve(ServerConfig(port=0), blocking=False)
        with httpx.Client(base_url=f"{server.url}/v1", timeout=60) as client:
            yield client, tokenizer


def some_tokens(tokenizer: Any) -> dict[str, float]:
    """`logit_bias` for bytes of a character, for letters, and now and then for what is no text at all."""
    of_text = tokenizer("ß at", add_special_tokens=False)["input_ids"]
    return {str(token): 200.0 for token in of_text} | {str(tokenizer.bos_token_id): 195.0}


def text_of(choice: dict[str, Any]) -> str:
    inner = choice.get("message") or choice.get("delta") or choice
    return inner.get("content") or inner.get("text") or ""


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_chunks_join_to_the_reply(place: tuple[httpx.Client, Any], path: str):
    client, tokenizer = place
    asked = {"messages": HI} if path.startswith("chat") else {"prompt": "the cat"}
    asked |= {"max_tokens": LENGTH, "logit_bias": some_tokens(tokenizer), "ignore_eos": True, "temperature": 5}

    def answer(**fields: Any) -> str:
        reply = client.post(path, json=asked | fields)
        assert reply.status_code == 200, reply.text
        return reply.text

    def whole(**fields: Any) -> dict[str, Any]:
        return json.loads(answer(**fields))["choices"][0]

    def chunks(**fields: Any) -> list[dict[str, Any]]:
        *sent, done = [event.removeprefix("data: ") for event in answer(stream=True, **fields).split("\n\n") if event]
        assert done == "[DONE]"
        return [choice for event in sent for choice in json.loads(event)["choices"]]

    said = ""
    for seed in SEEDS:
        text = text_of(whole(seed=seed))
        stop, kept = (text[9:12] if seed % 2 else None), seed % 4 == 3
        fields = {"seed": seed, "stop": stop, "include_stop_str_in_output": kept}
        reply, pieces = whole(**fields), chunks(**fields)
        assert "".join(map(text_of, pieces)) == text_of(reply)
        assert pieces[-1]["finish_reason"] == reply["finish_reason"] == ("stop" if stop else "length")
        assert pieces[-1]["stop_reason"] == reply["stop_reason"] == stop
        if stop:
            assert text_of(reply) == text[: text.index(stop) + len(stop) * kept]
        said += text
    for kind in ("ß", "\N{REPLACEMENT CHARACTER}", "a", " "):
        assert kind in said, "the models say less than they should"
    assert "<bos>" not in said
