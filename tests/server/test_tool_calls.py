"""Tests of tool-call parsing: calls are found however the reply is split, other text is unchanged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.server.chat_template.reply_parser import ToolCallParser, parser_for
from rollout.server.chat_template.tool_formats import (
    FORMATS,
    GLM,
    HERMES,
    LLAMA3,
    QWEN_XML,
    ToolFormat,
    format_of,
)
from tests.server.chat_templates import LLAMA31, PLAIN, QWEN3, QWEN25, WEATHER

NAMES = {"f": {}, "get_weather": {"city": {"type": "string"}, "days": {"type": "integer"}}}
CALL = '{"name": "f", "arguments": {"a": 1}}'
DONE = ("f", '{"a": 1}')


def parse(tool_format: ToolFormat, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls of a reply that arrives in pieces."""
    parser = ToolCallParser(tool_format, NAMES)
    contents, found = zip(*map(parser.push, pieces), parser.push("", ended=True), strict=True)
    calls = [call for each in found for call in each]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    return "".join(contents), [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def read(tool_format: ToolFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    return parse(tool_format, [text])


BLOCKS = [
    (
        QWEN_XML,
        "<tool_call>\n<function={0}>\n{1}</function>\n</tool_call>",
        "<parameter=city>\nÅre <b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n",
    ),
    (
        GLM,
        "<tool_call>{0}\n{1}</tool_call>",
        "<arg_key>city</arg_key>\n<arg_value>Åre <b></arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n",
    ),
]
"""Formats that are not JSON alone: how a call of {0} is written, with the parameters {1}."""

ARGUMENTS = '{"city": "Åre <b>", "days": 3}'


@pytest.mark.parametrize(("known", "text", "parameters"), BLOCKS, ids=[known.name for known, *_ in BLOCKS])
class TestBlocks:
    def test_a_call_is_read_in_pieces_as_whole(self, known: ToolFormat, text: str, parameters: str):
        call = text.format("get_weather", parameters)
        for reply, content in ((call, ""), (f"Let me see.\n{call}\n", "Let me see.")):
            assert parse(known, reply) == (content, [("get_weather", ARGUMENTS)])

    def test_a_call_that_is_cut_off_or_malformed_stays_text(self, known: ToolFormat, text: str, parameters: str):
        call = text.format("get_weather", parameters)
        for reply in (
            call[: len(call) - len(known.closing) - 4],
            call.replace("get_weather", ""),
            known.marker + "x y",
            f"{known.marker}x y{known.closing}",
        ):
            assert read(known, reply) == (reply, [])


@pytest.mark.parametrize(("template", "known"), [
    (QWEN25, HERMES), (QWEN3, HERMES), (LLAMA31, LLAMA3), (PLAIN, None), (None, None),
    *(("{{ tools }} arguments " + " ".join(known.signs), known) for known, *_ in BLOCKS),
    (QWEN25.replace("arguments", "<function=f>"), None),  # shares a marker, but writes no JSON
])  # fmt: skip
def test_a_template_tells_its_format(template: str | None, known: ToolFormat | None):
    assert format_of(template) is known
    assert (parser_for(template, [WEATHER]) is None) == (known is None)
    assert parser_for(template, []) is None


BLOCK = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize(("known", "text", "content", "calls"), [
    (HERMES, BLOCK, "", 1), (HERMES, f"\n\n<tool_call>{CALL}</tool_call>\n", "", 1), (HERMES, f"<tool_call>\n{CALL}", "", 1),
    (HERMES, f"<tool_call>\n[{CALL}]\n</tool_call>", "", 1), (HERMES, f"{BLOCK}\n{BLOCK}", "", 2),
    (HERMES, f"One.\n{BLOCK} two {BLOCK}\nthree \n", "One. two\nthree \n", 2),
    (HERMES, f'<tool_call>\n{{"name": oh\n</tool_call>\n{BLOCK}', '<tool_call>\n{"name": oh\n</tool_call>', 1),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', "", 1), (LLAMA3, f"<|python_tag|>{CALL}", "", 1),
    (LLAMA3, ' {"type": "function", "name": "f", "parameters": {"a": 1}}\n', "", 1), (LLAMA3, f"{CALL}; {CALL}", "", 2),
    (LLAMA3, f"<|python_tag|>{CALL};{CALL}", "", 2),
])  # fmt: skip
def test_calls_come_in_their_order_and_the_text_around_them_is_content(
    known: ToolFormat, text: str, content: str, calls: int
):
    assert read(known, text) == (content, [DONE] * calls)


def test_arguments_have_the_values_that_the_model_wrote():
    written = '{ "b":1.50,  "a" : "\\"{\\u00e9 é\\\\", "c": [1, {"d": null}], "e": 123456789012345678901 }'
    ((name, arguments),) = read(HERMES, f'<tool_call>{{"arguments": {written} , "name":"f"}}</tool_call>')[1]
    assert (name, json.loads(arguments)) == ("f", json.loads(written))


@pytest.mark.parametrize(
    "inside",
    [
        "",
        "not json",
        "{",
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": 1]}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": 1,}}',
        '{"name": "f", "arguments": "a"}',
        '{"name": 3, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f" "arguments": {}}',
        "{3: 4}",
        "[]",
        "[3]",
        "{]",
        '{"name": "f\\',
        "[" * 100_000 + "]" * 100_000,
    ],
)
@pytest.mark.parametrize("closing", ["", "\n</tool_call>", "\n</tool_call>\nDone."])
def test_what_only_looks_like_a_call_is_content(inside: str, closing: str):
    text = f"Well: <tool_call>\n{inside}{closing}"
    assert read(HERMES, text) == (text, [])


@pytest.mark.parametrize("text", [
    '{"name": "Ada", "age": 3}', '{"a": {}}', "{ not json", '{"name": "f"} and more {', '<|python_tag|>search.call(q="x")',
])  # fmt: skip
def test_an_answer_in_json_or_python_is_no_call_unless_it_names_a_tool(text: str):
    assert read(LLAMA3, text) == (text, [])


def test_text_is_given_out_as_soon_as_it_cannot_be_a_call():
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push("Hi <") == ("Hi", [])
    assert parser.push("b>") == (" <b>", [])
    assert parser.push(" <tool_") == ("", [])
    assert parser.push("box>") == (" <tool_box>", [])


def test_a_call_is_given_out_when_it_is_complete():
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push(f"<tool_call>\n{CALL}\n</tool_call") == ("", [])
    (call,) = parser.push(">")[1]
    assert (call["index"], *call["function"].values()) == (0, *DONE)
    assert parser.push("\n") == parser.push("", ended=True) == ("", [])


def test_ids_differ():
    ids = {call["id"] for call in ToolCallParser(HERMES, NAMES).push(BLOCK * 9, ended=True)[1]}
    assert len(ids) == 9
    assert all(len(each) == 29 for each in ids)


PARTS = ["<tool_call>", "</tool_call>", "<tool", "<", "[", "]", "{", "}", "<|python_tag|>", ";", ", ", " ",
         "\n", '"', "\\", "é🙂", "x", "12", '"name": ', '"f"', '{"name": "f"', ', "arguments": ', "{}", CALL,
         CALL.replace("1", '"</tool_call>"'), BLOCK]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


@given(st.sampled_from(FORMATS), TEXTS, st.data())
def test_cuts_make_no_difference(tool_format: ToolFormat, text: str, data: st.DataObject):
    whole = parse(tool_format, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8), label="cuts"))
    assert parse(tool_format, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]) == whole
    assert parse(tool_format, text) == whole


@given(st.sampled_from(FORMATS), TEXTS)
def test_a_text_without_a_call_comes_out_as_it_went_in(tool_format: ToolFormat, text: str):
    content, calls = read(tool_format, text)
    if not calls:
        assert content == text
    for name, arguments in calls:
        assert name in ("f", "x")
        assert isinstance(json.loads(arguments), dict)


def test_a_reply_made_to_be_searched_again_and_again_is_read_once():
    text = '<tool_call>{"' * 20_000
    assert read(HERMES, text) == (text, [])
