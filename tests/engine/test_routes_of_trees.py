"""Tests of expert routes over prefix trees: log-probs and gradients of replayed padded rows."""

from __future__ import annotations

import copy

import pytest
import torch

import rollout
from rollout.engine.training.tree_forward import TreeAttachment
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.tree import pack_tree
from rollout.requests.request import DynamicInferenceRequest
from tests import replay_table
from tests.engines import make_engine, shared_model, token_ids
from tests.rollouts import trainer_logprobs_of
from tests.routers import LowestExperts, batch_of, elsewhere
from tests.zoo.small_models import build


@pytest.fixture(scope="module")
def foreign() -> RolloutBatch:
    """Rows whose routes differ from what the routers would choose."""
    model = shared_model("qwen3_moe")
    return batch_of(*(elsewhere(model, token_ids(3 + seed, seed), token_ids(4, 9), seed) for seed in range(3)))


def twin_of(request: DynamicInferenceRequest, number: int) -> DynamicInferenceRequest:
    """Return a request of the same prompt with the same experts, and another completion."""
    twin = copy.copy(request)
    assert request.routing_indices is not None
    twin.request_id, twin.generated_tokens, twin.generated_log_probs = number, token_ids(2, 9), [-1.0] * 2
    twin.routing_indices = request.routing_indices[: len(twin.prompt_tokens) + 1]
    return twin


WITH_TREES = [name for name in replay_table.MIXTURES if name != "gpt_oss"]
"""Tree attention refuses attention sinks."""


@pytest.mark.parametrize("name", WITH_TREES)
def test_over_a_tree_log_probs_and_gradients_are_those_of_replayed_padded_rows(name: str) -> None:
    model, prompt = build(name), token_ids(6, 1)
    # Rows 0 and 1 have the same prompt and other experts; 2 and 3 have all in common but their completions.
    rows = [elsewhere(model, prompt, token_ids(4, 2 + row), row) for row in range(3)]
    batch = batch_of(*rows, twin_of(rows[2], 3))

    def gradient() -> list[torch.Tensor]:
        found = [weight.grad for weight in model.parameters()]
        model.zero_grad()
        return [each for each in found if each is not None]

    with rollout.replay(batch, model):
        padded = trainer_logprobs_of(model, batch)[batch.response_mask]
    padded.sum().backward()
    right = gradient()
    packed = batch.tree()
    assert len(packed) == 3 * (6 + 4) + 2, "a prompt is shared where its experts are the same"
    with TreeAttachment(model), rollout.replay(packed, model):
        found = packed.logprobs_of(model)[batch.response_mask]
        found.sum().backward()
    torch.testing.assert_close(found, padded, atol=1e-5, rtol=0)
    for ours, theirs in zip(gradient(), right, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    with TreeAttachment(model), torch.no_grad():
        live = packed.logprobs_of(model)[batch.response_mask]
    assert (live - padded).abs().max() > 0.01, "replay has an effect"


def test_a_tree_of_a_rollout_replays_it_under_checkpointing_too() -> None:
    model = copy.deepcopy(shared_model("qwen3_moe"))
    model.gradient_checkpointing_enable()
    engine = make_engine(model, record_routes=True)
    with LowestExperts(model):
        batch = batch_of(*engine.generate([token_ids(9, 1), token_ids(5, 2)], replay_table.DRAWN.replace(n=3)))
    for packed in (*batch.trees(20), batch.tree()):
        with TreeAttachment(model), rollout.replay(packed, model):
            logprobs = batch.logprobs_of(model, packed)
            logprobs.sum().backward()
        mask = batch.response_mask[packed.rows][:, : logprobs.shape[1]]
        wanted = batch.logprobs[packed.rows][:, : logprobs.shape[1]]
        torch.testing.assert_close(logprobs[mask], wanted[mask], atol=1e-5, rtol=0)


def test_a_tree_that_is_not_that_of_the_forward_or_has_rows_without_routes_is_refused(foreign: RolloutBatch) -> None:
    model = shared_model("qwen3_moe")
    forked = batch_of(foreign[0], twin_of(foreign[0], 1))
    with TreeAttachment(model):
        with rollout.replay(foreign.tree(), model), pytest.raises(ValueError, match=r"that are not the .* of the tree"):
            model(**forked.tree().inputs)
        with rollout.replay(forked, model), pytest.raises(ValueError, match=r"by replay\(packed, model\)"):
            model(**forked.tree().inputs)
    spoilt = copy.copy(foreign[1])
    spoilt.routing_indices = None
    with (
        pytest.raises(ValueError, match="row 1 of the batch has tokens without routes"),
        rollout.replay(batch_of(foreign[0], spoilt, foreign[2]).tree(), model),
    ):
        pass
    spoilt.error = "ValueError: broken"
    with rollout.replay(batch_of(foreign[0], spoilt, foreign[2]).tree(), model):
        pass
    with pytest.raises(ValueError, match=r"routed_experts of shape .*: must be \[N, at least 9"):
        pack_tree(
            foreign.input_ids, foreign.attention_mask.bool(), foreign.response_mask, None, foreign.routed_experts[:, :3]
        )
