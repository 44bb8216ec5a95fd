"""Incremental JSON scanner for tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

_OUTSIDE = re.compile(r"[\s\w.,:+-]*")
_INSIDE = re.compile(r'[^"\\]*')
_SPACE = re.compile(r"\s*")


class JsonEnd:
    """Incremental search for the end of a JSON object or array in a growing text. Scans each character once.

    Attributes:
        position: index of the first character not scanned; the end of the value once it is complete.
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> bool | None:
        """Continue the scan. True: the value ends at `position`. False: not JSON at `position`. None: needs more text."""
        while True:
            skipped = _INSIDE if self._in_string else _OUTSIDE if self._depth else _SPACE
            match = skipped.match(text, self.position)
            self.position = match.end() if match else self.position
            char = text[self.position : self.position + 1]
            if not char or (char == "\\" and self._in_string and self.position + 1 == len(text)):
                return None
            if not self._accept(char):
                return False
            self.position += 2 if char == "\\" else 1
            if not self._depth:
                return True

    def _accept(self, char: str) -> bool:
        if self._in_string:
            self._in_string = char == "\\"
        elif char in "{[":
            self._depth += 1
        elif not self._depth:
            return False
        elif char in "}]":
            self._depth -= 1
        else:
            self._in_string = char == '"'
            return self._in_string
        return True


def read_calls(value: str) -> list[tuple[str, str]]:
    """Return (name, arguments) of each call in a JSON object or an array of objects.

    Raises:
        ValueError: not JSON, or not calls.
    """
    objects = [value] if value.startswith("{") else [raw for _, raw in _members(value)]
    if not objects:
        raise ValueError("an empty array calls nothing")
    return [_one_call(raw) for raw in objects]


def _one_call(raw: str) -> tuple[str, str]:
    members = dict(_members(raw)) if raw.startswith("{") else {}
    name = json.loads(members.get("name", "null"))
    arguments = members.get("arguments", members.get("parameters", "{}"))
    if not isinstance(name, str) or not name or not arguments.startswith("{"):
        raise ValueError("a call has a name, and an object of arguments")
    return name, arguments


def refuse_constant(constant: str) -> NoReturn:
    """Refuse `NaN` and `Infinity`, which Python's decoder takes."""
    raise ValueError(f"{constant} is not JSON")


# Only the ends of numbers matter: parsed as strings, they may have any number of digits.
_DECODER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=refuse_constant)


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Yield (key, raw text) of each member of a JSON object or array, in order; keys are "" in an array.

    Raises:
        ValueError: the text is not JSON.
    """
    is_object = text.startswith("{")
    closer = "}" if is_object else "]"
    at = _skip(text, 1)
    if text.endswith(closer) and at == len(text) - 1:
        return
    while True:
        key = ""
        if is_object:
            key, at = _DECODER.raw_decode(text, at)
            at = _expect(text, at, ":")
        _, end = _DECODER.raw_decode(text, at)
        if not isinstance(key, str):
            raise ValueError("a key is a string")
        yield key, text[at:end]
        if text.endswith(closer) and _skip(text, end) == len(text) - 1:
            return
        at = _expect(text, end, ",")


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] in (" ", "\t", "\n", "\r"):
        at += 1
    return at


def _expect(text: str, at: int, char: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != char:
        raise ValueError(f"{char!r} is missing at {at}")
    return _skip(text, at + 1)
