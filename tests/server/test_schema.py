"""Tests of request schemas: accepted bodies, their conversion, and the field named in a refusal."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from rollout.sampling_params import SamplingParams
from rollout.server.errors import ApiError, explain
from rollout.server.openai.chat_schema import ChatRequest
from rollout.server.openai.schema import MAX_N, MAX_PROMPTS, MAX_STOPS, CompletionRequest

HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REPLY = {"role": "assistant", "content": "yes"}
IDS = {"prompt_token_ids": [1], "token_ids": [2]}


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [HI]} | fields)


def text(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "hi"} | fields)


def refused(make: Any, **fields: Any) -> tuple[str, str | None]:
    """Message and field of a refusal."""
    try:
        make(**fields).sampling_params(**{"max_tokens": 7} if fields.get("max_tokens") is None else {})
    except ApiError as exc:
        return exc.message, exc.param
    except ValidationError as exc:
        return explain([{**error, "loc": ("body", *error["loc"])} for error in exc.errors()])
    raise AssertionError("it was taken")


@pytest.mark.parametrize("make", [chat, text])
def test_a_field_that_is_null_has_its_default(make: Any):
    body = make(**dict.fromkeys(set(type(make()).model_fields) - {"messages", "prompt"}))
    assert body.sampling_params(max_tokens=7) == SamplingParams(max_tokens=7)
    assert body.return_rollout
    assert not body.stream_options.include_usage


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u"},
        {"store": False},
        {"metadata": {"a": "b"}},
        {"service_tier": "auto"},
        {"safety_identifier": "s"},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"mode": "implicit"}},
        {"parallel_tool_calls": False},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
        {"tools": [TOOL | {"function": {"name": "f", "strict": True}}]},
    ],
    ids=str,
)
def test_what_changes_nothing_is_taken(fields: dict[str, Any]):
    assert chat(**fields).sampling_params(max_tokens=3) == SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("suffix", "x"),
        ("best_of", 1),
        ("functions", []),
        ("skip_special_tokens", False),
        ("reasoning_effort", "much"),
        ("response_format", {"type": "grammar"}),
        ("modalities", ["audio"]),
        ("store", True),
        ("service_tier", "flex"),
    ],
)
def test_what_would_change_the_result_and_is_not_there_is_named(field: str, value: Any):
    message, param = refused(chat, **{field: value})
    assert (param or "").startswith(field)
    assert message.startswith(field)


# --- no value is converted --------------------------------------------------------------------------------------------

HOSTILE = [
    ("temperature", "1"), ("temperature", True), ("temperature", -0.1), ("temperature", 1e-7), ("temperature", 1e308),
    ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", 10**400), ("top_p", 0), ("top_p", 1.1),
    ("n", 0), ("n", True), ("n", "1"), ("n", 1.0), ("n", MAX_N + 1), ("max_tokens", -1), ("max_tokens", 2**31),
    ("max_tokens", 1.5), ("seed", "1"), ("stop", ""), ("stop", ["a", ""]),
    ("stop", 3), ("stop", ["a", 3]), ("stop", ["a"] * (MAX_STOPS + 1)), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("logit_bias", []), ("stream", 1), ("stream", "true"), ("stream_options", {"a": 1}),
    ("top_k", -2), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", 1e-300), ("min_tokens", -1),
    ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("ignore_eos", 0), ("prompt_logprobs", -2),
    ("logprobs_mode", "cooked"), ("priority", 2**31), ("timeout_s", 0), ("timeout_s", float("inf")),
    ("return_rollout", "yes"), ("logit_bias", {"x": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"5": "1"}),
    ("logit_bias", {"5": True}), ("logit_bias", {"5": 1e40}), ("logit_bias", {"9" * 10: 1}), ("model", 3), ("user", 3),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), HOSTILE, ids=[f"{field}={value!s:.20}" for field, value in HOSTILE])
@pytest.mark.parametrize("make", [chat, text])
def test_a_value_out_of_range_or_of_another_kind_is_refused_by_name(make: Any, field: str, value: Any):
    message, param = refused(make, **{field: value})
    assert param is not None
    assert param.partition("[")[0].partition(".")[0] == field
    assert message.startswith(field)


@pytest.mark.parametrize("make", [chat, text])
def test_an_unknown_field_is_named(make: Any):
    assert refused(make, temprature=1)[1] == "temprature"


# --- what it becomes --------------------------------------------------------------------------------------------------


def test_sampling_fields_reach_the_engine_as_they_are():
    fields = {
        "n": 3, "temperature": 0.0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 9,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "stop": ["a", "b"], "min_tokens": 2, "ignore_eos": True,
        "stop_token_ids": [5], "include_stop_str_in_output": True, "logprobs_mode": "raw", "prompt_logprobs": 2,
    }  # fmt: skip
    params = text(**fields, logit_bias={"5": 1, "007": -2.5}).sampling_params(max_tokens=8, logprobs=1)
    assert params == SamplingParams(**fields, logit_bias={5: 1.0, 7: -2.5}, max_tokens=8, logprobs=1)
    assert text(stop="abc").sampling_params(max_tokens=1).stop == ("abc",)
    assert text(seed=-1).sampling_params(max_tokens=1).seed == 2**63 - 1


def test_more_tokens_than_there_may_be_cannot_be_the_least():
    with pytest.raises(ApiError) as caught:
        text(min_tokens=5).sampling_params(max_tokens=4)
    assert (caught.value.status, caught.value.param) == (400, "min_tokens")


# --- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [None, 3, {}, [], [[]], [[1], []], ["a", 1], [1, "a"], [1.0], [-1], [True], [2**31], [[1], "a"], [[["a"]]],
     ["a"] * (MAX_PROMPTS + 1), [[1]] * (MAX_PROMPTS + 1)],
    ids=lambda prompt: f"{prompt!s:.15}",
)  # fmt: skip
def test_another_prompt_is_refused(prompt: Any):
    assert (refused(text, prompt=prompt)[1] or "").startswith("prompt")


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        HI,
        {"role": "system", "content": ""},
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "a", "name": "bob"},
        REPLY,
        REPLY | {"rollout": IDS | {"log_probs": [None], "policy_versions": [0], "something": 1}},
        REPLY | {"rollout": None, "refusal": None, "annotations": [], "audio": None, "function_call": None},
        REPLY | {"reasoning_content": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}]},
        {"role": "assistant", "tool_calls": [CALL]},
        REPLY | {"provider_specific_fields": {"refusal": None}, "thinking_blocks": [], "anything": {"else": 1}},
        REPLY | {"provider_specific_fields": {"rollout": IDS}},
        {"role": "assistant", "tool_calls": [CALL | {"extra_content": None}]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ],
    ids=lambda message: f"{message!s:.60}",
)
def test_a_message_as_clients_send_it_is_taken(message: dict[str, Any]):
    assert chat(messages=[message]).messages[0].role == message["role"]


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "user"}, "messages[1]", "content"),
        ({"role": "user", "content": None}, "messages[1]", "content"),
        ({"role": "user", "content": 3}, "messages[1].content", "string"),
        ({"role": "user", "content": []}, "messages[1].content", "at least 1"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[1].content[0].image_url.url",
            "required",
        ),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0]", "text or image_url"),
        ({"role": "user", "content": [{"type": "text", "txt": "a"}]}, "messages[1].content[0].txt", "no such field"),
        ({"role": "user", "content": "a", "rollout": IDS}, "messages[1]", "rollout"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "messages[1]", "tool_calls"),
        ({"role": "robot", "content": "a"}, "messages[1].role", "assistant"),
        ({"content": "a"}, "messages[1].role", "required"),
        ({"role": "tool", "content": "a"}, "messages[1]", "tool_call_id"),
        ({"role": "assistant"}, "messages[1]", "content"),
        ({"role": "assistant", "tool_calls": []}, "messages[1]", "content"),
        (
            REPLY | {"tool_calls": [{"id": "c", "type": "custom", "custom": {}}]},
            "messages[1].tool_calls[0].type",
            "'custom'",
        ),
        (REPLY | {"tool_calls": 3}, "messages[1].tool_calls", "list"),
        (REPLY | {"rollout": {"token_ids": [1]}}, "messages[1].rollout.prompt_token_ids", "required"),
        (REPLY | {"rollout": {"prompt_token_ids": [1], "token_ids": [-1]}}, "messages[1].rollout.token_ids[0]", "0"),
        (HI | {"mood": "good"}, "messages[1].mood", "no such field"),
        ("hi", "messages[1]", "dictionary"),
    ],
    ids=lambda value: f"{value!s:.50}",
)
def test_a_message_that_cannot_be_is_named(message: Any, param: str, says: str):
    named, field = refused(chat, messages=[HI, message])
    assert field == param
    assert says in named


def test_the_first_wrong_entry_of_a_list_ends_the_reading_of_it():
    for make, fields in (
        (text, {"prompt": [1, *["a"] * 1000]}),
        (chat, {"messages": [HI, *[3] * 1000]}),
    ):
        with pytest.raises(ValidationError) as caught:
            make(**fields)
        assert caught.value.error_count() == 1


# --- tools and log-probs ----------------------------------------------------------------------------------------------


def test_tools_are_passed_on_as_they_were_sent():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"default": None, "b": [1, {"c": 2.5}]}}}
    choice = {"type": "function", "function": {"name": "f"}}
    body = chat(tools=[tool], tool_choice=choice)
    assert body.shown_tools == body.forced_tools == [tool]
    assert chat(tools=[tool], tool_choice="required").forced_tools == [tool]
    assert chat(tools=[tool]).forced_tools == chat(tools=[tool], tool_choice="none").shown_tools == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice.type"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "tools[0].function.parameters"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format.schema"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_named(fields: dict[str, Any], param: str):
    assert refused(chat, **fields)[1] == param


def test_both_names_of_the_budget_count():
    assert chat(max_tokens=3).budget == 3
    assert chat(max_completion_tokens=0).budget == 0
    assert chat(max_tokens=3, max_completion_tokens=4).budget == 4
    assert chat().budget is None


def test_json_that_is_nested_without_end_is_refused():
    deep: Any = {}
    for _ in range(2000):
        deep = {"a": deep}
    assert (refused(chat, chat_template_kwargs=deep)[1] or "").startswith("chat_template_kwargs")
