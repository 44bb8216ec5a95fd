"""A thread-safe tokenizer of prompts, which rejects a string that is too long without tokenising it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from rollout.errors import InvalidRequestError


class PromptTokenizer:
    """A tokenizer of prompts that checks their length.

    Args:
        tokenizer: a private copy of a Hugging Face tokenizer. A trainer may change the original's padding and truncation.
        room: function that returns the current maximum length of a prompt, in tokens.
        special: whether to add the tokenizer's special tokens around each string.
    """

    def __init__(self, tokenizer: Any, room: Callable[[], int], *, special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._room = room
        self._special = special

    def ids(self, text: str, field: str) -> list[int]:
        """Return the token ids of `text`.

        Args:
            field: the request's field that contains the text, for the message of an `InvalidRequestError`.
        """
        self.check(text, field)
        try:
            read = self._tokenizer(text, add_special_tokens=self._special, verbose=False)
        except (TypeError, UnicodeError) as exc:
            raise InvalidRequestError(
                f"{field}: the text contains half a surrogate pair and cannot be tokenised; send valid UTF-8"
            ) from exc
        return [int(token) for token in read["input_ids"]]

    def check(self, text: str, field: str) -> None:
        """Raise `InvalidRequestError`, naming `field`, if `text` has more characters than the longest prompt can have."""
        most = self._room() * self._longest
        if len(text) > most:
            raise InvalidRequestError(
                f"{field}: {len(text)} characters, and max_sequence_length={self._room()} tokens have at most {most}; "
                "shorten it or raise max_sequence_length"
            )

    @cached_property
    def _longest(self) -> int:
        """The number of characters of the longest token in the vocabulary, which bounds the characters per token."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)
