"""Tests of token id reuse: a conversation sent back with ids continues from them without tokenising again."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollout.errors import InvalidRequestError
from rollout.server.chat_template.conversation import Conversation
from rollout.server.chat_template.earlier_ids import MAX_TRIED, tokens_to_append
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
    came,
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
@settings(max_examples=8, deadline=None)
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
        answer = came(conversation, messages, reply(text), so_far, earlier[len(so_far) :])
        messages += [answer, user(question)]
        prompt = conversation.render(messages)
        assert (prompt.reused, prompt.retokenized) == (len(earlier), None)
        assert prompt.token_ids[: len(earlier)] == earlier
        appended = prompt.token_ids[len(earlier) :]
        assert appended[: not ended] == [end] * (not ended), "the turn is ended once"
        assert end not in appended[not ended :][:1]
        so_far = prompt.token_ids


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1"])
@settings(max_examples=8, deadline=None)
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
            answer = came(conversation, messages, reply(text), prompt, ids_given)
            continued = conversation.render([*messages, answer, user("And?")])
            assert continued.token_ids == plain.token_ids
        messages += [reply(text), user(text)]


def test_thoughts_that_the_template_would_drop_stay():
    tokenizer = byte_level("qwen3")
    conversation = Conversation(tokenizer)
    prompt = conversation.render([USER]).token_ids
    written = plainly(tokenizer, "<think>\nhm\n</think>\n\nRain.<|im_end|>")
    message = came(conversation, [USER], reply("<think>\nhm\n</think>\n\nRain."), prompt, written)
    going_on = conversation.render([USER, message, user("So?")])
    following = "\n<|im_start|>user\nSo?<|im_end|>\n<|im_start|>assistant\n"
    assert behind(tokenizer, going_on, prompt + written) == following


def test_the_last_reply_with_ids_counts():
    tokenizer = byte_level("qwen2.5")
    conversation = Conversation(tokenizer)
    messages = [USER, came(conversation, [USER], reply("a"), [1], [2]), USER]
    messages += [came(conversation, messages, reply("b"), [30, 31], [32]), USER, reply("c"), USER]
    prompt = conversation.render(messages)
    text = behind(tokenizer, prompt, [30, 31, 32])
    assert text.count("Weather?") == 2
    assert "assistant\nc<|im_end|>" in text


def calls_of(name: str) -> str:
    return {
        "llama3.1": '{"name": "get_weather", "parameters": {"city":"Paris"}}<|eot_id|>',
    }.get(name, '<tool_call>\n{"name": "get_weather", "arguments": {"city":"Paris"}}\n</tool_call><|im_end|>')


FOLLOWING = {
    "qwen2.5": "\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\n<tool_response>\nrain\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama3.1": '<|start_header_id|>ipython<|end_header_id|>\n\n"rain"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("content", [None, "Let me see."])
def test_the_result_of_a_tool_follows_the_ids_of_its_call(name: str, content: str | None):
    tokenizer = byte_level(name)
    conversation = Conversation(tokenizer)
    prompt = conversation.render([USER], tools=[WEATHER]).token_ids
    written = plainly(tokenizer, calls_of(name))
    message = came(conversation, [USER], reply(content, tool_calls=[call()]), prompt, written, tools=[WEATHER])
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"}
    going_on = conversation.render([USER, message, result], tools=[WEATHER])
    assert behind(tokenizer, going_on, prompt + written) == FOLLOWING[name]


def test_a_turn_that_the_template_ends_otherwise_behind_a_call_ends_so():
    tokenizer = byte_level("llama3.1")
    written = plainly(tokenizer, '<|python_tag|>get_weather.call(city="Paris")<|eom_id|>')
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"}
    conversation = Conversation(tokenizer)
    for ids_given in (written, written[:-1]):
        going_on = conversation.render(
            [USER, came(conversation, [USER], reply("", tool_calls=[call()]), [20], ids_given), result],
            template_kwargs={"builtin_tools": ["get_weather"]},
        )
        assert behind(tokenizer, going_on, [20, *written]) == FOLLOWING["llama3.1"]


def test_a_turn_that_the_model_ended_its_own_way_is_not_ended_again():
    tokenizer = byte_level("llama3.1")
    eom = tokenizer.convert_tokens_to_ids("<|eom_id|>")
    messages = [USER, came(Conversation(tokenizer), [USER], reply("x"), [20], [21, eom]), user("So?")]
    twice = Conversation(tokenizer).render(messages)
    once = Conversation(tokenizer, end_token_ids=[eom]).render(messages)
    assert behind(tokenizer, twice, [20, 21, eom]).startswith("<|eot_id|>")
    assert behind(tokenizer, once, [20, 21, eom]).startswith("<|start_header_id|>user")


def test_a_reply_is_continued_without_the_end_of_its_turn():
    tokenizer = byte_level("qwen3")
    written = plainly(tokenizer, "It is<|im_end|>")
    conversation = Conversation(tokenizer)
    for ids_given in (written, written[:-1]):
        answer = came(conversation, [USER], reply("It is"), [20], ids_given)
        prompt = conversation.render([USER, answer], add_generation_prompt=False, continue_final_message=True)
        assert prompt.token_ids == [20, *written[:-1]]
        assert prompt.reused == len(prompt.token_ids)


def test_a_template_without_special_tokens_goes_on_in_the_middle_of_a_text():
    for maker in (byte_level, sentencepiece):
        tokenizer = maker("plain")
        conversation = Conversation(tokenizer)
        answer = came(conversation, [USER], reply("Rain."), [20], plainly(tokenizer, "Rain."))
        prompt = conversation.render([USER, answer, user("So?")])
        after = tokenizer.convert_ids_to_tokens(prompt.token_ids[1 + len(plainly(tokenizer, "Rain.")) :])
        assert not after[0].startswith("▁"), "a space nobody wrote"
        assert text_of(tokenizer, prompt).endswith("Rain.\n\nuser: So?\n\nassistant:")


# No token ends the call, and the first one behind it ends the result already.
NO_END = LLAMA31.replace("~ '}<|eot_id|>'", "~ '}'").replace("<|start_header_id|>ipython<|end_header_id|>", "")


@pytest.mark.parametrize(("name", "template", "calls"), [
    ("plain", "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}", None),
    ("plain", "{% for m in messages %}{{ m.content ~ m.content }}{% endfor %}", None),
    ("plain", "{% for m in messages %}{{ m.content | upper }}{% endfor %}", [call()]),
    ("llama3.1", NO_END, [call()]),
])  # fmt: skip
def test_where_the_following_text_cannot_be_told_all_is_tokenised_again(name: str, template: str, calls: Any):
    conversation = Conversation(byte_level(name), template)
    answer = came(conversation, [USER], reply("x", tool_calls=calls), [20], [21])
    result = {"role": "tool" if calls else "user", "tool_call_id": "abcdef123", "content": "rain"}
    prompt = conversation.render([USER, answer, result])
    assert prompt.token_ids == conversation.render([USER, answer | {"rollout": None}, result]).token_ids
    assert "messages[1].rollout: the text" in (prompt.retokenized or "")


# --- a conversation that has changed ------------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "SECRET-CONTEXT-A"}


def unwritten(tokenizer: Any, number: int = 0) -> list[int]:
    """Ids of tokens that are in no text of these tests."""
    return list(tokenizer.convert_tokens_to_ids(["ĀāĂ"[number], "ă"]))


def chain(tokenizer: Any, *, tools: Any = None) -> tuple[Conversation, list[dict[str, Any]], list[list[int]]]:
    """Three turns whose replies are of ids that no text is tokenised to, and the prompt of each."""
    conversation = Conversation(tokenizer)
    messages: list[dict[str, Any]] = [SYSTEM]
    prompts = []
    for number in range(3):
        messages.append(user(f"question {number}"))
        prompts.append(conversation.render(messages, tools=tools).token_ids)
        answer = reply(f"answer {number}")
        messages.append(came(conversation, messages, answer, prompts[-1], unwritten(tokenizer, number), tools=tools))
    return conversation, [*messages, user("So?")], prompts


def as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in message.items() if key != "rollout"} for message in messages]


def edited(place: int) -> Any:
    return lambda messages: [*messages[:place], messages[place] | {"content": "something else"}, *messages[place + 1 :]]


OTHER, CHANGED = "what stands before it", "its content or its calls"
EDITS: dict[str, tuple[Any, int, str, dict[str, Any]]] = {
    "the system prompt": (edited(0), 0, OTHER, {}),
    "no system prompt": (lambda messages: messages[1:], 0, OTHER, {}),
    "the oldest messages dropped": (lambda messages: [SYSTEM, *messages[3:]], 0, OTHER, {}),
    "the first question": (edited(1), 0, OTHER, {}),
    "the second question": (edited(3), 1, OTHER, {}),
    "the third question": (edited(5), 2, OTHER, {}),
    "the last reply": (edited(6), 2, CHANGED, {}),
    "tools added": (lambda messages: messages, 0, OTHER, {"tools": [WEATHER]}),
    "a variable": (lambda messages: messages, 0, OTHER, {"template_kwargs": {"enable_thinking": False}}),
}
"""Edit → (how, number of replies before it, reason, options of the template)."""


@pytest.mark.parametrize(
    ("name", "edit"), [(name, edit) for name in NAMES for edit in EDITS if edit != "a variable" or name == "qwen3"]
)
def test_ids_before_an_edit_stay_and_after_it_the_text_counts(name: str, edit: str):
    tokenizer = byte_level(name)
    conversation, messages, prompts = chain(tokenizer)
    change, replies, why, options = EDITS[edit]
    changed = change(messages)
    prompt = conversation.render(changed, **options)
    kept = prompts[replies - 1] + unwritten(tokenizer, replies - 1) if replies else []
    assert prompt.token_ids[: len(kept)] == kept
    assert prompt.reused == len(kept)
    assert re.match(rf"messages\[\d\]\.rollout: {why}.*: from there the text counts", prompt.retokenized or "")
    assert unwritten(tokenizer)[1] not in prompt.token_ids[len(kept) :]
    if not replies:
        assert prompt.token_ids == conversation.render(as_text(changed), **options).token_ids
    assert ("something else" in text_of(tokenizer, prompt)) == ("something else" in str(changed))


@pytest.mark.parametrize("name", NAMES)
def test_edited_arguments_of_a_call_count_and_their_layout_and_its_id_do_not(name: str):
    tokenizer = byte_level(name)
    conversation = Conversation(tokenizer)
    prompt = conversation.render([USER], tools=[WEATHER]).token_ids
    message = came(
        conversation, [USER], reply(None, tool_calls=[call()]), prompt, unwritten(tokenizer), tools=[WEATHER]
    )
    result = {"role": "tool", "tool_call_id": "abcdef123", "content": "rain"}
    for arguments, agrees in (
        ('{"city":"Paris"}', True),
        ('{ "city" : "Pa\\u0072is" }', True),
        ('{"city": "Oslo"}', False),
        ('{"city": "Paris", "now": 1}', False),
    ):
        for call_id, content in (("abcdef123", ""), ("123456789", None)):
            sent = {**message, "content": content, "tool_calls": [call(arguments=arguments, call_id=call_id)]}
            going_on = conversation.render([USER, sent, result | {"tool_call_id": call_id}], tools=[WEATHER])
            assert (going_on.retokenized is None) == agrees
            assert (going_on.token_ids[len(prompt) : len(prompt) + 2] == unwritten(tokenizer)) == agrees
    renamed = {**message, "tool_calls": [call(name="other")]}
    assert conversation.render([USER, renamed, result], tools=[WEATHER]).retokenized is not None


def test_ids_without_digests_are_not_used_and_that_is_said():
    tokenizer = byte_level("qwen2.5")
    conversation = Conversation(tokenizer)
    prompt = conversation.render([USER, reply("x", ids([20], [21])), user("So?")])
    assert prompt.token_ids == conversation.render([USER, reply("x"), user("So?")]).token_ids
    assert "without the digests" in (prompt.retokenized or "")


def test_a_long_conversation_is_written_a_few_times_and_not_once_per_reply(monkeypatch: pytest.MonkeyPatch):
    conversation = Conversation(byte_level("qwen2.5"))
    digests = {"prompt_digest": "0" * 32, "content_digest": "0" * 32}
    messages = [USER]
    for _ in range(4 * MAX_TRIED):
        messages += [reply("x", ids([20], [21]) | digests), USER]
    written = []
    write = conversation._write
    monkeypatch.setattr(conversation, "_write", lambda *args, **more: written.append(1) or write(*args, **more))
    assert conversation.render(messages).reused == 0
    assert len(written) == 1 + MAX_TRIED


# --- ids that are none --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "named"),
    [
        (ids([], [1]), r"messages\[1\].rollout.prompt_token_ids: empty"),
        (ids([1, -1], [1]), r"messages\[1\].rollout.prompt_token_ids\[1\]=-1"),
        (ids([1], [1, 5000]), r"messages\[1\].rollout.token_ids\[1\]=5000: .* \[0, \d+\)"),
    ],
)
def test_ids_that_are_none_are_named(rollout: Any, named: str):
    conversation = Conversation(byte_level("qwen3"))
    message = came(conversation, [USER], reply("x"), [20], [21])
    digests = {name: value for name, value in message["rollout"].items() if name.endswith("_digest")}
    message["rollout"] = digests | rollout
    with pytest.raises(InvalidRequestError, match=named):
        conversation.render([USER, message, USER])


def test_a_model_may_have_more_ids_than_its_tokenizer():
    conversation = Conversation(byte_level("qwen3"), vocab_size=5001)
    prompt = conversation.render([USER, came(conversation, [USER], reply("x"), [20], [5000]), USER])
    assert prompt.token_ids[:2] == [20, 5000]


@pytest.mark.parametrize(
    ("written", "following", "appended"),
    [
        ([5, 9], [9, 1], [1]),
        ([5], [9, 1], [9, 1]),
        ([5, 7, 8], [7, 8, 1], [1]),
        ([5, 8], [9, 1], [1]),
        ([5, 8], [1, 9], [1, 9]),
        ([], [9, 1], [9, 1]),
        ([9], [], []),
    ],
)
def test_a_turn_ends_once(written: list[int], following: list[int], appended: list[int]):
    assert tokens_to_append(written, following, {8, 9}) == appended
