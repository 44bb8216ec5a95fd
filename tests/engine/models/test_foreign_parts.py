"""Tests of models whose attention or positions are not transformers' own: they are compared at full length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from rollout.engine.models.model_support import inspect_model
from rollout.engine.models.originals import foreign_part
from rollout.errors import UnsupportedModelError
from tests.engines import assert_greedy, greedily, make_engine, token_ids
from tests.models import CONFIGS, make_model

Change = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Query [B, H, P, D] and causal scores mask [P, P] → those that act."""


def window(query: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in a window of 100 that nothing tells of."""
    return query, seen.triu(-99)


def log_n(query: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Queries beyond 128 positions scaled by the logarithm of their position."""
    positions = torch.arange(1, query.shape[2] + 1)
    return query * (positions.log() / math.log(128)).clamp(min=1)[:, None], seen


def plain(query: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention."""
    return query, seen


def own(change: Change) -> Callable[..., tuple[Tensor, None]]:
    """An attention function of a user's own."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        query, seen = change(query, torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril())
        out = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=options["scaling"])
        return out.transpose(1, 2), None

    return attend


class GrowingRotary(nn.Module):
    """Dynamic NTK: the base grows with the longest position of a forward, once that has passed 100; or it jumps there."""

    def __init__(self, dim: int, *, jumps: bool) -> None:
        super().__init__()
        self.dim, self.jumps = dim, jumps

    def forward(self, hidden: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        longest = int(position_ids.max())
        base = 1e4 * max(1.0, 4.0 * (longest > 100) if self.jumps else longest / 100) ** 2
        inverse = base ** -(torch.arange(0, self.dim, 2) / self.dim)
        angles = (position_ids[..., None] * inverse).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


@pytest.fixture
def registered() -> Iterator[Callable[[Any, Callable[..., Any]], Any]]:
    """Gives a model an attention function under a name of its own."""

    def register(model: Any, function: Callable[..., Any]) -> Any:
        AttentionInterface.register("users_own", function)
        AttentionMaskInterface.register("users_own", sdpa_mask)
        model.set_attn_implementation("users_own")
        return model

    yield register
    AttentionInterface._global_mapping.pop("users_own", None)
    AttentionMaskInterface._global_mapping.pop("users_own", None)


def build(model: Any, length: int = 320) -> Any:
    return make_engine(model, max_sequence_length=length, kv_cache_blocks=256, verify_model=True)


@pytest.mark.parametrize("change", [window, log_n])
def test_attention_of_a_users_own_that_differs_far_into_a_sequence_is_refused(registered: Any, change: Change) -> None:
    model = registered(make_model("qwen3", max_position_embeddings=512), own(change))
    with pytest.raises(UnsupportedModelError, match=r"'users_own' is not transformers' own.*320 tokens"):
        build(model)
    # Up to where it is the same, it is served.
    engine = build(model, 48)
    (request,) = engine.generate([token_ids(30)], greedily(8))
    assert_greedy(model, request)


def test_attention_of_a_users_own_that_is_causal_is_served(registered: Any) -> None:
    model = registered(make_model("qwen3", max_position_embeddings=512), own(plain))
    assert foreign_part(model, inspect_model(model).layer_of) == "attention 'users_own'"
    (request,) = build(model).generate([token_ids(200)], greedily(4))
    assert_greedy(model, request)


@pytest.mark.parametrize("jumps", [False, True])
def test_a_rotary_embedding_that_grows_with_the_sequence_is_refused(jumps: bool) -> None:
    model = make_model("qwen3", max_position_embeddings=512)
    model.model.rotary_emb = GrowingRotary(16, jumps=jumps)
    with pytest.raises(UnsupportedModelError, match=r"GrowingRotary \(model.rotary_emb\) is not transformers' own"):
        build(model)
    build(model, 64)


@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers_have_no_foreign_part(name: str) -> None:
    model = make_model(name)
    assert foreign_part(model, inspect_model(model).layer_of) is None


def test_a_function_of_the_modeling_file_that_was_replaced_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3")
    layers = inspect_model(model).layer_of
    monkeypatch.setattr(
        "transformers.models.qwen3.modeling_qwen3.apply_rotary_pos_emb", lambda query, key, *_: (query, key)
    )
    assert foreign_part(model, layers) == "Qwen3Attention (model.layers.0.self_attn)"
