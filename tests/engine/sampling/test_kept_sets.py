"""Kept tokens of the sampler: the tokens with a probability, the same by C++ and by torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.sampling.sampler import sample
from rollout.engine.sampling.sampling_table import SamplingTable
from rollout.requests.block_hash import stream_key
from rollout.requests.token_columns import KeptTokens
from rollout.sampling_params import SamplingParams

VOCAB, ROWS = 1000, 40
KINDS: list[dict[str, Any]] = [
    {"top_p": 0.9}, {"top_k": 7}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.7, "min_p": 0.01, "temperature": 0.6},
    {"top_p": 0.95, "repetition_penalty": 1.3, "logit_bias": {3: 4.0, 5: -1e9}}, {"top_k": 900, "temperature": 0.2},
]  # fmt: skip


def drawn(keep: list[bool], **options: Any) -> Any:
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    logits[0, 10:] = -torch.inf
    table = SamplingTable("cpu")
    for row in range(ROWS):
        params = SamplingParams(**KINDS[row % len(KINDS)], return_kept_tokens=keep[row], logprobs=VOCAB)
        table.set(row, params, stream_key(row, 0))
    histories = [(np.arange(row), np.arange(row)) for row in range(ROWS)]
    rows, positions = table.select(np.arange(ROWS)), torch.zeros(ROWS, dtype=torch.int64)
    return sample(logits, rows, positions, histories=histories, banned=[(1, [2, 3])], **options)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_the_kept_tokens_are_those_with_a_probability(
    compiled: bool, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr("rollout.engine.sampling.sampler.cpu_draw.load", lambda: None)
    monkeypatch.setattr("rollout.engine.sampling.sampler._rows_at_once", lambda logits: -(-ROWS // parts))
    keep = [row % 5 > 0 for row in range(ROWS)]
    sampled = drawn(keep)
    sets = KeptTokens(sampled.kept_ids.numpy(), sampled.kept_counts.numpy().astype(np.int32))
    assert len(sets) == ROWS
    for row, ids in enumerate(sets):
        # Below 2^-42 of the most likely token, a token has no weight, and its log-prob is only formally above -inf.
        likely = sampled.top_logprobs[row] > sampled.top_logprobs[row, 0] - 29.1121
        expected = sampled.top_ids[row][likely].sort().values
        assert ids.tolist() == (expected.tolist() if keep[row] else [])
        assert not keep[row] or sampled.token_ids[row] in ids


def test_c_plus_plus_and_torch_keep_the_same_tokens_and_asking_for_them_changes_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, plain = drawn([True] * ROWS), drawn([False] * ROWS)
    monkeypatch.setattr("rollout.engine.sampling.sampler.cpu_draw.load", lambda: None)
    by_torch = drawn([True] * ROWS)
    assert torch.equal(compiled.kept_ids, by_torch.kept_ids)
    assert torch.equal(compiled.kept_counts, by_torch.kept_counts)
    assert torch.equal(compiled.token_ids, plain.token_ids)
    assert torch.equal(compiled.logprobs, plain.logprobs)
    assert plain.kept_ids is None


def test_rows_beside_those_that_return_their_kept_tokens_return_none_and_lose_nothing() -> None:
    """In a part of the step without any row that returns them, too."""
    table = SamplingTable("cpu")
    table.set(0, SamplingParams(), stream_key(0, 0))
    table.set(1, SamplingParams(top_k=3, return_kept_tokens=True), stream_key(1, 0))
    table.set(2, SamplingParams(temperature=0), stream_key(2, 0))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    sampled = sample(logits, table.select(np.arange(3)), torch.zeros(3, dtype=torch.int64))
    assert sampled.kept_counts is not None
    assert sampled.kept_counts.tolist() == [0, 3, 0]
    assert sampled.kept_ids is not None
    assert sampled.kept_ids.tolist() == sorted(logits[1].topk(3).indices.tolist())
