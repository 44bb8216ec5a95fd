"""Log-probs in OpenAI's two formats, a prompt's log-probs in vLLM's format, and the texts of single tokens.

Every generated token has one entry, even if it adds no text. The concatenated bytes of the tokens are the text's UTF-8,
even if a character spans several tokens. A log-prob of minus infinity is written as -9999.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from rollout.requests.detokenizer import TokenBytes
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.token_columns import TopN
from rollout.server.errors import bad_request
from rollout.server.openai.samples import prompt_columns

MAX_LISTED = 1_000_000
"""The maximum number of entries in the prompt log-probs of a request. This many entries take about 60 MB of JSON."""
LOWEST = -9999.0
"""The number that replaces minus infinity (a token removed by a filter), which JSON cannot represent."""


class TokenTexts:
    """The cached text and bytes of single tokens. Without a tokenizer, a token's text is its id, such as `token_id:7`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known = None if tokenizer is None else TokenBytes(tokenizer)
        self.special = frozenset() if self._known is None else self._known.special
        """The ids of special tokens, which decoding omits."""

    def text_of(self, token: int) -> str:
        """Return the text of the token; an incomplete character becomes U+FFFD."""
        return f"token_id:{token}" if self._tokenizer is None else self.bytes_of(token).decode("utf-8", "replace")

    def distinct(self, token: int) -> str:
        r"""Return the token's text, or its bytes as `bytes:\xe2\x82` if they are not complete UTF-8."""
        text = self.text_of(token)
        return text if "\ufffd" not in text else "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes_of(token))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of the token; empty if there is no tokenizer."""
        return b"" if self._known is None else self._known.of(token)

    def shown(self, token: int, *, first: bool) -> bytes:
        """Return the bytes that a token adds to the text; none if it is special. The `first` may lose its leading space."""
        if self._known is None or token in self.special:
            return b""
        if first and not self._known.byte_level:
            return str(self._tokenizer.decode([token], skip_special_tokens=True)).encode()
        return self.bytes_of(token)


class TokenIdNames(TokenTexts):
    """A `TokenTexts` that names every token by its id, `token_id:7`, for `return_tokens_as_token_ids`."""

    def text_of(self, token: int) -> str:
        return f"token_id:{token}"

    distinct = text_of


# --- chat -------------------------------------------------------------------------------------------------------------


def chat_logprobs(
    texts: TokenTexts, tokens: Sequence[int], log_probs: Sequence[float | None], top: TopN | None
) -> list[dict[str, Any]]:
    """Return `choice.logprobs.content` of a chat reply.

    Args:
        tokens: [T] token ids.
        log_probs: [T] log-probs, with None for the first token of a prompt, which has no log-prob.
        top: [T] rows of the most likely tokens, best first. None if only the tokens' own log-probs were requested.
    """
    rows: TopN = [[] for _ in tokens] if top is None else top
    return [
        _entry(texts, token, log_prob) | {"top_logprobs": [_entry(texts, *each) for each in likeliest]}
        for token, log_prob, likeliest in zip(tokens, log_probs, rows, strict=True)
    ]


def _entry(texts: TokenTexts, token: int, log_prob: float | None) -> dict[str, Any]:
    return {"token": texts.text_of(token), "logprob": finite(log_prob), "bytes": list(texts.bytes_of(token))}


# --- completions ------------------------------------------------------------------------------------------------------


class CompletionLogprobs:
    """A builder of a completion choice's `logprobs`, whole or chunk by chunk, which tracks the text offset."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        self._begun = False

    def take(self, tokens: Sequence[int], log_probs: Sequence[float | None], top: TopN | None) -> dict[str, list[Any]]:
        """Return the columns of `logprobs` for the next tokens of the choice. See `chat_logprobs` for the arguments.

        `text_offset` counts characters. A token that begins inside a character has that character's offset.
        `top_logprobs` includes the token itself. An entry is null if the token has no log-prob.
        """
        rows: TopN = [[] for _ in tokens] if top is None else top
        return {
            "tokens": [self._texts.distinct(token) for token in tokens],
            "token_logprobs": [finite(log_prob) for log_prob in log_probs],
            "top_logprobs": [
                None if log_prob is None else self._likeliest(token, log_prob, likeliest)
                for token, log_prob, likeliest in zip(tokens, log_probs, rows, strict=True)
            ],
            "text_offset": [self._advance(token) for token in tokens],
        }

    def _likeliest(self, token: int, log_prob: float, likeliest: list[tuple[int, float]]) -> dict[str, float | None]:
        named: dict[str, float | None] = {}
        for each, value in (*likeliest, (token, log_prob)):
            # Two tokens may have the same text. The more likely token comes first and keeps the key.
            named.setdefault(self._texts.distinct(each), finite(value))
        return named

    def _advance(self, token: int) -> int:
        offset = self._offset
        shown = self._texts.shown(token, first=not self._begun)
        self._begun = self._begun or bool(shown)
        self._offset += len(self._characters.decode(shown))
        return offset


def finite(log_prob: float | None) -> float | None:
    """Return the log-prob, or `LOWEST` for minus infinity."""
    # NaN passes through and becomes null in JSON.
    return log_prob if log_prob is None or log_prob != -float("inf") else LOWEST


# --- prompts, in vLLM's shape -----------------------------------------------------------------------------------------


def listed_per_position(asked: int | None, vocab_size: int, prompt_tokens: int) -> int | None:
    """Return the number of most likely tokens to list per prompt position. None stays None, and -1 means all tokens.

    Raises `ApiError` 400 if there would be more than `MAX_LISTED` entries at all `prompt_tokens` positions together.
    """
    if asked is None:
        return None
    count = vocab_size if asked < 0 else min(asked, vocab_size)
    if count * prompt_tokens > MAX_LISTED:
        raise bad_request(
            f"prompt_logprobs={asked}: {count} tokens at {prompt_tokens} positions are more than {MAX_LISTED} entries; "
            "request fewer, or send fewer prompts in a request",
            param="prompt_logprobs",
        )
    return count


def prompt_logprobs(
    texts: TokenTexts, sample: DynamicInferenceRequest, top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """Return one dict per prompt position, as vLLM does: token id → log-prob, rank and text. The first position has None.

    The prompt's own token is always included. If it is not among the `top` most likely tokens, its rank is set to `top + 1`.
    """
    found: list[dict[str, dict[str, Any]] | None] = []
    for token, log_prob, row in zip(*prompt_columns(sample, top), strict=True):
        if log_prob is None:
            found.append(None)
            continue
        entries = {str(each): _ranked(texts, each, value, rank) for rank, (each, value) in enumerate(row, 1)}
        entries.setdefault(str(token), _ranked(texts, token, log_prob, len(row) + 1))
        found.append(entries)
    return found


def _ranked(texts: TokenTexts, token: int, log_prob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(log_prob), "rank": rank, "decoded_token": texts.text_of(token)}
