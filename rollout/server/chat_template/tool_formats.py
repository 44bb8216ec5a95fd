"""The tool-call formats of chat-template families: their table, the detection of a template's format, and call parsing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

Schemas = Mapping[str, Mapping[str, Any]]
"""A dict from function name to a dict from parameter name to the parameter's JSON schema."""
Call = tuple[str, str]
"""A tool call: (function name, arguments as JSON text)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The tool-call syntax of a family of chat templates."""

    name: str
    signs: tuple[str, ...]
    """The strings that identify the format's family: every chat template of the family contains all of them."""
    foreign: tuple[str, ...] = ()
    """The strings that no chat template of the format's family contains."""
    marker: str
    """The text that introduces a block of one or more tool calls."""
    bare: str = ""
    """The first text of a call whose marker is missing at the start of a reply. A marker that is a special token does not
    appear in the reply's text. If "", a call always has its marker."""
    closing: str = ""
    """The text after a block of calls, which a reply may lack at its end. If "", the block extends to the reply's end."""
    closed: bool = False
    """Whether calls without the closing text after them are content, because truncated calls would look complete."""
    named: str
    """The start of a call forced by `tool_choice`. NAME is replaced by the quoted function name, BARE by the plain name."""
    ending: tuple[str, ...] = ()
    """The texts after the arguments of a call forced by `tool_choice`, with optional white space before each."""
    one_call_ends_at: str = ""
    """The stop string that ends a reply after its first call and occurs nowhere else; "" if there is none."""
    call: str | None = None
    """The regular expression of a call between `marker` and `closing`. Its groups are the function's name and the
    parameters. If None, calls are JSON objects."""
    parameter: tuple[str, str] | None = None
    """The texts before and after a parameter's value, with KEY for the parameter's name. If None, the arguments are a JSON
    object."""
    value: str = ""
    """The regular expression of one parameter of a call. Its groups are the parameter's name and value."""

    def opening(self, function: str) -> str:
        return self.named.replace("NAME", json.dumps(function)).replace("BARE", function)

    def calls(self, text: str, schemas: Schemas) -> list[Call]:
        """Return the calls in a block's text; raise `ValueError` for any other text. `schemas` has the parameters' types."""
        if self.call is None:
            return _json_calls(text)
        found = []
        for call in _each(self.call, text):
            name = call[1].strip()
            if _NAME.fullmatch(name) is None:
                raise ValueError("not the name of a function")
            pairs = _each(self.value, call[2]) if call[2] else []
            known = schemas.get(name, {})
            values = {each[1].strip(): _value(each[2], known.get(each[1].strip())) for each in pairs}
            found.append((name, json.dumps(values, ensure_ascii=False)))
        return found


_NAME = re.compile(r"[^\W\d][\w.:-]*")


def _each(pattern: str, text: str) -> list[re.Match[str]]:
    """Return the adjacent matches of `pattern` that cover the whole text; raise `ValueError` if they do not."""
    found: list[re.Match[str]] = []
    at, compiled = 0, re.compile(pattern, re.DOTALL)
    while at < len(text) or not found:
        match = compiled.match(text, at)
        if match is None or match.end() == at:
            raise ValueError("not calls")
        found.append(match)
        at = match.end()
    return found


def _value(text: str, schema: Any) -> Any:
    """Return a parameter's value: the parsed JSON, or the text itself if it is not JSON or the schema requires a string."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text


def _json_calls(text: str) -> list[Call]:
    """Return the calls in a string of JSON objects, or arrays of objects, separated by white space or `;`."""
    found: list[Any] = []
    while text := text.strip(" \t\n\r;"):
        value, end = _DECODER.raw_decode(text)
        found += value if isinstance(value, list) else [value]
        text = text[end:]
    if not found:
        raise ValueError("nothing is called")
    return [_json_call(each) for each in found]


def _json_call(value: Any) -> Call:
    if not isinstance(value, dict):
        raise ValueError("a call is an object")
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("a call has a name, and an object of arguments")
    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _refuse_constant(constant: str) -> NoReturn:
    """Raise `ValueError` for `NaN` and `Infinity`, which Python's JSON decoder would accept."""
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


HERMES = ToolFormat(
    name="hermes",
    signs=("<tool_call>", "arguments"),
    foreign=("<function=", "<arg_key>"),
    marker="<tool_call>",
    closing="</tool_call>",
    named='<tool_call>\n{"name": NAME, "arguments":',
    one_call_ends_at="</tool_call>",
    ending=("}", "</tool_call>"),
)
"""The format of Hermes 2 and 3, and of Qwen 2.5 and 3."""

LLAMA3 = ToolFormat(
    name="llama3",
    signs=("<|start_header_id|>", "ipython", "parameters"),
    foreign=("<tool_call>", "func_name1("),
    marker="<|python_tag|>",
    bare="{",
    named='{"name": NAME, "parameters":',
    ending=("}",),
)
"""The format of Llama 3.1 to 3.3, with calls in JSON."""

QWEN_XML = ToolFormat(
    name="qwen_xml",
    signs=("<tool_call>", "<function=", "<parameter="),
    marker="<tool_call>",
    closing="</tool_call>",
    named="<tool_call>\n<function=BARE>",
    one_call_ends_at="</tool_call>",
    ending=("</function>", "</tool_call>"),
    parameter=("<parameter=KEY>\n", "\n</parameter>"),
    call=r"\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*",
    value=r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*",
)
"""The format of Qwen3-Coder and Qwen 3.5."""

GLM = ToolFormat(
    name="glm",
    signs=("<tool_call>", "<arg_key>", "<arg_value>"),
    foreign=("<function=",),
    marker="<tool_call>",
    closing="</tool_call>",
    named="<tool_call>BARE",
    ending=("</tool_call>",),
    parameter=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>"),
    call=r"\s*([^\s<]+)\s*((?:<arg_key>.*)?)\Z",
    value=r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*",
    closed=True,
)
"""The format of GLM-4.5 and later GLM models."""

FORMATS = (HERMES, LLAMA3, QWEN_XML, GLM)


def format_of(template: str | None) -> ToolFormat | None:
    """Return the tool-call format of a chat template, or None if the template uses none of `FORMATS`."""
    for known in FORMATS:
        if template and all(s in template for s in known.signs) and not any(f in template for f in known.foreign):
            return known
    return None
