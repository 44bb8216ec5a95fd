"""Tests of the constraint on a chat reply: which texts it accepts, told by llguidance over a real tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.engine.sampling.constraints import Constraints
from rollout.errors import InvalidRequestError
from rollout.sampling_params import StructuredOutput
from rollout.server.chat_template.reply_grammar import forced_call, reply_constraint
from rollout.server.chat_template.reply_parser import ToolCallParser
from rollout.server.chat_template.tool_formats import HERMES, LLAMA3, ToolFormat
from tests.server.chat_templates import byte_level
from tests.server.test_tool_calls import ARGUMENTS, BLOCKS

TOKENIZER = byte_level("qwen2.5")
CONSTRAINTS = Constraints(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id])
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
FREE = {"type": "function", "function": {"name": "g"}}
CALL_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BAD_F = CALL_F.replace("1", '"x"')
CALL_G = '<tool_call>\n{"name": "g", "arguments": {"any": ["thing"]}}\n</tool_call>'
THOUGHT = "<think>\n{so} <tool_call> it is\n</think>\n\n"


def accepts(constraint: StructuredOutput | None, text: str) -> bool:
    assert constraint is not None
    matcher = CONSTRAINTS._copy_of(constraint)
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_without_anything_to_constrain_a_reply_is_free():
    assert reply_constraint(None, None, HERMES) is None
    assert reply_constraint(None, [FREE], HERMES) is None
    assert reply_constraint(None, [STRICT], LLAMA3) is None, "checked when the reply is read"


@pytest.mark.parametrize(("asked", "yes", "no"), [
    ({"schema": SCHEMA}, ['{"a":1}', '{ "a": -3 }'], ["", "a", '{"a":"x"}', '{"a":1} ', THOUGHT + '{"a":1}']),
    ({"schema": SCHEMA, "reasoning": "possible"}, ['{"a":1}', THOUGHT + '{"a":1}'], ["hm</think>" + '{"a":1}', THOUGHT]),
    ({"schema": SCHEMA, "reasoning": "open"}, ['hm\n</think>\n\n{"a":1}'], ['{"a":1}']),
    ({"schema": SCHEMA, "tools": [STRICT, FREE]}, ['{"a":1}', CALL_F, CALL_G, CALL_F + "\n" + CALL_G], ["hi", BAD_F, ""]),
    ({"tools": [STRICT, FREE]}, ["", "hello", "a <tool", "Look: " + CALL_F + " and\n" + CALL_G + " bye"],
     [BAD_F, "Look: " + BAD_F, CALL_F + BAD_F, "<tool_call> is a tag", CALL_F.replace('"f"', '"h"')]),
    ({"tools": [STRICT], "reasoning": "possible"}, ["hi", "<think>so</think>" + CALL_F, "<think>so"],
     ["<think>so</think>" + BAD_F]),
])  # fmt: skip
def test_what_a_reply_may_be(asked: dict[str, Any], yes: list[str], no: list[str]):
    schema, tools = asked.pop("schema", None), asked.pop("tools", None)
    constraint = reply_constraint(schema, tools, HERMES, **asked)
    assert [text for text in yes if not accepts(constraint, text)] == []
    assert [text for text in no if accepts(constraint, text)] == []


WEATHER_CALLS = [*BLOCKS,
    (HERMES, '<tool_call>\n{{"name": "{0}", "arguments": {2}}}\n</tool_call>', ""),
    (LLAMA3, '{{"name": "{0}", "parameters": {2}}}', ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "text", "parameters"), WEATHER_CALLS, ids=[known.name for known, *_ in WEATHER_CALLS]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_forced_call_is_complete_and_of_an_offered_function(
    known: ToolFormat, text: str, parameters: str, strict: bool
):
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
              "required": ["city"], "additionalProperties": False}  # fmt: skip
    if not strict:  # what need not be honoured is not: an unserved keyword, and a name that is not declared
        schema["properties"]["days"]["not"] = {"const": 7}  # type: ignore[index]
        del schema["additionalProperties"]
    weather = {"type": "function", "function": {"name": "get_weather", "parameters": schema, "strict": strict}}
    parser = ToolCallParser(known, {"get_weather": schema["properties"]})  # type: ignore[dict-item]
    tools = [FREE, weather, {"type": "function", "function": {"name": "get_weather2"}}]
    good = text.format("get_weather", parameters, ARGUMENTS)
    assert len(parser.push(good, ended=True)[1]) == 1
    town = text.format("get_weather", parameters.replace("city", "town"), ARGUMENTS.replace("city", "town"))
    worded = text.format("get_weather", parameters.replace("3", "x"), ARGUMENTS.replace("3", '"x"'))
    for offered in (tools, [weather]):
        constraint = forced_call(offered, known)
        assert accepts(constraint, good)
        for other in ("g", "get_weather2", "get_weathe"):
            assert accepts(constraint, text.format(other, "", "{}")) == (offered is tools and other != "get_weathe")
        for wrong in (town, worded, good[:-2], "hello", ""):
            assert not accepts(constraint, wrong), wrong


def test_references_of_a_schema_are_followed_inside_a_call():
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"], "$defs": {"b": {"const": 7}},
              "additionalProperties": False}  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for constraint in (reply_constraint(None, [tool], HERMES), reply_constraint(schema, [tool], HERMES)):
        assert accepts(constraint, CALL_F.replace("1", "7"))
        assert not accepts(constraint, CALL_F)


def test_json_and_calls_that_cannot_be_told_apart_are_refused():
    with pytest.raises(InvalidRequestError, match="response_format"):
        reply_constraint(SCHEMA, [FREE], LLAMA3)
    with pytest.raises(InvalidRequestError, match="structured: schemas and tools have more than 262144"):
        reply_constraint({"enum": ["x" * 2**18]}, None, None)
