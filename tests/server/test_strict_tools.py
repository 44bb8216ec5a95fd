"""Tests of strict tools: a call matches its schema or is text; unsupported keywords are refused."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.errors import InvalidRequestError
from rollout.server.chat_template.reply_parser import parser_for
from rollout.server.chat_template.strict_tools import MAX_CHECKS, StrictTool, strict_tools
from tests.server.chat_templates import QWEN25, WEATHER

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Oslo"]},
        "days": {"type": ["integer", "null"], "minimum": 1, "maximum": 7},
        "places": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"anyOf": [{"type": "string", "maxLength": 3}, {"const": 5}]}},
}


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"city": "Paris"}, True),
        ({"city": "Paris", "days": 7, "places": ["abc", 5]}, True),
        ({"city": "Paris", "days": None}, True),
        ({"city": "Paris", "days": 3.0}, True),
        ({"city": "Rome"}, False),
        ({"days": 3}, False),
        ({"city": "Paris", "days": 8}, False),
        ({"city": "Paris", "days": 3.5}, False),
        ({"city": "Paris", "days": True}, False),
        ({"city": "Paris", "days": float("nan")}, False),
        ({"city": "Paris", "now": 1}, False),
        ({"city": "Paris", "places": []}, False),
        ({"city": "Paris", "places": ["a", "b", "c"]}, False),
        ({"city": "Paris", "places": ["abcd"]}, False),
        ({"city": "Paris", "places": [True]}, False),
        ([], False),
    ],
    ids=str,
)
def test_arguments_fit_or_do_not(arguments: Any, fits: bool):
    assert StrictTool(CITY, "x").fits(arguments) == fits


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "patternProperties": {}}, "x.patternProperties"),
        ({"properties": {"a": {"pattern": "a"}}}, "x.properties.a.pattern"),
        ({"anyOf": [{}, {"format": "date"}]}, r"x.anyOf\[1\].format"),
        ({"type": "text"}, "x.type='text'"),
        ({"required": "a"}, "x.required='a'"),
        ({"required": [[]]}, "x.required"),
        ({"minimum": "1"}, "x.minimum='1'"),
        ({"items": 3}, "x.items=3"),
        ({"$ref": "#/$defs/nowhere"}, r"x.\$ref='#/\$defs/nowhere'"),
        ({"$ref": "https://example.org/a"}, r"x.\$ref"),
    ],
)
def test_what_cannot_be_checked_is_refused_by_name(schema: Any, named: str):
    with pytest.raises(InvalidRequestError, match=named):
        StrictTool(schema, "x")


def test_a_schema_that_asks_for_endless_work_is_fitted_by_nothing():
    assert not StrictTool({"$ref": "#"}, "x").fits({})
    doubling: dict[str, Any] = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)}
    doubling["d60"] = {"type": "null"}
    tool = StrictTool({"$ref": "#/$defs/d0", "$defs": doubling}, "x")
    assert not tool.fits({})
    assert tool._left >= -MAX_CHECKS


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_call_that_does_not_fit_stays_text_where_the_tool_is_strict(strict: bool | None):
    tools = [{"type": "function", "function": {**WEATHER["function"], "parameters": CITY, "strict": strict}}]
    assert bool(strict_tools(tools)) == bool(strict)
    make = parser_for(QWEN25, tools)
    assert make is not None
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    parser = make()
    content, calls = parser.push(text)
    assert bool(calls) == (not strict)
    if strict:
        assert content + parser.finish()[0] == text
    assert make().push(text.replace("Rome", "Oslo"))[1]
