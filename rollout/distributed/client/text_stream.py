"""Incremental detokenisation of a group's deltas: text, log-probs and finish reasons per sample.

Always true:
- the concatenated text of a sample's deltas since its last restart is its final text;
- emitted text is final: incomplete UTF-8 sequences and possible beginnings of a stop string are held back;
- the work per token is constant, independent of the completion's length.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, repeat
from struct import unpack_from
from typing import TypeVar

from rollout.distributed.client.group import OpenGroup
from rollout.distributed.protocol.messages import Stretch
from rollout.distributed.protocol.outcome import unpack, unpack_top_n
from rollout.requests.detokenizer import StableText, Tokenizer
from rollout.requests.growth import TopN
from rollout.sampling_params import SamplingParams

_Row = tuple[int, int, int, bytes, bytes, int]
"""A row of `Stretch.samples`."""
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text and tokens of one sample. Per-token lists have one entry per new token.

    A token's text may come in a later delta than the token, so a delta may have either without the other.
    """

    sample_index: int
    text: str
    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]
    """Policy version of the weights that sampled each token."""
    top_log_probs: TopN | None = None
    """(token id, log-prob) of the most probable tokens, best first, per new token; None unless `params.logprobs` >= 1."""
    restarted: bool = False
    """Whether the sample was restarted: discard its earlier text and tokens."""
    finish_reason: str | None = None
    """A `FinishReason` value in the sample's last delta, else None."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, in its last delta."""
    error: str | None = None
    """Why it failed, in its last delta."""


class GroupText:
    """Builds the text deltas of one group.

    A sample with tokens known at submission (`ClientSession.submit(…, known=…)`) has all of them in its first delta. If
    the engine's final text differs from what was emitted, the last delta is `restarted` and holds the whole sample with
    the engine's text.

    Args:
        params: the group's sampling parameters.
        tokenizer: the engine's tokenizer; None: a sample's text, if any, comes in its last delta.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._samples: dict[int, _Sample] = {}

    def take(self, group: OpenGroup, stretch: Stretch) -> list[TextDelta]:
        """Return the deltas of a stretch that the group has just taken, at most one per sample, in its order.

        The arguments are those of `OpenGroup.on_update`.

        Raises:
            SerializationError: an outcome or a top-n column is malformed.
        """
        deltas = [self._take(group, stretch, row) for row in stretch.samples()]
        return [delta for delta in deltas if delta is not None]

    def _take(self, group: OpenGroup, stretch: Stretch, row: _Row) -> TextDelta | None:
        index, start, count = row[:3]
        sample = self._samples.get(index)
        length = 0 if sample is None else sample.length
        if start not in (0, length):
            return self._whole(group, index)
        restarted = start == 0 and length > 0
        if not count and not restarted and _entry(stretch.outcomes, row[5]) is None:
            return None
        if sample is None or restarted:
            sample = self._begin(index)
        return self._delta(stretch, row, sample, restarted) or self._whole(group, index, restarted=True)

    def _begin(self, index: int) -> _Sample:
        sample = self._samples[index] = _Sample(self._params, self._tokenizer)
        return sample

    def _whole(self, group: OpenGroup, index: int, restarted: bool = False) -> TextDelta | None:
        """Return the whole sample as one delta."""
        stretch = group.known()[0].only({index})
        (row,) = stretch.samples()
        return self._delta(stretch, row, self._begin(index), restarted)

    def _delta(self, stretch: Stretch, row: _Row, sample: _Sample, restarted: bool) -> TextDelta | None:
        """Return a stretch's delta for a sample; None: its final text differs from the emitted text."""
        index, _, count, token_ids, log_probs, column = row
        tokens = list(unpack_from(f"<{count}i", token_ids))
        going_on = _entry(stretch.outcomes, column) is None
        text = sample.push(tokens) if going_on else sample.end(tokens, _entry(stretch.texts, column))
        if text is None:
            return None
        sample.length += count
        runs = stretch.versions[column]
        return TextDelta(
            index,
            text,
            tokens,
            list(unpack_from(f"<{count}f", log_probs)),
            list(chain.from_iterable(map(repeat, runs[1::2], runs[2::2]))),
            _top_n(stretch, column) if self._params.logprobs else None,
            restarted,
            *_ending(_entry(stretch.outcomes, column)),
        )


class _Sample:
    """Incremental detokenisation of one sample: token count and emitted text."""

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.length = 0
        self._text = (
            None if tokenizer is None else StableText(tokenizer, params.stop, params.include_stop_str_in_output)
        )
        self._readable = True

    def push(self, tokens: list[int]) -> str:
        if self._text is None or not self._readable:
            return ""
        try:
            return self._text.push(tokens)
        except Exception:  # noqa: BLE001 - a tokenizer that cannot read a token harms this sample's text alone
            self._readable = False
            return ""

    def end(self, tokens: list[int], text: str | None) -> str | None:
        """Return the remaining text; None: the emitted text is not a prefix of `text`.

        Args:
            text: of the whole completion, if the engine detokenises.
        """
        if self._text is None:
            return text or ""
        if text is not None:
            return self._text.rest(text)
        piece = self.push(tokens)
        return piece + (self._text.rest(self._text.text()) or "") if self._readable else piece


def _top_n(stretch: Stretch, column: int) -> TopN:
    packed = _entry(stretch.top_n, column)
    return [] if packed is None else unpack_top_n(packed)


def _ending(packed: bytes | None) -> tuple[str | None, str | int | None, str | None]:
    """(finish reason, stop reason, error)."""
    if packed is None:
        return None, None, None
    outcome = unpack(packed)
    return outcome.finish_reason, outcome.stop_reason, outcome.error


def _entry(column: list[_Entry | None] | None, index: int) -> _Entry | None:
    return None if column is None else column[index]
