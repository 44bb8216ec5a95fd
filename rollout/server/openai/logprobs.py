"""Log-probs in OpenAI's two formats.

Always true: every generated token has one entry, those that show no text included; a token's bytes, joined over the
tokens, are the text's UTF-8 even where a character spans tokens; an infinite log-prob is written as -9999.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any

from rollout.requests.growth import TopN

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has not: a token that a filter removed."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenTexts:
    """What each token reads as, by itself; kept, because few tokens make up most texts.

    Args:
        tokenizer: a Hugging Face tokenizer; None: a token reads as `token_id:7` and has no bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._byte_of = _byte_alphabet() if _is_byte_level(tokenizer) else None
        self._special = _special_ids(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def text_of(self, token: int) -> str:
        """The token's text; a part of a character reads as U+FFFD."""
        return f"token_id:{token}" if self._tokenizer is None else self.bytes_of(token).decode("utf-8", "replace")

    def distinct(self, token: int) -> str:
        r"""The same, but parts of characters differ from each other: `bytes:\xe2\x82`."""
        text = self.text_of(token)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token))

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes; none without a tokenizer."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = b"" if self._tokenizer is None else self._read(token)
        return known

    def shown(self, token: int, *, first: bool) -> bytes:
        """The bytes that the token adds to a text: none if it is special, no leading space where `decode` drops it."""
        if self._tokenizer is None or token in self._special:
            return b""
        if first and self._byte_of is None:
            return str(self._tokenizer.decode([token], skip_special_tokens=True)).encode()
        return self.bytes_of(token)

    def _read(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if match := _BYTE_TOKEN.fullmatch(name):
            return bytes([int(match[1], 16)])
        if token in self._special:
            return str(name).encode()
        if self._byte_of is not None and all(character in self._byte_of for character in name):
            return bytes(self._byte_of[character] for character in name)
        if _WORD_START in name:
            return str(name).replace(_WORD_START, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


# --- chat -------------------------------------------------------------------------------------------------------------


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], log_probs: Sequence[float | None], top: TopN | None
) -> list[dict[str, Any]]:
    """`choice.logprobs.content`.

    Args:
        tokens: [T] token ids.
        log_probs: [T]; None: the token has none (the first of a prompt).
        top: [T] rows of the likeliest tokens, best first; None where only the tokens' own were asked for.
    """
    rows: TopN = [[] for _ in tokens] if top is None else top
    return [
        _entry(texts, token, log_prob) | {"top_logprobs": [_entry(texts, *each) for each in likeliest]}
        for token, log_prob, likeliest in zip(tokens, log_probs, rows, strict=True)
    ]


def _entry(texts: TokenTexts, token: int, log_prob: float | None) -> dict[str, Any]:
    return {"token": texts.text_of(token), "logprob": _finite(log_prob), "bytes": list(texts.bytes_of(token))}


# --- completions ------------------------------------------------------------------------------------------------------


class CompletionLogprobs:
    """`choice.logprobs` of one completion's choice, whole or chunk by chunk: knows how much text came before."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._begun = False

    def take(self, tokens: Sequence[int], log_probs: Sequence[float | None], top: TopN | None) -> dict[str, list[Any]]:
        """The columns of the next tokens; arguments as those of `chat_logprobs`.

        `text_offset` counts characters; a token that begins inside one has the offset of that character. `top_logprobs`
        holds the token itself beside the likeliest ones; it is null where the token has no log-prob.
        """
        rows: TopN = [[] for _ in tokens] if top is None else top
        return {
            "tokens": [self._texts.distinct(token) for token in tokens],
            "token_logprobs": [_finite(log_prob) for log_prob in log_probs],
            "top_logprobs": [
                None if log_prob is None else self._likeliest(token, log_prob, likeliest)
                for token, log_prob, likeliest in zip(tokens, log_probs, rows, strict=True)
            ],
            "text_offset": [self._advance(token) for token in tokens],
        }

    def _likeliest(self, token: int, log_prob: float, likeliest: list[tuple[int, float]]) -> dict[str, float | None]:
        named: dict[str, float | None] = {}
        for each, value in (*likeliest, (token, log_prob)):
            # Two tokens may read the same; the likelier one comes first and keeps the name.
            named.setdefault(self._texts.distinct(each), _finite(value))
        return named

    def _advance(self, token: int) -> int:
        offset = self._offset
        shown = self._texts.shown(token, first=not self._begun)
        self._begun = self._begun or bool(shown)
        self._offset += len(self._characters.decode(shown))
        return offset


# --- what a tokenizer's tokens are made of ----------------------------------------------------------------------------


def _finite(log_prob: float | None) -> float | None:
    # NaN is neither: it becomes null when it is written.
    return log_prob if log_prob is None or log_prob != -float("inf") else LOWEST


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that `decode` leaves out of a text: those the tokenizer has a name for, and others that are marked so."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = (token for token, entry in added.items() if entry.special)
    return frozenset((*getattr(tokenizer, "all_special_ids", ()), *marked))


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether a token's name spells its bytes in the alphabet of GPT-2."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character of GPT-2's alphabet (its `bytes_to_unicode`): printable bytes are themselves, the others
    the characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
