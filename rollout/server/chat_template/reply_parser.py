"""A parser that splits a reply into reasoning, content and tool calls, incrementally or whole.

- The result does not depend on how the text is cut into pieces.
- Text that only resembles a call (invalid JSON, no name) is returned completely as content.
- Every character is searched once.

The tool-call formats are data (`tool_formats`), and one state machine parses them all.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout.server.chat_template.earlier_ids import ReplyDigest
from rollout.server.chat_template.tool_formats import Call, Schemas, ToolFormat, format_of

OPEN, CLOSE = "<think>", "</think>"


def marks_reasoning(template: str) -> bool:
    return CLOSE in template


def opens_reasoning(prompt: str) -> bool:
    return prompt.rstrip().endswith(OPEN)


def _held_back(text: str, marker: str) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of `marker`."""
    return next(n for n in range(len(marker) - 1, -1, -1) if text.endswith(marker[:n]))


class ReplyReader:
    """A reader that splits the text of one reply, whole or piece by piece.

    Args:
        reasoning: parser that splits off the reasoning. If None, reasoning stays in the content.
        calls: parser that splits off the tool calls. If None, calls stay in the content.

    Attributes:
        called: whether the text so far contains a tool call.
    """

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls
        self._digest = ReplyDigest()
        self.called = False

    def push(self, text: str, *, ended: bool) -> tuple[str, str, list[dict[str, Any]]]:
        """Add the next piece of the reply. Return the reasoning, content and calls that this piece made final.

        Args:
            ended: whether this is the last piece.

        Returns:
            (reasoning, content, calls). The calls have the format that OpenAI's API uses in streams.
        """
        thought, found = "", list[dict[str, Any]]()
        if self._reasoning is not None:
            thought, text = self._reasoning.push(text, ended=ended)
        if self._calls is not None:
            text, found = self._calls.push(text, ended=ended)
        self.called = self.called or bool(found)
        self._digest.add(text, found)
        return thought, text, found

    def digest(self) -> str:
        return self._digest.hexdigest()


class ReasoningParser:
    """A parser that splits one reply into reasoning and content. White space around the tags is dropped.

    Args:
        opened: whether the prompt ends with the opening tag. If not, only a reply that begins with the tag has reasoning.
    """

    def __init__(self, opened: bool) -> None:
        self._buffer = ""
        self._state = "reasoning" if opened else "start"
        self._fresh = True

    def push(self, text: str, *, ended: bool = False) -> tuple[str, str]:
        """Add the next piece of the reply. Return the (reasoning, content) that this piece made final."""
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
        if ended and self._state == "reasoning":
            rest, self._buffer = self._buffer.rstrip(), ""
            return reasoning + rest, ""
        content = ""
        if self._state == "content" or (ended and self._state == "start"):
            content, self._buffer = self._buffer, ""
        return reasoning, content


# --- tool calls -------------------------------------------------------------------------------------------------------


def parser_for(template: str | None, tools: Sequence[Mapping[str, Any]] | None) -> Callable[[], ToolCallParser] | None:
    """Return a function that builds a tool-call parser for one reply, or None without tools or for an unknown format."""
    known = format_of(template)
    if known is None or not tools:
        return None
    schemas = {str(tool["function"]["name"]): _properties(tool["function"]) for tool in tools}
    return lambda: ToolCallParser(known, schemas)


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    found = (function.get("parameters") or {}).get("properties")
    return found if isinstance(found, Mapping) else {}


class ToolCallParser:
    """An incremental parser for the tool calls in one reply. Each state is a method, which returns False to get more text.

    Text before, between and after calls is content. Only the formatting of calls is dropped: their markers, the white space
    before a call, and the white space between the last call and the end of the reply.

    Args:
        tool_format: the chat template's tool-call format.
        tools: parameter schemas of the offered functions. JSON without a marker is a call only if it names one of these
            functions. Otherwise it is content.
    """

    def __init__(self, tool_format: ToolFormat, tools: Schemas) -> None:
        self._format = tool_format
        self._tools = tools
        self._buffer = ""
        self._state = self._lead
        self._block_start = 0
        self._searched = 0
        self._num_calls = 0
        self._content = ""
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str, *, ended: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """Add the next piece of the reply. Return the content and the calls that this piece made final."""
        self._buffer += text
        while self._state():
            pass
        if ended:
            if self._state == self._block and not self._format.closed:
                self._end_block(len(self._buffer), len(self._buffer))
            if self._num_calls and self._buffer.isspace() and self._state != self._text:
                self._buffer = ""
            self._give(len(self._buffer))
        taken = self._content, self._calls
        self._content, self._calls = "", []
        return taken

    def _give(self, length: int) -> None:
        self._content += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _lead(self) -> bool:
        """Handle the state in which only white space has followed the start of the reply or the previous call."""
        marker, bare = self._format.marker, self._format.bare
        rest = self._buffer.lstrip()
        if marker.startswith(rest) and rest != marker:
            return False
        if bare and rest.startswith(bare) and not rest.startswith(marker):
            self._enter_block(len(self._buffer) - len(rest))
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
        self._enter_block(at - before + len(marker))
        return True

    def _enter_block(self, start: int) -> None:
        """Enter a block of calls. The buffer begins with white space and an optional marker; the calls begin at `start`."""
        self._block_start = self._searched = start
        self._state = self._block

    def _block(self) -> bool:
        """Handle the state inside a block of calls, up to its closing text, or to the reply's end if the format has none."""
        closing = self._format.closing
        at = self._buffer.find(closing, self._searched) if closing else -1
        if at < 0:
            self._searched = max(self._block_start, len(self._buffer) - len(closing) + 1)
            return False
        self._end_block(at, at + len(closing))
        return True

    def _end_block(self, end: int, behind: int) -> None:
        """Emit the calls of a block, or its text as content if it has no calls.

        Args:
            end: index in the buffer at which the calls end.
            behind: index in the buffer of the first character after the closing text.
        """
        calls = self._read(self._buffer[self._block_start : end])
        if not calls:
            self._give(behind)
            self._state = self._text
            return
        for name, arguments in calls:
            made, function = f"call_{secrets.token_hex(12)}", {"name": name, "arguments": arguments}
            self._calls.append({"index": self._num_calls, "id": made, "type": "function", "function": function})
            self._num_calls += 1
        self._buffer = self._buffer[behind:]
        self._state = self._lead

    def _read(self, text: str) -> list[Call]:
        """Return the calls in the text of a block.

        The list is empty if the block contains anything else, or if it has no marker and calls an unknown function."""
        try:
            calls = self._format.calls(text, self._tools)
        except (ValueError, RecursionError):
            return []
        marked = self._buffer.lstrip().startswith(self._format.marker)
        return calls if marked or all(name in self._tools for name, _ in calls) else []
