"""The constraint on a chat reply, built from `response_format`, strict tools and a forced tool call.

- A JSON reply may begin with reasoning. If there are tools, the reply may consist of calls instead.
- A call that `tool_choice` forces is one complete call of an offered function. It is supported in every tool-call format.
- A free call, to which the model is not forced, is constrained only in the Hermes format. That format writes a call as JSON
  between two tags. In other formats `strict` has no effect on free calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rollout.errors import ConfigError, InvalidRequestError
from rollout.sampling_params import MAX_CHARACTERS, StructuredOutput, json_rule
from rollout.server.chat_template.reply_parser import CLOSE, OPEN
from rollout.server.chat_template.tool_formats import HERMES, ToolFormat

Tools = Sequence[Mapping[str, Any]]

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

_SPACE = r"SPACE: /[ \n]{1,8}/"
_TEXT = r"TEXT: /(.|\n)*/"
_TILL_CLOSED = r"(.|\n)*" + CLOSE.replace("/", r"\/")


def reply_constraint(
    schema: Any,
    tools: Tools | None,
    tool_format: ToolFormat | None,
    *,
    reasoning: Literal["open", "possible"] | None = None,
) -> StructuredOutput | None:
    """Return the constraint on a reply, or None if every text is allowed.

    Args:
        schema: JSON schema of the reply's content, or None if the content is free text.
        tools: functions that the reply may call, or None if it cannot have calls.
        tool_format: the chat template's tool-call format, or None if it is unknown.
        reasoning: "open" if the prompt ends inside a reasoning block, "possible" if the reply may begin with one, else None.

    Raises:
        InvalidRequestError: schema and tools cannot be combined in this format, or the schemas are too large.
    """
    strict = any(tool["function"].get("strict") for tool in tools or ())
    if schema is None and not (strict and tool_format is HERMES):
        return None
    if tools and tool_format is not HERMES:
        raise InvalidRequestError(
            "response_format: with tools of this chat template's format, calls look like the reply's JSON; set "
            'tool_choice="none", or leave one of them out'
        )
    rules = [_SPACE]
    if tools:
        rules += _rules_of_calls(tools)
    if schema is None:
        # Constrain calls anywhere in the reply, even inside reasoning, because this grammar has no rule for where the
        # reasoning ends.
        rules += ["opening[lazy]: TEXT " + json.dumps(HERMES.marker), _TEXT]
        return _grammar(["start: (opening body)* TEXT", *rules])
    begin = _reasoning(reasoning, rules)
    rules.append(f"reply: {json_rule(schema)}")
    if tools:
        rules.append(f"call: {json.dumps(HERMES.marker)} body SPACE?")
    return _grammar([f"start: {begin} {'(reply | call+)' if tools else 'reply'}", *rules])


def forced_call(tools: Tools, known: ToolFormat) -> StructuredOutput:
    """Return the constraint that a reply is one complete call of one of `tools`, in the format `known`.

    Raises:
        InvalidRequestError: the schemas together are too large.
    """
    rules, calls = [_SPACE], []
    for place, tool in enumerate(tools):
        function = tool["function"]
        strict, schema = bool(function.get("strict")), dict(function.get("parameters") or ANY_OBJECT)
        if not strict and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        if known.parameter is None:
            rules.append(f"arguments_{place}: SPACE? {json_rule(schema, lenient=not strict)}")
        else:
            rules += _parameters(place, schema, known.parameter, strict)
        calls.append(f"{_text(known.opening(function['name']))} arguments_{place}")
    ending = " ".join(f"SPACE? {_text(each)}" for each in known.ending)
    return _grammar([f"start: ({' | '.join(calls)}) {ending}", *rules])


def _rules_of_calls(tools: Tools) -> list[str]:
    rules = []
    for place, tool in enumerate(tools):
        function = tool["function"]
        arguments = (function.get("parameters") if function.get("strict") else None) or ANY_OBJECT
        call = {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        # Copy definitions to the root of the call's schema, because references such as #/$defs/X start at the root.
        call |= {word: arguments[word] for word in ("$defs", "definitions") if word in arguments}
        rules.append(f"call_{place}: {json_rule(call)}")
    names = " | ".join(f"call_{place}" for place in range(len(tools)))
    return [f"body: SPACE? ({names}) SPACE? {json.dumps(HERMES.closing)}", *rules]


def _parameters(place: int, schema: Mapping[str, Any], around: tuple[str, str], strict: bool) -> list[str]:
    """Return the grammar rules of a call's arguments, written one by one in the order of the schema.

    Args:
        place: index of the tool, which makes the names of the rules unique.
        schema: JSON schema of the tool's parameters. Unless `strict`, its unsupported keywords are ignored.
        around: the texts before and after a value, as in `ToolFormat.parameter`.
    """
    rules, names = [], []
    defined = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    for number, (key, inner) in enumerate((schema.get("properties") or {}).items()):
        name = f"parameter_{place}_{number}"
        names.append(name if key in (schema.get("required") or ()) else f"{name}?")
        rules.append(f"{name}: SPACE? {_text(around[0].replace('KEY', key))} value_{name}")
        if isinstance(inner, dict) and inner.get("type") == "string":
            text = "|".join(map(_pattern, inner["enum"])) if inner.get("enum") else r"(.|\n)*"
            rules.append(f"value_{name}[lazy]: /({text}){_pattern(around[1])}/")
        else:
            whole = inner | defined if isinstance(inner, dict) else inner
            rules += [
                f"value_{name}: json_{name} {_text(around[1])}",
                f"json_{name}: {json_rule(whole, lenient=not strict)}",
            ]
    return [f"arguments_{place}: {' '.join(names) or 'SPACE?'}", *rules]


def _pattern(text: str) -> str:
    """Return a regular expression that matches exactly `text`, escaped for use between slashes in a grammar."""
    return re.escape(text).replace("/", r"\/").replace("\n", "n")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _reasoning(reasoning: Literal["open", "possible"] | None, rules: list[str]) -> str:
    if reasoning is None:
        return ""
    rules.append(f"thought[lazy]: /{'' if reasoning == 'open' else OPEN}{_TILL_CLOSED}/")
    return "thought SPACE?" if reasoning == "open" else "(thought SPACE?)?"


def _grammar(rules: Sequence[str]) -> StructuredOutput:
    try:
        return StructuredOutput(grammar="\n".join(rules))
    except ConfigError as exc:
        raise InvalidRequestError(
            f"structured: schemas and tools have more than {MAX_CHARACTERS} characters together: send smaller ones"
        ) from exc
