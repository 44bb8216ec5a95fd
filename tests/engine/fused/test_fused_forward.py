"""Tests of the fused C++ forward: equal to the module's own, whatever the trainer changes between calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.qwen3 import modeling_qwen3

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward.trial_forwards import paged_logits
from rollout.engine.kernels import cpu_library
from tests.engine.changes import FOREIGN, Change, changed
from tests.engines import (
    assert_greedy,
    at_random,
    finish,
    greedily,
    in_one_piece,
    make_engine,
    pass_suspended,
    token_ids,
)
from tests.models import CONFIGS, MORE_CONFIGS, make_model

pytestmark = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")

FUSED = ["qwen3", "llama", "qwen2", "mistral", "gemma2", "gemma3", "olmo2", "olmo3", "phi3", "glm", "glm4", "qwen3_moe",
         "mixtral", "gpt2", "qwen3_next", "qwen3_5", "qwen3_5_moe"]  # fmt: skip


def fused(engine: DynamicInferenceEngine) -> bool:
    """Whether a step would go through the C++ forward now."""
    runner = engine.controller.runner
    with engine.installation:
        return runner.fused is not None and runner.fused.ready(runner.installation.module_epoch)


def logits(engine: DynamicInferenceEngine, tokens: list[int], *cuts: int) -> Tensor:
    return paged_logits(engine.controller.runner, tokens, *cuts).float()


def own_logits(engine: DynamicInferenceEngine, tokens: list[int]) -> Tensor:
    return engine.controller.runner.module.own_logits(tokens).float()


def test_every_architecture_outside_the_table_runs_its_own_forward_and_so_do_all_with_the_option() -> None:
    for name in sorted((CONFIGS | MORE_CONFIGS).keys() - set(FUSED)):
        assert not fused(make_engine(name)), name
    assert not fused(make_engine("qwen3", fused_forward=False))


def test_a_smaller_pool_at_the_same_address_is_bound_again() -> None:
    arena = torch.zeros(1 << 20)
    engine = make_engine("qwen3", allocate=in_one_piece(lambda numel, dtype, device: arena[:numel]))
    runner, cache = engine.controller.runner, engine.cache
    with engine.installation:
        epoch = runner.installation.module_epoch
        assert runner.fused.ready(epoch)
        bound, first = runner.fused._bound, cache.layer(0)[0].data_ptr()
        assert runner.fused.ready(epoch)
        assert runner.fused._bound is bound
        cache.drop()
        cache.materialize(cache.num_blocks // 2)
        assert cache.layer(0)[0].data_ptr() == first
        assert runner.fused.ready(epoch)
        assert runner.fused._bound is not bound, "the other layers are elsewhere"


def test_gradient_checkpointing_leaves_it_on() -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    model.gradient_checkpointing_enable()
    assert model.get_input_embeddings()._forward_hooks
    assert fused(engine)


def assert_equal(engine: DynamicInferenceEngine) -> None:
    """The engine's logits are the module's own, for prompts of several lengths and cuts."""
    for length, cut in ((2, 1), (30, 29), (70, 3), (200, 130)):
        tokens = token_ids(length, length)
        torch.testing.assert_close(logits(engine, tokens, cut), own_logits(engine, tokens), atol=2e-5, rtol=1e-5)


def assert_as_close_to_exact(model: Any, seeds: int, most: float = 1.25) -> None:
    """The engine's logits of a bfloat16 model are as close to float32 as the module's."""
    engine, exact = make_engine(model), make_engine(copy.deepcopy(model).float(), fused_forward=False)
    ours, own = [], []
    for seed in range(seeds):
        tokens = token_ids(60, seed)
        truth = own_logits(exact, tokens)
        ours.append((logits(engine, tokens, 40) - truth).abs().mean())
        own.append((own_logits(engine, tokens) - truth).abs().mean())
    assert fused(engine)
    assert torch.stack(ours).mean() < most * torch.stack(own).mean()


def test_rotary_tables_grow_with_the_sequence() -> None:
    engine = make_engine("qwen3", kv_cache_blocks=128)
    for length in (3, 5, 40, 300, 480):
        tokens = token_ids(length, 1)
        torch.testing.assert_close(
            logits(engine, tokens, length // 2), own_logits(engine, tokens), atol=2e-5, rtol=1e-5
        )


# --- the trainer has the model in hands ------------------------------------------------------------------------------


def by_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


CHANGES: list[Callable[[Any], object]] = [
    by_data,
    lambda model: [parameter.data.mul_(0.9) for parameter in model.parameters()],
    lambda model: setattr(model.model.layers[1].mlp, "up_proj", nn.Linear(48, 96, bias=False)),
    lambda model: setattr(model.model.norm, "weight", nn.Parameter(0.5 * model.model.norm.weight.detach())),
    lambda model: model.load_state_dict(make_model("qwen3", seed=3).state_dict()),
]


@pytest.mark.parametrize("held", [False, True])
def test_however_weights_change_the_next_call_has_the_new_ones(held: bool) -> None:
    """Even if an installation is held meanwhile, under which the module counts as unchanged."""
    model = make_model("qwen3")
    engine = make_engine(model)
    with engine.installation if held else nullcontext():
        for change in CHANGES:
            assert_greedy(model, engine.generate([token_ids(9, 1)], greedily(6))[0])
            change(model)
            engine.weights_updated()
            assert fused(engine)
        assert_greedy(model, engine.generate([token_ids(9, 1)], greedily(6))[0])


class Doubled(nn.Linear):
    """Stands for an adapter or a quantised layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


@contextmanager
def parametrised(projection: nn.Linear) -> Iterator[None]:
    parametrizations.weight_norm(projection)
    yield
    nn.utils.parametrize.remove_parametrizations(projection, "weight")


ADDED: dict[str, Change] = FOREIGN | {
    # 1.003: a little less than what comparing numbers would see.
    "a hook on an activation": lambda model, layer: layer.mlp.act_fn.register_forward_hook(
        lambda module, args, output: 1.003 * output
    ),
    "a replaced activation": lambda model, layer: patch.object(
        layer.mlp.act_fn, "forward", lambda x: 2 * nn.functional.silu(x)
    ),
    "another scale": lambda model, layer: changed(layer.self_attn, "scaling", 3 * layer.self_attn.scaling),
    "a subclass": lambda model, layer: changed(
        layer.self_attn, "v_proj", Doubled(*layer.self_attn.v_proj.weight.shape[::-1], bias=False)
    ),
    "a child": lambda model, layer: patch.object(layer.mlp.down_proj, "adapter", nn.Linear(2, 2), create=True),
    "a parametrisation": lambda model, layer: parametrised(layer.mlp.gate_proj),
    "a strided weight": lambda model, layer: changed(
        layer.self_attn.q_proj.weight, "data", 1.5 * layer.self_attn.q_proj.weight.data.t().contiguous().t()
    ),
}


@pytest.mark.parametrize("what", ADDED)
def test_whatever_is_added_to_the_module_takes_part(what: str) -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    tokens = token_ids(30, 1)
    assert fused(engine)
    with ADDED[what](model, model.model.layers[1]):
        assert not fused(engine)
        torch.testing.assert_close(logits(engine, tokens, 20), own_logits(engine, tokens), atol=2e-5, rtol=1e-5)
    assert fused(engine)
    torch.testing.assert_close(logits(engine, tokens, 20), own_logits(engine, tokens), atol=2e-5, rtol=1e-5)


def test_numbers_of_the_modules_are_read_again() -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    tokens = token_ids(30, 1)
    before = logits(engine, tokens, 20)
    for layer in model.model.layers:
        layer.self_attn.scaling *= 3
    model.model.norm.variance_epsilon = 0.1
    assert not fused(engine), "one epsilon for all norms is all it knows"
    model.model.norm.variance_epsilon = model.model.layers[0].input_layernorm.variance_epsilon
    model.model.rotary_emb.inv_freq.mul_(0.5)
    model.model.rotary_emb.attention_scaling = 1.1
    assert fused(engine)
    after = logits(engine, tokens, 20)
    torch.testing.assert_close(after, own_logits(engine, tokens), atol=2e-5, rtol=1e-5)
    assert (after - before).abs().max() > 0.1
    with changed(model.config, "num_hidden_layers", 2):
        assert not fused(engine)
    assert fused(engine)


# --- what others replace in transformers and torch, as Liger and Unsloth do --------------------------------------------


def test_a_function_of_the_package_in_the_place_of_another_is_a_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.gptj import modeling_gptj

    engine = make_engine("qwen3")
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", modeling_gptj.apply_rotary_pos_emb)
    assert not fused(engine)
    monkeypatch.undo()
    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", modeling_qwen3.Qwen3RMSNorm.forward)
    assert not fused(engine)


def test_a_mode_of_torch_sees_every_operation_and_a_default_device_is_none() -> None:
    engine = make_engine("qwen3")
    with FlopCounterMode(display=False) as counter:
        engine.generate([token_ids(9, 1)], greedily(2))
    assert counter.get_total_flops() > 0
    with torch.device("cpu"):
        assert fused(engine)


def test_under_autocast_the_module_computes_as_the_trainer_does() -> None:
    engine = make_engine("qwen3")
    tokens = token_ids(30, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fused(engine)
        assert (logits(engine, tokens, 20) - own_logits(engine, tokens)).abs().max() < 0.1
    assert fused(engine)


def test_every_thread_count_gives_the_same_bits() -> None:
    engine = make_engine("llama")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(logits(engine, token_ids(90, 3), 50))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)
    assert np.isfinite(results[0].numpy()).all()


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_a_default_device_set_by_the_trainer_moves_no_buffer(name: str) -> None:
    model, tokens = make_model(name), token_ids(9, 1)
    params = [greedily(5), at_random(5, top_p=0.9, logprobs=2, prompt_logprobs=1), at_random(5, repetition_penalty=1.2)]

    def run() -> list[tuple[list[int], list[float]]]:
        engine = make_engine(model, verify_model=True)
        for each in params:
            engine.add_request(tokens, each)
        engine.step()
        pass_suspended(engine, "offload")
        done = finish(engine)
        return [(done[number, 0].generated_tokens, done[number, 0].generated_log_probs) for number in range(3)]

    plain = run()
    with torch.device("meta"):
        assert run() == plain
