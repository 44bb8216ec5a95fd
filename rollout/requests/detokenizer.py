"""Incremental detokenisation with stop strings.

Promises:
- the pieces of text given out, joined, are what the tokenizer's own `decode` makes of all the tokens;
- no piece is taken back: bytes that may still become another character are held back;
- the work per token does not grow with the completion: only a short window of tokens is decoded again.

Knows tokenizers by two methods, no tensors and no requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

WINDOW = 16
"""Tokens decoded together at most, but for a run of byte tokens."""

CONTEXT = 4
"""Tokens that stay in the window when it moves on: a byte each at least, as many as the longest UTF-8 character has."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """What is asked of a tokenizer; every Hugging Face one has it."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any:
        """Text of the tokens."""

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """The token's name in the vocabulary; None when there is no such token."""


class IncrementalDetokenizer:
    """Tokens in, text out as soon as nothing that follows can change it.

    A token is decoded behind some of its predecessors, because its text depends on them: a leading space is dropped at
    the start only, and a character may span tokens. Two texts are unsettled. A trailing U+FFFD may be the start of a
    character. And a run of byte tokens (`<0x0A>`, sentencepiece's byte fallback) is decoded as a whole, where one bad
    byte turns all of it into U+FFFD: it is settled when another token follows.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._shown = ""
        self._pieces: list[str] = []
        self._pending = ""

    @property
    def text(self) -> str:
        """All text given out."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def pending(self) -> str:
        """The unsettled text behind it, as `decode` shows it now."""
        return self._pending

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; the text that they settle."""
        return "".join([self._push(int(token)) for token in token_ids])

    def finish(self) -> str:
        """No token follows: the text that was held back."""
        return self._give(self._pending, "")

    def _push(self, token: int) -> str:
        text = self._decode([*self._window, token])
        if text == self._shown + self._pending and self._vanishes(token):
            return ""
        self._window.append(token)
        fresh = text[len(self._shown) :]
        if _BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
            self._pending = fresh
            return ""
        pending = _REPLACEMENT if fresh.endswith(_REPLACEMENT) else ""
        piece = self._give(fresh.removesuffix(pending), pending)
        if len(self._window) >= WINDOW:
            self._advance()
        return piece

    def _give(self, piece: str, pending: str) -> str:
        self._shown += piece
        self._pending = pending
        self._pieces.append(piece)
        return piece

    def _advance(self) -> None:
        """Forget old tokens. What is left may begin inside a character: its text then begins oddly, and always will."""
        self._window = self._window[-CONTEXT:]
        self._shown = self._decode(self._window).removesuffix(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens))

    def _vanishes(self, token: int) -> bool:
        """Whether `decode` leaves the token out, wherever it stands: it is special, or no token at all.

        A window of nothing else would be no context, and a long run of them would never leave it.
        """
        if self._tokenizer.convert_ids_to_tokens(token) is None:
            return True
        if not self._skip_special_tokens or self._decode([token]):
            return False
        return bool(self._tokenizer.decode([token], skip_special_tokens=False))


def pieces_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text that each token settles; joined, what `decode` makes of all of them."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push((token,)) for token in token_ids]
    return [*pieces[:-1], pieces[-1] + detokenizer.finish()] if pieces else []


class CompletionText:
    """The text of one completion, ended by the first of its stop strings.

    The stop string that begins earliest in the text counts; of those that begin together, the longest. It may straddle
    tokens. One that was complete while stopping was not allowed does not count later.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], include_stop_str_in_output: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = sorted(stop, key=len, reverse=True)
        self._reach = max(map(len, stop), default=1) - 1
        self._include = include_stop_str_in_output
        self._tail = ""
        self._before_tail = 0
        self._searched = 0
        self._stop: str | None = None
        self._ended_text = ""

    def push(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take the next token; the stop string that the text now has, if any. Tokens after a stop are not looked at."""
        if self._stop is None:
            settled = self._tail + self._detokenizer.push((token_id,))
            seen = settled + self._detokenizer.pending.rstrip(_REPLACEMENT)
            if may_stop:
                self._find(seen)
            self._searched = self._before_tail + len(seen)
            cut = max(0, len(settled) - self._reach)
            self._tail = settled[cut:]
            self._before_tail += cut
        return self._stop

    def text(self) -> str:
        """The completion as it would read if it ended now, cut at the stop string (behind it, if that is kept).

        Unfinished bytes read as the tokenizer decodes them.
        """
        return self._detokenizer.text + self._detokenizer.pending if self._stop is None else self._ended_text

    def stable_text(self) -> str:
        """What of it a stream may show: without unsettled bytes, and without a tail that may become a stop string.

        The whole of it, made anew; `StableText` is for whoever shows it piece by piece.
        """
        if self._stop is not None:
            return self._ended_text
        text = self._detokenizer.text
        return text if self._include else text[: len(text) - _held_back(text, self._stops)]

    def _find(self, seen: str) -> None:
        searched = self._searched - self._before_tail
        # What was not complete before ends behind what was searched. Longest first: `min` takes the first of equals.
        hits = [(seen.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stops]
        start, self._stop = min((hit for hit in hits if hit[0] >= 0), key=lambda hit: hit[0], default=(0, None))
        if self._stop is not None:
            end = self._before_tail + start + (len(self._stop) if self._include else 0)
            self._ended_text = (self._detokenizer.text + self._detokenizer.pending)[:end]


class StableText:
    """What a stream may show of a completion, piece by piece: joined, the pieces are its `CompletionText.stable_text()`.

    It finds no stop string: whoever ends the completion knows the text that it ended with, and `rest` what of it is
    still to be shown.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], include_stop_str_in_output: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        # A stop string that is kept takes back nothing of what was shown.
        self._stops = () if include_stop_str_in_output else tuple(stop)
        self._held = ""
        self._shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Take more tokens, none of which completes a stop string that counts; the text that may be shown now."""
        piece = self._detokenizer.push(token_ids)
        if not piece:
            return ""
        # What is not held back already begins no stop string, so nothing before it has to be looked at again.
        settled = self._held + piece
        safe = len(settled) - _held_back(settled, self._stops)
        self._held = settled[safe:]
        self._shown += safe
        return settled[:safe]

    def text(self) -> str:
        """The completion as it would read if it ended now, without a stop string."""
        return self._detokenizer.text + self._detokenizer.pending

    def rest(self, text: str) -> str | None:
        """What is still to be shown of the text that the completion has ended with; None: it begins differently."""
        shown = self._detokenizer.text[: self._shown]
        return text[self._shown :] if text.startswith(shown) else None


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that more text could make a stop string."""
    return max([_begun(text, stop) for stop in stops], default=0)


def _begun(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start
