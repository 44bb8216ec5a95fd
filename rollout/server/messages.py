"""Messages as OpenAI's API has them into messages as chat templates read them, and the token ids of an earlier reply.

Always true: what goes to a template is made of the keys in `SHOWN` and nothing else; an error names the message by its
place, `messages[i]`. Knows no template and no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.errors import InvalidRequestError

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any]]

SHOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a message that a template may read."""


@dataclass(frozen=True, slots=True)
class EarlierReply:
    """A reply whose token ids came back with the conversation.

    Attributes:
        index: place of its message.
        prompt_token_ids: the prompt that it answered.
        token_ids: what the model wrote, with the token that ended it where there was one.
    """

    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Copies that a template can read: text parts joined, arguments of calls as objects, nothing that is None.

    Raises:
        InvalidRequestError: a message does not have the shape it must have.
    """
    if not messages:
        raise InvalidRequestError("messages: empty; a conversation has one message at least")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def earlier_reply(messages: Sequence[Mapping[str, Any]], vocab_size: int) -> EarlierReply | None:
    """The last reply that came back with its token ids; None if none did.

    Args:
        messages: of which an assistant's may have `rollout`, an object with `prompt_token_ids` and `token_ids`.
        vocab_size: every id is below it.

    Raises:
        InvalidRequestError: the ids are no token ids.
    """
    for index in range(len(messages) - 1, -1, -1):
        rollout = messages[index].get("rollout")
        if rollout is not None and messages[index].get("role") == "assistant":
            where = f"messages[{index}].rollout"
            if not isinstance(rollout, Mapping):
                raise InvalidRequestError(f"{where}={rollout!r:.80}: must be the object that the reply came with")
            prompt = _token_ids(rollout, "prompt_token_ids", where, vocab_size)
            if not prompt:
                raise InvalidRequestError(f"{where}.prompt_token_ids: empty; a reply had a prompt")
            return EarlierReply(index, prompt, _token_ids(rollout, "token_ids", where, vocab_size))
    return None


def check_tools(tools: Tools | None) -> None:
    """Whether every tool is a function that has a name.

    Raises:
        InvalidRequestError: one is not.
    """
    for index, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"tools[{index}]={tool!r:.80}: must be an object with a function that has a name")


def _token_ids(rollout: Mapping[str, Any], name: str, where: str, vocab_size: int) -> list[int]:
    ids = rollout.get(name)
    if not isinstance(ids, list):
        raise InvalidRequestError(f"{where}.{name}={ids!r:.80}: must be the list of token ids that the reply came with")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{where}.{name}[{position}]={token!r:.80}: must be a token id, an integer in [0, {vocab_size})"
            )
    return list(ids)


def _plain(message: Mapping[str, Any], where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(f"{where}={message!r:.80}: must be an object with a role")
    shown = {key: message[key] for key in SHOWN if message.get(key) is not None}
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
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(written: Any) -> Any:
    """The object that the JSON text stands for, which templates want; other texts as they are."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        read = json.loads(written)
    except (ValueError, RecursionError):
        return written
    return read if isinstance(read, dict) else written
