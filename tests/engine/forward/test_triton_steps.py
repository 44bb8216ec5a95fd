"""Tests of engines whose captured decode steps run on the Triton kernels: against the module's forward and `generate`.

They run in Triton's interpreter, in a process of its own (see tests/engine/test_in_tritons_interpreter.py), and on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward.trial_forwards import paged_logits
from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.graphs.decode_step import TritonDecode
from rollout.engine.kernels.triton_paged import load
from tests.capturable import Rerun
from tests.engines import (
    assert_greedy,
    finish,
    greedily,
    in_one_piece,
    make_engine,
    pass_suspended,
    steps,
    token_ids,
)
from tests.interpreter import INTERPRETED, on_the_device
from tests.models import make_model, scale_weights

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NAMES = ["qwen3", "llama", "gemma2", "mistral"]


def small(name: str, **changes: Any) -> Any:
    """A model whose heads the kernels take; interpreted programs are slow, so it has few layers and heads there."""
    few: dict[str, Any] = {"num_attention_heads": 3}
    if name != "gpt2":
        few |= {"num_key_value_heads": 1, "head_dim": 16}
    if INTERPRETED:
        few["num_hidden_layers"] = 2 if name == "gemma2" else 1
    return make_model(name, **(few | changes)).to(DEVICE)


def engine_of(model: Any, **options: Any) -> DynamicInferenceEngine:
    """An engine on the Triton kernels, captured decode steps included."""
    options = {"block_size_tokens": 8, "max_tokens_per_step": 16, "max_requests": 2, "fused_forward": False} | options
    engine = make_engine(model, **options)
    if INTERPRETED:
        runner, cache = engine.controller.runner, engine.cache
        kernels, runner.module.paged = load(DEVICE), load(DEVICE)
        assert kernels is not None
        decode = TritonDecode(kernels, cache)
        runner.graphs = GraphedDecode(runner.model, runner.layout, cache, 2, Rerun(), decode)
    return engine


def captured(engine: DynamicInferenceEngine) -> list[int]:
    """Rows of the graphs."""
    graphs = engine.controller.runner.graphs
    assert graphs is not None
    assert not graphs.why_not
    return graphs.captured


@on_the_device
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_eager_and_captured_steps_are_the_modules(name) -> None:
    engine, tokens = engine_of(small(name)), token_ids(11, 1)
    # A prompt, a chunk that goes on from it, and a captured step.
    logits = paged_logits(engine.controller.runner, tokens, 6, 10)
    torch.testing.assert_close(logits, engine.controller.runner.module.own_logits(tokens), atol=1e-5, rtol=1e-4)
    assert captured(engine) == [1, 2]


@on_the_device
@pytest.mark.skipif(INTERPRETED, reason="too slow where programs are interpreted")
@pytest.mark.parametrize("name", NAMES)
def test_eager_and_captured_steps_give_the_tokens_of_generate(name) -> None:
    model = small(name)
    engine = engine_of(model)
    for seed in range(2):
        engine.add_request(token_ids(4 + 15 * seed, seed), greedily(40))
    done = finish(engine)
    assert captured(engine) == [1, 2]
    for request in done.values():
        assert_greedy(model, request, tolerance=1e-3)


@on_the_device
def test_heads_that_the_attention_kernels_do_not_take_run_eagerly_with_plain_attention() -> None:
    model, tokens = make_model("gpt2", num_attention_heads=6, n_layer=1).to(DEVICE), token_ids(6, 1)
    engine = engine_of(model)
    for _ in range(2):
        logits = paged_logits(engine.controller.runner, tokens, 5)
        torch.testing.assert_close(logits, engine.controller.runner.module.own_logits(tokens), atol=1e-5, rtol=1e-4)
    graphs = engine.controller.runner.graphs
    assert graphs is None or not graphs.captured


@on_the_device
def test_weights_changed_in_place_are_read_by_the_graphs_there_are() -> None:
    model = small("llama")
    engine = engine_of(model)
    engine.generate([token_ids(3, 1)], greedily(3))
    graphs = engine.controller.runner.graphs
    before = dict(graphs._graphs)
    scale_weights(model, 1.2)
    engine.weights_updated()
    (request,) = engine.generate([token_ids(3, 1)], greedily(3))
    assert all(graphs._graphs[rows] is graph for rows, graph in before.items())
    assert_greedy(model, request, tolerance=1e-5 if INTERPRETED else 1e-3)


@on_the_device
@pytest.mark.parametrize("name", ["qwen3"] if INTERPRETED else ["qwen3", "gemma2"])
def test_under_autocast_logits_are_those_of_the_module_under_autocast(name) -> None:
    # The interpreter multiplies the bits of bfloat16 as integers.
    model, dtype = small(name), torch.float16 if INTERPRETED else torch.bfloat16
    tokens = token_ids(6, 1)
    with torch.autocast(DEVICE.type, dtype):
        runner = engine_of(model).controller.runner
        found, expected = paged_logits(runner, tokens, 3, 5), runner.module.own_logits(tokens)
    scale, bound = float(expected.abs().max()), 5e-3 if INTERPRETED else 5e-2
    assert float((found - expected).abs().max()) < scale * bound


@pytest.mark.skipif(not INTERPRETED, reason="runs in Triton's interpreter")
def test_the_kernels_of_graphs_read_a_pool_that_has_moved() -> None:
    @in_one_piece
    def elsewhere(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        pools.append(torch.zeros(numel, dtype=dtype))
        return pools[-1]

    pools: list[torch.Tensor] = []
    model = small("qwen3")
    engine = engine_of(model, allocate=elsewhere)
    for seed in range(2):
        engine.add_request(token_ids(7 + seed, seed), greedily(4))
    steps(engine, 2)
    pass_suspended(engine, "offload")
    pools[0].fill_(torch.nan)
    done = finish(engine)
    assert len(pools) == 2
    assert len(done) == 2
    for request in done.values():
        assert_greedy(model, request, tolerance=1e-4)
