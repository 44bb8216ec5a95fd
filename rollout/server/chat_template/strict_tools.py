"""Validates tool-call arguments against the JSON schema of a strict tool.

Every schema keyword is checked or raises `InvalidRequestError`; only descriptive ones (`title`, `default`) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.errors import InvalidRequestError

_DESCRIBING = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"}
)
_BOUNDS = frozenset({"minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength"})

MAX_CHECKS = 10_000
"""Maximum (value, schema) checks per call: recursive references can otherwise require any number."""

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

    Raises `InvalidRequestError` if `schema` is not a JSON schema, or has an unsupported keyword; `where` is the field in the
    message, such as `tools[0].function.parameters`.
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
                    f"{at}: with strict=true every keyword is checked, and this one cannot be; leave out it or strict"
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
    return one == other and isinstance(one, bool) == isinstance(other, bool)


Check = Callable[[StrictTool, Any, Any, Mapping[str, Any]], bool]


def _if(kind: Any, holds: Callable[[Any, Any], bool]) -> Check:
    """A check that concerns values of this type only."""
    return lambda tool, value, given, schema: (
        not isinstance(value, kind) or isinstance(value, bool) or holds(value, given)
    )


_CHECKS: dict[str, Check] = {
    "type": lambda tool, value, kinds, schema: any(_TYPES[kind](value) for kind in _names(kinds)),
    "enum": lambda tool, value, members, schema: any(_same(value, each) for each in members),
    "const": lambda tool, value, only, schema: _same(value, only),
    "properties": lambda tool, value, properties, schema: (
        not isinstance(value, dict)
        or all(tool._fits(value[name], inner) for name, inner in properties.items() if name in value)
    ),
    "additionalProperties": lambda tool, value, others, schema: (
        not isinstance(value, dict)
        or all(tool._fits(inner, others) for name, inner in value.items() if name not in schema.get("properties", {}))
    ),
    "items": lambda tool, value, inner, schema: (
        not isinstance(value, list) or all(tool._fits(each, inner) for each in value)
    ),
    "anyOf": lambda tool, value, schemas, schema: any(tool._fits(value, each) for each in schemas),
    "allOf": lambda tool, value, schemas, schema: all(tool._fits(value, each) for each in schemas),
    "$ref": lambda tool, value, reference, schema: tool._fits(value, tool._target(reference)),
    "required": _if(dict, lambda value, names: all(name in value for name in names)),
    "minimum": _if(int | float, lambda value, least: value >= least),
    "maximum": _if(int | float, lambda value, most: value <= most),
    "minItems": _if(list, lambda value, least: len(value) >= least),
    "maxItems": _if(list, lambda value, most: len(value) <= most),
    "minLength": _if(str, lambda value, least: len(value) >= least),
    "maxLength": _if(str, lambda value, most: len(value) <= most),
}
"""Schema keyword → function that checks a value against it."""


def strict_tools(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, StrictTool]:
    """Return the validators of the tools with strict=true, by function name; raises as `StrictTool`."""
    functions = [tool["function"] for tool in tools or ()]
    return {
        str(function["name"]): StrictTool(function.get("parameters") or {}, f"tools[{place}].function.parameters")
        for place, function in enumerate(functions)
        if function.get("strict")
    }
