"""Tests of rendering: messages, tools and tool choice become the chat template's tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollout.errors import InvalidRequestError
from rollout.server.chat_template.conversation import Conversation
from tests.server.chat_templates import PLAIN, TEMPLATES, USER, WEATHER, byte_level, call, reply, text_of, user

NAMES = sorted(TEMPLATES)

# --- through the template ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_what_the_template_makes_of_it(name: str):
    tokenizer = byte_level(name)
    messages = [{"role": "system", "content": "Be kind."}, USER, reply("Where?"), user("Oslo")]
    expected = tokenizer.apply_chat_template(messages, tools=[WEATHER], add_generation_prompt=True, return_dict=False)
    prompt = Conversation(tokenizer).render(messages, tools=[WEATHER])
    assert (prompt.token_ids, prompt.reused, prompt.retokenized) == (expected, 0, None)


def test_what_openai_sends_is_what_templates_read():
    tokenizer = byte_level("qwen2.5")
    parts = [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]
    sent = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts, "rollout": "no template sees it"},
        reply(None, tool_calls=[call(arguments='{ "city":"Å" }'), call(arguments="broken {")], refusal=None),
        {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"},
        reply("Rain.", tool_calls=[], function_call={"name": "no"}),
    ]
    text = text_of(tokenizer, Conversation(tokenizer).render(sent, add_generation_prompt=False))
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Å"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": broken {}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nRain.<|im_end|>\n"
    )
    assert sent[2]["tool_calls"][0]["function"]["arguments"] == '{ "city":"Å" }'


def test_a_template_that_knows_developers_sees_them():
    template = "{% for m in messages %}[{{ m.role }}{{ ' wow' if m.role == 'developer' }}]{% endfor %}"
    tokenizer = byte_level("plain")
    prompt = Conversation(tokenizer, template).render([{"role": "developer", "content": "x"}])
    assert text_of(tokenizer, prompt) == "[developer wow]"


def test_variables_reach_the_template():
    tokenizer = byte_level("qwen3")
    prompt = Conversation(tokenizer).render([USER], template_kwargs={"enable_thinking": False})
    assert text_of(tokenizer, prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["chat_template", "tools", "add_generation_prompt", "self"])
def test_a_variable_cannot_take_the_place_of_an_argument(name: str):
    with pytest.raises(InvalidRequestError, match=f"TypeError: .*{name}"):
        Conversation(byte_level("qwen3")).render([USER], template_kwargs={name: "x"})


@pytest.mark.parametrize("name", NAMES)
def test_the_final_message_is_continued(name: str):
    tokenizer = byte_level(name)
    prompt = Conversation(tokenizer).render(
        [USER, reply("It is")], add_generation_prompt=False, continue_final_message=True
    )
    assert text_of(tokenizer, prompt).endswith("It is")


def test_a_message_is_either_continued_or_answered():
    with pytest.raises(InvalidRequestError, match="set add_generation_prompt=false"):
        Conversation(byte_level("qwen3")).render([USER], continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ nowhere.x }}", "'nowhere' is undefined"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    ],
)
def test_what_a_template_says_is_said(template: str, said: str):
    with pytest.raises(InvalidRequestError, match=said):
        Conversation(byte_level("plain"), template).render([USER])


def test_without_a_template_the_cure_is_named():
    tokenizer = copy.deepcopy(byte_level("plain"))
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequestError, match="has no chat template; start the server with one"):
        Conversation(tokenizer).render([USER])


def test_what_a_trainer_sets_on_its_tokenizer_meanwhile_changes_nothing():
    tokenizer = copy.deepcopy(byte_level("qwen3"))
    tokenizer([USER["content"], ""], padding="max_length", max_length=99)
    conversation = Conversation(tokenizer)
    prompt = conversation.render([USER])
    tokenizer([USER["content"]], truncation=True, max_length=2)
    assert conversation.render([USER]) == prompt
    assert text_of(tokenizer, prompt) == "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"


NESTED: dict[str, Any] = {}
for _ in range(3000):
    NESTED = {"a": NESTED}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages: empty"),
        ([user("\ud800")], "surrogate"),
        ([USER, {"content": "x"}], r"messages\[1\]="),
        ([user(3)], r"messages\[0\].content=3"),  # type: ignore[arg-type]
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"messages\[0\].content\[0\]="),
        ([USER, reply("", tool_calls=[{"id": "x"}])], r"messages\[1\].tool_calls\[0\]="),
        ([USER, reply("", tool_calls={})], r"messages\[1\].tool_calls="),
        ([USER, reply("", tool_calls=[call()] * 2)], "single tool-calls"),
        ([USER, reply("", tool_calls=[{"function": {"name": "f", "arguments": NESTED}}])], "RecursionError"),
    ],
)
def test_a_message_that_is_none_is_named(messages: list[dict[str, Any]], named: str):
    with pytest.raises(InvalidRequestError, match=named):
        Conversation(byte_level("llama3.1")).render(messages)


def test_tools_that_the_template_never_prints_are_refused():
    conversation = Conversation(byte_level("qwen3"), PLAIN)
    with pytest.raises(InvalidRequestError, match="tools: the chat template never prints them"):
        conversation.render([USER], tools=[WEATHER])
    assert conversation.render([USER], tools=[]) == conversation.render([USER])


def test_calls_are_forced_where_the_format_is_known():
    conversation = Conversation(byte_level("qwen3"))
    prompt = conversation.render([USER], tools=[WEATHER])
    assert conversation.constraint_on(prompt, None, [WEATHER], [WEATHER]) is not None
    with pytest.raises(InvalidRequestError, match='use "auto"'):
        Conversation(byte_level("plain")).constraint_on(prompt, None, [WEATHER], [WEATHER])
