"""Tests of the fused forward's table of layer parts: each family equals its module, and each part is verified."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import activations, pytorch_utils
from transformers.integrations import moe
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.glm import modeling_glm
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen3 import modeling_qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5

from rollout.engine.kernels import cpu_library
from tests.engine.fused.test_fused_forward import (
    FUSED,
    assert_as_close_to_exact,
    assert_equal,
    fused,
    logits,
    own_logits,
)
from tests.engines import assert_greedy, at_random, finish, greedily, make_engine, token_ids
from tests.models import make_model
from tests.vision_models import make_vision_model

pytestmark = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")

HYBRID = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
EXPERTS = ["qwen3_moe", "mixtral", "qwen3_next", "qwen3_5_moe"]
families = pytest.mark.parametrize("name", FUSED)


def trained(name: str, **changes: Any) -> Any:
    """A model whose norms and biases are not those of a new one."""
    model = make_model(name, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


ODD: dict[str, dict[str, Any]] = {
    "odd": {"hidden_size": 40, "intermediate_size": 52, "head_dim": 12, "vocab_size": 103},
    "one KV head": {"num_key_value_heads": 1, "attention_bias": True, "rms_norm_eps": 0.1},
    "wide heads": {"num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True},
}


@pytest.mark.parametrize(("name", "shape"), [*product(FUSED, ["odd", "one KV head"]), ("qwen3", "wide heads")])
def test_its_logits_are_the_modules(name: str, shape: str) -> None:
    changes = ODD[shape]
    if name == "gpt2":
        changes = {"odd": {"n_embd": 40, "n_inner": 50, "vocab_size": 103}}.get(shape, {})
    if name in EXPERTS and shape == "odd":
        changes = changes | {"moe_intermediate_size": 20, "num_experts": 9, "num_local_experts": 9}
    engine = make_engine(trained(name, **changes), max_tokens_per_step=512)
    assert fused(engine)
    assert_equal(engine)


@families
def test_in_bfloat16_it_is_as_close_to_exact_as_the_module_is(name: str) -> None:
    # Rounding tips the choice of an expert now and then, on either side.
    assert_as_close_to_exact(trained(name).to(torch.bfloat16), 8, 1.5 if name in EXPERTS else 1.25)


@families
def test_every_cut_gives_greedy_tokens_and_logprobs_of_the_module(name: str) -> None:
    # Queries and keys of almost no length are made unit vectors, which multiplies what float32 has rounded off.
    judged = name in HYBRID
    engine = make_engine(name, max_tokens_per_step=3, max_requests=3, kv_cache_blocks=12)
    stem = token_ids(9, 4)
    for prompt in (stem, stem[:5], [*stem, 7, 8]):
        engine.add_request(prompt, greedily(8))
    for request in finish(engine).values():
        assert_greedy(name, request, judged=judged)
    # These continue cached prefixes, and forked samples.
    engine.add_request([*stem, 7, 8, 9], greedily(5, n=2))
    for request in finish(engine).values():
        assert_greedy(name, request, judged=judged)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "olmo2", "glm", "mixtral", "gpt2", "qwen3_next"])
def test_a_sequence_gets_the_same_bits_alone_and_among_others(name: str) -> None:
    prompt, params = token_ids(7, 1), at_random(40 if name == "qwen3" else 12, seed=5)
    (alone,) = make_engine(name).generate([prompt], params)
    requests = make_engine(name, kv_cache_blocks=256).generate(
        [token_ids(length, 9) for length in (30, 2, 11)] + [prompt], params
    )
    assert requests[3].generated_tokens == alone.generated_tokens
    assert requests[3].generated_log_probs == alone.generated_log_probs


def test_a_recurrence_gets_the_same_bits_however_its_prompt_is_cut() -> None:
    engine, tokens = make_engine(trained("qwen3_5"), max_tokens_per_step=512), token_ids(200, 3)
    whole = logits(engine, tokens)
    assert all(torch.equal(logits(engine, tokens, *cuts), whole) for cuts in ((1, 2, 3), (64,), (67, 130, 199)))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_text_for_a_model_of_text_and_images_is_fused_and_the_modules(name: str) -> None:
    engine = make_engine(make_vision_model(name), max_tokens_per_step=512)
    assert fused(engine)
    assert_equal(engine)


def test_experts_of_equal_score_are_chosen_as_torch_chooses() -> None:
    model = trained("qwen3_moe", num_experts=16, num_experts_per_tok=3)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.copy_(layer.mlp.gate.weight[:4].repeat(4, 1))
    assert_equal(make_engine(model, max_tokens_per_step=512))


# --- what is verified -------------------------------------------------------------------------------------------------


def set_to(find: Callable[[Any], Any], name: str, value: Any) -> Callable[[Any], None]:
    return lambda model: setattr(find(model), name, value)


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "cap of scores": ("gemma2", set_to(lambda m: m.model.layers[1].self_attn, "attn_logit_softcapping", 1.0)),
    "cap of logits": ("gemma2", set_to(lambda m: m.config, "final_logit_softcapping", 0.5)),
    "scale of embeddings": ("gemma2", lambda m: m.model.embed_tokens.embed_scale.mul_(2)),
    "window": ("gemma3", set_to(lambda m: m.model.layers[1].self_attn, "sliding_window", 3)),
    "frequencies of one type": ("gemma3", lambda m: m.model.rotary_emb.sliding_attention_inv_freq.mul_(0.5)),
    "epsilon": ("gpt2", set_to(lambda m: m.transformer.h[1].ln_2, "eps", 0.1)),
    "hook in a dropout": ("phi3", lambda m: m.model.layers[0].resid_mlp_dropout.register_forward_hook(doubled_hook)),
    "hook in a router": ("mixtral", lambda m: m.model.layers[0].mlp.gate.register_forward_hook(doubled_hook)),
    "experts per token": ("mixtral", set_to(lambda m: m.model.layers[1].mlp.gate, "top_k", 1)),
    "normalisation of shares": ("qwen3_moe", set_to(lambda m: m.model.layers[1].mlp.gate, "norm_topk_prob", True)),
    "epsilon of a gated norm": (
        "qwen3_5",
        set_to(lambda m: m.model.layers[0].linear_attn.norm, "variance_epsilon", 0.5),
    ),
    "activation after a convolution": (
        "qwen3_5",
        set_to(lambda m: m.model.layers[0].linear_attn, "activation", "relu"),
    ),
    "decay of a recurrence": ("qwen3_5", lambda m: m.model.layers[0].linear_attn.A_log.data.add_(1.0)),
    "function in an activation": ("gemma2", set_to(lambda m: m.model.layers[0].mlp.act_fn, "act", torch.tanh)),
}


def doubled_hook(module: nn.Module, args: Any, output: Any) -> Any:
    return (
        tuple(each * 2 if each.is_floating_point() else each for each in output)
        if isinstance(output, tuple)
        else 2 * output
    )


@pytest.mark.parametrize("change", CHANGES)
def test_numbers_and_hooks_of_a_part_are_read_again(change: str) -> None:
    name, apply = CHANGES[change]
    model = trained(name)
    engine = make_engine(model)
    tokens = token_ids(30, 1)
    before = logits(engine, tokens, 20)
    assert fused(engine)
    apply(model)
    after = logits(engine, tokens, 20)
    if change == "window":
        # The engine's own attention, too, has the windows of its construction.
        assert not fused(engine)
        return
    own = logits(make_engine(model, fused_forward=False), tokens, 20)
    torch.testing.assert_close(after, own, atol=2e-5, rtol=1e-5)
    assert (after - before).abs().max() > 1e-4


REPLACED: list[tuple[str, Any, str]] = [
    *(("qwen3", getattr(modeling_qwen3, f"Qwen3{name}"), "forward") for name in (
        "MLP", "RMSNorm", "Attention", "DecoderLayer", "RotaryEmbedding", "Model", "ForCausalLM",
    )),
    *(("qwen3", modeling_qwen3, name) for name in ("apply_rotary_pos_emb", "rotate_half", "slice_logits_to_keep")
      # Since transformers 5.21.
      if hasattr(modeling_qwen3, name)),
    *(("qwen3", nn.functional, name) for name in ("silu", "linear")),
    ("qwen3", nn.Linear, "forward"),
    ("qwen3", nn.Embedding, "forward"),
    ("gemma2", modeling_gemma2.Gemma2RMSNorm, "_norm"),
    ("gemma2", modeling_gemma2.Gemma2TextScaledWordEmbedding, "forward"),
    ("gemma2", activations.GELUTanh, "forward"),
    ("glm", modeling_glm, "rotate_half"),
    ("glm", modeling_glm.GlmMLP, "forward"),
    ("mixtral", modeling_mixtral.MixtralTopKRouter, "forward"),
    ("mixtral", modeling_mixtral.MixtralExperts, "forward"),
    ("mixtral", modeling_mixtral.MixtralExperts, "_apply_gate"),
    ("mixtral", moe, "grouped_mm_experts_forward"),
    ("qwen3_5", modeling_qwen3_5.Qwen3_5GatedDeltaNet, "forward"),
    ("qwen3_5", modeling_qwen3_5.Qwen3_5RMSNormGated, "forward"),
    ("qwen3_5", modeling_qwen3_5, "torch_chunk_gated_delta_rule"),
    ("qwen3_5", modeling_qwen3_5, "l2norm"),
    ("gpt2", pytorch_utils.Conv1D, "forward"),
    ("gpt2", nn.LayerNorm, "forward"),
    ("gpt2", nn.functional, "layer_norm"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "owner", "function"), REPLACED, ids=[f"{getattr(o, '__name__', o)}.{f}" for _, o, f in REPLACED]
)
def test_a_function_replaced_in_its_package_turns_it_off(
    name: str, owner: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(name)
    assert fused(engine)
    own = getattr(owner, function)
    monkeypatch.setattr(owner, function, functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs)))
    assert not fused(engine)
    assert not fused(make_engine(name)), "nor where the engine comes later"
    monkeypatch.undo()
    assert fused(engine)


def test_experts_registered_in_the_place_of_transformers_own_turn_it_off() -> None:
    engine = make_engine("mixtral")
    assert fused(engine)
    own = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] = lambda *args: 2 * own(*args)
    try:
        assert not fused(engine)
    finally:
        del moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]


def test_recording_routes_runs_the_modules_own_forward_and_says_so() -> None:
    runner = make_engine("qwen3_moe", record_routes=True).controller.runner
    assert "record_routes" in str(runner.why_not_fused())


# --- LoRA -------------------------------------------------------------------------------------------------------------


def adapted(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model with adapters that change a lot in every projection of its layers."""
    model = trained(name).to(dtype)
    # PEFT takes the names of a shared expert's projections for those of all experts.
    targets = sorted({
        path.rpartition(".")[2] for path, module in model.named_modules()
        if type(module) in (nn.Linear, pytorch_utils.Conv1D) and "lm_head" not in path and "shared_expert" not in path
    })  # fmt: skip
    config = LoraConfig(r=5, lora_alpha=8, lora_dropout=0.5, init_lora_weights=False, target_modules=targets,
                        fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM")  # fmt: skip
    return get_peft_model(model, config, **options).train()


@families
def test_live_lora_in_every_projection_is_the_modules(name: str) -> None:
    model = adapted(name)
    engine = make_engine(model, max_tokens_per_step=512)
    assert fused(engine)
    assert_equal(engine)
    base = own_logits(engine, token_ids(30, 30))
    with model.disable_adapter():
        assert_equal(engine)
        assert (own_logits(engine, token_ids(30, 30)) - base).abs().max() > 0.1


@pytest.mark.parametrize("autocast", [True, False], ids=["float32 adapters", "bfloat16 adapters"])
def test_lora_in_bfloat16_is_as_close_to_exact_as_the_module_is(autocast: bool) -> None:
    assert_as_close_to_exact(adapted("gemma2", torch.bfloat16, autocast_adapter_dtype=autocast), 8)


def test_the_scaling_of_an_adapter_is_read_again_and_two_adapters_run_in_the_module() -> None:
    model = adapted("llama")
    engine = make_engine(model)
    tokens = token_ids(30, 1)
    before = logits(engine, tokens, 20)
    model.base_model.model.model.layers[1].mlp.up_proj.scaling["default"] *= 3
    assert fused(engine)
    after = logits(engine, tokens, 20)
    torch.testing.assert_close(after, own_logits(engine, tokens), atol=2e-5, rtol=1e-5)
    assert (after - before).abs().max() > 1e-3
    model.add_adapter("other", model.peft_config["default"])
    model.base_model.set_adapter(["default", "other"])
    assert not fused(engine)
    assert "act together" in str(engine.controller.runner.why_not_fused())
    torch.testing.assert_close(logits(engine, tokens, 20), own_logits(engine, tokens), atol=2e-5, rtol=1e-5)
