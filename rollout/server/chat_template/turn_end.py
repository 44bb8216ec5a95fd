"""Token ids that a chat template appends after a reply, joined to the model's own ids.

The reply's content is replaced by a mark that stands nowhere else: what the template writes behind the mark is what
follows the reply: the end of its turn, later messages, the generation prompt. Knows a template as a function from
messages to text, and tokens as integers.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from typing import Protocol

from rollout.errors import InvalidRequestError
from rollout.requests.chat_messages import Message

END_TOKENS = 32
"""Tokens of an end of turn that a reply may already have, at most."""


class Write(Protocol):
    """A chat template with everything but the messages given."""

    def __call__(self, conversation: list[Message], *, closed: bool = False) -> str:
        """The text. `closed`: it ends with the last message, which is neither continued nor answered.

        Raises:
            InvalidRequestError: the template refuses.
        """


def text_behind_reply(
    messages: list[Message], index: int, write: Write, special_texts: Collection[str], *, closed: bool = False
) -> str:
    """What the template writes behind the content of `messages[index]`, from the end of its turn on.

    A template may ask that a tool's message follows a call, or write something else behind a call. So a reply with
    calls is written without them only if the whole conversation ends with the same text; else its calls stay, and the
    first special token behind them ends it.

    Args:
        messages: as templates read them.
        index: place of the reply.
        write: the template.
        special_texts: special tokens, as text.
        closed: as `Write` has it.

    Raises:
        InvalidRequestError: the template refuses the conversation, or where the reply ends cannot be told.
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
    """Joins a reply and what the template writes behind it, so that the turn ends once.

    Args:
        reply: ids that the model wrote; with the end of its turn, or without, where its length was limited.
        behind: ids of the template's text, which begins with the end of the turn.
        end_token_ids: tokens that end a reply. A model may end it with another one than the template writes.

    Returns:
        How many tokens of the reply come before the end of its turn, and the tokens to put behind the reply.
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
    """The same with the mark in the arguments of the last call.

    What closes the call is the reply's own: the first special token behind the mark ends the reply, if it stands
    before the content of the next message, which for this gets a mark too.
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
    """A word that is in no message: nobody can guess it. Templates neither trim nor escape it."""
    return f"reply{secrets.token_hex(16)}"


def _behind(mark: str, text: str) -> str | None:
    """The text behind the mark; None if it is not there exactly once."""
    parts = text.split(mark)
    return parts[1] if len(parts) == 2 else None
