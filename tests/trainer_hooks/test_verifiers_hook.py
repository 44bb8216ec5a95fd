"""Tests of the adapter to verifiers, which need not be installed: its types are stand-ins of the documented fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollout import EpisodeBatch
from rollout.errors import InvalidRequestError
from trainer_hooks.verifiers import trace_batch


def node(ids: list[int], sampled: int = 0, logprobs: list[float] | None = None) -> Any:
    """A `MessageNode` whose last `sampled` tokens the model sampled."""
    made = [-float(token) for token in ids[len(ids) - sampled :]] if logprobs is None else logprobs
    return SimpleNamespace(
        token_ids=ids, mask=[False] * (len(ids) - sampled) + [True] * sampled, logprobs=made if sampled else [],
        sampled=sampled > 0,
    )  # fmt: skip


def trace(*branches: list[Any], reward: float = 0.0, error: str | None = None) -> Any:
    return SimpleNamespace(
        branches=[SimpleNamespace(nodes=nodes, trainable=True) for nodes in branches],
        ok=error is None,
        last_error=error and SimpleNamespace(type="ToolError", message=error),
        reward=reward,
        task=SimpleNamespace(data="task"),
    )


def test_traces_become_a_batch_in_which_a_token_that_branches_share_is_marked_once():
    user, shared = node([5, 6]), node([7, 8, 9], sampled=2)
    whole = trace(
        [user, shared, node([10]), node([11, 12], sampled=1)], [user, shared, node([20]), node([21], sampled=1)], reward=2.0
    )  # fmt: skip
    whole.branches.append(SimpleNamespace(nodes=[node([5]), node([30], sampled=1)], trainable=False))
    failed = trace([node([5]), node([6], sampled=1)], error="no such tool")
    batch = trace_batch([whole, failed], policy_version=3, pad_token_id=0, n=2)
    assert isinstance(batch, EpisodeBatch)
    assert batch.episode_ids.tolist() == [0, 0, 1]
    assert batch.input_ids[0].tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert [row[mask].tolist() for row, mask in zip(batch.input_ids, batch.response_mask, strict=True)] == [
        [8, 9, 12], [21], [],
    ]  # fmt: skip
    assert torch.equal(batch.logprobs[batch.response_mask], -batch.input_ids[batch.response_mask].float())
    assert batch.policy_versions[batch.response_mask].tolist() == [3] * 4
    assert batch.rewards.nan_to_num(-1.0).tolist() == [2.0, -1.0]
    assert "no such tool" in str(batch.errors)


@pytest.mark.parametrize(
    "said",
    [node([6, 7], sampled=2, logprobs=[]), SimpleNamespace(token_ids=[], mask=[], logprobs=[], sampled=True)],
    ids=["no log-probs", "no tokens"],
)
def test_a_trace_of_the_evaluation_client_is_refused(said: Any):
    evaluated = trace([node([5]), said])
    with pytest.raises(InvalidRequestError, match=r"traces\[0\].*training client"):
        trace_batch([evaluated], policy_version=0, pad_token_id=0)
