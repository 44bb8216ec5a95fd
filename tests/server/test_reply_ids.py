"""A conversation that comes back with the ids of a reply goes on from them; nothing before is tokenised again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidRequestError
from rollout.server.conversation import Conversation, RenderedPrompt
from rollout.server.reply_end import tokens_to_append
from tests.server.chat_templates import (
    END,
    LLAMA31,
    MAKERS,
    TEMPLATES,
    USER,
    WEATHER,
    behind,
    byte_level,
    call,
    ids,
    plainly,
    reply,
    sentencepiece,
    text_of,
    user,
)

NAMES = sorted(TEMPLATES)
WORDS = st.text(st.sampled_from("user the Paris\n é🙂<"), max_size=12)
TURN = st.tuples(WORDS, st.lists(st.integers(20, 300), max_size=6), st.booleans())


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(first=WORDS, turns=st.lists(TURN, min_size=1, max_size=4))
def test_the_ids_of_earlier_turns_come_back_unchanged(maker: str, name: str, first: str, turns: list[Any]):
    """The model's ids are any ids at all, hardly what their text would be tokenised to."""
    tokenizer = MAKERS[maker](name)
    end = tokenizer.convert_tokens_to_ids(END[name])
    conversation = Conversation(tokenizer)
    messages = [user(first)]
    so_far = conversation.render(messages).token_ids
    for question, written, ended in turns:
        earlier = so_far + written + [end] * ended
        text = tokenizer.decode(written, skip_special_tokens=True)
        messages += [reply(text, ids(so_far, earlier[len(so_far) :])), user(question)]
        prompt = conversation.render(messages)
        assert prompt.continued
        assert prompt.token_ids[: len(earlier)] == earlier
        appended = prompt.token_ids[len(earlier) :]
        assert appended[: not ended] == [end] * (not ended), "the turn is ended once"
        assert end not in appended[not ended :][:1]
        so_far = prompt.token_ids


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "mistral"])
@settings(max_examples=15, deadline=None)
@given(texts=st.lists(WORDS.filter(str.strip), min_size=2, max_size=4))
def test_from_canonical_ids_follows_the_plain_rendering(maker: str, name: str, texts: list[str]):
    tokenizer = MAKERS[maker](name)
    end = tokenizer.convert_tokens_to_ids(END[name])
    conversation = Conversation(tokenizer)
    messages: list[dict[str, Any]] = [user("Hi")]
    for text in texts:
        prompt = conversation.render(messages).token_ids
        closed = conversation.render([*messages, reply(text)], add_generation_prompt=False).token_ids
        assume(closed[: len(prompt)] == prompt)
        written = closed[len(prompt) : closed.index(end, len(prompt)) + 1]
        plain = conversation.render([*messages, reply(text), user("And?")])
        for ids_given in (written, written[:-1]):
            continued = conversation.render([*messages, reply(text, ids(prompt, ids_given)), user("And?")])
            assert continued.token_ids == plain.token_ids
        messages += [reply(text), user(text)]


def test_thoughts_that_the_template_would_drop_stay():
    tokenizer = byte_level("qwen3")
    conversation = Conversation(tokenizer)
    prompt = conversation.render([USER]).token_ids
    written = plainly(tokenizer, "<think>\nhm\n</think>\n\nRain.<|im_end|>")
    for message in (reply("Rain."), reply("Rain.", reasoning_content="hm"), reply("<think>\nhm\n</think>\n\nRain.")):
        message["rollout"] = ids(prompt, written)
        going_on = conversation.render([USER, message, user("So?")])
        assert behind(tokenizer, going_on, prompt + written) == (
            "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
        )


def test_the_last_reply_with_ids_counts():
    tokenizer = byte_level("qwen2.5")
    messages = [USER, reply("a", ids([1], [2])), USER, reply("b", ids([30, 31], [32])), USER, reply("c"), USER]
    prompt = Conversation(tokenizer).render(messages)
    text = behind(tokenizer, prompt, [30, 31, 32])
    assert text.count("Weather?") == 2
    assert "assistant\nc<|im_end|>" in text


def calls_of(name: str) -> str:
    return {
        "llama3.1": '{"name": "get_weather", "parameters": {"city":"Paris"}}<|eot_id|>',
        "mistral": '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city":"Paris"}}]</s>',
    }.get(name, '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}\n</tool_call><|im_end|>')


FOLLOWING = {
    "qwen2.5": "\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3.1": '<|start_header_id|>ipython<|end_header_id|>\n\n"rain"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": '[TOOL_RESULTS] {"content": rain, "call_id": "abcdef123"}[/TOOL_RESULTS]',
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [None, "Let me see."])
def test_the_result_of_a_tool_follows_the_ids_of_its_call(name: str, content: str | None):
    tokenizer = byte_level(name)
    conversation = Conversation(tokenizer)
    prompt = conversation.render([USER], tools=[WEATHER]).token_ids
    written = plainly(tokenizer, calls_of(name))
    message = reply(content, ids(prompt, written), tool_calls=[call()])
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"}
    going_on = conversation.render([USER, message, result], tools=[WEATHER])
    assert behind(tokenizer, going_on, prompt + written) == FOLLOWING[name]


def test_roles_that_must_alternate_are_counted_with_the_call_there():
    """Without its calls the reply would be an answer, and the next answer one too many."""
    tokenizer = byte_level("mistral")
    prompt, written = [20, 21], plainly(tokenizer, calls_of("mistral"))
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"}
    messages = [USER, reply("", ids(prompt, written), tool_calls=[call()]), result, reply("Rain."), user("So?")]
    going_on = Conversation(tokenizer).render(messages)
    assert behind(tokenizer, going_on, prompt + written) == FOLLOWING["mistral"] + " Rain.</s>[INST] So?[/INST]"


def test_a_turn_that_the_template_ends_otherwise_behind_a_call_ends_so():
    tokenizer = byte_level("llama3.1")
    written = plainly(tokenizer, '<|python_tag|>get_weather.call(city="Paris")<|eom_id|>')
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"}
    for ids_given in (written, written[:-1]):
        going_on = Conversation(tokenizer).render(
            [USER, reply("", ids([20], ids_given), tool_calls=[call()]), result],
            template_kwargs={"builtin_tools": ["get_weather"]},
        )
        assert behind(tokenizer, going_on, [20, *written]) == FOLLOWING["llama3.1"]


def test_a_turn_that_the_model_ended_its_own_way_is_not_ended_again():
    tokenizer = byte_level("llama3.1")
    eom = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    messages = [USER, reply("x", ids([20], [21, eom])), user("So?")]
    twice = Conversation(tokenizer).render(messages)
    once = Conversation(tokenizer, end_token_ids=[eom]).render(messages)
    assert behind(tokenizer, twice, [20, 21, eom]).startswith("<|eot_id|>")
    assert behind(tokenizer, once, [20, 21, eom]).startswith("<|start_header_id|>user")


def test_a_reply_is_continued_without_the_end_of_its_turn():
    tokenizer = byte_level("qwen3")
    written = plainly(tokenizer, "It is<|im_end|>")
    for ids_given in (written, written[:-1]):
        prompt = Conversation(tokenizer).render(
            [USER, reply("It is", ids([20], ids_given))], add_generation_prompt=False, continue_final_message=True
        )
        assert prompt == RenderedPrompt([20, *written[:-1]], forced_prefix="", continued=True)


def test_a_reply_of_no_tokens_is_ended():
    tokenizer = byte_level("qwen3")
    prompt = Conversation(tokenizer).render([USER, reply("", ids([20], [])), user("So?")])
    assert behind(tokenizer, prompt, [20]).startswith("<|im_end|>\n<|im_start|>user\nSo?")


def test_a_call_can_be_forced_behind_an_earlier_reply():
    tokenizer = byte_level("qwen3")
    prompt = Conversation(tokenizer).render(
        [USER, reply("x", ids([20], [21])), USER], tools=[WEATHER], tool_choice="required"
    )
    assert prompt.forced_prefix == "<tool_call>\n"
    assert behind(tokenizer, prompt, [20, 21]).endswith("<|im_start|>assistant\n<tool_call>\n")


def test_a_template_without_special_tokens_goes_on_in_the_middle_of_a_text():
    for maker in (byte_level, sentencepiece):
        tokenizer = maker("plain")
        messages = [USER, reply("Rain.", ids([20], plainly(tokenizer, "Rain."))), user("So?")]
        prompt = Conversation(tokenizer).render(messages)
        after = tokenizer.convert_ids_to_tokens(prompt.token_ids[1 + len(plainly(tokenizer, "Rain.")) :])
        assert not after[0].startswith("▁"), "a space nobody wrote"
        assert text_of(tokenizer, prompt).endswith("Rain.\n\nuser: So?\n\nassistant:")


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}",
        "{% for m in messages %}{{ m.content ~ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("calls", [None, [call()]])
def test_what_follows_is_refused_where_it_cannot_be_told(template: str, calls: Any):
    messages = [USER, reply("x", ids([20], [21]), tool_calls=calls), {**USER, "tool_call_id": "abcdef123"}]
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].rollout: .* leave `rollout` out"):
        Conversation(byte_level("plain"), template).render(messages)


def test_a_result_is_not_taken_for_the_end_of_a_call():
    """No token ends the call, and the first one behind it ends the result already."""
    template = LLAMA31.replace("~ '}<|eot_id|>'", "~ '}'").replace("<|start_header_id|>ipython<|end_header_id|>", "")
    assert template != LLAMA31
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"}
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].rollout"):
        Conversation(byte_level("llama3.1"), template).render(
            [USER, reply("", ids([20], [21]), tool_calls=[call()]), result]
        )


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        ("x", r"messages\[1\].rollout='x'"),
        ({"token_ids": [1]}, r"messages\[1\].rollout.prompt_token_ids=None"),
        ({"prompt_token_ids": [1]}, r"messages\[1\].rollout.token_ids=None"),
        (ids([], [1]), r"messages\[1\].rollout.prompt_token_ids: empty"),
        (ids([1, -1], [1]), r"messages\[1\].rollout.prompt_token_ids\[1\]=-1"),
        (ids([1], [1, 5000]), r"messages\[1\].rollout.token_ids\[1\]=5000: .* \[0, \d+\)"),
        (ids([1], [True]), r"messages\[1\].rollout.token_ids\[0\]=True"),
        (ids([1], [1.0]), r"messages\[1\].rollout.token_ids\[0\]=1.0"),  # type: ignore[list-item]
    ],
)
def test_ids_that_are_none_are_named(rollout: Any, named: str):
    with pytest.raises(InvalidRequestError, match=named):
        Conversation(byte_level("qwen3")).render([USER, reply("x", rollout), USER])


def test_a_model_may_have_more_ids_than_its_tokenizer():
    messages = [USER, reply("x", ids([20], [5000])), USER]
    prompt = Conversation(byte_level("qwen3"), vocab_size=5001).render(messages)
    assert prompt.token_ids[:2] == [20, 5000]


@pytest.mark.parametrize(
    ("written", "following", "kept", "appended"),
    [
        ([5, 9], [9, 1], 1, [1]),
        ([5], [9, 1], 1, [9, 1]),
        ([5, 7, 8], [7, 8, 1], 1, [1]),
        ([5, 8], [9, 1], 1, [1]),
        ([5, 8], [1, 9], 1, [1, 9]),
        ([], [9, 1], 0, [9, 1]),
        ([9], [], 0, []),
    ],
)
def test_a_turn_ends_once(written: list[int], following: list[int], kept: int, appended: list[int]):
    assert tokens_to_append(written, following, {8, 9}) == (kept, appended)
