"""Tests of the rates that floors of benchmarks follow from."""

from __future__ import annotations

import pytest
import torch

from rollout.engine.kernels import cpu_library
from tests.benchmarks import rates
from tests.benchmarks.rates import Rates, Weights, products
from tests.engines import shared_model
from tests.models import VOCAB, make_model

needs_compiler = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_of_products_is_that_of_our_kernels_where_torch_is_slower(dtype, monkeypatch):
    torch_square, torch_flat, ours = products(dtype, torch.device("cpu"), 64)
    assert (torch_square[0], torch_flat[0], ours[0]) == (2 * 64**3, 64**3, 64**3)
    torch.testing.assert_close(ours[1](), torch_flat[1](), atol=0.05, rtol=0.02)
    seconds = iter([1.0] * 10 + [8.0] * 8 + [1.0] * 4)
    monkeypatch.setattr(rates, "SIDE", 64)
    monkeypatch.setattr(rates, "seconds", lambda run, device: next(seconds))
    assert Rates.measure(dtype, torch.device("cpu")).matmul == 64**3


def test_of_a_mixture_of_experts_only_the_chosen_ones_count_and_a_tied_embedding_once():
    mixture = Weights.of(shared_model("qwen3_moe"))
    experts = sum(p.numel() for name, p in shared_model("qwen3_moe").named_parameters() if ".experts." in name)
    embedding = VOCAB * 48
    assert experts
    assert mixture.multiplied == mixture.parameters - experts // 2 - embedding
    tied = Weights.of(make_model("qwen3", tie_word_embeddings=True))
    assert tied.multiplied == tied.parameters
