"""Tests of chat completions with OpenAI's client: replies, streams, tools, continued conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion as TheirReply
from openai.types.chat import ChatCompletionChunk as TheirChunk

from rollout.config import ServerConfig
from rollout.distributed.client.text_stream import TextDelta
from rollout.errors import RequestAbortedError
from tests.server.chat_templates import WEATHER, byte_level
from tests.server.fake_llm import served
from tests.server.scripted import ScriptedLLM, client_of, events, joined, scripted, spoken

HI = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TOKENIZER = byte_level("qwen2.5")


@pytest.fixture
def llm(stage: tuple[ScriptedLLM, OpenAI]) -> ScriptedLLM:
    """Answers "Hello 🙂" unless told otherwise."""
    return stage[0].begin(spoken(TOKENIZER, "Hello 🙂"))


def ask(client: OpenAI, **fields: Any) -> TheirReply:
    return client.chat.completions.create(**({"model": "m", "messages": HI} | fields))


def read(client: OpenAI, **fields: Any) -> list[TheirChunk]:
    return list(ask(client, stream=True, **fields))  # type: ignore[call-overload]


def content(chunks: list[TheirChunk], index: int = 0) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index)


def reasons(chunks: list[TheirChunk]) -> dict[int, str | None]:
    return {c.index: c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason}


def raw(client: OpenAI, **fields: Any) -> list[Any]:
    return events(client, "chat/completions", {"model": "m", "messages": HI} | fields)


# --- whole replies ----------------------------------------------------------------------------------------------------


def test_a_reply_has_openais_shape_and_our_ids(llm: ScriptedLLM, client: OpenAI):
    llm.policy_version, llm.cached = 2, 3
    reply = ask(client)
    TheirReply.model_validate(reply.model_dump())
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello 🙂", "stop")
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "m"
    prompt, tokens = llm.submitted[0][0], TOKENIZER("Hello 🙂")["input_ids"]
    digests = {name: choice.message.rollout.pop(name) for name in ("prompt_digest", "content_digest")}
    assert [len(digest) for digest in digests.values()] == [32, 32]
    assert choice.message.rollout == {
        "prompt_ids_reused": 0,
        "retokenized": None,
        "prompt_token_ids": prompt,
        "token_ids": tokens,
        "log_probs": [-0.5] * len(tokens),
        "policy_versions": [0] * len(tokens),
        "policy_staleness": [2] * len(tokens),
        "finish_reason": "stop",
    }
    assert reply.policy_version == 2
    usage = reply.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), len(tokens))
    assert usage.total_tokens == len(prompt) + len(tokens)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 3
    assert "rollout" not in ask(client, extra_body={"return_rollout": False}).choices[0].message.model_dump()


def test_log_probs_are_there_when_asked_for(llm: ScriptedLLM, client: OpenAI):
    llm.script = spoken(TOKENIZER, "a=", top=[(TOKENIZER("b")["input_ids"][0], -0.25)])
    logprobs = ask(client, logprobs=True, top_logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [(each.token, each.logprob, each.bytes) for each in logprobs.content] == [
        ("a", -0.5, [97]),
        ("=", -0.5, [61]),
    ]
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [("b", -0.25)]
    assert llm.submitted[-1][1].logprobs == 1
    assert ask(client).choices[0].logprobs is None


def test_log_probs_of_the_prompt_have_an_entry_per_token(llm: ScriptedLLM, client: OpenAI):
    found = ask(client, extra_body={"prompt_logprobs": 1}).prompt_logprobs
    prompt = llm.submitted[0][0]
    assert found[0] is None
    assert [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], found[1:], strict=True)] == [-0.25] * (
        len(prompt) - 1
    )
    with pytest.raises(openai.BadRequestError, match=r"prompt_logprobs, .* set stream=false") as caught:
        read(client, extra_body={"prompt_logprobs": 1})
    assert caught.value.param == "stream"


def test_ids_are_where_vllm_has_them_when_asked_for(llm: ScriptedLLM, client: OpenAI):
    asked = {"return_token_ids": True, "return_tokens_as_token_ids": True, "return_rollout": False}
    reply = ask(client, logprobs=True, extra_body=asked | {"top_k": -1, "cache_salt": "7", "made_up": None})
    (choice,) = reply.choices
    tokens = TOKENIZER("Hello 🙂")["input_ids"]
    assert reply.prompt_token_ids == llm.submitted[0][0]
    assert choice.token_ids == tokens
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{token}" for token in tokens]
    chunks = raw(client, **asked)[:-1]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [reply.prompt_token_ids] + [None] * (len(chunks) - 1)
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    assert streamed == tokens


def test_special_tokens_in_the_text_are_refused(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="skip_special_tokens=False: must be True"):
        ask(client, extra_body={"skip_special_tokens": False})


def test_budget_and_time_are_what_fits_unless_less_is_said(llm: ScriptedLLM, client: OpenAI):
    ask(client)
    prompt, params, *_ = llm.submitted[-1]
    assert params.max_tokens == llm.max_sequence_length - len(prompt)
    ask(client, max_completion_tokens=5)
    assert llm.submitted[-1][1].max_tokens == 5
    ask(client, max_tokens=10**6, extra_body={"timeout_s": 80000})
    assert llm.submitted[-1][1].max_tokens == llm.max_sequence_length - len(prompt)
    assert llm.submitted[-1][2:] == (0, ServerConfig().request_timeout_s)
    ask(client, extra_body={"timeout_s": 7.5, "priority": 3})
    assert llm.submitted[-1][2:] == (3, 7.5)


def test_a_sample_cut_for_its_age_ends_as_by_length_and_says_so(llm: ScriptedLLM, client: OpenAI):
    llm.script = spoken(TOKENIZER, "old", reason="stale")
    choice = ask(client).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.rollout["finish_reason"] == "stale"


BLAMED = "InvalidRequestError: request 7 sample 0: its structured output cannot be followed: no text can continue it"


@pytest.mark.parametrize(("reason", "error", "kind", "said", "code"), [
    ("error", "RequestFailedError: NaN", openai.InternalServerError, "choice 1 failed: RequestFailedError: NaN",
     "sample_failed"),
    ("error", BLAMED, openai.BadRequestError, "choice 1: its structured output cannot be followed", "sample_failed"),
    ("abort", None, openai.ConflictError, "choice 1 was aborted", "aborted"),
])  # fmt: skip
def test_a_failed_or_aborted_sample_is_an_error_that_names_it(
    llm: ScriptedLLM, client: OpenAI, reason: str, error: str | None, kind: Any, said: str, code: str
):
    llm.script = [*spoken(TOKENIZER, "fine"), TextDelta(1, "", [], [], [], finish_reason=reason, error=error)]
    with pytest.raises(kind, match=said) as caught:
        ask(client, n=2)
    assert caught.value.code == code
    if reason == "error":
        *_, last = raw(client, n=2)
        assert last["error"]["code"] == code


def test_what_the_template_refuses_names_the_message(client: OpenAI):
    reply = ask(client).choices[0].message.model_dump()
    reply["rollout"]["prompt_token_ids"] = []
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, messages=[*HI, reply, *HI])
    assert (caught.value.param or "").startswith("messages[1].rollout")


def test_a_reply_that_litellm_kept_goes_on_from_its_ids(llm: ScriptedLLM, client: OpenAI):
    """Its message has what it does not know of OpenAI's in a field of its own, and other fields that are its own."""
    rollout = ask(client).choices[0].message.rollout
    kept = {
        "content": "Hello 🙂",
        "role": "assistant",
        "tool_calls": None,
        "function_call": None,
        "annotations": [],
        "thinking_blocks": None,
        "provider_specific_fields": {"refusal": None, "rollout": rollout},
    }
    reply = ask(client, messages=[*HI, kept, *HI])
    assert reply.choices[0].message.rollout["prompt_ids_reused"] == len(
        rollout["prompt_token_ids"] + rollout["token_ids"]
    )
    kept["provider_specific_fields"] = {"refusal": None}
    assert ask(client, messages=[*HI, kept, *HI]).choices[0].message.rollout["prompt_ids_reused"] == 0


def test_a_stream_brings_what_a_conversation_goes_on_with(llm: ScriptedLLM, client: OpenAI):
    chunks, whole = read(client), ask(client).choices[0].message
    put_together: dict[str, Any] = {"prompt_token_ids": [], "token_ids": []}
    for chunk in chunks:
        for name, value in (getattr(chunk.choices[0].delta, "rollout", None) or {}).items():
            put_together[name] = put_together[name] + value if name in put_together else value
    for name in ("prompt_token_ids", "token_ids", "prompt_digest", "content_digest", "prompt_ids_reused"):
        assert put_together[name] == whole.rollout[name]


def test_without_a_tokenizer_there_is_no_chat():
    with (
        served(served_model_name="m") as (_, server),
        client_of(server) as client,
        pytest.raises(openai.BadRequestError, match="no tokenizer"),
    ):
        ask(client)


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_begins_with_the_role_and_ends_with_done(llm: ScriptedLLM, client: OpenAI):
    sent = raw(client, stream_options={"include_usage": True})
    assert sent[-1] == "[DONE]"
    assert sent[0]["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
        "rollout": {
            "prompt_token_ids": llm.submitted[0][0],
            "prompt_digest": ask(client).choices[0].message.rollout["prompt_digest"],
            "prompt_ids_reused": 0,
            "retokenized": None,
        },
    }
    assert {chunk["usage"] is None for chunk in sent[:-2]} == {True}
    assert sent[-2]["choices"] == []
    assert sent[-2]["usage"]["completion_tokens"] == len(TOKENIZER("Hello 🙂")["input_ids"])
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in sent[:-1]}) == 1


def test_the_chunks_add_up_to_the_whole_reply(llm: ScriptedLLM, client: OpenAI):
    whole = ask(client, logprobs=True).choices[0]
    chunks = read(client, logprobs=True)
    for chunk in chunks:
        TheirChunk.model_validate(chunk.model_dump())
    assert content(chunks) == whole.message.content
    assert all("\ufffd" not in (c.delta.content or "") for chunk in chunks for c in chunk.choices)
    choices = [choice for chunk in chunks for choice in chunk.choices if not choice.delta.content]
    silent = [choice for choice in choices if "token_ids" in (getattr(choice.delta, "rollout", None) or {})]
    assert len(silent) >= 3, "the bytes of the emoji but the last have ids and no text"
    for name in ("token_ids", "log_probs", "policy_versions", "policy_staleness"):
        assert joined(chunks, name) == whole.message.rollout[name]
    entries = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content or ()]
    assert whole.logprobs is not None
    assert entries == whole.logprobs.content
    assert reasons(chunks) == {0: "stop"}


def test_samples_come_as_they_grow(llm: ScriptedLLM, client: OpenAI):
    one, two = spoken(TOKENIZER, "one!", sample=0), spoken(TOKENIZER, "two!", sample=1, reason="length")
    llm.script = [delta for pair in zip(one, two, strict=False) for delta in pair]
    llm.script += [*one[len(two) :], *two[len(one) :]]
    chunks = read(client, n=2)
    assert (content(chunks, 0), content(chunks, 1)) == ("one!", "two!")
    assert reasons(chunks) == {0: "stop", 1: "length"}
    first = {}
    for chunk in chunks:
        for choice in chunk.choices:
            first.setdefault(choice.index, choice.delta.role)
    assert first == {0: "assistant", 1: "assistant"}


def test_an_error_has_its_status_before_the_first_byte_and_is_an_event_after_it(llm: ScriptedLLM, client: OpenAI):
    llm.script, llm.end_with = [], RequestAbortedError("request 1 was aborted", 1)
    with pytest.raises(openai.ConflictError):
        read(client)
    llm.script, llm.end_with = spoken(TOKENIZER, "half", reason="abort"), RequestAbortedError("was aborted", 1)
    sent = raw(client)
    assert sent[-1] == {"error": {"message": "was aborted", "type": "conflict_error", "param": None, "code": "aborted"}}
    with pytest.raises(openai.APIError, match="was aborted"):
        read(client)


def test_a_sample_that_begins_afresh_cannot_take_back_what_was_sent(llm: ScriptedLLM, client: OpenAI):
    begun = spoken(TOKENIZER, "half", reason=None)
    afresh = spoken(TOKENIZER, "whole")
    llm.script = [*begun, replace(afresh[0], restarted=True), *afresh[1:]]
    sent = raw(client)
    assert sent[-1]["error"]["code"] == "restarted"
    llm.script = llm.script[len(begun) :]
    assert content(read(client)) == "whole"


def test_a_reply_ends_behind_its_only_call_where_calls_in_parallel_are_not_wanted(llm: ScriptedLLM, client: OpenAI):
    asked: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({}, ()),
        ({"tools": [WEATHER]}, ("</tool_call>",)),
        ({"tools": [WEATHER], "stop": "x"}, ("x", "</tool_call>")),
        ({"tools": [WEATHER], "stop": ["</tool_call>"]}, ("</tool_call>",)),
        ({"tools": [WEATHER], "tool_choice": "none"}, ()),
    ]
    for fields, stop in asked:
        ask(client, parallel_tool_calls=False, **fields)
        assert llm.submitted[-1][1].stop == stop
    ask(client, parallel_tool_calls=True, tools=[WEATHER])
    assert llm.submitted[-1][1].stop == ()
    # As the engine gives it: what ended it is not in the text.
    llm.script = spoken(TOKENIZER, CALL.partition("</tool_call>")[0])
    choice = ask(client, parallel_tool_calls=False, tools=[WEATHER]).choices[0]
    assert (choice.finish_reason, len(choice.message.tool_calls or ())) == ("tool_calls", 1)


def test_one_call_is_refused_by_name_where_nothing_ends_it():
    with scripted(byte_level("llama3.1"), served_model_name="m") as (_, client):
        with pytest.raises(openai.BadRequestError, match="llama3") as caught:
            ask(client, parallel_tool_calls=False, tools=[WEATHER])
        assert caught.value.param == "parallel_tool_calls"


def test_values_that_json_has_not_are_null(llm: ScriptedLLM, client: OpenAI):
    llm.script = [TextDelta(0, "x", [5], [float("nan")], [0], finish_reason="stop")]
    assert ask(client).choices[0].message.rollout["log_probs"] == [None]
    assert joined(read(client), "log_probs") == [None]


# --- tools ------------------------------------------------------------------------------------------------------------


def test_calls_are_told_from_text(llm: ScriptedLLM, client: OpenAI):
    llm.script = spoken(TOKENIZER, f"Let me see.\n{CALL}")
    (choice,) = ask(client, tools=[WEATHER]).choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    (call,) = choice.message.tool_calls or ()
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get_weather", '{"city": "Oslo"}')
    chunks = read(client, tools=[WEATHER])
    assert content(chunks) == "Let me see."
    (piece,) = [t for chunk in chunks for c in chunk.choices for t in c.delta.tool_calls or ()]
    assert piece.index == 0
    assert piece.function is not None
    assert (piece.function.name, piece.function.arguments) == ("get_weather", '{"city": "Oslo"}')
    assert reasons(chunks) == {0: "tool_calls"}
    assert joined(chunks, "token_ids") == TOKENIZER(f"Let me see.\n{CALL}")["input_ids"]


def test_a_reply_of_calls_alone_has_no_content_and_can_be_sent_back(llm: ScriptedLLM, client: OpenAI):
    llm.script = spoken(TOKENIZER, CALL)
    message = ask(client, tools=[WEATHER]).choices[0].message
    assert message.content is None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    ask(client, tools=[WEATHER], messages=[*HI, message, result])
    ids = message.rollout["prompt_token_ids"] + message.rollout["token_ids"]
    assert llm.submitted[-1][0][: len(ids)] == ids
    ask(client, tools=[WEATHER], messages=[*HI, message.model_dump(), result])
    assert llm.submitted[-1][0][: len(ids)] == ids


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_call_is_a_constraint_on_the_reply(llm: ScriptedLLM, client: OpenAI, choice: Any):
    ask(client, tools=[WEATHER])
    free = llm.submitted[-1]
    llm.script = spoken(TOKENIZER, CALL)
    (made,) = ask(client, tools=[WEATHER], tool_choice=choice).choices
    assert (made.finish_reason, made.message.content) == ("tool_calls", None)
    forced = llm.submitted[-1]
    assert forced[0] == free[0]
    assert free[1].structured is None
    assert "get_weather" in forced[1].structured.grammar


def test_with_the_choice_none_tools_are_not_shown_and_text_stays_text(llm: ScriptedLLM, client: OpenAI):
    ask(client)
    plain = llm.submitted[-1][0]
    llm.script = spoken(TOKENIZER, CALL)
    (choice,) = ask(client, tools=[WEATHER], tool_choice="none").choices
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
    assert llm.submitted[-1][0] == plain


def test_a_call_that_is_cut_is_text_and_ends_by_length(llm: ScriptedLLM, client: OpenAI):
    cut = CALL[:40]
    llm.script = spoken(TOKENIZER, cut, reason="length")
    (choice,) = ask(client, tools=[WEATHER]).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (cut, None, "length")
    chunks = read(client, tools=[WEATHER])
    assert (content(chunks), reasons(chunks)) == (cut, {0: "length"})
