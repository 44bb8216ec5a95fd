"""Tests of tree attention in the trainer's model: every architecture, and a model that is otherwise as it was."""

from __future__ import annotations

import copy

import pytest
import torch

from rollout.engine.models.attention import configs_of
from rollout.engine.training.tree_forward import TreeAttachment
from rollout.errors import UnsupportedModelError
from rollout.sampling_params import SamplingParams
from tests.models import make_model
from tests.rollouts import make_rollout
from tests.trees import make_batch, padded_logprobs, tree_logprobs

NO_DROPOUT = {"gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}}

NOT_IN_TREES = ("gpt_oss", "qwen3_next", "falcon_h1", "lfm2")


def model_of(name: str, attention: str = "eager"):
    model = make_model(name, **NO_DROPOUT.get(name, {}))
    model.set_attn_implementation(attention)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the only one that takes float64
    return model


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_forward_without_a_tree_is_the_models_own(attention):
    model, batch = model_of("gemma3", attention), make_batch()
    before = padded_logprobs(model, batch)
    with TreeAttachment(model) as attachment:
        assert model.config._attn_implementation == f"rollout_tree_{attention}"
        assert torch.equal(padded_logprobs(model, batch), before)
        ids, mask = batch.input_ids.flip(1), batch.attention_mask.flip(1)
        masked = model(ids, attention_mask=mask).logits
        greedy = model.generate(ids[:1], attention_mask=mask[:1], do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert {config._attn_implementation for config in configs_of(model)} == {attention}
    assert torch.equal(model(ids, attention_mask=mask).logits, masked)
    assert torch.equal(
        model.generate(ids[:1], attention_mask=mask[:1], do_sample=False, max_new_tokens=4, pad_token_id=0), greedy
    )
    attachment.detach()


def test_the_rollout_samples_as_before_and_keeps_its_fused_forward():
    model = make_model("qwen3")
    outcomes = []
    for attached in (False, True):
        attachment = TreeAttachment(model) if attached else None
        with make_rollout(model) as rollout:
            batch = rollout.generate([[5, 6, 7]], SamplingParams(n=2, max_tokens=6, seed=3), progress=False)
            outcomes.append((batch.input_ids.tolist(), rollout.engine.controller.runner.fused is not None))
        if attachment is not None:
            rollout_logprobs = tree_logprobs(model, batch)
            assert (rollout_logprobs - batch.logprobs).abs().max() < 1e-4
            attachment.detach()
    assert outcomes[0] == outcomes[1]


def test_what_cannot_be_is_refused_by_name():
    batch, model = make_batch(), make_model("qwen2")
    with pytest.raises(UnsupportedModelError, match="not a wrapper"):
        TreeAttachment(torch.nn.DataParallel(model))
    with TreeAttachment(model):
        with pytest.raises(ValueError, match="attached to this model already"):
            TreeAttachment(model)
        other = copy.deepcopy(model)
        with pytest.raises(UnsupportedModelError, match=r"Qwen2Attention got a prefix tree.*copy of"):
            tree_logprobs(other, batch)
        with TreeAttachment(other):
            assert torch.equal(tree_logprobs(other, batch), tree_logprobs(model, batch))
        assert other.config._attn_implementation == "sdpa"
        packed = batch.tree()
        with pytest.raises(ValueError, match=r"do not fit a tree of \d+ tokens: pass all of packed.inputs"):
            model(
                **packed.inputs | {"input_ids": packed.input_ids[:, :-1], "position_ids": packed.position_ids[:, :-1]}
            )
        model.model.layers[0].self_attn.attention_dropout = 0.1
        with pytest.raises(UnsupportedModelError, match=r"attention dropout of 0\.1"):
            tree_logprobs(model, batch)
    with pytest.raises(RuntimeError):
        tree_logprobs(model, batch)  # detached: the model's own attention takes no tree


def test_a_load_balancing_loss_over_a_tree_is_refused_by_name():
    model = make_model("qwen3_moe")
    with TreeAttachment(model), pytest.raises(UnsupportedModelError, match="output_router_logits to False"):
        model(**make_batch().tree().inputs, output_router_logits=True)


@pytest.mark.parametrize("name", NOT_IN_TREES)
def test_a_model_that_needs_more_than_a_window_is_refused_when_attaching(name):
    model = make_model(name)
    refused = r"(attention sinks|recurrent layers).*train it on padded rows"
    with pytest.raises(UnsupportedModelError, match=refused):
        TreeAttachment(model)
    assert not model.config._attn_implementation.startswith("rollout")
