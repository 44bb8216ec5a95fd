"""Draws of the tests, and the distribution that they must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollout.engine.sampling.edits import History
from rollout.engine.sampling.sampler import Sampled, sample
from rollout.engine.sampling.sampling_table import SamplingRows, SamplingTable
from rollout.requests.block_hash import stream_key
from rollout.sampling_params import SamplingParams

VOCAB = 1000
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 0.5, "top_p": 0.7, "min_p": 0.3},
    {"repetition_penalty": 1.4},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.7},
]


def logits_of(rows: int, vocabulary: int = VOCAB, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def rows_of(params: Sequence[SamplingParams], device: str = "cpu", first_key: int = 0) -> SamplingRows:
    """One row of the table for each row, each with its own stream."""
    table = SamplingTable(device)
    for row, each in enumerate(params):
        table.set(row, each, stream_key(first_key + row, 0))
    return table.select(np.arange(len(params)))


def draw(logits: Tensor, *params: SamplingParams, position: int = 0, **more: Any) -> Sampled:
    """One row per row of logits; a single `params` serves all."""
    rows = rows_of(params * len(logits) if len(params) == 1 else params)
    return sample(logits, rows, torch.full((len(logits),), position), **more)


def draw_many(logits: Tensor, params: SamplingParams, count: int, **more: Any) -> Tensor:
    """Tokens drawn from one row of logits [V] at `count` positions of one stream."""
    table = SamplingTable("cpu")
    table.set(0, params, stream_key(7, 0))
    rows = table.select(np.zeros(count, np.int64))
    return sample(logits.expand(count, -1), rows, torch.arange(count), **more).token_ids


def final_log_probs(logits: Tensor, params: SamplingParams, **more: Any) -> Tensor:
    """Our log-prob of every token [R, V]; -inf where filtered."""
    sampled = draw(logits, params.replace(logprobs=logits.shape[1]), **more)
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    return torch.full_like(logits, torch.nan).scatter_(1, sampled.top_ids, sampled.top_logprobs)


def reference(logits: Tensor, params: SamplingParams, histories: Sequence[History]) -> Tensor:
    """The same by Hugging Face's own processors."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    ids = torch.from_numpy(np.stack([np.concatenate(history) for history in histories]))
    scores: Tensor = processors(ids, logits.clone())
    return scores.log_softmax(-1)


def histories_of(rows: int, seed: int = 0, vocabulary: int = VOCAB) -> list[History]:
    random = np.random.default_rng(seed)
    return [(random.integers(0, vocabulary, 30), random.integers(0, vocabulary, 20)) for _ in range(rows)]


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Pearson's statistic in standard deviations above its mean: about N(0, 1) for true samples."""
    freedom = int((expected > 0).sum()) - 1
    statistic = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum().item()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


def equal(left: Sampled, right: Sampled) -> bool:
    """Bit for bit, NaN equal to NaN."""
    pairs = [
        (getattr(left, name), getattr(right, name)) for name in ("token_ids", "logprobs", "top_ids", "top_logprobs")
    ]
    return all(a is b is None or torch.equal(bits(a), bits(b)) for a, b in pairs)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32) if tensor.dtype == torch.float32 else tensor


def row_of(sampled: Sampled, index: int) -> Sampled:
    one = slice(index, index + 1)
    top_ids, top_logprobs = sampled.top_ids, sampled.top_logprobs
    return Sampled(
        sampled.token_ids[one],
        sampled.logprobs[one],
        None if top_ids is None else top_ids[one],
        None if top_logprobs is None else top_logprobs[one],
    )
