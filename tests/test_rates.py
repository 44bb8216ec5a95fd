"""Tests of the rates that floors of benchmarks follow from."""

from __future__ import annotations

import pytest
import torch

from rollout.engine.kernels import cpu_library
from tests.benchmarks import rates
from tests.benchmarks.rates import Rates, Weights, products, reads
from tests.engines import shared_model
from tests.models import VOCAB, make_model

needs_compiler = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_of_products_is_that_of_our_kernels_where_torch_is_slower(dtype, monkeypatch):
    torch_square, torch_flat, ours = products(dtype, torch.device("cpu"), 64)
    assert (torch_square[0], torch_flat[0], ours[0]) == (2 * 64**3, 64**3, 64**3)
    torch.testing.assert_close(ours[1](), torch_flat[1](), atol=0.05, rtol=0.02)
    seconds = iter([1.0] * 30 + [8.0] * 8 + [1.0] * 4)
    monkeypatch.setattr(rates, "SIDE", 64)
    monkeypatch.setattr(rates, "seconds", lambda run, device: next(seconds))
    assert Rates.measure(dtype, torch.device("cpu"), 2**16).matmul == 64**3


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bandwidth_is_that_of_the_fastest_way_to_read_as_many_bytes_as_the_weights(dtype, monkeypatch):
    ways = reads(dtype, torch.device("cpu"), 2**16)
    assert [size for size, _ in ways] == [2**16] * 3
    torch.testing.assert_close(ways[2][1](), ways[1][1]())
    seconds = iter([8.0] * 20 + [4.0] * 9 + [2.0] + [1.0] * 12)
    monkeypatch.setattr(rates, "SIDE", 64)
    monkeypatch.setattr(rates, "seconds", lambda run, device: next(seconds))
    assert Rates.measure(dtype, torch.device("cpu"), 2**16).bandwidth == 2**15


def test_of_a_mixture_of_experts_only_the_chosen_ones_count_and_a_tied_embedding_once():
    mixture = Weights.of(shared_model("qwen3_moe"))
    experts = sum(p.numel() for name, p in shared_model("qwen3_moe").named_parameters() if ".experts." in name)
    embedding = VOCAB * 48
    assert experts
    assert mixture.multiplied == mixture.parameters - experts // 2 - embedding
    tied = Weights.of(make_model("qwen3", tie_word_embeddings=True))
    assert tied.multiplied == tied.parameters
