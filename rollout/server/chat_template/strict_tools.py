"""Validates tool-call arguments against the JSON schema of a strict tool.

Every schema keyword is either checked or refused by name; only descriptive keywords (`title`, `default`, ...) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.errors import InvalidRequestError

_DESCRIBING = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
)

MAX_CHECKS = 10_000
"""Maximum (value, schema) checks per call: recursive references can otherwise require any number."""

_BOUNDS = frozenset({"minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength"})

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": lambda value: _is_number(value),
}


class StrictTool:
    """Validator of one function's arguments.

    Args:
        schema: JSON schema of the arguments; {} accepts everything.
        where: field path for errors, such as `tools[0].function.parameters`.

    Raises:
        InvalidRequestError: `schema` is not a valid schema, or has an unsupported keyword.
    """

    def __init__(self, schema: Mapping[str, Any], where: str) -> None:
        self._root = schema
        self._left = 0
        self._look_through(schema, where)

    def fits(self, arguments: Any) -> bool:
        """Whether `arguments` match the schema; False if the check exceeds `MAX_CHECKS`."""
        self._left = MAX_CHECKS
        try:
            return self._fits(arguments, self._root)
        except (RecursionError, OverflowError, ValueError):
            return False

    def _fits(self, value: Any, schema: Any) -> bool:
        self._left -= 1
        if self._left < 0:
            return False
        if isinstance(schema, bool):
            return schema
        return all(check(self, value, schema[word], schema) for word, check in _CHECKS.items() if word in schema)

    def _look_through(self, schema: Any, where: str) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, Mapping):
            raise InvalidRequestError(f"{where}={schema!r:.80}: must be a JSON schema, an object")
        for word, value in schema.items():
            at = f"{where}.{word}"
            if word not in _CHECKS and word not in _DESCRIBING:
                raise InvalidRequestError(
                    f"{at}: with strict=true every keyword is checked, and this one is not served here"
                )
            if word in ("properties", "$defs", "definitions"):
                for name, inner in _of(dict, value, at).items():
                    self._look_through(inner, f"{at}.{name}")
            elif word in ("anyOf", "allOf"):
                for place, inner in enumerate(_of(list, value, at)):
                    self._look_through(inner, f"{at}[{place}]")
            elif word in ("items", "additionalProperties"):
                self._look_through(value, at)
            elif word in ("enum", "required"):
                members = _of(list, value, at)
                if word == "required" and not all(isinstance(name, str) for name in members):
                    raise InvalidRequestError(f"{at}={value!r:.80}: must be names of properties")
            elif word in _BOUNDS and not _is_number(value):
                raise InvalidRequestError(f"{at}={value!r:.80}: must be a number")
            elif word == "$ref":
                self._target(value, at)
            elif word == "type" and not all(isinstance(each, str) and each in _TYPES for each in _names(value)):
                raise InvalidRequestError(f"{at}={value!r:.80}: must be of {', '.join(_TYPES)}")

    def _target(self, reference: Any, where: str = "$ref") -> Any:
        """Resolve a `$ref` within the schema."""
        found: Any = self._root
        parts = reference.split("/") if isinstance(reference, str) else [""]
        for part in parts[1:]:
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if parts[0] != "#" or found is None:
            raise InvalidRequestError(f"{where}={reference!r:.80}: must name a part of this schema, #/$defs/…")
        return found

    def _object(self, value: Any, properties: Mapping[str, Any], _: Any) -> bool:
        return not isinstance(value, dict) or all(
            self._fits(value[name], inner) for name, inner in properties.items() if name in value
        )

    def _others(self, value: Any, others: Any, schema: Mapping[str, Any]) -> bool:
        known = schema.get("properties", {})
        return not isinstance(value, dict) or all(
            self._fits(inner, others) for name, inner in value.items() if name not in known
        )


def _names(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def _of(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidRequestError(f"{where}={value!r:.80}: must be {'an object' if kind is dict else 'a list'}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(one: Any, other: Any) -> bool:
    """JSON equality: unlike in Python, true is not equal to 1."""
    return (
        type(one) is type(other) and one == other if isinstance(one, bool) or isinstance(other, bool) else one == other
    )


Check = Callable[[StrictTool, Any, Any, Mapping[str, Any]], bool]

_CHECKS: dict[str, Check] = {
    "type": lambda tool, value, kinds, schema: any(_TYPES[kind](value) for kind in _names(kinds)),
    "enum": lambda tool, value, members, schema: any(_same(value, each) for each in members),
    "const": lambda tool, value, only, schema: _same(value, only),
    "properties": StrictTool._object,
    "required": lambda tool, value, names, schema: not isinstance(value, dict) or all(name in value for name in names),
    "additionalProperties": StrictTool._others,
    "items": lambda tool, value, inner, schema: (
        not isinstance(value, list) or all(tool._fits(each, inner) for each in value)
    ),
    "anyOf": lambda tool, value, schemas, schema: any(tool._fits(value, each) for each in schemas),
    "allOf": lambda tool, value, schemas, schema: all(tool._fits(value, each) for each in schemas),
    "$ref": lambda tool, value, reference, schema: tool._fits(value, tool._target(reference)),
    "minimum": lambda tool, value, least, schema: not _is_number(value) or value >= least,
    "maximum": lambda tool, value, most, schema: not _is_number(value) or value <= most,
    "minItems": lambda tool, value, least, schema: not isinstance(value, list) or len(value) >= least,
    "maxItems": lambda tool, value, most, schema: not isinstance(value, list) or len(value) <= most,
    "minLength": lambda tool, value, least, schema: not isinstance(value, str) or len(value) >= least,
    "maxLength": lambda tool, value, most, schema: not isinstance(value, str) or len(value) <= most,
}
"""Schema keyword → function that checks a value against it."""


def strict_tools(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, StrictTool]:
    """Return the validators of the tools with strict=true, by function name.

    Raises:
        InvalidRequestError: a schema has an unsupported keyword.
    """
    return {
        str(tool["function"]["name"]): StrictTool(
            tool["function"].get("parameters") or {}, f"tools[{place}].function.parameters"
        )
        for place, tool in enumerate(tools or ())
        if tool["function"].get("strict")
    }
