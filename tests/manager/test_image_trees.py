"""Tests of batches with images as prefix trees: log-probs and gradients of the padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout import Advanced, InferenceConfig, RolloutBatch, RolloutManager, SamplingParams
from rollout.errors import UnsupportedModelError
from tests.engines import token_ids
from tests.trees import distance, gradient, tree_logprobs
from tests.vision_models import CONFIGS, IMAGE, NO_MARKS, make_vision_model, picture_prompt
from trainer_hooks.tree import attach

RECURRENT = ["qwen3_5", "qwen3_5_moe"]
SAMPLED = SamplingParams(n=3, max_tokens=6, ignore_eos=True, seed=3, logit_bias=NO_MARKS)


def batch_of(name: str, model: Any, *prompts: Any, **options: Any) -> RolloutBatch:
    config = InferenceConfig(kv_cache_blocks=96, max_requests=16, advanced=Advanced(block_size_tokens=4))
    with RolloutManager(model, None, config) as manager:
        return manager.generate(prompts, SAMPLED.replace(**options))


def padded_logprobs(model: nn.Module, batch: RolloutBatch) -> Tensor:
    logits = model(**batch.model_inputs(), use_cache=False).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(2, batch.input_ids[:, 1:, None])[..., 0]
    return nn.functional.pad(chosen, (1, 0)).where(batch.response_mask, 0.0)


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(RECURRENT)))
def test_gradients_are_those_of_the_padded_batch_and_each_image_is_computed_once(name: str) -> None:
    """Also of prompts that share their first image and not the text behind it, and of those that end, or begin, with one."""
    model = make_vision_model(name).eval()
    several = picture_prompt(name, [2, "a", 3, "b"])
    other = several | {"input_ids": several["input_ids"].clone()}
    other["input_ids"][0, (other["input_ids"][0] == 93).nonzero()[0] + 1] = 7
    bare = picture_prompt(name, [2, "b"])
    bare = bare | {"input_ids": bare["input_ids"][:, :-1], "attention_mask": None}
    last = picture_prompt(name, ["c", 4, "clip", 2] if "qwen" in name else ["c", 4])
    begins = picture_prompt(name, ["a", 3])
    begins = begins | {"input_ids": begins["input_ids"][:, 1:], "attention_mask": None}
    batch = batch_of(name, model, several, token_ids(5), last, other, bare, begins)
    right, expected = gradient(model, batch, padded_logprobs), padded_logprobs(model, batch).detach()
    deltas = getattr(model.model, "rope_deltas", None)
    with attach(model):
        mine, found = gradient(model, batch, tree_logprobs), tree_logprobs(model, batch).detach()
        part = batch.tree(slice(6, 9))
        found_part = part.logprobs_of(model).detach()
    assert distance(mine, right) < 1e-5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found_part, expected[6:9], rtol=0, atol=1e-5)
    assert getattr(model.model, "rope_deltas", None) is deltas
    inputs, packed = batch.model_inputs(), batch.tree()
    assert (batch.input_ids == IMAGE).sum() == 3 * (packed.input_ids == IMAGE).sum()
    shared = (packed.image_inputs["pixel_values"] != 0).sum()
    assert (inputs["pixel_values"] != 0).sum() == 3 * shared
    assert batch.to("cpu").tree().image_inputs.keys() == packed.image_inputs.keys()


def test_a_tree_of_text_rows_of_a_batch_with_images_holds_no_image() -> None:
    name = "qwen3_vl"
    model = make_vision_model(name).eval()
    batch = batch_of(name, model, picture_prompt(name, [2, "a"]), token_ids(5))
    packed = batch.tree(slice(3, 6))
    assert "pixel_values" not in packed.image_inputs
    with attach(model):
        logprobs = packed.logprobs_of(model).detach()
    torch.testing.assert_close(logprobs, padded_logprobs(model, batch)[3:6].detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RECURRENT)
def test_a_vision_model_with_recurrent_layers_is_refused_when_attaching(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        attach(make_vision_model(name))
