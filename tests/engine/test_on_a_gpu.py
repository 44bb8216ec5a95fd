"""Tests of whole engines on a GPU: dtypes, depth, autocast, adapters, prefixes, mixed steps, pressure."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.engine.engine import DynamicInferenceEngine
from rollout.sampling_params import SamplingParams
from tests.engines import (
    assert_greedy,
    finish,
    greedily,
    make_engine,
    pass_suspended,
    suspended,
    token_ids,
)
from tests.models import make_model, scale_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def deep_model(dtype: torch.dtype, layers: int = 28) -> Any:
    """Return a model of Qwen3 0.6B's depth, head size and vocabulary, a quarter as wide."""
    config = Qwen3Config(hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=128, vocab_size=151936)  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, dtype=dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(5)
    model.generation_config.eos_token_id = None
    return model


def engine_of(model: Any, **options: Any) -> DynamicInferenceEngine:
    sizes = {"block_size_tokens": 16, "kv_cache_blocks": 512, "max_requests": 32, "max_tokens_per_step": 256}
    return make_engine(model, **(sizes | options))


def captured(engine: DynamicInferenceEngine) -> int:
    graphs = engine.controller.runner.graphs
    assert graphs is not None
    assert not graphs.why_not
    return len(graphs.captured)


def before_and_after_an_update(where: str, *, graphs: bool) -> list[torch.Tensor]:
    """Log-probs of greedy samples of float32 weights under autocast, entered in one of three ways."""
    model = deep_model(torch.float32, layers=4)
    if where == "inside":
        model.forward = torch.autocast("cuda", torch.bfloat16)(model.forward)
    options = {"autocast_dtype": "bfloat16"} if where == "option" else {}
    values = []
    with torch.autocast("cuda", torch.bfloat16, enabled=where == "around"):
        engine = engine_of(model, cuda_graphs=graphs, **options)
        for _ in range(2):
            (request,) = engine.generate([token_ids(20, 1)], greedily(16))
            values.append(torch.tensor(request.generated_log_probs))
            scale_weights(model, 1.2)
            engine.weights_updated()
        assert not graphs or captured(engine)
    return values


@pytest.mark.parametrize("where", ["around", "option", "inside"])
def test_graphs_run_under_autocast_and_follow_the_weights(where: str) -> None:
    graphed = before_and_after_an_update(where, graphs=True)
    eager = before_and_after_an_update(where, graphs=False)
    assert (graphed[0] - eager[0]).abs().max() < 0.1
    assert (graphed[1] - eager[1]).abs().max() < 0.1
    assert (eager[1] - eager[0]).abs().max() > 0.2, "the update is large enough to be seen"


@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen3"])
def test_windows_prefixes_mixed_steps_and_preemption_give_the_tokens_of_the_module(name: str) -> None:
    engine = engine_of(make_model(name).cuda(), kv_cache_blocks=24, max_tokens_per_step=48, max_requests=8)
    common = token_ids(300, 9)
    for seed in range(4):
        engine.add_request([*common, *token_ids(5 + seed, seed)], greedily(8))
        engine.step()
    done = finish(engine)
    assert len(done) == 4
    for request in done.values():
        assert_greedy(name, request, tolerance=1e-3)


def test_a_decode_step_never_waits_for_the_device_but_for_its_tokens() -> None:
    engine = engine_of(deep_model(torch.bfloat16, layers=2))
    engine.add_request(token_ids(20, 1), SamplingParams(max_tokens=64, ignore_eos=True))
    for _ in range(4):
        engine.step()
    runner, waits = engine.controller.runner, []
    forward = runner.forward

    def watched(*given: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits.append(1)

    runner.forward = watched  # type: ignore[method-assign]
    for _ in range(4):
        engine.step()
    assert len(waits) == 4
    assert captured(engine)


@pytest.mark.whole_device
def test_a_capture_without_memory_costs_that_size_until_memory_is_back() -> None:
    model = deep_model(torch.bfloat16, layers=2)
    engine = engine_of(model)
    torch.cuda.empty_cache()
    rest = torch.empty(torch.cuda.mem_get_info()[0] - 2**26, dtype=torch.uint8, device="cuda")
    engine.add_request(token_ids(20, 1), greedily(40))
    for _ in range(4):
        engine.step()
    del rest
    torch.cuda.empty_cache()
    pass_suspended(engine, "offload")
    (request,) = finish(engine).values()
    assert request.error is None
    assert captured(engine)


def test_weights_written_on_another_stream_are_waited_for() -> None:
    model = make_model("qwen3").cuda()
    reference = make_model("qwen3")
    engine = engine_of(model)
    engine.generate([token_ids(9, 1)], greedily(4))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        scale_weights(model, 1.3)
        engine.weights_updated()
    (request,) = engine.generate([token_ids(9, 1)], greedily(8))
    scale_weights(reference, 1.3)
    assert_greedy(reference, request, tolerance=1e-2)


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_a_suspend_and_a_resume_on_another_stream_keep_the_order_of_the_steps(mode: str) -> None:
    engine = engine_of(make_model("qwen3").cuda())
    for seed in range(3):
        engine.add_request(token_ids(9 + seed, seed), greedily(12))
    for _ in range(3):
        engine.step()
    side = torch.cuda.Stream()
    for _ in range(3):
        # What a step still does when the next call comes from another stream.
        torch.cuda._sleep(10**8)
        engine.step()
        with torch.cuda.stream(side), suspended(engine, mode):
            torch.cuda._sleep(10**8)
    for request in finish(engine).values():
        assert_greedy("qwen3", request, tolerance=1e-3)


def test_an_engine_steps_beside_a_thread_that_uses_and_waits_for_the_device() -> None:
    engine = engine_of(make_model("qwen3").cuda(), verify_model=False)
    over = threading.Event()
    failed: list[BaseException] = []

    def train() -> None:
        layer = torch.nn.Linear(512, 512, device="cuda")
        optimizer = torch.optim.AdamW(layer.parameters())
        try:
            while not over.is_set():
                layer(torch.rand(64, 512, device="cuda")).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                try:
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
                except RuntimeError as exc:
                    # CUDA refuses to wait for a device while any thread captures on it.
                    if "captur" not in str(exc):
                        raise
        except BaseException as exc:  # noqa: BLE001 - to be seen by the test
            failed.append(exc)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        requests = engine.generate([token_ids(9 + seed, seed) for seed in range(6)], greedily(20))
    finally:
        over.set()
        thread.join(60)
    assert not failed
    for request in requests:
        assert_greedy("qwen3", request, tolerance=1e-3)
    engine.pause()
    engine.suspend("offload")
    engine.resume()
    engine.unpause()
    engine.generate([token_ids(9)], greedily(20))
    assert captured(engine), "after a suspend, the thread being gone"
