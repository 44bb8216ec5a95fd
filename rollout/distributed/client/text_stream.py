"""The incremental detokenisation of a group's new tokens: text, log-probs and finish reasons per sample.

A sample's final text is the concatenation of the texts of its deltas since the last restart. Incomplete UTF-8 and possible
beginnings of a stop string are held back, so emitted text does not change. The work per token is constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout.requests.delta import SampleDelta
from rollout.requests.detokenizer import StableText
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.token_columns import KeptTokens, Routes, TopN, unpack_routes
from rollout.sampling_params import SamplingParams


@dataclass(slots=True)
class TextDelta:
    """The new text and tokens of one sample. It is read-only. Per-token lists have one entry per new token.

    A token's text may arrive in a later delta than the token, so a delta may contain only text or only tokens.
    """

    sample_index: int
    text: str
    token_ids: list[int]
    log_probs: list[float]
    policy_versions: list[int]
    """The policy version of the weights that sampled each token."""
    top_log_probs: TopN | None = None
    """The most probable (token id, log-prob) pairs per position, best first; None unless `params.logprobs` is at least
    1."""
    restarted: bool = False
    """Whether the sample was restarted, so that the reader must discard its earlier text and tokens."""
    finish_reason: str | None = None
    """A `FinishReason` value in the sample's last delta, None in the other deltas."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the sample, in the sample's last delta; otherwise None."""
    error: str | None = None
    """The reason why the sample failed, in the sample's last delta; otherwise None."""
    routed_experts: Routes | None = None
    """The experts that each token was routed to, [rows, layers, k]; None unless the engine records them. The last row
    belongs to the position from which the last new token was sampled. There may be more rows than new tokens: the first
    delta includes the prompt's rows, and in later deltas rows of recomputed KV replace earlier rows."""
    kept_tokens: list[list[int]] | None = None
    """The token ids that the sampling options left to draw from, one list per new token; None unless
    `params.return_kept_tokens` is set."""


class GroupText:
    """A builder of the text deltas of one group.

    If the engine's final text does not begin with the emitted text, the last delta has `restarted` set and contains the
    whole sample, with the engine's text.

    Args:
        params: the group's sampling parameters.
        tokenizer: the engine's tokenizer; if None, only a sample's last delta contains text.
    """

    def __init__(self, params: SamplingParams, tokenizer: Any | None) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._samples: dict[int, _Decoder] = {}

    def take(self, delta: SampleDelta | None, ended: DynamicInferenceRequest | None = None) -> TextDelta | None:
        """Return the delta that a stream yields for new tokens of a sample, or None if there is nothing to yield.

        Args:
            delta: the sample's new tokens, which start at 0 if the sample was restarted; if None, `ended` is yielded whole.
            ended: the finished sample if `delta` contains its last tokens or is None; otherwise None.
        """
        if delta is None:
            return None if ended is None else whole(ended)
        sample = self._samples.get(delta.sample_index)
        restarted = sample is not None and sample.length > delta.start
        tokens = delta.token_list()
        if ended is None and not tokens and not restarted:
            return None
        if sample is None or restarted:
            sample = self._samples[delta.sample_index] = _Decoder(self._params, self._tokenizer)
        text = sample.push(tokens) if ended is None else sample.end(tokens, ended.generated_text)
        if ended is not None and text is None:
            return whole(ended, restarted=True)
        sample.length += len(tokens)
        return TextDelta(
            delta.sample_index,
            text or "",
            tokens,
            delta.log_prob_list(),
            delta.policy_versions(),
            delta.top_n_rows() if self._params.logprobs else None,
            restarted,
            *((None, None, None) if ended is None else _ending(ended)),
            routed_experts=None if delta.routes is None else unpack_routes(delta.routes)[1],
            kept_tokens=_listed(delta.kept_tokens()),
        )


def whole(request: DynamicInferenceRequest, *, restarted: bool = False) -> TextDelta:
    """Return all text and tokens of a finished sample as a single delta; `restarted` is copied to the delta."""
    return TextDelta(
        request.sample_index,
        request.generated_text or "",
        request.generated_tokens,
        request.generated_log_probs,
        request.policy_versions[len(request.prompt_tokens) :].tolist(),
        request.generated_top_n_logprobs if request.sampling_params.logprobs else None,
        restarted,
        *_ending(request),
        routed_experts=request.routing_indices,
        kept_tokens=_listed(request.generated_kept_tokens),
    )


def _listed(sets: KeptTokens | None) -> list[list[int]] | None:
    return None if sets is None else sets.tolist()


def _ending(request: DynamicInferenceRequest) -> tuple[str | None, str | int | None, str | None]:
    reason = request.finish_reason
    return None if reason is None else reason.value, request.stop_reason, request.error


class _Decoder:
    """An incremental detokeniser of one sample."""

    def __init__(self, params: SamplingParams, tokenizer: Any | None) -> None:
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
        except Exception:  # noqa: BLE001 - if the tokenizer fails on a token, only this sample loses its text
            self._readable = False
            return ""

    def end(self, tokens: list[int], text: str | None) -> str | None:
        """Return the part of the final `text` that follows the emitted text, or None if the final text does not begin
        with the emitted text. Without a final text, decode the last `tokens` instead."""
        if self._text is None:
            return text or ""
        if text is not None:
            return self._text.rest(text)
        piece = self.push(tokens)
        return piece + (self._text.rest(self._text.text()) or "") if self._readable else piece
