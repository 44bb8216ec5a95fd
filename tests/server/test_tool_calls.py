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
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    FORMATS,
    GLM,
    HERMES,
    KIMI,
    LLAMA3,
    MISTRAL,
    QWEN_XML,
    ToolFormat,
    format_of,
)
from tests.server.chat_templates import LLAMA31, PLAIN, QWEN3, QWEN25, WEATHER
from tests.server.chat_templates import MISTRAL as MISTRAL_TEMPLATE

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
    (
        KIMI,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{0}:0<|tool_call_argument_begin|>{2}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
    ),
    (
        DEEPSEEK_V3,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{0}\n```json\n{2}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
    ),
    (
        DEEPSEEK_V31,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{0}<｜tool▁sep｜>{2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
]
"""Formats that are not JSON alone: how a call of {0} is written, with the parameters {1} or the JSON {2}."""

ARGUMENTS = '{"city": "Åre <b>", "days": 3}'


@pytest.mark.parametrize(("known", "text", "parameters"), BLOCKS, ids=[known.name for known, *_ in BLOCKS])
class TestBlocks:
    def test_a_call_is_read_in_pieces_as_whole(self, known: ToolFormat, text: str, parameters: str):
        call = text.format("get_weather", parameters, ARGUMENTS)
        for reply, content in ((call, ""), (f"Let me see.\n{call}\n", "Let me see.")):
            assert parse(known, reply) == (content, [("get_weather", ARGUMENTS)])

    def test_a_call_that_is_cut_off_or_malformed_stays_text(self, known: ToolFormat, text: str, parameters: str):
        call = text.format("get_weather", parameters, ARGUMENTS)
        for reply in (
            call[: len(call) - len(known.closing) - 4],
            call.replace("get_weather", ""),
            known.marker + "x y",
            f"{known.marker}x y{known.closing}",
        ):
            assert read(known, reply) == (reply, [])


@pytest.mark.parametrize("signs", [known.signs for known, *_ in BLOCKS])
def test_a_template_of_blocks_tells_its_format(signs: tuple[str, ...]):
    (expected,) = (known for known, *_ in BLOCKS if known.signs == signs)
    assert format_of("{{ tools }} arguments " + " ".join(signs)) is expected


def test_calls_of_a_section_are_all_read():
    text = "<|tool_calls_section_begin|>" + "".join(
        f'<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>{{"a": {place}}}<|tool_call_end|>'
        for place, name in enumerate(["f", "get_weather"])
    )
    assert read(KIMI, text) == ("", [("f", '{"a": 0}'), ("get_weather", '{"a": 1}')]), "also without the section's end"


@pytest.mark.parametrize(
    ("template", "known"),
    [(QWEN25, HERMES), (QWEN3, HERMES), (LLAMA31, LLAMA3), (MISTRAL_TEMPLATE, MISTRAL), (PLAIN, None), (None, None)],
)
def test_a_template_tells_its_format(template: str | None, known: ToolFormat | None):
    assert format_of(template) is known


@pytest.mark.parametrize("template", [QWEN25.replace("arguments", "<function=f>"), MISTRAL_TEMPLATE + "[ARGS]"])
def test_a_family_that_shares_a_marker_but_writes_no_json_is_unknown(template: str):
    assert format_of(template) is None


def test_without_tools_or_a_known_format_text_stays_text():
    assert parser_for(QWEN25, None) is None
    assert parser_for(QWEN25, []) is None
    assert parser_for(PLAIN, [WEATHER]) is None


def test_every_sample_has_a_parser_of_its_own():
    make = parser_for(QWEN25, [WEATHER])
    assert make is not None
    make().push("<tool_call>")
    assert make().push("hello") == ("hello", [])


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>"),
        (HERMES, f"\n\n<tool_call>{CALL}</tool_call>\n"),
        (HERMES, f"<tool_call>\n{CALL}"),
        (HERMES, f"<tool_call>\n[{CALL}]\n</tool_call>"),
        (LLAMA3, '{"name": "f", "parameters": {"a": 1}}'),
        (LLAMA3, f"<|python_tag|>{CALL}"),
        (LLAMA3, ' {"type": "function", "name": "f", "parameters": {"a": 1}}\n'),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}]"),
        (MISTRAL, f"[TOOL_CALLS]{CALL}"),
        (MISTRAL, f" [{CALL}]"),
    ],
)
def test_a_call_alone_leaves_no_content(tool_format: ToolFormat, text: str):
    assert read(tool_format, text) == ("", [DONE])


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"),
        (LLAMA3, f"{CALL}; {CALL}"),
        (LLAMA3, f"<|python_tag|>{CALL};{CALL}"),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}, {CALL}]"),
    ],
)
def test_several_calls_come_in_their_order(tool_format: ToolFormat, text: str):
    assert read(tool_format, text) == ("", [DONE, DONE])


def test_text_around_calls_is_content():
    call = f"<tool_call>\n{CALL}\n</tool_call>"
    assert read(HERMES, f"One.\n{call} two {call}\nthree \n") == ("One. two\nthree \n", [DONE, DONE])


def test_arguments_have_the_values_that_the_model_wrote():
    written = '{ "b":1.50,  "a" : "\\"{\\u00e9 é\\\\", "c": [1, {"d": null}], "e": 123456789012345678901 }'
    ((name, arguments),) = read(HERMES, f'<tool_call>{{"arguments": {written} , "name":"f"}}</tool_call>')[1]
    assert (name, json.loads(arguments)) == ("f", json.loads(written))


def test_a_call_without_arguments_has_an_empty_object():
    assert read(HERMES, '<tool_call>{"name": "f"}</tool_call>') == ("", [("f", "{}")])


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


def test_a_call_behind_a_broken_one_is_found():
    broken = '<tool_call>\n{"name": oh <tool_call>\n{"name"}\n</tool_call>\n'
    assert read(HERMES, f"{broken}<tool_call>{CALL}</tool_call>") == (broken.rstrip(), [DONE])


@pytest.mark.parametrize("text", ['{"name": "Ada", "age": 3}', '{"a": {}}', "{ not json", '{"name": "f"} and more {'])
def test_an_answer_in_json_is_no_call_unless_it_names_a_tool(text: str):
    content, calls = read(LLAMA3, text)
    assert (content, calls) == (text, [])


def test_python_behind_the_tag_is_content():
    text = '<|python_tag|>brave_search.call(query="x")'
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


def test_ids_differ_and_have_the_shape_that_the_templates_ask_for():
    for tool_format, text in [
        (HERMES, f"<tool_call>{CALL}</tool_call>" * 9),
        (MISTRAL, f"[TOOL_CALLS] [{', '.join([CALL] * 9)}]"),
    ]:
        parser = ToolCallParser(tool_format, NAMES)
        ids = {call["id"] for call in parser.push(text, ended=True)[1]}
        assert len(ids) == 9
        assert all(len(i) == (29 if tool_format is HERMES else 9) and i.replace("_", "").isalnum() for i in ids)


PARTS = ["<tool_call>", "</tool_call>", "<tool", "<", "[TOOL_CALLS]", "[", "]", "{", "}", "<|python_tag|>", ";", ", ", " ",
         "\n", '"', "\\", "é🙂", "x", "12", '"name": ', '"f"', '{"name": "f"', ', "arguments": ', "{}", CALL,
         CALL.replace("1", '"</tool_call>"'), f"<tool_call>\n{CALL}\n</tool_call>", f"[TOOL_CALLS] [{CALL}]"]  # fmt: skip
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
