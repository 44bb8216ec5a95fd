"""Tokenises prompts with work bounded by the maximum prompt length. Thread-safe."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

from rollout.errors import InvalidRequestError
from rollout.server.errors import ClientGoneError

PIECE = 65536
"""Characters per piece of a long text."""
CERTAINLY = 2
"""Factor over the permitted tokens at which the pieces of a text are too many: joining them cannot halve their number."""


class Stop(threading.Event):
    """Cancellation flag for work in a thread; set when the client has disconnected."""

    def check(self) -> None:
        """Raise `ClientGoneError` if the flag is set."""
        if self.is_set():
            raise ClientGoneError


class PromptTokenizer:
    """Tokenises prompts with length checks.

    Args:
        tokenizer: used only here: a trainer may change padding and truncation of its own.
        room: returns the current maximum number of tokens of a prompt.
        special: whether the tokenizer adds its special tokens around a text.
    """

    def __init__(self, tokenizer: Any, room: Callable[[], int], *, special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._room = room
        self._special = special

    def ids(self, text: str, field: str, stop: Stop | None = None) -> list[int]:
        """Return the token ids of a text; a long one is tokenised in pieces until they clearly exceed the limit.

        Args:
            field: request field named in errors.
            stop: cancels the work when set.

        Raises:
            InvalidRequestError: the text is too long, or not valid Unicode.
            ClientGoneError: `stop` was set.
        """
        self.check(text, field)
        if len(text) > PIECE:
            self._check_pieces(text, field, stop or Stop())
        return self._encode(text, field)

    def check(self, text: str, field: str) -> None:
        """Raise `InvalidRequestError` if the text has more characters than the longest tokens can cover."""
        most = self._room() * self._longest
        if len(text) > most:
            raise InvalidRequestError(
                f"{field}: {len(text)} characters, and max_sequence_length={self._room()} tokens have at most {most}; "
                "shorten it or raise max_sequence_length"
            )

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token name: an upper bound of the characters that a token stands for."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _check_pieces(self, text: str, field: str, stop: Stop) -> None:
        room, found = self._room(), 0
        for start in range(0, len(text), PIECE):
            stop.check()
            found += len(self._encode(text[start : start + PIECE], field))
            if found > CERTAINLY * room:
                raise InvalidRequestError(
                    f"{field}: more than {found} tokens, and max_sequence_length={room} has no room for them; shorten it "
                    "or raise max_sequence_length"
                )
        stop.check()

    def _encode(self, text: str, field: str) -> list[int]:
        try:
            read = self._tokenizer(text, add_special_tokens=self._special, verbose=False)
        except (TypeError, UnicodeError) as exc:
            raise InvalidRequestError(
                f"{field}: the text contains half a surrogate pair and cannot be tokenised; send valid UTF-8"
            ) from exc
        return [int(token) for token in read["input_ids"]]
