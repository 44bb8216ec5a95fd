"""Incremental detokenisation with stop strings.

Always true:
- the emitted pieces of text, joined, equal the tokenizer's `decode` of all the tokens;
- emitted text is final: bytes that may still become another character are held back;
- the work per token does not grow with the completion: only a short window of tokens is decoded again.

The module requires only two tokenizer methods, `decode` and `convert_ids_to_tokens`. It does not depend on requests.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

WINDOW = 16
"""The maximum number of tokens decoded together, except for a run of byte tokens."""

CONTEXT = 4
"""The number of tokens kept when the window moves: enough for a character of 4 bytes, as a token has at least one byte."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"


class IncrementalDetokenizer:
    """A converter of tokens to text, which emits text as soon as no later token can change it.

    A token is decoded together with some of its predecessors, because its text depends on them. Two kinds of text may still
    change: a trailing U+FFFD, which may be the start of a character, and a run of byte tokens (`<0x0A>`, sentencepiece's
    byte fallback). Such a run is decoded as a whole, and becomes final with the next token of another kind.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = ""
        self._pieces: list[str] = []
        self._pending = ""

    @property
    def text(self) -> str:
        """All text emitted so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    @property
    def pending(self) -> str:
        """The text after `text` that later tokens may still change, as `decode` renders it without them."""
        return self._pending

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that has become final, so that no later token can change it."""
        return "".join([self._push(int(token)) for token in token_ids])

    def finish(self) -> str:
        """Mark the completion as finished; return the text held back in `pending`, which can no longer change."""
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
        """Drop the window's oldest tokens. If it then starts inside a character, U+FFFD in `_shown` stands for that part."""
        self._window = self._window[-CONTEXT:]
        self._shown = self._decode(self._window).removesuffix(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _vanishes(self, token: int) -> bool:
        """Return whether `decode` always omits the token, because it is special or not in the vocabulary.

        Such tokens do not enter the window, where they would displace tokens that are needed as context.
        """
        if self._tokenizer.convert_ids_to_tokens(token) is None:
            return True
        return not self._decode([token]) and bool(self._tokenizer.decode([token], skip_special_tokens=False))


def pieces_of(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return, for each token, the text that becomes final with it. The joined texts equal the `decode` of all tokens."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push((token,)) for token in token_ids]
    return [*pieces[:-1], pieces[-1] + detokenizer.finish()] if pieces else []


class CompletionText:
    """The text of one completion, up to its first stop string.

    The stop string that starts earliest counts; if several start at the same place, the longest. A stop string may span
    tokens. A stop string that was completed while stopping was not allowed does not count later.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], include_stop_str_in_output: bool) -> None:
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
        """Add a token; return the stop string if one is complete and `may_stop` is set. Then later tokens are ignored."""
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
        """Return the text as if the completion ended now. It is cut before the stop string, or after it if configured so.

        Incomplete bytes appear as the tokenizer decodes them.
        """
        return self._detokenizer.text + self._detokenizer.pending if self._stop is None else self._ended_text

    def _find(self, seen: str) -> None:
        searched = self._searched - self._before_tail
        # Ignore matches that end in text searched earlier: they completed while stopping was not allowed. The stop strings
        # are sorted longest first, so that `min` takes the longest of the matches with the same start.
        hits = [(seen.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in self._stops]
        start, self._stop = min((hit for hit in hits if hit[0] >= 0), key=lambda hit: hit[0], default=(0, None))
        if self._stop is not None:
            end = self._before_tail + start + (len(self._stop) if self._include else 0)
            self._ended_text = (self._detokenizer.text + self._detokenizer.pending)[:end]


class StableText:
    """A stream of text that no later token can change. It holds back incomplete bytes and a possible start of a stop string.

    The stream does not search for stop strings. Once the completion has finished, `rest` returns the part of the final text
    that the stream has not shown yet.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], include_stop_str_in_output: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        # Hold nothing back if the output includes the stop string: completing it then never removes text.
        self._stops = () if include_stop_str_in_output else tuple(stop)
        self._held = ""
        self._shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens that do not complete a stop string; return the text that became final and was not returned before."""
        piece = self._detokenizer.push(token_ids)
        if not piece:
            return ""
        # Check only the held text and the new piece: if earlier text could begin a stop string, it would be held too.
        settled = self._held + piece
        safe = len(settled) - _held_back(settled, self._stops)
        self._held = settled[safe:]
        self._shown += safe
        return settled[:safe]

    def text(self) -> str:
        """Return the text as if the completion ended now without a stop string."""
        return self._detokenizer.text + self._detokenizer.pending

    def rest(self, text: str) -> str | None:
        """Return the part of the final `text` after the shown text; None if `text` does not start with the shown text."""
        shown = self._detokenizer.text[: self._shown]
        return text[self._shown :] if text.startswith(shown) else None


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of a stop string."""
    return max([_begun(text, stop) for stop in stops], default=0)


def _begun(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return 0 if start < 0 else len(text) - start


# --- bytes of single tokens -----------------------------------------------------------------------------------------------


class TokenBytes:
    """The cached bytes of single tokens.

    Args:
        tokenizer: a byte-level BPE tokenizer (GPT-2, Llama 3, Qwen), a sentencepiece tokenizer (Llama 2, Mistral, Gemma),
            or any other tokenizer that can decode single tokens.

    Attributes:
        special: the ids that `decode` omits: named special tokens, and added tokens marked as special.
        byte_level: whether token names encode bytes in GPT-2's alphabet.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        marked = (token for token, entry in added.items() if entry.special)
        self.special = frozenset((*getattr(tokenizer, "all_special_ids", ()), *marked))
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self.byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._byte_of = _byte_alphabet() if self.byte_level else {}
        self._bytes: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; for a special token, its name; for an id without a token, no bytes."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._read(token)
        return known

    def _read(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        if token in self.special:
            return str(name).encode()
        if self.byte_level and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        if _WORD_START in name:
            return str(name).replace(_WORD_START, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the dict character → byte of GPT-2's alphabet, the inverse of `bytes_to_unicode`.

    In this alphabet printable bytes stand for themselves, and other bytes are U+0100 and later characters, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
