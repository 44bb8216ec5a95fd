"""Reference values of a sample, token by token, from Hugging Face's forward with the weights of each version.

A segment of a record says under which version each position's K and V were written, and which version has sampled each
token. The oracle believes none of it: it feeds the same tokens to a frozen copy of the weights of each version, one
cache for all of them, and what comes out must be what the record says. Log-probs are made of the logits in
float64 by plain loops.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from rollout.engine.sampling.numerics import uniforms
from rollout.requests.block_hash import stream_key
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason

Row = NDArray[np.float64]
CLOSE = 2e-4
"""Between log-probs in float32, of weights that differ by much more from version to version."""
EDGE = 1e-4
"""Around the edge of a filter, within which rounding decides."""


class Policy:
    """A model whose weights change, and a frozen copy for every version it has had."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self.model = model
        self._noise = torch.Generator().manual_seed(seed)
        self.versions: list[PreTrainedModel] = []
        self._keep()

    def _keep(self) -> None:
        frozen = copy.deepcopy(self.model).eval()
        self.versions.append(frozen)

    @torch.no_grad()
    def update(self) -> None:
        """Another version: every weight moves a little."""
        for parameter in self.model.parameters():
            step = torch.randn(parameter.shape, generator=self._noise)
            parameter.add_(step * 0.1 * parameter.std() if parameter.numel() > 1 else 0)
        self._keep()

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], versions: Sequence[int]) -> Row:
        """[T, V] logits of tokens [T] whose K and V are written under `versions` [T]."""
        cache, rows, start = DynamicCache(config=self.model.config), [], 0
        while start < len(tokens):
            stop = start + 1
            while stop < len(tokens) and versions[stop] == versions[start]:
                stop += 1
            ids = torch.tensor([tokens[start:stop]])
            out = self.versions[versions[start]](ids, past_key_values=cache, use_cache=False)
            rows.append(out.logits[0].double().numpy())
            start = stop
        return np.concatenate(rows)


# --- the distribution -------------------------------------------------------------------------------------------------


def log_softmax(scores: Row) -> Row:
    """In float64."""
    shifted = scores - scores.max()
    total: Row = shifted - np.log(np.exp(shifted).sum())
    return total


@dataclass
class Distribution:
    """The distribution that a token is drawn from."""

    log_probs: Row
    """[V], of the distribution that is reported."""
    probabilities: Row
    """[V], of the distribution sampled from; what a filter has removed is 0."""
    on_edge: bool
    """A filter's edge lies so near a token that rounding decides whether it is kept."""


def distribution(
    logits: Row, params: SamplingParams, prompt: Sequence[int], made: Sequence[int], stop_ids: Sequence[int]
) -> Distribution:
    """Return the distribution of the token after `prompt` and `made`, made of logits [V] by the parameters."""
    scores = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        scores[token] += bias
    if len(made) < params.min_tokens:
        scores[list(stop_ids)] = -np.inf
    for token in {*prompt, *made}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token in set(made):
        scores[token] -= params.presence_penalty + params.frequency_penalty * made.count(token)
    if params.greedy:
        best = np.sort(scores)[::-1]
        only = np.zeros(len(scores))
        only[scores.argmax()] = 1.0
        return Distribution(
            log_softmax(logits if params.logprobs_mode == "raw" else scores), only, best[0] - best[1] < EDGE
        )
    kept, on_edge = _filtered(log_softmax(scores / params.temperature), params)
    reported = log_softmax(logits) if params.logprobs_mode == "raw" else kept
    return Distribution(reported, np.exp(kept), on_edge)


def _filtered(log_probs: Row, params: SamplingParams) -> tuple[Row, bool]:
    order = np.argsort(-log_probs, kind="stable")
    count, edges = len(order), []
    if 0 < params.top_k < count:
        edges.append(log_probs[order[params.top_k - 1]] - log_probs[order[params.top_k]])
        count = params.top_k
    if params.top_p < 1:
        sums = np.exp(log_probs[order[:count]]).cumsum() / np.exp(log_probs[order[:count]]).sum()
        edges.append(np.abs(sums - params.top_p).min())
        count = min(count, int(np.searchsorted(sums, params.top_p)) + 1)
    relative = np.exp(log_probs - log_probs.max())
    keep = np.zeros(len(order), bool)
    keep[order[:count]] = True
    if params.min_p:
        edges.append(np.abs(relative - params.min_p).min())
        keep &= relative >= params.min_p
    return log_softmax(np.where(keep, log_probs, -np.inf)), any(edge < EDGE for edge in edges)


# --- a record ---------------------------------------------------------------------------------------------------------


def check_record(policy: Policy, record: DynamicInferenceRequestRecord, stop_ids: Sequence[int]) -> int:
    """Check every number that a record gives of its tokens; return how many tokens it has.

    Raises:
        AssertionError: one differs from the oracle's.
    """
    first, merged = record[0], record.merge()
    made: list[int] = []
    for segment in record:
        tokens, length = segment.prompt_tokens + segment.generated_tokens, len(segment.prompt_tokens)
        wants_prompt = segment.prompt_log_probs is not None
        if not segment.generated_tokens and not wants_prompt:
            continue
        kv = segment.kv_versions.tolist()
        sampled = segment.policy_versions.tolist()
        assert len(segment.kv_spans) >= len(tokens) - 1, f"{record.request_id}: positions without KV"
        logits = policy.logits(tokens[:-1], kv[:-1]) if len(tokens) > 1 else np.zeros((0, 1))
        if wants_prompt:
            _check_prompt(segment, logits)
        for place, token in enumerate(segment.generated_tokens):
            at = length + place
            name = f"request {record.request_id} sample {record.sample_index} token {len(made)}"
            assert sampled[at] == kv[at - 1], f"{name} of version {sampled[at]} was sampled by version {kv[at - 1]}"
            expected = distribution(logits[at - 1], first.sampling_params, first.prompt_tokens, made, stop_ids)
            _check_token(segment, place, token, expected, name)
            _check_draw(first, token, len(made), expected, name)
            made.append(token)
    assert made == merged.generated_tokens
    _check_end(merged, stop_ids)
    return len(made)


def _check_prompt(segment: DynamicInferenceRequest, logits: Row) -> None:
    for at, log_prob in enumerate(segment.prompt_log_probs or []):
        expected = log_softmax(logits[at])[segment.prompt_tokens[at + 1]]
        assert abs(expected - log_prob) < CLOSE, f"{segment!r}: prompt token {at + 1}: {log_prob}, not {expected}"


def _check_token(segment: DynamicInferenceRequest, place: int, token: int, expected: Distribution, name: str) -> None:
    if expected.on_edge and not segment.sampling_params.greedy:
        return
    if segment.generated_kept_tokens is not None:
        kept, likely = (
            segment.generated_kept_tokens[place].tolist(),
            expected.probabilities / expected.probabilities.max(),
        )
        # Tokens below 2^-42 of the most likely one have weight 0, and their rounding differs from ours.
        assert set(np.flatnonzero(likely > 2**-41)) <= set(kept) <= set(np.flatnonzero(likely > 2**-43)), name
    log_prob, theirs = segment.generated_log_probs[place], expected.log_probs[token]
    assert abs(log_prob - theirs) < CLOSE, f"{name}: log-prob {log_prob}, not {theirs}"
    if segment.sampling_params.logprobs:
        row = segment.generated_top_n_logprobs[place]
        best = np.sort(expected.log_probs)[::-1][: segment.sampling_params.logprobs]
        assert len(row) == len(best)
        for (top, top_log_prob), value in zip(row, best, strict=True):
            for mine in (value, expected.log_probs[top]):
                assert top_log_prob == mine or abs(top_log_prob - mine) < CLOSE, f"{name}: top {top} {top_log_prob}"


def _check_draw(first: DynamicInferenceRequest, token: int, position: int, expected: Distribution, name: str) -> None:
    if expected.on_edge:
        return
    key = stream_key(int(first.seed or 0), first.sample_index)
    drawn = uniforms(torch.tensor([key]), torch.tensor([position])).item()
    below = expected.probabilities[:token].sum()
    above = below + expected.probabilities[token]
    greedy = first.sampling_params.greedy
    assert expected.probabilities[token] > 0, f"{name}: {token} cannot be drawn"
    assert greedy or below - EDGE <= drawn <= above + EDGE, f"{name}: {drawn} is not in [{below}, {above}]"


def _check_end(merged: DynamicInferenceRequest, stop_ids: Sequence[int]) -> None:
    params, made = merged.sampling_params, merged.generated_tokens
    stops = [place for place, token in enumerate(made) if token in stop_ids and place >= params.min_tokens]
    if merged.finish_reason is FinishReason.STOP:
        assert stops == [len(made) - 1], f"{merged!r} went on behind a stop token, or stopped at none"
        assert merged.stop_reason == made[-1]
    else:
        assert not stops, f"{merged!r} ended by {merged.finish_reason} behind a stop token"
