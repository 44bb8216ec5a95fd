"""Reuses token ids of earlier replies, and joins them to the ids of the text that the template writes after them.

Ids are reused only if both digests sent with them match: that of the prompt text rendered before the reply (messages, tools
and template variables), and that of the reply's content and tool calls. The text after a reply is found by rendering the
conversation with a unique random mark in the reply's place.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

from rollout.errors import InvalidRequestError
from rollout.requests.prompt import Message, plain_arguments

Ask = Callable[[list[Message]], str]
"""Renders messages followed by a generation prompt."""

DIGEST_BYTES = 16

END_TOKENS = 32
"""Maximum number of end-of-turn tokens that a reply may already contain."""

_NO_DIGEST = "it came back without the digests that its reply had"
_OTHER_PROMPT = (
    "what stands before it is not what it answered (a message, the tools or a template variable has changed)"
)
_OTHER_REPLY = "its content or its calls are not those of the reply"


def text_digest(text: str) -> str:
    """Return the digest of a prompt's text."""
    return blake2b(_bytes(text), digest_size=DIGEST_BYTES).hexdigest()


class ReplyDigest:
    """Incremental digest of a reply's content and tool calls. Independent of call ids and JSON formatting."""

    def __init__(self) -> None:
        self._content = blake2b(digest_size=DIGEST_BYTES)
        self._calls: list[tuple[str, Any]] = []

    def add(self, content: str, calls: Sequence[Mapping[str, Any]] = ()) -> None:
        """Add content and tool calls; arguments as JSON text or as the parsed object."""
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
    """An earlier reply with token ids whose prompt digest matches."""

    index: int
    """Index of its message."""
    prompt_text: str
    prompt_token_ids: list[int]
    """Token ids of the prompt that it answered."""
    token_ids: list[int] | None
    """Generated token ids, including the one that ended the reply, if any; None if the content digest does not match."""


class EarlierReplies:
    """Earlier replies with token ids in one conversation.

    Args:
        messages: assistant messages may have `rollout`, an object with `prompt_token_ids` and `token_ids`.
        plain: the same messages in the format of chat templates.
        ask: renders messages followed by a generation prompt.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], plain: list[Message], ask: Ask, vocab_size: int) -> None:
        self._plain = plain
        self._ask = ask
        self._vocab_size = vocab_size
        self._texts: dict[int, str | None] = {}
        self._found: list[tuple[int, Mapping[str, Any]]] = [
            (index, message["rollout"])
            for index, message in enumerate(messages)
            if message.get("rollout") is not None and message.get("role") == "assistant"
        ]

    def agreeing(self) -> Iterator[EarlierReply]:
        """Yield the replies whose prompt digest matches, latest first.

        An edit invalidates all replies after it and none before it, so the latest match is found by bisection: a long
        conversation is rendered a few times, not once per reply. Raises `InvalidRequestError` for ids that cannot be.
        """
        latest = len(self._found) - 1
        if latest >= 0 and self._prompt_text(latest) is None:
            low, high = 0, latest
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if self._prompt_text(middle) is None else (middle + 1, high)
            latest = low - 1
        for place in range(latest, -1, -1):
            text = self._prompt_text(place)
            if text is not None:
                yield self._reply(place, text)

    def why_not(self, used: EarlierReply | None) -> str | None:
        """Return why the ids of the last reply are not used if the ids of `used` are (None: of no reply); None if they are
        used."""
        if not self._found:
            return None
        index, rollout = self._found[-1]
        if used is not None and used.index == index:
            if used.token_ids is not None:
                return None
            why = _OTHER_REPLY
        elif rollout.get("prompt_digest") is None or rollout.get("content_digest") is None:
            why = _NO_DIGEST
        else:
            why = _OTHER_PROMPT if self._prompt_text(len(self._found) - 1) is None else _OTHER_REPLY
        return f"messages[{index}].rollout: {why}: from there the text counts"

    def _prompt_text(self, place: int) -> str | None:
        """Return the rendered text before a reply if it matches the reply's prompt digest, else None. Cached."""
        if place not in self._texts:
            self._texts[place] = self._agreed_text(*self._found[place])
        return self._texts[place]

    def _agreed_text(self, index: int, rollout: Mapping[str, Any]) -> str | None:
        if not index or rollout.get("prompt_digest") is None:
            return None
        try:
            text = self._ask(self._plain[:index]) + (rollout.get("forced_prefix") or "")
        except InvalidRequestError:
            # The template rendered the reply's original prompt, so a conversation that it rejects is a different one.
            return None
        return text if text_digest(text) == rollout["prompt_digest"] else None

    def _reply(self, place: int, text: str) -> EarlierReply:
        index, rollout = self._found[place]
        where = f"messages[{index}].rollout"
        prompt = _token_ids(rollout, "prompt_token_ids", where, self._vocab_size)
        if not prompt:
            raise InvalidRequestError(
                f"{where}.prompt_token_ids: empty, and a reply had a prompt; send the object that the reply came with"
            )
        written = _token_ids(rollout, "token_ids", where, self._vocab_size)
        message, digest = self._plain[index], ReplyDigest()
        digest.add(message.get("content", ""), message.get("tool_calls", ()))
        agrees = digest.hexdigest() == rollout.get("content_digest")
        return EarlierReply(index, text, prompt, written if agrees else None)


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


class Write(Protocol):
    """A chat template with all arguments bound except the messages."""

    def __call__(self, conversation: list[Message], *, closed: bool = False) -> str:
        """Render a conversation. `closed`: end with the last message, without continuation or generation prompt."""


def text_behind_reply(
    messages: list[Message], index: int, write: Write, special_texts: Collection[str], *, closed: bool = False
) -> str:
    """Return the text that the template `write` renders after the content of `messages[index]`, from its end of turn on.

    A template may require a tool message after a call, or render different text after a call. So a reply with calls is
    rendered without them only if the whole conversation ends with the same text; otherwise its calls are kept, and the
    first special token (one of `special_texts`) after them ends the reply. Raises `InvalidRequestError` if that cannot be
    determined.
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
            f"messages[{index}].rollout: the text that the chat template writes after this reply cannot be told from it; "
            "leave `rollout` out of the messages to have them tokenised again"
        )
    return behind


def tokens_to_append(reply: Sequence[int], behind: list[int], end_token_ids: Collection[int]) -> tuple[int, list[int]]:
    """Join a reply and the ids of the template's text `behind` it, so that the end of turn occurs once.

    The reply has its end of turn unless its length was limited; the model's `end_token_ids` may differ from the template's.
    Returns (number of reply tokens before the end of turn, tokens to append to the reply)."""
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
