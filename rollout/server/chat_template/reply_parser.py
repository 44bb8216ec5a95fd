"""Splits a reply into reasoning, content and tool calls, incrementally or whole.

Always true: the result does not depend on how the text is cut into pieces; text that only resembles a call (invalid JSON,
no name, arguments that a strict tool refuses) is returned completely as content; arguments are returned exactly as they
were generated; every character is scanned once. Formats are data (`tool_formats`), read by one state machine.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.server.chat_template.strict_tools import StrictTool, strict_tools
from rollout.server.chat_template.tool_formats import Call, Schemas, ToolFormat, format_of

OPEN, CLOSE = "<think>", "</think>"


def marks_reasoning(template: str) -> bool:
    """Whether a chat template writes reasoning between the tags."""
    return CLOSE in template


def opens_reasoning(prompt: str) -> bool:
    """Whether a prompt's text ends inside an open reasoning."""
    return prompt.rstrip().endswith(OPEN)


def _held_back(text: str, marker: str) -> int:
    """Number of characters at the end of a text that may be the beginning of a marker."""
    return next(n for n in range(len(marker) - 1, -1, -1) if text.endswith(marker[:n]))


class ReasoningParser:
    """Splits one reply. White space around the tags belongs to neither part; a tag inside the content is content.

    Args:
        opened: the prompt ends with the opening tag. Otherwise the reply has a reasoning only if it begins with the tag.
    """

    def __init__(self, opened: bool) -> None:
        self._buffer = ""
        self._state = "reasoning" if opened else "start"
        self._fresh = True

    def push(self, text: str) -> tuple[str, str]:
        """Add the next piece of the reply; return the (reasoning, content) that are now certain."""
        self._buffer += text
        reasoning = ""
        if self._state == "start":
            rest = self._buffer.lstrip()
            if rest.startswith(OPEN):
                self._buffer, self._state = rest.removeprefix(OPEN), "reasoning"
            elif not OPEN.startswith(rest):
                self._state = "content"
        if self._state == "reasoning":
            before, closed, behind = self._buffer.partition(CLOSE)
            if closed:
                reasoning, self._buffer, self._state = before.rstrip(), behind, "behind"
            else:
                reasoning = before[: len(before) - _held_back(before, CLOSE)].rstrip()
                self._buffer = before[len(reasoning) :]
            if self._fresh:
                reasoning = reasoning.lstrip()
                self._fresh = not reasoning
        if self._state == "behind":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "content"
        return reasoning, self._take() if self._state == "content" else ""

    def finish(self) -> tuple[str, str]:
        """End the reply; return the text that was held back."""
        if self._state == "reasoning":
            return self._take().rstrip(), ""
        return "", self._take() if self._state in ("start", "content") else ""

    def _take(self) -> str:
        text, self._buffer = self._buffer, ""
        return text


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call."""

    index: int
    """Index among the calls of the reply."""
    id: str
    name: str
    arguments: str
    """JSON object, as generated."""


RandomHex = Callable[[int], str]
"""Returns the given number of random hexadecimal digits."""


def random_hex(digits: int) -> str:
    """Return random hexadecimal digits from the operating system's generator."""
    return secrets.token_hex((digits + 1) // 2)[:digits]


def parser_for(template: str | None, tools: Sequence[Mapping[str, Any]] | None) -> Callable[[], ToolCallParser] | None:
    """Return a factory of parsers (one per sample), or None if there are no tools or the template's format is unknown."""
    known = format_of(template)
    if known is None or not tools:
        return None
    schemas = {str(tool["function"]["name"]): _properties(tool["function"]) for tool in tools}
    strict = strict_tools(tools)
    return lambda: ToolCallParser(known, schemas, strict=strict)


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (function.get("parameters") or {}).get("properties")
    return found if isinstance(found, Mapping) else {}


class ToolCallParser:
    """Incremental tool-call parser of one reply. A state is a method that consumes text from the front of the buffer.

    Text before, between and after calls is content. Only the formatting around a call is dropped: white space before it,
    the separators of its format, white space between it and the end of the reply.

    Args:
        tools: parameter schemas of the offered functions. A call without a marker must name one of them: otherwise it is
            an answer that happens to be JSON.
        random_hex: source of call ids.
        strict: functions whose calls are accepted only if their arguments match the schema.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Schemas,
        random_hex: RandomHex = random_hex,
        strict: Mapping[str, StrictTool] | None = None,
    ) -> None:
        self._format = tool_format
        self._tools = tools
        self._random_hex = random_hex
        self._strict = strict or {}
        self._buffer = ""
        self._state = self._lead
        self._value = _JsonEnd(0)
        self._value_start = 0
        self._searched = 0
        self._num_calls = 0
        self._content = ""
        self._calls: list[ToolCall] = []

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add the next piece of the reply; return the content and the calls that are now certain."""
        self._buffer += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """End the reply; return what was held back."""
        if self._state == self._block and not self._format.closed:
            self._end_call(len(self._buffer), len(self._buffer), self._lead)
        if self._num_calls and self._buffer.isspace() and self._state != self._text:
            self._buffer = ""
        self._give(len(self._buffer))
        return self._take()

    def _take(self) -> tuple[str, list[ToolCall]]:
        taken = self._content, self._calls
        self._content, self._calls = "", []
        return taken

    def _give(self, length: int) -> None:
        """Emit the first `length` characters of the buffer as content."""
        self._content += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _lead(self) -> bool:
        """State: only white space since the start or the previous call."""
        marker, bare = self._format.marker, self._format.bare
        rest = self._buffer.lstrip()
        if marker.startswith(rest) and rest != marker:
            return False
        if bare and rest.startswith(bare) and not rest.startswith(marker):
            self._enter_call(len(self._buffer) - len(rest))
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        marker = self._format.marker
        at = self._buffer.find(marker)
        if at < 0:
            self._give(len(self._buffer[: len(self._buffer) - _held_back(self._buffer, marker)].rstrip()))
            return False
        before = len(self._buffer[:at].rstrip())
        self._give(before)
        self._enter_call(at - before + len(marker))
        return True

    def _enter_call(self, value_start: int) -> None:
        """Enter a call; the buffer holds white space, an optional marker, and the call from `value_start` on."""
        self._value_start = self._searched = value_start
        if self._format.call is not None:
            self._state = self._block
        else:
            self._value = _JsonEnd(value_start)
            self._state = self._call

    def _call(self) -> bool:
        """State: inside a call of JSON."""
        if self._value.find(self._buffer) is None:
            return False
        self._end_call(self._value.position, self._value.position, self._behind)
        return True

    def _block(self) -> bool:
        """State: inside a block that its closing text ends."""
        closing = self._format.closing
        at = self._buffer.find(closing, self._searched)
        if at < 0:
            self._searched = max(self._value_start, len(self._buffer) - len(closing) + 1)
            return False
        self._end_call(at, at + len(closing), self._lead)
        return True

    def _behind(self) -> bool:
        """State: directly after a call; drop the closing text of the format."""
        closing = self._format.closing
        rest = self._buffer.lstrip()
        if closing and rest.startswith(closing):
            self._buffer = rest.removeprefix(closing)
        elif closing.startswith(rest) and closing:
            return False
        self._state = self._lead
        return True

    def _end_call(self, end: int, behind: int, then: Callable[[], bool]) -> None:
        """Emit the calls of a text that ends at `end`; a text that is not a call is content up to `behind`."""
        calls = self._read(self._buffer[self._value_start : end])
        if not calls:
            self._give(behind)
            self._state = self._text
            return
        for name, arguments, written_id in calls:
            made = written_id or self._format.id_prefix + self._random_hex(self._format.id_digits)
            self._calls.append(ToolCall(self._num_calls, made, name, arguments))
            self._num_calls += 1
        self._buffer = self._buffer[behind:]
        self._state = then

    def _read(self, value: str) -> list[Call]:
        """Return the calls of a text; none if it is not a call of an offered function, or a strict tool refuses it."""
        marked = self._buffer.lstrip().startswith(self._format.marker)
        try:
            calls = self._format.calls(value, self._tools)
            fit = all(self._strict[name].fits(json.loads(text)) for name, text, _ in calls if name in self._strict)
        except (ValueError, RecursionError):
            return []
        return calls if fit and (marked or all(name in self._tools for name, *_ in calls)) else []


_OUTSIDE = re.compile(r"[\s\w.,:+-]*")
_INSIDE = re.compile(r'[^"\\]*')
_SPACE = re.compile(r"\s*")


class _JsonEnd:
    """Incremental search for the end of a JSON object or array in a growing text, from `position` on."""

    def __init__(self, position: int) -> None:
        self.position = position
        """Index of the first character not scanned; the end of the value once it is complete."""
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
