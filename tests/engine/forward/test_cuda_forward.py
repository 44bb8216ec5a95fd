"""Tests of the Triton forward: its kernels against plain torch, whole engines against `generate`, what it refuses.

They run in Triton's interpreter, in a process of its own (see tests/engine/test_in_tritons_interpreter.py), and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward import chunk_state, cuda_forward, cuda_graphs, prefix_sharing
from rollout.engine.forward.choices import Routes
from rollout.engine.forward.cuda_forward import CudaForward
from rollout.engine.forward.cuda_graphs import GraphedDecode
from rollout.engine.forward.decode_kernels import TritonDecode
from rollout.engine.forward.decode_runs import DecodeRuns
from rollout.engine.forward.graphed_runs import LEAD, GraphedRuns
from rollout.engine.forward.model_runner import ModelRunner
from rollout.engine.forward.trial_forwards import paged_logits
from rollout.engine.kernels import (
    decode_parts,
    triton_experts,
    triton_layer_trial,
    triton_layers,
)
from rollout.engine.kernels.cpu_forward import Activation, NormKind, RotaryKind
from rollout.engine.kernels.triton_experts import ExpertSizes
from rollout.engine.kernels.triton_layer_trial import LayerSizes, normed, rotated
from rollout.engine.kernels.triton_layers import HeadNorms, Norms, NormWeights, Place
from rollout.engine.kernels.triton_paged import load
from rollout.engine.memory.arena import PoolMemory
from rollout.engine.memory.block_pool import zeros
from rollout.engine.scheduling import run_ahead
from rollout.engine.weights.autocast_copies import NO_COPIES, AutocastCopies
from tests.capturable import Capturable
from tests.engines import assert_greedy, at_random, finish, greedily, make_engine, token_ids
from tests.interpreter import INTERPRETED
from tests.models import make_model, require_recurrent_cache

try:
    import triton
    import triton.language
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
except ImportError:
    triton = None

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore:TRITON_DEFAULT_FP_FUSION")

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
"""Triton's interpreter cuts bits of bfloat16 off instead of rounding."""
BY_TYPE = ["gemma2", "gemma3", "olmo3"]
"""Families whose layers differ by type."""
NAMES = [
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "llama",
    "qwen2",
    "mistral",
    "gemma2",
    "gemma3",
    "olmo2",
    "olmo3",
    "phi3",
    "glm",
    "glm4",
    "gpt2",
]


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
        with Capturable():
            work()
        return lambda: self._replay(work)

    def forget(self) -> None:
        pass

    def _replay(self, work: Callable[[], None]) -> None:
        self.replays += 1
        work()


def small(name: str, **changes: Any) -> Any:
    """A model whose heads the kernels take; interpreted programs are slow, so it has few layers and heads there."""
    few = {"num_attention_heads": 3}
    if name != "gpt2":
        few |= {"num_key_value_heads": 1, "head_dim": 16}
    if INTERPRETED:
        few["num_hidden_layers"] = 2 if name in BY_TYPE else 1
    model = make_model(name, **(few | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases that are not those of a new model.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(DEVICE)


def engine_of(model: Any, *, chunked: bool = False, **options: Any) -> DynamicInferenceEngine:
    """An engine on the Triton kernels, captured decode steps included, and steps with chunks if `chunked`."""
    engine = make_engine(model, block_size_tokens=8, max_tokens_per_step=16, max_requests=2, **options)
    if INTERPRETED:
        runner, cache = engine.controller.runner, engine.cache
        kernels, runner.paged = load(DEVICE), load(DEVICE)
        assert kernels is not None
        decode = TritonDecode(kernels, cache)
        runner.copies = AutocastCopies(runner.model, DEVICE, PoolMemory(zeros), lambda: math.inf)
        runner.fused = CudaForward(runner.model, runner.layout, cache, runner._attention, decode, runner.copies)
        runner.graphs = GraphedDecode(
            runner.model, runner.layout, cache, 2, Rerun(), decode, runner.fused, chunked=chunked, copies=runner.copies
        )
        runner.runs = DecodeRuns(
            GraphedRuns(runner.forward, runner.graphs, DEVICE), runner.table, cache, runner.sampling, runner.adapters,
            runner.installation, engine.lifecycle.lock.asked,
        )  # fmt: skip
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


LLAMA = LayerSizes(
    48, 1100, 6, 2, 16, NormKind.RMS, after=False, head_norms=False, rotary=16, rotary_wide=False,
    rotary_kind=RotaryKind.HALVES, activation=Activation.SILU, gated=True, adapted=True, dtype=torch.float32, device=DEVICE,
)  # fmt: skip
SIZES: dict[str, LayerSizes] = {
    "llama": LLAMA,
    "qwen3": replace(LLAMA, heads=5, kv_heads=1, dim=24, rotary=24, head_norms=True),
    "gemma3": replace(
        LLAMA, norm=NormKind.RMS_OF_ONE_PLUS_WEIGHT, after=True, head_norms=True, activation=Activation.GELU_TANH
    ),
    "olmo2": replace(LLAMA, width=40, norm=NormKind.RMS_ROUNDED_ONCE, after=True, rotary_wide=True),
    "glm4": replace(LLAMA, dim=24, rotary=12, rotary_kind=RotaryKind.PAIRS, after=True),
    "gpt2": replace(LLAMA, norm=NormKind.LAYER_NORM, rotary=0, activation=Activation.GELU_TANH, gated=False),
}


@on_the_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SIZES)
def test_kernels_give_what_plain_torch_does(name, dtype) -> None:
    assert triton_layer_trial.failure(replace(SIZES[name], dtype=dtype)) is None


@on_the_device
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_experts_give_what_plain_torch_does(wide, dtype) -> None:
    activation = Activation.GELU_TANH if wide else Activation.SILU
    assert triton_experts.failure(ExpertSizes(72, 40, 2, wide, activation, dtype, DEVICE)) is None


@on_the_device
@pytest.mark.parametrize("count", [0, 1, 70])
def test_experts_that_have_no_position_or_several_blocks_of_them_are_computed(count) -> None:
    generator = torch.Generator().manual_seed(count)
    drawn = [torch.randn(shape, generator=generator).to(DEVICE) for shape in ((count, 24), (5, 32, 24), (5, 24, 16))]
    hidden, gate_up, down = drawn
    chosen = torch.stack((torch.full((count,), 3), torch.arange(count) % 2), 1).to(DEVICE)
    shares = torch.rand(count, 2, generator=generator).to(DEVICE)
    found = triton_experts.load()(hidden, shares, chosen, gate_up, down, Activation.SILU)
    expected = triton_experts.mixed(hidden, shares, chosen, gate_up, down, Activation.SILU)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@on_the_device
def test_a_kernel_that_differs_or_raises_is_named(monkeypatch) -> None:
    kernels = type(triton_layers.load())
    monkeypatch.setattr(kernels, "activate", lambda self, gate, up, activation: gate * up)
    assert "activate differs from plain torch by" in str(triton_layer_trial.failure(replace(LLAMA, inner=96)))
    monkeypatch.setattr(kernels, "add_norm", lambda *_: 1 / 0)
    assert triton_layer_trial.failure(replace(LLAMA, width=24)) == (
        "Triton's add_norm does not work: ZeroDivisionError: division by zero"
    )
    monkeypatch.setattr(triton_experts.TritonExperts, "__call__", lambda self, hidden, *_: hidden)
    sizes = ExpertSizes(24, 16, 1, True, Activation.SILU, torch.float32, DEVICE)
    assert "experts differ from plain torch by" in str(triton_experts.failure(sizes))


@on_the_device
@pytest.mark.parametrize("head_normed", [False, True])
@pytest.mark.parametrize("kind", [NormKind.RMS, NormKind.RMS_OF_ONE_PLUS_WEIGHT])
def test_under_autocast_values_are_rounded_where_the_module_rounds_them(kind, head_normed) -> None:
    """Weights, residual stream, cosines in float32, products in float16: the dtypes of a module under autocast."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    wide, kernels, norms, halves = torch.float32, triton_layers.load(), Norms(kind, 1e-6), RotaryKind.HALVES
    query, key, value = drawn(2, 4, 16), drawn(2, 2, 16), drawn(2, 2, 16)
    head_norms = HeadNorms(drawn(16, dtype=wide), drawn(16, dtype=wide)) if head_normed else None
    cosines, sines = drawn(2, 16, dtype=wide), drawn(2, 16, dtype=wide)
    place = Place(*(torch.zeros(1, 8, 2, 16, dtype=torch.float16, device=DEVICE) for _ in range(2)), None)
    slots = torch.tensor([5, 0], device=DEVICE)
    found = kernels.rotate_and_write(query, key, value, head_norms, norms, (cosines, sines), halves, place, slots)
    if head_norms is not None:
        query, key = (
            normed(*each, norms)
            for each in ((query, NormWeights(head_norms.query)), (key, NormWeights(head_norms.key)))
        )
    for ours, expected in zip(found, (query, key), strict=True):
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours, rotated(expected, cosines, sines, halves).half(), atol=2e-3, rtol=2e-3)
    assert torch.equal(place.keys[0, [5, 0]], found[1])
    assert torch.equal(place.values[0, [5, 0]], value)
    hidden, delta = drawn(2, 40, dtype=wide), drawn(2, 40)
    norm, after = NormWeights(drawn(40, dtype=wide)), NormWeights(drawn(40, dtype=wide))
    total, made = kernels.add_norm(hidden, delta, after, norm, norms, torch.float16)
    torch.testing.assert_close(total, hidden + normed(delta, after, norms), atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(made, normed(total, norm, norms).half(), atol=2e-3, rtol=2e-3)


@pytest.mark.skipif(INTERPRETED or triton is None, reason="compiles, and so needs Triton, and not its interpreter")
def test_kernels_compile_for_a_device_that_is_not_there(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from rollout.engine.kernels import triton_expert_kernels as expert_code  # needs Triton
    from rollout.engine.kernels import triton_layer_kernels as device_code

    def compiled(kernel: Any, constants: dict[str, object], **types: str) -> str:
        names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
        signature = {name: "constexpr" if name in constants else types.get(name, "*bf16") for name in names}
        signature |= {name: "i32" for name in names if name.endswith("stride")}
        aligned = {
            (names.index(n),): [["tt.divisibility", 16]]
            for n in names
            if signature[n][0] == "*" or n.endswith("stride")
        }
        source = ASTSource(triton.jit(kernel), signature, {(names.index(n),): v for n, v in constants.items()}, aligned)
        return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])

    width = {"width": 4096, "padded_width": 4096}
    text = compiled(
        device_code.add_norm,
        {"adds": True, "delta_normed": True, "normed": True, "centred": False, "biased": False, "twice": True,
         "plus_one": False, **width},
        epsilon="fp32", total="*fp32", hidden="*fp32", weight="*fp32", delta_weight="*fp32",
    )  # fmt: skip
    assert "ld.global.v4" in text
    text = compiled(
        device_code.add_norm,
        {"adds": True, "delta_normed": False, "normed": True, "centred": True, "biased": True, "twice": False,
         "plus_one": False, **width},
        epsilon="fp32",
    )  # fmt: skip
    assert "ld.global.v4" in text
    head = {
        "moves": True, "normed": True, "twice": False, "plus_one": True, "pairs": False, "block_size": 16, "group": 4,
        "padded_group": 4, "dim": 128, "padded_dim": 128, "rotary": 128, "padded_half": 64,
    }  # fmt: skip
    partial = {"normed": False, "pairs": True, "rotary": 64, "padded_half": 32}
    for options in (head, head | partial, head | {"normed": False, "rotary": 0, "padded_half": 1}):
        types = {"cells": "*i64", "slots": "*i32", "epsilon": "fp32", "cosines": "*fp32"}
        assert compiled(device_code.rotate_and_write, options, **types)
    for gelu, gated in ((False, True), (True, False)):
        options = {"gelu": gelu, "gated": gated, "width": 12288, "span": 1024}
        assert "ld.global.v4" in compiled(device_code.activate, options)
    assert "ld.global.v4" in compiled(
        device_code.add_scaled, {"width": 12288, "span": 1024}, more="*fp32", factor="fp32"
    )
    experts = {"count": 128, "padded_count": 128, "width": 2048, "inner": 768, "rows": 64, "columns": 64, "depth": 64}
    index = {"order": "*i64", "begins": "*i32"}
    text = compiled(expert_code.gate_and_up, experts | {"chosen": 8, "gelu": False}, **index)
    assert "wgmma" in text
    assert "wgmma" in compiled(expert_code.shared_down, experts, **index)
    exact = {"hidden": "*fp32", "weight": "*fp32", "out": "*fp32"} | index
    options = experts | {"chosen": 8, "gelu": False, "rows": 16, "depth": 32}
    assert "tf32" not in compiled(expert_code.gate_and_up, options, **exact)


# --- engines ----------------------------------------------------------------------------------------------------------


@on_the_device
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_eager_and_captured_steps_are_the_modules(name) -> None:
    engine, tokens = engine_of(small(name)), token_ids(11, 1)
    assert why_not(engine) == ""
    # A prompt, a chunk that goes on from it, and a captured step.
    logits = paged_logits(runner_of(engine), tokens, 6, 10)
    torch.testing.assert_close(logits, engine.controller.forward_logits(tokens), atol=1e-5, rtol=1e-4)
    assert captured(engine) == [True]


@on_the_device
@pytest.mark.skipif(INTERPRETED, reason="too slow where programs are interpreted")
@pytest.mark.parametrize("name", NAMES)
def test_eager_and_captured_steps_give_the_tokens_of_generate(name) -> None:
    model = small(name)
    engine = engine_of(model)
    for seed in range(2):
        engine.add_request(token_ids(4 + 15 * seed, seed), greedily(40))
    done = finish(engine)
    assert why_not(engine) == ""
    assert captured(engine) == [True] * len(captured(engine)) != []
    for request in done.values():
        assert_greedy(model, request, tolerance=1e-3)


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
def test_runs_of_steps_queued_on_the_device_are_those_steps(monkeypatch) -> None:
    """A row ends within the run, another crosses blocks and parts of keys, whose lists are made on the device."""
    monkeypatch.setattr(decode_parts, "SPLIT", 16)
    monkeypatch.setattr(run_ahead, "LONGEST_S", 1e9)
    model, found, lengths = small("qwen3"), [], []
    tokens, stops = (6, range(3, 50)) if INTERPRETED else (60, range(3, 6))
    for ahead in (False, True):
        engine = engine_of(model)
        engine.add_request(token_ids(13, 1), at_random(tokens))
        engine.add_request(token_ids(3, 2), at_random(tokens, ignore_eos=False, stop_token_ids=list(stops)))
        ended: list[Any] = []
        while engine.has_unfinished:
            ended += engine.step(ahead=ahead)
            lengths.append(engine.parts.stepper.made)
        found.append({each.request_id: each.merge() for each in ended})
        assert captured(engine) == [True] * len(captured(engine)) != []
    assert max(lengths) > LEAD, "no run was made"
    for key, wanted in found[0].items():
        ours = found[1][key]
        assert (ours.generated_tokens, ours.finish_reason) == (wanted.generated_tokens, wanted.finish_reason)
        assert ours.generated_log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-5)
    assert found[0][1].finish_reason == "stop"


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
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_an_active_adapter_takes_part_in_eager_and_captured_steps(name) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3, lora_alpha=6, lora_dropout=0.5, init_lora_weights=False, fan_in_fan_out=name == "gpt2",
        target_modules=["c_attn", "c_proj", "c_fc"] if name == "gpt2" else "all-linear",
    )  # fmt: skip
    model = small(name)
    tuned = peft.get_peft_model(model, config).train()
    tuned.add_adapter("other", config)
    engine, tokens = engine_of(tuned), token_ids(6, 1)

    def found() -> torch.Tensor:
        """Logits of a captured step."""
        own = engine.controller.forward_logits(tokens)
        assert why_not(engine) == ""
        with engine.installation:
            ours = paged_logits(runner_of(engine), tokens, 5)
        torch.testing.assert_close(ours, own, atol=2e-5, rtol=1e-4)
        return ours

    one = found()
    tuned.set_adapter("other")
    other = found()
    with tuned.disable_adapter():
        base = found()
    for module in tuned.modules():
        if hasattr(module, "lora_A"):
            module.scaling["other"] *= 3
    scaled = found()
    results = (one, other, base, scaled)
    assert all((first - second).abs().max() > 1e-2 for first, second in combinations(results, 2))
    assert any(captured(engine))
    tuned.base_model.set_adapter(["default", "other"])
    assert "act together" in why_not(engine)


@on_the_device
def test_what_routers_choose_is_recorded_also_where_steps_are_replayed() -> None:
    model, tokens = small("qwen3_moe"), token_ids(12, 1)
    engine, own = engine_of(model), make_engine(model, fused_forward=False)
    paged_logits(runner_of(engine), tokens, 11)
    assert captured(engine) == [True]
    routes, expected = Routes(), Routes()
    paged_logits(runner_of(engine), tokens, 11, routes=routes)
    paged_logits(runner_of(own), tokens, 11, routes=expected)
    found = routes.joined()
    assert len(found) == len(model.model.layers)
    assert all(map(torch.equal, found, expected.joined()))


@on_the_device
def test_what_is_left_to_the_module_is_named() -> None:
    require_recurrent_cache()
    assert why_not(engine_of(make_model("qwen3_5").to(DEVICE))) == (
        "it has recurrent layers, which only the C++ forward on a CPU computes"
    )
    model = small("qwen3_moe")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert "experts run under an autocast" in why_not(engine_of(model))


@on_the_device
def test_heads_that_the_attention_kernels_do_not_take_run_eagerly_with_plain_attention() -> None:
    model, tokens = make_model("gpt2", num_attention_heads=6, n_layer=1).to(DEVICE), token_ids(6, 1)
    engine = engine_of(model)
    for _ in range(2):
        logits = paged_logits(runner_of(engine), tokens, 5)
        torch.testing.assert_close(logits, engine.controller.forward_logits(tokens), atol=1e-5, rtol=1e-4)
    assert why_not(engine) == ""
    graphs = runner_of(engine).graphs
    assert graphs is None or not graphs._graphs


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
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2"])
def test_under_autocast_logits_are_those_of_the_module_under_autocast(name) -> None:
    # The interpreter multiplies the bits of bfloat16 as integers.
    model, dtype = small(name), torch.float16 if INTERPRETED else torch.bfloat16
    tokens = token_ids(6, 1)
    with torch.autocast(DEVICE.type, dtype):
        engine = engine_of(model)
        runner = runner_of(engine)
        copies, runner.copies = runner.copies, NO_COPIES
        cast = paged_logits(runner, tokens, 3)
        runner.copies = copies
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
            model.lm_head.weight.mul_(-1)
        engine.weights_updated()
        turned = paged_logits(runner, tokens, 3)
        tied = model.lm_head.weight is model.get_input_embeddings().weight
        assert tied or float((turned + logits).abs().max()) < scale * bound
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
    own = kernels.activate
    monkeypatch.setattr(kernels, "activate", lambda self, *parts: 1.5 * own(self, *parts))
    monkeypatch.setattr(cuda_forward, "failure", lambda sizes: None)
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
