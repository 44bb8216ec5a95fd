"""Converts OpenAI messages to chat-template messages, for HTTP, `LLM` and `RolloutManager`.

Always true: text parts are joined into one text, and parts other than text and images are refused by name; an error
names the message by its index, `messages[i]`. Independent of any tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from rollout.errors import InvalidRequestError

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]

SHOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of an HTTP message that are passed to the template."""

IMAGES = ("image_url", "image")
"""Types of parts that are images: as in OpenAI's API, or as transformers' chat templates have them."""


class MessageImage(NamedTuple):
    """An image of a message."""

    where: str
    """Its place in the messages, which begins the message of an error."""
    source: Any
    """See `open_picture`."""


def plain_messages(
    messages: Sequence[Mapping[str, Any]],
    shown: Collection[str] | None = None,
    images: list[MessageImage] | None = None,
) -> list[Message]:
    """Copies of the messages for a template: text parts joined, call arguments parsed into objects, None values dropped.

    Args:
        shown: keys that the template may read; None: all keys.
        images: takes every image; a content with one stays a list of parts, as templates of vision models read it.
            None: they are refused.

    Raises:
        InvalidRequestError: a message is malformed.
    """
    if not messages:
        raise InvalidRequestError("messages: empty; give at least one message")
    return [_plain(message, f"messages[{index}]", shown, images) for index, message in enumerate(messages)]


def known_roles(messages: list[Message], template: str) -> list[Message]:
    """Replace the role "developer" by "system" if the template does not name it: most templates drop unknown roles."""
    if "developer" in template:
        return messages
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def check_tools(tools: Tools | None) -> None:
    """Check that every tool is a function with a name.

    Raises:
        InvalidRequestError: a tool is not.
    """
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"tools[{index}]={tool!r:.80}: must be an object with a function that has a name")


def _plain(
    message: Mapping[str, Any], where: str, keys: Collection[str] | None, images: list[MessageImage] | None
) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where}={message!r:.80}: must be an object with a role")
    shown = {key: message[key] for key in keys or message if message.get(key) is not None}
    if "content" in shown:
        shown["content"] = _content(shown["content"], f"{where}.content", images)
    if "tool_calls" in shown:
        calls = shown.pop("tool_calls")
        if not isinstance(calls, list):
            raise InvalidRequestError(f"{where}.tool_calls={calls!r:.80}: must be a list of calls")
        # Templates test for the key, so an empty list is left out.
        if calls:
            shown["tool_calls"] = [_call(call, f"{where}.tool_calls[{place}]") for place, call in enumerate(calls)]
    return shown


def image_of(part: Any, where: str) -> MessageImage | None:
    """The image that a part of a content names, in OpenAI's form or transformers'; None: it is another part.

    {"type": "image_url", "image_url": {"url": …}}, {"type": "image", "image": …} (or "url", "path").

    Raises:
        InvalidRequestError: it names none, or something is said of it that is not read; it is a video.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("video_url", "video"):
        raise InvalidRequestError(
            f"{where}: videos in messages are not decoded; call the model's processor with text and videos, and send what "
            "it returns as the prompt"
        )
    if kind not in IMAGES:
        return None
    said = {key: value for key, value in part.items() if value is not None and key != "type"}
    if isinstance(said.get("image_url"), Mapping):
        said |= {key: value for key, value in said.pop("image_url").items() if value not in (None, "auto")}
    sources = [said.pop(key) for key in (*IMAGES, "url", "path") if key in said]
    if said or len(sources) != 1:
        wrong = (
            f"{', '.join(map(repr, said))} is not read here" if said else f"names {len(sources)} images, must name one"
        )
        raise InvalidRequestError(
            f'{where}={part!r:.80}: {wrong}; {{"type": "image_url", "image_url": {{"url": …}}}} or '
            '{"type": "image", "image": …}'
        )
    return MessageImage(where, sources[0])


def _content(content: Any, where: str, images: list[MessageImage] | None) -> str | list[dict[str, Any]]:
    if images is None or not isinstance(content, list):
        return _text(content, where)
    found = [image_of(part, f"{where}[{place}]") for place, part in enumerate(content)]
    if all(each is None for each in found):
        return _text(content, where, IMAGES)
    parts: list[dict[str, Any]] = []
    for place, (part, each) in enumerate(zip(content, found, strict=True)):
        if each is None:
            parts.append({"type": "text", "text": _text([part], where, IMAGES, place)})
        else:
            images.append(each)
            parts.append({"type": "image"})
    return parts


def _text(content: Any, where: str, others: Sequence[str] = (), first: int = 0) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}={content!r:.80}: must be text or a list of text parts")
    for place, part in enumerate(content, first):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            beside = f", and parts of type {', '.join(others)}," if others else ""
            raise InvalidRequestError(
                f'{where}[{place}]={part!r:.80}: only {{"type": "text", "text": …}}{beside} can be shown to this model'
            )
    return "".join(part["text"] for part in content)


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"{where}={call!r:.80}: must be an object with a function that has a name")
    return {**call, "function": {**function, "arguments": plain_arguments(function.get("arguments"))}}


def plain_arguments(written: Any) -> Any:
    """Arguments of a call parsed from JSON into an object, as templates expect; other texts are returned unchanged."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        read = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return read if isinstance(read, dict) else written
