"""Tokenisation and detokenisation in separate threads, so that they do not block the coordinator's loop.

If the tokenizer raises an error for a text, only the request with this text fails. The first job loads the tokenizer.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollout.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from rollout.distributed.coordinator.core.requests import TextJob

_log = logging.getLogger(__name__)


TextResult = Sequence[int] | Exception | list[str | None]
"""The result of a job. Tokenisation returns the token ids (an int32 array), or an exception. Detokenisation returns a list
with the text of each completion, or None for a completion that cannot be decoded."""


class TextCodec:
    """A lazily loaded tokenizer of the `tokenizers` library. Thread-safe.

    Args:
        tokenizer: path or content of a `tokenizer.json`. If None, there is no tokenizer, so prompts must be token ids.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._source = tokenizer
        self._lock = threading.Lock()
        self._read: Tokenizer | None = None

    def tokenize(self, text: str) -> Sequence[int]:
        """Return the token ids (int32) of a string, with the special tokens of the tokenizer's template.

        Raises:
            InvalidRequestError: there is no tokenizer, or the tokenizer cannot encode the text.
        """
        try:
            (encoding,) = self._tokenizer.encode_batch_fast([text])
            return array("i", encoding.ids)
        except BaseException as exc:  # A panic in the Rust library raises no Exception subclass.
            raise InvalidRequestError(f"text of {len(text)} characters: {type(exc).__name__}: {exc}") from exc

    def detokenize(self, completions: Sequence[bytes]) -> list[str | None]:
        """Return the text of each completion without special tokens, or None for a completion that cannot be decoded.

        Args:
            completions: token ids of each completion, as little-endian int32.
        """
        return [self._text(np.frombuffer(completion, "<i4").tolist()) for completion in completions]

    def _text(self, token_ids: list[int]) -> str | None:
        try:
            (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=True)
        except BaseException as exc:  # noqa: BLE001 - a panic in the Rust library is not an Exception
            _log.warning("a completion of %d tokens comes without text: %r", len(token_ids), exc)
            return None
        return str(text)

    @property
    def _tokenizer(self) -> Tokenizer:
        with self._lock:
            if self._read is None:
                self._read = _read_tokenizer(self._source)
            return self._read


def _read_tokenizer(source: str | None) -> Tokenizer:
    from tokenizers import Tokenizer

    if source is None:
        raise ConfigError("no tokenizer: set CoordinatorConfig.tokenizer, or send token ids")
    content = source if source.lstrip().startswith("{") else Path(source).read_text(encoding="utf-8")
    tokenizer = Tokenizer.from_str(content)
    # Turn off truncation and padding: a `tokenizer.json` stores the settings that were active when it was saved, but
    # prompts must be neither truncated nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class TextWorker:
    """A pool of two threads that run tokenizer jobs. One long text therefore does not delay short texts.

    Args:
        codec: the tokenizer.
        wake: a function that is called on one of the threads when a result is ready.
    """

    def __init__(self, codec: TextCodec, wake: Callable[[], None]) -> None:
        self._codec = codec
        self._wake = wake
        self._results: deque[tuple[int, TextResult]] = deque()
        self._threads = ThreadPoolExecutor(2, "coordinator-texts")

    def put(self, job: TextJob) -> None:
        """Queue a job. A later `take_results` returns its result."""
        self._threads.submit(self._work, job)

    def take_results(self) -> list[tuple[int, TextResult]]:
        """Return (job id, result) pairs of the jobs that have finished since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self) -> None:
        """Cancel the jobs that have not started. Does not wait for running jobs."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self, job: TextJob) -> None:
        result: TextResult
        if job.text is None:
            result = self._codec.detokenize(job.token_ids or [])
        else:
            try:
                result = self._codec.tokenize(job.text)
            except InvalidRequestError as exc:
                result = exc
        self._results.append((job.job_id, result))
        self._wake()
