"""Tests of attention masks: sliding windows read from transformers' mask functions, other masks described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)
from transformers.models.qwen3 import modeling_qwen3

from rollout.engine.models.attention_masks import MaskFunction, OtherMask, window_of
from rollout.errors import UnsupportedModelError
from tests.engines import assert_greedy, finish, greedily, make_engine, token_ids
from tests.models import SMALL, make_model, spread_logits

CPU = torch.device("cpu")


def in_chunks(size: int) -> MaskFunction:
    return chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.long))


@pytest.mark.parametrize(
    ("function", "length", "window"),
    [
        (causal_mask_function, 1, None),
        (causal_mask_function, 70_000, None),
        (sliding_window_causal_mask_function(1), 300, 1),
        (sliding_window_causal_mask_function(24), 300, 24),
        (sliding_window_causal_mask_function(299), 300, 299),
        (sliding_window_causal_mask_function(4096), 131_072, 4096),
        (sliding_window_causal_mask_function(300), 300, None),
        (and_masks(sliding_window_causal_mask_function(24), sliding_window_causal_mask_function(90)), 300, 24),
        (in_chunks(300), 300, None),
    ],
)
def test_the_window_of_a_mask_is_found(function: MaskFunction, length: int, window: int | None) -> None:
    assert window_of(function, length, CPU) == window


def every_other(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((query - key) % 2 == 0)


def first_ones_too(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (key <= query) & ((key > query - 24) | (key < 4))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (bidirectional_mask_function, "position 0 sees position 1,"),
        (chunked_causal_mask_function(16, torch.full((1,), 5)), "neither causal attention nor a window"),
        (in_chunks(100), "neither causal attention nor a window"),
        (or_masks(causal_mask_function, blockwise_overlay(torch.ones(1, 300, dtype=torch.long))), "sees position 1,"),
        (or_masks(causal_mask_function, blockwise_overlay(torch.ones(1, 4, dtype=torch.long))),
         r"does not take position 299 \(IndexError"),
        (every_other, "does not see position"),
        (first_ones_too, "neither causal attention nor a window"),
    ],
)  # fmt: skip
def test_a_mask_that_is_none_of_a_window_is_described(function: MaskFunction, message: str) -> None:
    with pytest.raises(OtherMask, match=message):
        window_of(function, 300, CPU)


# --- models ------------------------------------------------------------------------------------------------------------

MOE = SMALL | {"num_experts_per_tok": 2, "sliding_window": 24}


def phimoe() -> hf.PreTrainedModel:
    return hf.PhimoeForCausalLM(hf.PhimoeConfig(**MOE, num_local_experts=4))


def qwen2_moe() -> hf.PreTrainedModel:
    return hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(
            **MOE, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32, use_sliding_window=True,
            max_window_layers=1,
        )
    )  # fmt: skip


def stablelm() -> hf.PreTrainedModel:
    return hf.StableLmForCausalLM(hf.StableLmConfig(**SMALL | {"hidden_size": 64}))


def nemotron() -> hf.PreTrainedModel:
    return hf.NemotronForCausalLM(hf.NemotronConfig(**SMALL))


@pytest.mark.parametrize("make", [phimoe, qwen2_moe, stablelm, nemotron])
def test_what_only_the_mask_knows_and_what_layers_drop_is_honoured(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = make()
    spread_logits(model)
    engine = make_engine(model.train(), max_tokens_per_step=13, verify_model=True)
    for length in (3, 20, 61):
        engine.add_request(token_ids(length, length), greedily(8))
    for request in finish(engine).values():
        assert_greedy(model, request)


def test_a_window_at_the_length_of_the_longest_sequence_is_none() -> None:
    torch.manual_seed(0)
    assert make_engine(phimoe(), max_sequence_length=24).controller.layout.mask_windows == {}
    assert set(make_engine(phimoe(), max_sequence_length=25).controller.layout.mask_windows.values()) == {24}


def test_a_mask_that_no_kernel_computes_is_refused_with_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    own = modeling_qwen3.create_causal_mask
    monkeypatch.setattr(
        modeling_qwen3, "create_causal_mask", lambda **inputs: own(**inputs, and_mask_function=every_other)
    )
    with pytest.raises(
        UnsupportedModelError, match=r"'model\.layers\.0\.self_attn': position \d+ does not see position \d+"
    ):
        make_engine(model)


def test_what_a_flash_attention_is_handed_is_what_it_does() -> None:
    torch.manual_seed(0)
    model = phimoe()
    model.config._attn_implementation_internal = "flash_attention_2"
    assert {call.window for call in make_engine(model).controller.layout.calls} == {None}


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = make_model("qwen3")
    with pytest.raises(UnsupportedModelError, match=r"embed_tokens\.weight is on the meta device"):
        make_engine(model)
