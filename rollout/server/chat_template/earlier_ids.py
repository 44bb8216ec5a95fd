"""Reuses token ids of earlier replies as far as their digests match the conversation.

Token ids are reused only if both digests sent with them match: the digest of the prompt text rendered before the reply
(which covers messages, tools and template variables), and the digest of the reply's content and tool calls. A missing
digest does not match.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from rollout.errors import InvalidRequestError
from rollout.requests.prompt import Message, plain_arguments

Ask = Callable[[list[Message]], str]
"""Renders messages followed by a generation prompt."""

DIGEST_BYTES = 16

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
    """An earlier reply with token ids whose prompt digest matches.

    Attributes:
        index: index of its message.
        prompt_text: text of the prompt.
        prompt_token_ids: token ids of the prompt that it answered.
        token_ids: generated token ids, including the one that ended the reply, if any; None if the content digest does
            not match.
    """

    index: int
    prompt_text: str
    prompt_token_ids: list[int]
    token_ids: list[int] | None


class EarlierReplies:
    """Earlier replies with token ids in one conversation.

    Args:
        messages: assistant messages may have `rollout`, an object with `prompt_token_ids` and `token_ids`.
        plain: the same messages in the format of chat templates.
        ask: renders messages followed by a generation prompt.
        vocab_size: exclusive upper bound of token ids.

    Raises:
        InvalidRequestError: a `rollout` is not an object.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]], plain: list[Message], ask: Ask, vocab_size: int) -> None:
        self._plain = plain
        self._ask = ask
        self._vocab_size = vocab_size
        self._texts: dict[int, str | None] = {}
        self._found = [
            (index, _object(message["rollout"], index))
            for index, message in enumerate(messages)
            if message.get("rollout") is not None and message.get("role") == "assistant"
        ]

    def agreeing(self) -> Iterator[EarlierReply]:
        """Yield the replies whose prompt digest matches, latest first.

        An edit invalidates all replies after it and none before it, so the latest match is found by bisection: a long
        conversation is rendered a few times, not once per reply.

        Raises:
            InvalidRequestError: the ids of a reply are not valid token ids.
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
        """Return why the token ids of the last reply are not used, or None if they are.

        Args:
            used: the reply whose ids are used; None: no reply's.
        """
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
            self._texts[place] = self._agreed_text(place)
        return self._texts[place]

    def _agreed_text(self, place: int) -> str | None:
        index, rollout = self._found[place]
        if not index or rollout.get("prompt_digest") is None:
            return None
        try:
            text = self._ask(self._plain[:index]) + (rollout.get("forced_prefix") or "")
        except InvalidRequestError:
            # The template rendered the reply's original prompt, so a conversation that it refuses is a different one.
            return None
        return text if text_digest(text) == rollout["prompt_digest"] else None

    def _reply(self, place: int, text: str) -> EarlierReply:
        index, rollout = self._found[place]
        where = f"messages[{index}].rollout"
        prompt = _token_ids(rollout, "prompt_token_ids", where, self._vocab_size)
        if not prompt:
            raise InvalidRequestError(f"{where}.prompt_token_ids: empty; a reply had a prompt")
        written = _token_ids(rollout, "token_ids", where, self._vocab_size)
        message, digest = self._plain[index], ReplyDigest()
        digest.add(message.get("content", ""), message.get("tool_calls", ()))
        agrees = digest.hexdigest() == rollout.get("content_digest")
        return EarlierReply(index, text, prompt, written if agrees else None)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _object(rollout: Any, index: int) -> Mapping[str, Any]:
    if not isinstance(rollout, Mapping):
        raise InvalidRequestError(
            f"messages[{index}].rollout={rollout!r:.80}: must be the object that the reply came with"
        )
    return rollout


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
