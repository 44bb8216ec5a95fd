"""Tests of the comparison with the model's own forward that an engine begins with, where a router's choice is a tie."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.fused import fused_binding, fused_parts
from rollout.engine.kernels import cpu_library
from rollout.engine.kernels.cpu_forward import Layer
from rollout.errors import UnsupportedModelError
from tests.engine.fused.test_fused_families import EXPERTS, trained
from tests.engine.fused.test_fused_forward import fused
from tests.engines import make_engine

needs_compiler = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")
VERIFIED = 12
"""Tokens that an engine verifies its model with."""


def mixture(name: str, *, tied: bool) -> Any:
    """A mixture in bfloat16 whose experts differ a lot, `tied`: with equal scores."""
    model = trained(name)
    with torch.no_grad():
        for module in model.modules():
            if tied and type(module).__name__.endswith("TopKRouter"):
                module.weight.copy_(module.weight[:1].expand_as(module.weight))
            if type(module).__name__.endswith("Experts"):
                module.gate_up_proj.mul_(8)
                module.down_proj.mul_(16)
    return model.to(torch.bfloat16)


def otherwise(weight: torch.Tensor) -> torch.Tensor:
    """Weights of a router in which ties fall otherwise, by a rounding."""
    changed = weight.detach().clone()
    changed[0::2] *= 1 - torch.finfo(weight.dtype).eps
    changed[1::2] *= 1 + torch.finfo(weight.dtype).eps
    return changed


class Tipped(nn.Module):
    """A router whose ties fall otherwise in chunks than in whole sequences."""

    def __init__(self, router: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.whole, self.part = router, copy.deepcopy(router)
        self.part.weight.data = change(router.weight)

    def forward(self, hidden: torch.Tensor) -> Any:
        rows = hidden.reshape(-1, hidden.shape[-1])
        return (self.whole if len(rows) == VERIFIED else self.part)(rows)


def tip_routers(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    for layer in model.model.layers:
        layer.mlp.gate = Tipped(layer.mlp.gate, change)
    return model


@pytest.mark.parametrize("name", ["mixtral", "qwen3_next"])
def test_a_mixture_is_not_refused_because_rounding_tips_a_choice(name: str) -> None:
    model = tip_routers(mixture(name, tied=True), otherwise)
    engine = make_engine(model, verify_model=True)
    assert not fused(engine)
    # The engine compares along the same routes: without that the two forwards are far apart.
    tokens = [(7 * position + 3) % engine.controller.layout.vocab_size for position in range(VERIFIED)]
    whole = engine.controller.runner.module.own_logits(tokens)
    for layer in model.model.layers:
        layer.mlp.gate.whole = layer.mlp.gate.part
    assert (engine.controller.runner.module.own_logits(tokens) - whole).abs().max() > 0.1 * whole.abs().max()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_next"])
def test_a_mixture_whose_chunks_take_clearly_worse_experts_is_refused(name: str) -> None:
    model = tip_routers(mixture(name, tied=False), lambda weight: weight.roll(1, 0))
    with pytest.raises(UnsupportedModelError, match="12 tokens in chunks"):
        make_engine(model, verify_model=True)


# --- the fused forward ------------------------------------------------------------------------------------------------


def verified(model: Any, caplog: pytest.LogCaptureFixture) -> DynamicInferenceEngine:
    with caplog.at_level(logging.WARNING):
        return make_engine(model, verify_model=True)


@needs_compiler
@pytest.mark.parametrize("name", EXPERTS)
def test_the_fused_forward_is_kept_where_rounding_tips_a_choice(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, held = fused_parts.Parts.experts, []

    def experts(self: fused_parts.Parts, block: Any) -> Any:
        found = own(self, block)
        held.append(otherwise(block.gate.weight))
        found.router = held[-1].data_ptr()
        return found

    monkeypatch.setattr(fused_parts.Parts, "experts", experts)
    engine = verified(mixture(name, tied=True), caplog)
    assert fused(engine)
    assert "differs" not in caplog.text


def another_router(layers: Any) -> None:
    layers[0].experts.router, layers[1].experts.router = layers[1].experts.router, layers[0].experts.router


def another_norm(layers: Any) -> None:
    layers[0].before_mlp, layers[1].before_mlp = copied(layers[1].before_mlp), copied(layers[0].before_mlp)


def another_weight(layers: Any) -> None:
    layers[0].experts.down, layers[1].experts.down = layers[1].experts.down, layers[0].experts.down


def copied(part: Any) -> Any:
    return type(part).from_buffer_copy(part)


@needs_compiler
@pytest.mark.parametrize("damage", [another_router, another_norm, another_weight])
def test_a_fused_forward_bound_to_a_wrong_parameter_is_not_used(
    damage: Callable[[Any], None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fused_binding.Bound._bind

    def bind(self: Any, *args: Any) -> None:
        own(self, *args)
        assert isinstance(self._layers[0], Layer)
        damage(self._layers)

    monkeypatch.setattr(fused_binding.Bound, "_bind", bind)
    engine = verified(trained("qwen3_next").to(torch.bfloat16), caplog)
    assert not fused(engine)
    assert "the fused forward differs" in caplog.text
