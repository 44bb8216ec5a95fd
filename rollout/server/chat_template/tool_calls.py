"""Parses tool calls from a reply, incrementally or whole.

Promises:
- how the text is cut makes no difference: pieces pushed in any cuts add up to the same content and the same calls;
- a text without a call comes out as it went in; text before, between and behind calls is content. Only the layout
  around a call goes: white space before it, the separators of its format, white space between it and the end;
- a call is given out when its JSON is complete, its arguments exactly as the model wrote them;
- what only looks like a call (broken JSON, no name, no arguments object, none that a strict tool takes) is content, to the
  last character;
- a call is scanned once, whatever the model writes and however it is cut.

The formats are data; one machine reads them all. Knows strings, no tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.server.chat_template.strict_tools import StrictTool, strict_tools
from rollout.server.chat_template.tool_formats import ToolFormat, format_of
from rollout.server.chat_template.tool_json import JsonEnd, read_calls


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call, complete.

    Attributes:
        index: place among the calls of the reply, from 0.
        id: what the message with its result refers to.
        name: the function.
        arguments: a JSON object, as the model wrote it.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """What one piece of a reply adds: content, or a call."""

    content: str = ""
    tool_call: ToolCall | None = None


RandomHex = Callable[[int], str]
"""Gives so many random hexadecimal digits."""


def random_hex(digits: int) -> str:
    """So many digits from the operating system."""
    return secrets.token_hex((digits + 1) // 2)[:digits]


def parser_for(
    template: str | None, tools: Sequence[Mapping[str, Any]] | None, random_hex: RandomHex = random_hex
) -> Callable[[], ToolCallParser] | None:
    """A maker of parsers, one for each sample of a reply; None where text stays text: no tools, or no known format.

    Raises:
        InvalidRequestError: the schema of a strict tool cannot be checked.
    """
    known = format_of(template)
    if known is None or not tools:
        return None
    names = frozenset(str(tool["function"]["name"]) for tool in tools)
    strict = strict_tools(tools)
    return lambda: ToolCallParser(known, names, random_hex, strict)


class ToolCallParser:
    """The machine, for one reply.

    A state is a method that takes from the front of the buffer what it can decide about; False if it needs more text.

    Args:
        tool_format: what to look for.
        tool_names: functions that there are. A call without a marker counts only if it is of one of these: else it is
            an answer that happens to be JSON.
        random_hex: source of the ids.
        strict: functions whose calls count only if their arguments fit.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tool_names: Collection[str],
        random_hex: RandomHex = random_hex,
        strict: Mapping[str, StrictTool] | None = None,
    ) -> None:
        self.num_calls = 0
        """Calls given out."""
        self._format = tool_format
        self._tool_names = tool_names
        self._random_hex = random_hex
        self._strict = strict or {}
        self._buffer = ""
        self._state = self._lead
        self._value = JsonEnd(0)
        self._value_start = 0
        self._deltas: list[ChatDelta] = []

    def push(self, text: str) -> list[ChatDelta]:
        """Take the next piece of the reply; what it settles."""
        self._buffer += text
        while self._state():
            pass
        return self._take()

    def finish(self) -> list[ChatDelta]:
        """Nothing follows: what was held back."""
        if self.num_calls and self._buffer.isspace() and self._state != self._text:
            self._buffer = ""
        self._give(len(self._buffer))
        return self._take()

    def _lead(self) -> bool:
        """Nothing but white space since the start, or since a call."""
        rest = self._buffer.lstrip()
        if self._format.marker.startswith(rest) and rest != self._format.marker:
            return False
        if self._format.bare and rest.startswith(self._format.bare) and not rest.startswith(self._format.marker):
            self._enter_call(len(self._buffer) - len(rest))
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        marker = self._format.marker
        at = self._buffer.find(marker)
        if at < 0:
            held = next(n for n in range(len(marker) - 1, -1, -1) if self._buffer.endswith(marker[:n]))
            self._give(len(self._buffer[: len(self._buffer) - held].rstrip()))
            return False
        before = len(self._buffer[:at].rstrip())
        self._give(before)
        self._enter_call(at - before + len(marker))
        return True

    def _enter_call(self, value_start: int) -> None:
        """The buffer begins with the call: white space, the marker if there is one, and from `value_start` JSON."""
        self._value_start = value_start
        self._value = JsonEnd(value_start)
        self._state = self._call

    def _call(self) -> bool:
        complete = self._value.find(self._buffer)
        if complete is None:
            return False
        end = self._value.position
        calls = self._read(self._buffer[self._value_start : end].lstrip()) if complete else None
        if calls is None:
            self._give(end)
            self._state = self._text
            return True
        for name, arguments in calls:
            call_id = self._format.id_prefix + self._random_hex(self._format.id_digits)
            self._deltas.append(ChatDelta(tool_call=ToolCall(self.num_calls, call_id, name, arguments)))
            self.num_calls += 1
        self._buffer = self._buffer[end:]
        self._state = self._behind
        return True

    def _behind(self) -> bool:
        """Directly behind a call: its closing is no content."""
        closing = self._format.closing
        rest = self._buffer.lstrip()
        if closing and rest.startswith(closing):
            self._buffer = rest.removeprefix(closing)
        elif closing.startswith(rest) and closing:
            return False
        self._state = self._lead
        return True

    def _read(self, value: str) -> list[tuple[str, str]] | None:
        """Name and arguments of each call in a JSON value; None if it is no call."""
        try:
            calls = read_calls(value)
            if not all(self._strict[name].fits(json.loads(text)) for name, text in calls if name in self._strict):
                return None
        except (ValueError, RecursionError):
            return None
        marked = self._buffer.lstrip().startswith(self._format.marker)
        return calls if marked or all(name in self._tool_names for name, _ in calls) else None

    def _give(self, length: int) -> None:
        """So much of the buffer is content."""
        if length:
            self._deltas.append(ChatDelta(content=self._buffer[:length]))
            self._buffer = self._buffer[length:]

    def _take(self) -> list[ChatDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas
