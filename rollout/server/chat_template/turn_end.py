"""Token ids that a chat template appends after a reply, joined to the model's own ids.

The reply's content is replaced by a unique random mark. The text that the template renders after the mark follows the
reply: the end of its turn, later messages, the generation prompt. A template is a function from messages to text.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Protocol

from rollout.errors import InvalidRequestError
from rollout.requests.prompt import Message

END_TOKENS = 32
"""Maximum number of end-of-turn tokens that a reply may already contain."""


class Write(Protocol):
    """A chat template with all arguments bound except the messages."""

    def __call__(self, conversation: list[Message], *, closed: bool = False) -> str:
        """Render a conversation. `closed`: end with the last message, without continuation or generation prompt.

        Raises:
            InvalidRequestError: the template refuses the conversation.
        """


def text_behind_reply(
    messages: list[Message], index: int, write: Write, special_texts: Collection[str], *, closed: bool = False
) -> str:
    """Return the text that the template renders after the content of `messages[index]`, from its end of turn on.

    A template may require a tool message after a call, or render different text after a call. So a reply with calls is
    rendered without them only if the whole conversation ends with the same text; otherwise its calls are kept, and the
    first special token after them ends the reply.

    Args:
        messages: messages in the format of chat templates.
        index: index of the reply.
        write: the template.
        special_texts: texts of the special tokens.
        closed: see `Write`.

    Raises:
        InvalidRequestError: the template refuses the conversation, or the end of the reply cannot be determined.
    """
    reply = messages[index]
    if "tool_calls" not in reply:
        behind = _behind_content(messages, index, write, closed)
    else:
        whole = write(messages, closed=closed)
        try:
            behind = _behind_content(messages, index, write, closed)
        except InvalidRequestError:
            behind = None
        if behind is None or not whole.endswith(behind):
            behind = _behind_calls(messages, index, write, special_texts, closed)
    if behind is None:
        raise InvalidRequestError(
            f"messages[{index}].rollout: the chat template does not let one tell what follows this reply; leave "
            "`rollout` out of the messages to have them tokenised anew"
        )
    return behind


def tokens_to_append(reply: Sequence[int], behind: list[int], end_token_ids: Collection[int]) -> tuple[int, list[int]]:
    """Join a reply and the template's text after it, so that the end of turn occurs once.

    Args:
        reply: generated ids, with the end of turn, or without it if the length was limited.
        behind: ids of the template's text, which begins with the end of turn.
        end_token_ids: tokens that end a reply; the model's may differ from the template's.

    Returns:
        (number of reply tokens before the end of turn, tokens to append to the reply).
    """
    longest = min(END_TOKENS, len(reply), len(behind))
    shared = next((n for n in range(longest, 0, -1) if list(reply[-n:]) == behind[:n]), 0)
    if shared:
        return len(reply) - shared, behind[shared:]
    if reply and reply[-1] in end_token_ids:
        return len(reply) - 1, behind[1:] if behind and behind[0] in end_token_ids else behind
    return len(reply), behind


def _behind_content(messages: list[Message], index: int, write: Write, closed: bool) -> str | None:
    mark = _mark()
    reply = {"role": messages[index]["role"], "content": mark}
    return _behind(mark, write([*messages[:index], reply, *messages[index + 1 :]], closed=closed))


def _behind_calls(
    messages: list[Message], index: int, write: Write, special_texts: Collection[str], closed: bool
) -> str | None:
    """Return the text after a reply with calls, with the mark in the arguments of the last call.

    The text that closes the call belongs to the reply. The first special token after the mark ends the reply, provided
    it comes before the content of the next message, which gets a mark of its own for this check.
    """
    mark, next_mark = _mark(), _mark()
    reply = messages[index]
    *calls, last = reply["tool_calls"]
    last = {**last, "function": {**last["function"], "arguments": {"value": mark}}}
    marked = [*messages[:index], {**reply, "tool_calls": [*calls, last]}, *messages[index + 1 :]]
    behind = _behind(mark, write(marked, closed=closed))
    if behind is None:
        return None
    between = behind
    if index + 1 < len(messages):
        marked[index + 1] = {**messages[index + 1], "content": next_mark}
        between, found, _ = (_behind(mark, write(marked, closed=closed)) or "").partition(next_mark)
        between = between if found else ""
    ends = [at for at in (between.find(text) for text in special_texts) if at >= 0]
    if not ends or not behind.startswith(between[: min(ends)]):
        return None
    return behind[min(ends) :]


def _mark() -> str:
    """Return an unguessable word that occurs in no message and that templates neither trim nor escape."""
    return f"reply{secrets.token_hex(16)}"


def _behind(mark: str, text: str) -> str | None:
    """Return the text after the mark, or None unless the mark occurs exactly once."""
    parts = text.split(mark)
    return parts[1] if len(parts) == 2 else None
