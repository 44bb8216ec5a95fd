"""Tests of vLLM's token routes: `/inference/v1/generate`, tokenisation, chats of token ids."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from rollout.server.openai.sse import DONE
from tests.server.chat_templates import WEATHER, byte_level
from tests.server.scripted import ScriptedLLM, spoken

TOKENIZER = byte_level("qwen2.5")
HI = [{"role": "user", "content": "hi"}]
HELLO = TOKENIZER("Hello 🙂")["input_ids"]
PROMPT = [5, 6, 7]


@pytest.fixture
def llm(stage: tuple[ScriptedLLM, OpenAI]) -> ScriptedLLM:
    return stage[0].begin(spoken(TOKENIZER, "Hello 🙂", version=2, top=[(7, -0.25)]), version=3)


@pytest.fixture
def http(client: OpenAI) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=str(client.base_url).removesuffix("/v1/"), timeout=60) as plain:
        yield plain


def generate(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/inference/v1/generate", json={"token_ids": PROMPT} | fields)


@pytest.mark.parametrize(("dtype", "experts"), [("uint8", 200), ("int16", 300)])
def test_routes_come_as_base64_with_shape_and_dtype_whole_and_in_streams(
    llm: ScriptedLLM, http: httpx.Client, dtype: str, experts: int
):
    count = sum(len(delta.token_ids) for delta in llm.script)
    routes = np.arange(experts - 4 * (len(PROMPT) - 1 + count), experts).reshape(-1, 2, 2).astype(dtype)
    at, script = 0, []
    for delta in llm.script:
        rows = len(delta.token_ids) + (0 if at else len(PROMPT) - 1)
        script.append(replace(delta, routed_experts=routes[at : at + rows]))
        at += rows
    llm.script = script

    def read(field: dict[str, Any]) -> np.ndarray[Any, Any]:
        return np.frombuffer(b64decode(field["data"]), field["dtype"]).reshape(field["shape"])

    reply = generate(http).json()
    assert reply["choices"][0]["routed_experts"]["dtype"] == dtype
    np.testing.assert_array_equal(read(reply["choices"][0]["routed_experts"]), routes)
    chat = http.post("/v1/chat/completions", json={"messages": HI}).json()
    np.testing.assert_array_equal(read(chat["choices"][0]["message"]["rollout"]["routed_experts"]), routes)
    with http.stream("POST", "/inference/v1/generate", json={"token_ids": PROMPT, "stream": True}) as streamed:
        lines = [line.removeprefix("data: ") for line in streamed.iter_lines() if line.startswith("data: {")]
    pieces = [read(choice["routed_experts"]) for line in lines for choice in json.loads(line)["choices"]]
    np.testing.assert_array_equal(np.concatenate(pieces), routes)
    again = routes[::-1].copy()
    llm.script = [*script[:-1], replace(script[-1], routed_experts=again)]
    recomputed = read(generate(http).json()["choices"][0]["routed_experts"])
    np.testing.assert_array_equal(recomputed, again, "rows of earlier tokens replace those that came before")
    llm.script = [replace(delta, routed_experts=None) for delta in script]
    assert "routed_experts" not in generate(http).json()["choices"][0]


def test_generate_gives_ids_log_probs_and_versions(llm: ScriptedLLM, http: httpx.Client):
    params = {"stop_token_ids": [9], "logprobs": 1, "skip_special_tokens": False, "top_k": -1, "output_kind": 2, "n": 1}
    reply = generate(http, model="m", sampling_params=params, cache_salt="3", priority=4, return_token_ids=True).json()
    assert llm.submitted[-1][1].cache_salt == "3"
    (choice,) = reply["choices"]
    assert reply["prompt_token_ids"] == PROMPT
    assert choice["token_ids"] == HELLO
    assert [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]] == [
        (f"token_id:{token}", -0.5) for token in HELLO
    ]
    assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("stop", len(HELLO))
    assert (choice["policy_versions"], choice["policy_staleness"]) == ([2] * len(HELLO), [1] * len(HELLO))
    tokens, asked, priority, _ = llm.submitted[0]
    assert (tokens, asked.stop_token_ids, asked.top_k, priority) == (PROMPT, (9,), 0, -4)


def test_a_stream_of_generate_adds_up_to_the_reply(http: httpx.Client):
    sent = generate(http, stream=True, stream_options={"include_usage": True}, return_token_ids=True).content
    chunks = [httpx.Response(200, content=each[6:]).json() for each in sent.split(b"\n\n")[:-2]]
    assert sent.endswith(DONE)
    assert [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]] == HELLO
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert chunks[-1]["usage"]["completion_tokens"] == len(HELLO)


@pytest.mark.parametrize(("fields", "param"), [
    ({"token_ids": []}, "token_ids"),
    ({"features": {"a": 1}}, "features"),
    ({"content_parts": [{}]}, "content_parts"),
    ({"sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
    ({"sampling_params": {"stream": True}}, "sampling_params.stream"),
    ({"sampling_params": {"structured_outputs": {"regex": "a", "json_object": True}}}, "sampling_params.structured_outputs"),
])  # fmt: skip
def test_what_generate_cannot_do_is_refused_by_name(http: httpx.Client, fields: dict[str, Any], param: str):
    reply = generate(http, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_a_request_id_names_the_reply_and_is_taken_once(llm: ScriptedLLM, http: httpx.Client):
    assert generate(http, request_id="mine").json()["request_id"] == "mine"
    assert generate(http, request_id="mine").status_code == 200


def test_a_chat_of_tokens_uses_them_and_reads_the_reply(llm: ScriptedLLM, http: httpx.Client):
    llm.script = spoken(TOKENIZER, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>')
    body = {
        "model": "m",
        "messages": HI,
        "tools": [WEATHER],
        "tokens": PROMPT,
        "logprobs": True,
        "return_token_ids": True,
    }
    reply = http.post("/v1/chat/completions/tokens", json=body).json()
    assert llm.submitted[0][0] == reply["prompt_token_ids"] == PROMPT
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


def test_texts_and_conversations_are_tokenised_as_requests_are(llm: ScriptedLLM, http: httpx.Client):
    text = http.post("/tokenize", json={"prompt": "hi", "add_special_tokens": False, "return_token_strs": True}).json()
    ids = TOKENIZER("hi")["input_ids"]
    assert text == {"count": len(ids), "max_model_len": 4096, "tokens": ids,
                    "token_strs": TOKENIZER.convert_ids_to_tokens(ids)}  # fmt: skip
    chat = http.post("/tokenize", json={"model": "m", "messages": HI, "tools": [WEATHER]}).json()
    http.post("/v1/chat/completions", json={"messages": HI, "tools": [WEATHER]})
    assert chat["tokens"] == llm.submitted[-1][0]
    bare = http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()
    assert bare["tokens"] == TOKENIZER.apply_chat_template(HI, return_dict=False)


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, None), ("/tokenize", {"prompt": "a", "messages": HI}, None), ("/tokenize", {"prompt": 1}, "prompt"),
    ("/tokenize", {"model": "other", "prompt": "a"}, "model"),
    ("/tokenize", {"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
])  # fmt: skip
def test_what_cannot_be_tokenised_is_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str | None):
    reply = http.post(path, json=body)
    assert reply.status_code in (400, 404)
    assert reply.json()["error"]["param"] == param
