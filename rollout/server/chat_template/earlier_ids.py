"""Reuse of the token ids of earlier replies, which are joined to the ids of the text that the template writes after them.

A client sends two digests with a reply's ids, and the ids are reused only if both match. One is a digest of the prompt text
before the reply (messages, tools and template variables). The other is a digest of the reply's content and tool calls. To
find the text after a reply, the conversation is rendered with a unique random mark in the reply's place.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rollout.errors import InvalidRequestError
from rollout.requests.prompt import Message, plain_arguments

Write = Callable[[list[Message]], str]
"""A function that renders messages with the chat template, whose other arguments are already bound."""

DIGEST_BYTES = 16

MAX_TRIED = 16
"""The maximum number of earlier replies to try, latest first. It is bounded because each try renders the conversation."""

END_TOKENS = 32
"""The maximum number of tokens at a reply's end that are recognised as its end of turn, and so not appended again."""

_NO_DIGEST = "it came back without the digests that its reply had"
_OTHER_PROMPT = (
    "what stands before it is not what it answered (a message, the tools or a template variable has changed)"
)
_OTHER_REPLY = "its content or its calls are not those of the reply"


def text_digest(text: str) -> str:
    return blake2b(_bytes(text), digest_size=DIGEST_BYTES).hexdigest()


class ReplyDigest:
    """An incremental digest of a reply's content and tool calls, independent of call ids and JSON formatting."""

    def __init__(self) -> None:
        self._content = blake2b(digest_size=DIGEST_BYTES)
        self._calls: list[tuple[str, Any]] = []

    def add(self, content: str, calls: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add content and tool calls. The arguments of a call may be JSON text or the parsed object."""
        self._content.update(_bytes(content))
        for call in calls:
            function = call["function"]
            self._calls.append((function["name"], plain_arguments(function.get("arguments"))))

    def hexdigest(self) -> str:
        """Return the digest of everything added so far."""
        whole = self._content.copy()
        if self._calls:
            whole.update(b"\0" + json.dumps(self._calls, sort_keys=True).encode())
        return whole.hexdigest()


@dataclass(frozen=True, slots=True)
class EarlierReply:
    """A reply in the conversation whose token ids are reused."""

    index: int
    """The index of the reply's message in the conversation."""
    prompt_token_ids: list[int]
    """The token ids of the prompt that the reply answered."""
    token_ids: list[int]
    """The generated token ids of the reply, including the token that ended it, if any."""


def latest_reply(
    messages: Sequence[Mapping[str, Any]], plain: list[Message], ask: Write, vocab_size: int
) -> tuple[EarlierReply | None, str | None]:
    """Return (latest reply whose digests match, reason why the last reply's ids are not used). Either may be None.

    Args:
        messages: the conversation. An assistant message may have `rollout`, an object with token ids and digests.
        plain: the same messages in the format that chat templates take.
        ask: a function that renders messages followed by a generation prompt.
        vocab_size: exclusive upper bound of token ids.

    Raises:
        InvalidRequestError: the ids cannot be token ids of a prompt and its reply.
    """
    why = None
    with_ids = [
        index
        for index, message in enumerate(messages)
        if index and message.get("rollout") is not None and message["role"] == "assistant"
    ]
    for index in with_ids[: -1 - MAX_TRIED : -1]:
        rollout, where = messages[index]["rollout"], f"messages[{index}].rollout"
        changed = _what_changed(plain, index, rollout, ask)
        if changed is not None:
            why = why or f"{where}: {changed}: from there the text counts"
            continue
        prompt, written = (_token_ids(rollout, name, where, vocab_size) for name in ("prompt_token_ids", "token_ids"))
        if not prompt:
            raise InvalidRequestError(
                f"{where}.prompt_token_ids: empty, and a reply had a prompt; send the object that the reply came with"
            )
        return EarlierReply(index, prompt, written), why
    return None, why


def _what_changed(plain: list[Message], index: int, rollout: Mapping[str, Any], ask: Write) -> str | None:
    if rollout.get("prompt_digest") is None or rollout.get("content_digest") is None:
        return _NO_DIGEST
    try:
        prompt = text_digest(ask(plain[:index]))
    except InvalidRequestError:
        # Treat a conversation that the template rejects as changed, because the original prompt was not rejected.
        return _OTHER_PROMPT
    if prompt != rollout["prompt_digest"]:
        return _OTHER_PROMPT
    message, digest = plain[index], ReplyDigest()
    digest.add(message.get("content", ""), message.get("tool_calls", ()))
    return None if digest.hexdigest() == rollout["content_digest"] else _OTHER_REPLY


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _token_ids(rollout: Mapping[str, Any], name: str, where: str, vocab_size: int) -> list[int]:
    ids: list[int] = rollout[name]
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"{where}.{name}[{position}]={token}: must be a token id in [0, {vocab_size}); leave `rollout` out to have "
                "the text tokenised"
            )
    return ids


# --- the text after a reply -------------------------------------------------------------------------------------------


def text_behind_reply(messages: list[Message], index: int, write: Write, special_texts: Collection[str]) -> str | None:
    """Return the text that the template `write` renders after the reply `messages[index]`, from the reply's end of turn on.

    A unique mark replaces the reply's content, or the arguments of its last tool call. The call itself stays, because
    templates may treat the messages after a call differently. The text that closes a call belongs to the reply, so the
    reply ends at the first special token (one of `special_texts`) after the mark. Return None if the text is not found.
    """
    mark, reply = _mark(), messages[index]
    if "tool_calls" not in reply:
        return _behind(
            mark, write([*messages[:index], {"role": reply["role"], "content": mark}, *messages[index + 1 :]])
        )
    *calls, last = reply["tool_calls"]
    last = {**last, "function": {**last["function"], "arguments": {"value": mark}}}
    marked = [*messages[:index], {**reply, "tool_calls": [*calls, last]}, *messages[index + 1 :]]
    between = behind = _behind(mark, write(marked))
    if behind is not None and index + 1 < len(messages):
        # Mark the start of the next message's content. Only a special token before this mark ends the reply: the
        # content may contain special tokens of its own.
        next_mark = _mark()
        marked[index + 1] = {**messages[index + 1], "content": next_mark}
        between, found, _ = (_behind(mark, write(marked)) or "").partition(next_mark)
        between = between if found else None
    if behind is None or between is None:
        return None
    ends = [at for at in (between.find(text) for text in special_texts) if at >= 0]
    return behind[min(ends) :] if ends and behind.startswith(between[: min(ends)]) else None


def tokens_to_append(reply: Sequence[int], behind: list[int], end_token_ids: Collection[int]) -> list[int]:
    """Return the part of `behind` to append to the ids of a reply, without end-of-turn tokens that the reply already has.

    A reply has its end-of-turn token unless it reached its maximum length. The model may use another token of
    `end_token_ids` than the template.

    Args:
        reply: token ids of the reply.
        behind: token ids of the text that the template writes after the reply.
    """
    longest = min(END_TOKENS, len(reply), len(behind))
    shared = next((n for n in range(longest, 0, -1) if list(reply[-n:]) == behind[:n]), 0)
    ended = bool(reply) and reply[-1] in end_token_ids and bool(behind) and behind[0] in end_token_ids
    return behind[shared or int(ended) :]


def _mark() -> str:
    """Return an unguessable word that occurs in no message and that templates neither trim nor escape."""
    return f"reply{secrets.token_hex(16)}"


def _behind(mark: str, text: str) -> str | None:
    """Return the part of `text` after `mark`; None if `mark` does not occur exactly once."""
    parts = text.split(mark)
    return parts[1] if len(parts) == 2 else None
