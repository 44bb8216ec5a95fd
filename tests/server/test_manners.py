"""Tests of request log, cross-origin pages, the page of routes, and reasoning apart from content."""

from __future__ import annotations

import logging
import re
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pytest

from rollout.server.chat_template.reply_parser import ReasoningParser
from rollout.state import EngineState
from tests.engines import PATIENCE_S, until
from tests.server.chat_templates import QWEN3, QWEN25, byte_level
from tests.server.fake_llm import served
from tests.server.scripted import events, scripted, spoken

ASK = {"model": "fakes/one", "prompt": [1, 2, 3]}
TOKENIZER = byte_level("qwen2.5")


# --- request log ------------------------------------------------------------------------------------------------------


def lines_of(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """The log's lines, once there are so many: one is written after its reply."""
    until(lambda: len(caplog.messages) >= count)
    return list(caplog.messages)


def test_each_request_is_one_line_without_its_query_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rollout.server.requests"), served() as (_, server):
        for count, (method, path) in enumerate(
            [("POST", "/v1/completions"), ("GET", "/v1/models?key=secret"), ("GET", "/no%0Awhere")], start=1
        ):
            body, headers = (ASK, {"x-request-id": "my-7"}) if method == "POST" else (None, {"x-request-id": "a b"})
            reply = httpx.request(method, server.url + path, json=body, headers=headers, timeout=PATIENCE_S)
            assert lines_of(caplog, count)[-1].split()[-1] == reply.headers["x-request-id"]
            assert len(lines_of(caplog, count)) == count
        said = [re.sub(r"127.0.0.1:\d+|\d+\.\d{3}s|\b[0-9a-f]{32}\b", "*", line) for line in caplog.messages]
    assert said == [
        "* POST /v1/completions 200 * my-7", "* GET /v1/models 200 * *", "* GET /no%0Awhere 404 * *"
    ]  # fmt: skip


def test_every_reply_has_its_date_and_an_id_of_its_own(url: str) -> None:
    replies = [httpx.get(f"{url}/health"), httpx.get(f"{url}/nowhere"), httpx.post(f"{url}/v1/completions", json=ASK),
               httpx.post(f"{url}/v1/completions", json=ASK | {"stream": True}), httpx.post(url, content=b"{")]  # fmt: skip
    assert all(parsedate_to_datetime(reply.headers["date"]) for reply in replies)
    assert len({reply.headers["x-request-id"] for reply in replies}) == len(replies)


# --- pages of other sites ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("headers", "status"), [
    ({"Origin": "https://evil.example"}, 403), ({"Origin": "null"}, 403), ({"Host": "evil.example"}, 403),
    ({"Host": "evil.example:80", "Origin": "http://evil.example:80"}, 403), ({"Host": "127.0.0.1.evil.example"}, 403),
    ({"Host": "localhost:1"}, 200), ({"Host": "LOCALHOST"}, 200), ({"Host": "10.0.0.7:80"}, 200),
    ({"Host": "[::1]:80"}, 200), ({"Host": "node-3:8000"}, 200),
    ({"Host": "localhost:7", "Origin": "http://localhost:7"}, 200),
])  # fmt: skip
def test_without_a_key_no_page_of_another_site_may_ask(headers: dict[str, str], status: int) -> None:
    with served(admin=True, insecure=True) as (llm, server):
        asked = httpx.post(f"{server.url}/pause", headers=headers)
        assert (asked.status_code, llm.state == EngineState.PAUSED) == (status, status == 200)
        if status == 403:
            name = next(iter(headers))
            assert f"{name}: {headers[name]}" in asked.json()["error"]["message"]
            assert httpx.get(f"{server.url}/health", headers=headers).status_code == 200
            with served(api_key="sk-1") as (_, keyed):
                headers = headers | {"Authorization": "Bearer sk-1"}
                assert httpx.get(f"{keyed.url}/v1/models", headers=headers).status_code == 200


def test_operations_have_ids_of_their_own(recwarn: pytest.WarningsRecorder) -> None:
    with served(admin=True, insecure=True) as (_, server):
        document = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_S).json()
    ids = [each.get("operationId") for methods in document["paths"].values() for each in methods.values()]
    assert len(ids) == len(set(ids))
    assert not [str(each.message) for each in recwarn if "Operation ID" in str(each.message)]


def test_a_field_that_a_route_does_not_read_is_refused_with_the_nearest(url: str) -> None:
    assert "did you mean temperature?" in httpx.post(f"{url}/v1/completions", json=ASK | {"temprature": 1}).text
    for wrong, cure in (
        (
            {"sampling_params": {"temprature": 1}},
            "sampling_params.temprature: there is no such field here; did you mean ",
        ),
        ({"sampling_params": {"guided_json": {}}}, "did you mean sampling_params.structured_outputs?"),
        ({"max_tokens": 1}, "max_tokens: there is no such field here; did you mean sampling_params.max_tokens?"),
        ({"tokens": [1]}, "tokens: there is no such field here; did you mean token_ids?"),
        ({"stream_options": {"usage": True}}, "stream_options.usage: there is no such field here; "),
    ):
        assert cure in httpx.post(f"{url}/inference/v1/generate", json={"token_ids": [1]} | wrong).text
    unnamed = {"messages": [{"role": "user", "content": "?"}], "response_format": {"type": "json_schema"}}
    refused = httpx.post(f"{url}/v1/chat/completions", json=unnamed)
    assert refused.json()["error"]["param"] == "response_format.json_schema"
    assert httpx.head(f"{url}/health").status_code == 200


# --- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "opened", "parts"), [
    ("<think>\nso it is\n</think>\n\nYes.", False, ("so it is", "Yes.")),
    ("so it is\n</think>\nYes.", True, ("so it is", "Yes.")),
    ("Yes.", False, ("", "Yes.")),
    ("Yes <think>no</think>", False, ("", "Yes <think>no</think>")),
    ("<think>cut off </thi", False, ("cut off </thi", "")),
    ("<think></think>Yes", False, ("", "Yes")),
    ("<th", False, ("", "<th")),
])  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 100])
def test_reasoning_is_told_from_content_however_the_text_is_cut(text: str, opened: bool, parts: Any, size: int) -> None:
    parser = ReasoningParser(opened)
    pieces = [parser.push(text[start : start + size]) for start in range(0, len(text), size)]
    pieces.append(parser.push("", ended=True))
    assert tuple(map("".join, zip(*pieces, strict=True))) == parts


def test_a_reply_and_a_stream_have_their_reasoning_apart() -> None:
    tokenizer = byte_level("qwen3")
    ask = {"model": "fakes/one", "messages": [{"role": "user", "content": "?"}]}
    with scripted(tokenizer) as (llm, client):
        llm.script = spoken(tokenizer, "<think>\nso it is\n</think>\n\nYes.")
        message = client.chat.completions.create(**ask).choices[0].message  # type: ignore[call-overload]
        deltas = [each["choices"][0]["delta"] for each in events(client, "chat/completions", ask)[:-1]]
    assert (message.reasoning_content, message.reasoning, message.content) == ("so it is", "so it is", "Yes.")
    for field, value in (("reasoning_content", "so it is"), ("reasoning", "so it is"), ("content", "Yes.")):
        assert "".join(delta.get(field) or "" for delta in deltas) == value


def test_reasoning_comes_back_under_either_name() -> None:
    tokenizer = byte_level("qwen3")
    user = {"role": "user", "content": "?"}
    with scripted(tokenizer) as (llm, client):
        llm.script = spoken(tokenizer, "Yes.")
        prompts = []
        for name in ("reasoning", "reasoning_content"):
            messages = [user, {"role": "assistant", "content": "No.", name: "so it is"}]
            body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
            events(client, "chat/completions", body)
            prompts.append(tokenizer.decode(llm.submitted[-1][0]))
    assert prompts[0] == prompts[1]
    assert "so it is" in prompts[0]


@pytest.mark.parametrize(("template", "effort", "shown"), [
    (QWEN3 + "{{ reasoning_effort or '' }}", "high", "high"),
    (QWEN3 + "{{ reasoning_effort or '' }}", "none", "<think>\n\n</think>\n\nnone"),
    (QWEN3, "none", "<think>\n\n</think>"), (QWEN25, "none", ""), (QWEN25, None, ""), (QWEN3, "high", ""),
])  # fmt: skip
def test_a_reasoning_effort_is_the_templates(template: str, effort: str | None, shown: str) -> None:
    with scripted(TOKENIZER, chat_template=template) as (llm, client):
        llm.script = spoken(TOKENIZER, "Yes.")
        plain = {"model": "fakes/one", "messages": [{"role": "user", "content": "?"}]}
        url = f"{client.base_url}chat/completions"
        bodies = (plain, plain | {"reasoning_effort": effort})
        replies = [httpx.post(url, json=body, timeout=PATIENCE_S) for body in bodies]
        prompts = [TOKENIZER.decode(tokens) for tokens, *_ in llm.submitted]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert prompts[1].rstrip() == (prompts[0] + shown).rstrip()


def test_null_is_sent_where_vllm_sends_it(url: str) -> None:
    completion = httpx.post(f"{url}/v1/completions", json=ASK).json()["choices"][0]
    assert [completion[name] for name in ("token_ids", "prompt_token_ids", "prompt_logprobs")] == [None] * 3
    tokens = httpx.post(f"{url}/inference/v1/generate", json={"token_ids": [5]}).json()
    assert [tokens[name] for name in ("prompt_token_ids", "prompt_logprobs")] == [None] * 2
    with scripted(TOKENIZER) as (llm, client):
        llm.script = spoken(TOKENIZER, "Yes.")
        chat = client.chat.completions.create(model="fakes/one", messages=[{"role": "user", "content": "?"}])
    assert (chat.choices[0].token_ids, chat.prompt_token_ids, chat.prompt_logprobs) == (None, None, None)  # type: ignore[attr-defined]
