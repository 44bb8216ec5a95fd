"""Tokenises prompts with work bounded by what fits.

Always true: a text of more characters than the longest tokens could cover is refused unread; a long one is first read in
pieces, and refused as soon as these have clearly more tokens than there is room for. Any thread may ask.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from rollout.errors import InvalidRequestError
from rollout.server.errors import ClientGoneError

PIECE = 65536
"""Characters of a long text that are read together."""

CERTAINLY = 2
"""A text whose pieces have so many times the tokens that there is room for does not fit, however the pieces would join."""


class Stop(threading.Event):
    """Set when nobody waits for the work any more."""

    def check(self) -> None:
        """Raises: ClientGoneError: it is set."""
        if self.is_set():
            raise ClientGoneError


class PromptTokenizer:
    """One tokenizer, nobody else's: a trainer may set padding and truncation of its own while a thread is about to read.

    Args:
        tokenizer: a Hugging Face tokenizer.
        room: most tokens of a prompt, now.
        special: whether the tokenizer puts its own special tokens around a text.
    """

    def __init__(self, tokenizer: Any, room: Callable[[], int], *, special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._room = room
        self._special = special

    def ids(self, text: str, field: str, stop: Stop | None = None) -> list[int]:
        """Token ids of a text.

        Args:
            field: that errors name.
            stop: set from elsewhere, it ends the work.

        Raises:
            InvalidRequestError: it cannot fit, or is no text.
            ClientGoneError: `stop` was set.
        """
        self.check(text, field)
        if len(text) > PIECE:
            self._check_pieces(text, field, stop or Stop())
        return self._encode(text, field)

    def check(self, text: str, field: str) -> None:
        """Refuse by length alone.

        Raises:
            InvalidRequestError: it cannot fit.
        """
        most = self._room() * self._longest
        if len(text) > most:
            raise InvalidRequestError(
                f"{field}: {len(text)} characters, and max_sequence_length={self._room()} tokens have at most {most}; "
                "shorten it or raise max_sequence_length"
            )

    @cached_property
    def _longest(self) -> int:
        """Characters of the longest token; of byte-level ones more than it stands for, which is as well."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def _check_pieces(self, text: str, field: str, stop: Stop) -> None:
        room, found = self._room(), 0
        for piece in _pieces(text):
            stop.check()
            found += len(self._encode(piece, field))
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
                f"{field}: the text is no Unicode (a surrogate stands alone) and cannot be tokenised; send valid UTF-8"
            ) from exc
        return [int(token) for token in read["input_ids"]]


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]
