"""Tests of the Triton forward: its kernels against plain torch, whole engines against `generate`, what it refuses.

They run in Triton's interpreter, in a process of its own (see tests/engine/kernels/test_triton_paged.py), and on a GPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward import chunk_state, cuda_graphs, families, prefix_sharing
from rollout.engine.forward.cuda_forward import FAMILIES, CudaForward
from rollout.engine.forward.cuda_graphs import GraphedDecode
from rollout.engine.forward.decode_kernels import TritonDecode
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.forward.trial_forwards import paged_logits
from rollout.engine.kernels import decode_parts, triton_layers
from rollout.engine.kernels.triton_layers import HeadNorms, LayerSizes, Place, rms_norm, rotated
from rollout.engine.kernels.triton_paged import load
from rollout.engine.memory.arena import PoolMemory
from rollout.engine.memory.block_pool import zeros
from rollout.engine.weights.autocast_copies import AutocastCopies
from tests.engines import assert_greedy, finish, greedily, make_engine, token_ids
from tests.interpreter import assert_holds_interpreted
from tests.models import make_model

try:
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    triton = None

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore:TRITON_DEFAULT_FP_FUSION")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
"""Triton's interpreter cuts bits of bfloat16 off instead of rounding."""
NAMES = ["qwen3", "llama", "qwen2", "mistral"]


def on_the_device(function: Any) -> Any:
    if INTERPRETED:
        return function
    function = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(function)
    return pytest.mark.gpu(function)


class Rerun:
    """A device whose records are the work itself."""

    graph_bytes = 0

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        work()
        return lambda: self._replay(work)

    def forget(self) -> None:
        pass

    def _replay(self, work: Callable[[], None]) -> None:
        self.replays += 1
        work()


def small(name: str, **changes: Any) -> Any:
    """A model whose heads the kernels take; interpreted programs are slow, so it has few layers and heads there."""
    few = {"num_hidden_layers": 1, "num_key_value_heads": 1, "num_attention_heads": 3} if INTERPRETED else {}
    return make_model(name, head_dim=16, **(few | changes)).to(DEVICE)


def engine_of(model: Any, *, chunked: bool = False, **options: Any) -> DynamicInferenceEngine:
    """An engine on the Triton kernels, captured decode steps included, and steps with chunks if `chunked`."""
    engine = make_engine(model, block_size_tokens=8, max_tokens_per_step=16, max_requests=2, **options)
    if INTERPRETED:
        runner, cache = engine.controller.runner, engine.cache
        kernels, runner.paged = load(DEVICE), load(DEVICE)
        assert kernels is not None
        decode = TritonDecode(kernels, cache)
        runner.runs = None
        runner.copies = AutocastCopies(runner.model, DEVICE, PoolMemory(zeros), lambda: math.inf)
        runner.fused = CudaForward(runner.model, runner.layout, cache, runner._attention, decode, runner.copies)
        runner.graphs = GraphedDecode(
            runner.model, runner.layout, cache, 2, Rerun(), decode, runner.fused, chunked=chunked, copies=runner.copies
        )
    return engine


def runner_of(engine: DynamicInferenceEngine) -> ModelRunner:
    return engine.controller.runner


def why_not(engine: DynamicInferenceEngine) -> str:
    """Why a step would not run the Triton forward now; empty: it would."""
    runner = runner_of(engine)
    with engine.installation:
        assert runner.fused is not None
        return "" if runner.fused.ready(runner.installation.module_epoch) else runner.fused.why_not


def captured(engine: DynamicInferenceEngine) -> list[bool]:
    """Of each graph: whether the Triton forward was captured."""
    graphs = runner_of(engine).graphs
    assert graphs is not None
    assert not graphs.why_not
    return [size.fused is not None for size in graphs._graphs]


# --- kernels ----------------------------------------------------------------------------------------------------------


@on_the_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "normed"), [(6, 2, 16, False), (5, 1, 24, True)])
def test_kernels_give_what_plain_torch_does(heads, kv_heads, dim, normed, dtype) -> None:
    sizes = LayerSizes(48, 1100, heads, kv_heads, dim, normed, dtype, DEVICE)
    assert triton_layers.failure(sizes) is None


@on_the_device
def test_a_kernel_that_differs_or_raises_is_named(monkeypatch) -> None:
    sizes = LayerSizes(40, 96, 2, 1, 16, False, torch.float32, DEVICE)
    kernels = type(triton_layers.load())
    monkeypatch.setattr(kernels, "silu_times", lambda self, gate, up: gate * up)
    assert "silu_times differs from plain torch by" in str(triton_layers.failure(sizes))
    monkeypatch.setattr(kernels, "add_norm", lambda *_: 1 / 0)
    assert triton_layers.failure(replace(sizes, width=24)) == (
        "Triton's add_norm does not work: ZeroDivisionError: division by zero"
    )


@on_the_device
@pytest.mark.parametrize("normed", [False, True])
def test_under_autocast_values_are_rounded_where_the_module_rounds_them(normed) -> None:
    """Weights, residual stream, cosines in float32, products in float16: the dtypes of a module under autocast."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    wide, kernels = torch.float32, triton_layers.load()
    query, key, value = drawn(2, 4, 16), drawn(2, 2, 16), drawn(2, 2, 16)
    norms = HeadNorms(drawn(16, dtype=wide), drawn(16, dtype=wide)) if normed else None
    cosines, sines = drawn(2, 16, dtype=wide), drawn(2, 16, dtype=wide)
    place = Place(*(torch.zeros(1, 8, 2, 16, dtype=torch.float16, device=DEVICE) for _ in range(2)), None)
    slots = torch.tensor([5, 0], device=DEVICE)
    found = kernels.rotate_and_write(query, key, value, norms, 1e-6, cosines, sines, place, slots)
    if norms is not None:
        query, key = rms_norm(query, norms.query, 1e-6), rms_norm(key, norms.key, 1e-6)
    for ours, expected in zip(found, (query, key), strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, rotated(expected, cosines, sines).half(), atol=2e-3, rtol=2e-3)
    assert torch.equal(place.keys[0, [5, 0]], found[1])
    assert torch.equal(place.values[0, [5, 0]], value)
    hidden, delta, weight = drawn(2, 40, dtype=wide), drawn(2, 40), drawn(40, dtype=wide)
    total, normed_hidden = kernels.add_norm(hidden, delta, weight, 1e-6, torch.float16)
    assert torch.equal(total, hidden + delta)
    torch.testing.assert_close(normed_hidden, rms_norm(hidden + delta, weight, 1e-6).half(), atol=2e-3, rtol=2e-3)


@pytest.mark.skipif(INTERPRETED or triton is None, reason="compiles, and so needs Triton, and not its interpreter")
def test_kernels_compile_for_a_device_that_is_not_there(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from rollout.engine.kernels import triton_layer_kernels as device_code  # needs Triton

    def compiled(kernel: Any, constants: dict[str, object], **types: str) -> str:
        names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
        signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
        signature |= {name: "i32" for name in names if name.endswith("stride")}
        aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in names if signature[n][0] == "*"}
        source = ASTSource(triton.jit(kernel), signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
        return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])

    text = compiled(
        device_code.add_norm, {"adds": True, "width": 4096, "padded_width": 4096}, epsilon="fp32", total="*fp32",
        hidden="*fp32", weight="*fp32",
    )  # fmt: skip
    assert "ld.global.v4" in text
    head = {
        "moves": True,
        "normed": True,
        "block_size": 16,
        "group": 4,
        "padded_group": 4,
        "dim": 128,
        "padded_half": 64,
    }
    assert compiled(device_code.rotate_and_write, head, cells="*i64", slots="*i32", epsilon="fp32")
    assert "ld.global.v4" in compiled(device_code.silu_times, {"width": 12288, "span": 1024})


# --- engines ----------------------------------------------------------------------------------------------------------


@on_the_device
@pytest.mark.parametrize("name", NAMES)
def test_eager_and_captured_steps_give_the_tokens_of_generate(name) -> None:
    model = small(name)
    engine = engine_of(model)
    tokens = 3 if INTERPRETED else 40
    for seed in range(2):
        engine.add_request(token_ids(4 + 15 * seed, seed), greedily(tokens))
    done = finish(engine)
    assert why_not(engine) == ""
    assert captured(engine) == [True] * len(captured(engine)) != []
    for request in done.values():
        assert_greedy(model, request, tolerance=1e-5 if INTERPRETED else 1e-3)


@on_the_device
def test_a_prefix_that_samples_share_is_read_once_by_captured_steps(monkeypatch) -> None:
    monkeypatch.setattr(prefix_sharing, "WORTHWHILE", 1)
    monkeypatch.setattr(decode_parts, "SPLIT", 16)
    model = small("qwen3")
    engine = engine_of(model)
    requests = engine.generate([token_ids(18, 1)], greedily(3 if INTERPRETED else 40, n=2))
    assert captured(engine) == [True] * len(captured(engine))
    assert runner_of(engine).graphs._state.lengths.tolist()[:2] == [16, 16]
    assert any(size.shares for size in runner_of(engine).graphs._graphs)
    for request in requests:
        assert_greedy(model, request, tolerance=1e-5 if INTERPRETED else 1e-3)


@on_the_device
@pytest.mark.parametrize("fused", [True, False])
def test_captured_chunks_give_the_tokens_of_generate(fused, monkeypatch) -> None:
    monkeypatch.setattr(chunk_state, "SIZES", (16,))
    for module in (chunk_state, cuda_graphs):
        monkeypatch.setattr(module, "MOST_CHUNKS", 2)
    model = small("qwen3")
    engine = engine_of(model, chunked=True)
    runner = runner_of(engine)
    if not fused:
        runner.drop_fused("")
    engine.generate([token_ids(3, 1)], greedily(2))
    for seed in range(2):
        engine.add_request(token_ids(5 + 7 * seed, seed), greedily(3 if INTERPRETED else 40))
    done = finish(engine)
    assert {size.tokens for size in runner.graphs._graphs} == {0, 16}
    assert captured(engine) == [fused] * len(captured(engine))
    for request in done.values():
        assert_greedy(model, request, tolerance=1e-5 if INTERPRETED else 1e-3)


@on_the_device
def test_what_is_added_to_the_module_takes_part_and_graphs_of_both_forwards_live_side_by_side() -> None:
    model = small("qwen3")
    engine = engine_of(model)
    engine.generate([token_ids(3, 1)], greedily(3))
    assert captured(engine) == [True]
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: 2 * output)
    (request,) = engine.generate([token_ids(3, 1)], greedily(3))
    assert why_not(engine) == "Qwen3MLP has forward hooks"
    assert captured(engine) == [False]
    assert_greedy(model, request, tolerance=1e-3)
    handle.remove()
    assert why_not(engine) == ""
    model.model.norm.variance_epsilon = model.model.layers[0].input_layernorm.variance_epsilon = 1e-3
    assert "several epsilons" in why_not(engine)


@on_the_device
def test_an_adapter_that_acts_is_left_to_the_module() -> None:
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        small("qwen3"), peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    engine = engine_of(tuned)
    assert why_not(engine) == "LoRA acts in a projection"
    with tuned.disable_adapter():
        assert why_not(engine) == ""


@on_the_device
def test_weights_changed_in_place_are_read_by_the_graphs_there_are() -> None:
    model = small("llama")
    engine = engine_of(model)
    engine.generate([token_ids(3, 1)], greedily(3))
    graphs = list(runner_of(engine).graphs._graphs.values())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    engine.weights_updated()
    (request,) = engine.generate([token_ids(3, 1)], greedily(3))
    assert list(runner_of(engine).graphs._graphs.values()) == graphs
    assert_greedy(model, request, tolerance=1e-5 if INTERPRETED else 1e-3)


@on_the_device
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_under_autocast_logits_are_those_of_the_module_under_autocast(name) -> None:
    # The interpreter multiplies the bits of bfloat16 as integers.
    model, dtype = small(name), torch.float16 if INTERPRETED else torch.bfloat16
    tokens = token_ids(6, 1)
    with torch.autocast(DEVICE.type, dtype):
        engine = engine_of(model)
        runner = runner_of(engine)
        assert isinstance(runner.fused, CudaForward)
        copies, runner.fused._copies = runner.fused._copies, None
        cast = paged_logits(runner, tokens, 3)
        runner.fused._copies = copies
        # Which weights are cast shows in the first forward; the second reads copies of them.
        paged_logits(runner, tokens[:1])
        logits = paged_logits(runner, tokens, 3)
        assert engine.stats()["autocast_copy_bytes"] > 0
        assert torch.equal(logits, cast), "the copy is the cast"
        assert why_not(engine) == ""
        assert logits.dtype == dtype
        expected = engine.controller.forward_logits(tokens)
        scale, bound = float(expected.abs().max()), 5e-3 if INTERPRETED else 5e-2
        (request,) = engine.generate([tokens], greedily(3))
        assert captured(engine) == [True]
        assert request.error is None
        layout = copies.layout
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
        engine.weights_updated()
        flipped = paged_logits(runner, tokens, 3).flip(-1)
        assert float((flipped - logits).abs().max()) < scale * bound
        assert copies.layout == layout
    assert float((logits - expected).abs().max()) < scale * bound
    assert "KV cache has another dtype" in why_not(engine)


@on_the_device
def test_an_autocast_to_the_models_own_dtype_changes_nothing() -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    if INTERPRETED:
        pytest.skip("float16 weights are for the module's own forward")
    model = make_model("qwen3", head_dim=16, dtype=dtype).to(DEVICE)
    engine = engine_of(model)
    assert why_not(engine) == ""
    with torch.autocast(DEVICE.type, dtype):
        assert why_not(engine) == ""


@on_the_device
def test_a_forward_that_comes_out_wrong_is_dropped_by_name(monkeypatch, caplog) -> None:
    kernels = type(triton_layers.load())
    own = kernels.silu_times
    monkeypatch.setattr(kernels, "silu_times", lambda self, gate, up: 1.5 * own(self, gate, up))
    monkeypatch.setattr(triton_layers, "failure", lambda sizes: None)
    engine = engine_of(small("qwen3"))
    runner = runner_of(engine)
    engine.controller.verify_model(6)
    assert runner.fused is None
    assert runner.graphs.fused is None
    assert runner.why_not_fused() == "it differs from the model's own forward"
    assert "the fused forward differs from the model's own" in caplog.text


@on_the_device
def test_a_capture_that_fails_costs_the_fused_graphs_alone(monkeypatch, caplog) -> None:
    model = small("qwen3")
    engine = engine_of(model)
    monkeypatch.setattr(CudaForward, "decode", lambda self, inputs: 1 / 0)
    if INTERPRETED:
        device = runner_of(engine).graphs._device
        monkeypatch.setattr(device, "capture", lambda work: work() or work)
    (request,) = engine.generate([token_ids(3, 1)], greedily(4))
    assert captured(engine) == [False]
    assert why_not(engine) == "", "chunks still run it"
    assert "the fused forward cannot be captured" in caplog.text
    assert_greedy(model, request, tolerance=1e-3)


# --- without a device -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
def test_it_serves_the_families_without_adapters_that_exact_mode_serves() -> None:
    assert set(FAMILIES) == {f"{family.name}ForCausalLM" for family in families.FAMILIES if family.exact}


@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter")
@pytest.mark.skipif(triton is None, reason="Triton is not installed: pip install triton")
def test_all_of_this_holds_in_tritons_interpreter() -> None:
    assert_holds_interpreted(__file__)
