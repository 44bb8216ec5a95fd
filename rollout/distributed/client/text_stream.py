"""Incremental detokenisation of a group's deltas: text, log-probs and finish reasons per sample.

Always true:
- the text of a sample's deltas since it last began, joined, is the text that it ended with;
- nothing shown is taken back: bytes that may still become another character wait, and so does what may become a stop
  string;
- the work per token does not grow with the completion.

Knows no loop and no socket: whoever listens to a group hands over what it hears.
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
"""As `Stretch.samples` gives it."""
_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What is new of one sample. Per-token lists are as long as there are new tokens.

    A token's text may come with a later delta than the token, so a delta may have either without the other.
    """

    sample_index: int
    text: str
    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]
    """Of the weights that made each token."""
    top_log_probs: TopN | None = None
    """(token id, log-prob) of the likeliest tokens, best first, per new token; None unless `params.logprobs` >= 1."""
    restarted: bool = False
    """The sample has begun afresh: forget its earlier text and tokens."""
    finish_reason: str | None = None
    """A `FinishReason`'s value, in the sample's last delta; before, None."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended it, in its last delta."""
    error: str | None = None
    """Why it failed, in its last delta."""


class GroupText:
    """The deltas of one group.

    A sample of which tokens were known before anybody listened (`ClientSession.submit(…, known=…)`) begins with all of
    them in its first delta. Where a sample's engine and this tokenizer disagree about a text already shown, the last
    delta is `restarted` and holds the sample whole, with the engine's text.

    Args:
        params: the group's.
        tokenizer: what the engine detokenises with; None: a sample's text, if it has any, comes with its end.
    """

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._samples: dict[int, _Sample] = {}

    def take(self, group: OpenGroup, stretch: Stretch) -> list[TextDelta]:
        """What a stretch that the group has just taken adds, in its order: at most one delta per sample.

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
        """All that is known of a sample, as one delta."""
        stretch = group.known()[0].only({index})
        (row,) = stretch.samples()
        return self._delta(stretch, row, self._begin(index), restarted)

    def _delta(self, stretch: Stretch, row: _Row, sample: _Sample, restarted: bool) -> TextDelta | None:
        """What a stretch adds to a sample; None: its text has ended differently from what was shown."""
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
    """One sample: how many of its tokens are known, and what of its text was shown."""

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
        """The last text; None: what was shown is not how `text` begins.

        Args:
            text: the whole completion's, where its engine detokenises.
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
