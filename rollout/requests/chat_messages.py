"""Converts OpenAI messages to chat-template messages, for HTTP, `LLM` and `RolloutManager`.

Always true: text parts become one text, and a part that is no text is refused by name; an error names the message by its
place, `messages[i]`. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rollout.errors import InvalidRequestError

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]

SHOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that came over HTTP which a template may read."""


def plain_messages(messages: Sequence[Mapping[str, Any]], shown: Collection[str] | None = None) -> list[Message]:
    """Copies that a template can read: text parts joined, arguments of calls as objects, nothing that is None.

    Args:
        shown: keys that the template may read; None: all there are.

    Raises:
        InvalidRequestError: a message does not have the shape it must have.
    """
    if not messages:
        raise InvalidRequestError("messages: empty; a conversation has one message at least")
    return [_plain(message, f"messages[{index}]", shown) for index, message in enumerate(messages)]


def known_roles(messages: list[Message], template: str) -> list[Message]:
    """OpenAI's newer name for the system's role is unknown to most templates, which leave out what they do not know."""
    if "developer" in template:
        return messages
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def check_tools(tools: Tools | None) -> None:
    """Whether every tool is a function that has a name.

    Raises:
        InvalidRequestError: one is not.
    """
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"tools[{index}]={tool!r:.80}: must be an object with a function that has a name")


def _plain(message: Mapping[str, Any], where: str, keys: Collection[str] | None) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where}={message!r:.80}: must be an object with a role")
    shown = {key: message[key] for key in keys or message if message.get(key) is not None}
    if "content" in shown:
        shown["content"] = _text(shown["content"], f"{where}.content")
    if "tool_calls" in shown:
        calls = shown.pop("tool_calls")
        if not isinstance(calls, list):
            raise InvalidRequestError(f"{where}.tool_calls={calls!r:.80}: must be a list of calls")
        # An empty list is no calls: templates ask whether there are any by asking whether the key is there.
        if calls:
            shown["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return shown


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}={content!r:.80}: must be text or a list of text parts")
    for place, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f'{where}[{place}]={part!r:.80}: only {{"type": "text", "text": …}} can be shown to this model'
            )
    return "".join(part["text"] for part in content)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}={call!r:.80}: must be an object with a function that has a name")
    return {**call, "function": {**function, "arguments": plain_arguments(function.get("arguments"))}}


def plain_arguments(written: Any) -> Any:
    """The object that the JSON text stands for, which templates want; other texts as they are."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        read = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return read if isinstance(read, dict) else written
