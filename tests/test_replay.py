"""`replay_logprobs` against a dense masked softmax, with gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.algorithms import replay_logprobs

ROWS, COLUMNS, VOCAB, PROMPT = 3, 7, 11, 3


def example(seed: int = 0) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor, Tensor]:
    """Logits, kept, input_ids, mask, and kept as a dense mask [N, T, V]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, COLUMNS, VOCAB, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCAB, (ROWS, COLUMNS), generator=generator)
    dense = torch.rand(ROWS, COLUMNS, VOCAB, generator=generator) < 0.4
    dense.scatter_(2, ids[..., None], True)
    dense[:, :PROMPT] = False
    mask = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
    mask[:, :PROMPT] = False
    mask[1, 5:] = False
    return logits, (dense.nonzero()[:, 2].int(), dense.sum(2).int()), ids, mask, dense


def dense_logprobs(logits: Tensor, dense: Tensor, ids: Tensor, mask: Tensor, **shaping: Any) -> Tensor:
    """The same token by token, over a masked vocabulary."""
    out = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for row in range(ROWS):
        for column in range(1, COLUMNS):
            if not mask[row, column]:
                continue
            scores = list(logits[row, column - 1])
            for token, bias in shaping.get("logit_bias", {}).items():
                scores[token] = scores[token] + bias
            before, said = ids[row, :column].tolist(), ids[row, PROMPT:column].tolist()
            for token in set(before):
                penalty = shaping.get("repetition_penalty", 1.0)
                scores[token] = scores[token] * penalty if scores[token] < 0 else scores[token] / penalty
            for token in set(said):
                scores[token] = scores[token] - shaping.get("presence_penalty", 0.0)
                scores[token] = scores[token] - shaping.get("frequency_penalty", 0.0) * said.count(token)
            final = torch.stack(scores) / shaping.get("temperature", 1.0)
            if dense[row, column].any():
                final = final.masked_fill(~dense[row, column], -torch.inf)
            out[row, column] = final.log_softmax(0)[ids[row, column]]
    return out


SHAPINGS: list[dict[str, Any]] = [
    {}, {"temperature": 0.6}, {"logit_bias": {2: 1.5, 9: -3.0}}, {"repetition_penalty": 1.4},
    {"presence_penalty": 0.7, "frequency_penalty": -0.3, "temperature": 1.3, "repetition_penalty": 0.8,
     "logit_bias": {0: 2.0}},
]  # fmt: skip


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_values_and_gradients_are_those_of_a_dense_masked_softmax(shaping: dict[str, Any]) -> None:
    logits, kept, ids, mask, dense = example()
    weights = torch.randn(ROWS, COLUMNS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    prompts = torch.full((ROWS,), PROMPT)
    found = replay_logprobs(ours, kept, ids, mask, prompt_lengths=prompts, **shaping)
    expected = dense_logprobs(theirs, dense, ids, mask, **shaping)
    torch.testing.assert_close(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_each_row_has_its_own_shaping() -> None:
    logits, kept, ids, mask, dense = example()
    temperature, biases = torch.tensor([0.5, 1.0, 2.0]), [None, {1: 1.0}, {1: -1.0, 4: 2.0}]
    found = replay_logprobs(logits, kept, ids, mask, temperature=temperature, logit_bias=biases)
    for row, (warmth, bias) in enumerate(zip(temperature.tolist(), biases, strict=True)):
        expected = dense_logprobs(logits, dense, ids, mask, temperature=warmth, logit_bias=bias or {})
        torch.testing.assert_close(found[row], expected[row])


def test_a_token_without_a_set_could_be_any_and_one_outside_its_set_could_not() -> None:
    logits, _, ids, mask, dense = example()
    dense[0, 4] = False
    sets = (dense.nonzero()[:, 2].int(), dense.sum(2).int())
    ours = logits.clone().requires_grad_()
    found = replay_logprobs(ours, sets, ids, mask, temperature=0.7)
    torch.testing.assert_close(found, dense_logprobs(logits, dense, ids, mask, temperature=0.7))
    found.sum().backward()
    assert ours.grad is not None
    assert ours.grad.isfinite().all()
    with pytest.raises(ValueError, match=r"rows \[0\] have tokens without a set"):
        replay_logprobs(logits, sets, ids, mask, logit_bias={1: 1.0})
    other = ids.clone()
    other[2, 4] = next(token for token in range(VOCAB) if not dense[2, 4, token])
    assert replay_logprobs(logits, sets, other, mask)[2, 4] == -torch.inf


def test_any_layout_of_logits_is_read_through_predictors() -> None:
    logits, kept, ids, mask, _ = example()
    predictors = torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) - 1
    order = torch.randperm(ROWS * COLUMNS, generator=torch.Generator().manual_seed(3))
    moved = torch.empty(ROWS * COLUMNS, dtype=torch.int64)
    moved[order] = torch.arange(ROWS * COLUMNS)
    found = replay_logprobs(
        logits.flatten(0, 1)[order], kept, ids, mask, predictors=torch.where(mask, moved[predictors], 0)
    )
    torch.testing.assert_close(found, replay_logprobs(logits, kept, ids, mask))


def test_what_does_not_fit_is_refused() -> None:
    logits, kept, ids, mask, _ = example()
    with pytest.raises(ValueError, match="all columns of a forward"):
        replay_logprobs(logits[:, :-1], kept, ids, mask)
    with pytest.raises(ValueError, match="counts that sum to"):
        replay_logprobs(logits, (kept[0][:-1], kept[1]), ids, mask)
    with pytest.raises(ValueError, match="prompt_lengths=None"):
        replay_logprobs(logits, kept, ids, mask, repetition_penalty=1.2)
    with pytest.raises(ValueError, match="at column 0"):
        replay_logprobs(logits, kept, ids, torch.ones_like(mask))
