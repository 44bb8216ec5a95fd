"""Policies whose weights are quantised: sampled as the module computes, while the head or an adapter is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import linear

from rollout import SamplingParams
from tests.models import make_model
from tests.rollouts import assert_nothing_leaked, make_rollout, trainer_logprobs_of
from trainer_hooks.generate import attach as attach_generate
from trainer_hooks.optimizer import attach as attach_optimizer

SIZE = {"hidden_size": 64, "intermediate_size": 128}
"""Whole blocks of nf4."""
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]


class Int8Linear(nn.Module):
    """A layer as GPTQ's: integers and scales are buffers, and nothing is a parameter."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = dense.in_features, dense.out_features
        scale = dense.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("integers", (dense.weight.detach() / scale).round().to(torch.int8))

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.integers.to(inputs.dtype) * self.scale.to(inputs.dtype))


def _gptq(model: nn.Module) -> nn.Module:
    return _replaced(model, Int8Linear)


def _nf4(model: nn.Module) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def quantised(dense: nn.Linear) -> nn.Module:
        layer = bitsandbytes.nn.Linear4bit(
            dense.in_features, dense.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
        )
        layer.weight = bitsandbytes.nn.Params4bit(dense.weight.data, requires_grad=False, quant_type="nf4")
        return layer.to("cpu")

    return _replaced(model, quantised)


def _int8(model: nn.Module) -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def quantised(dense: nn.Linear) -> nn.Module:
        layer = bitsandbytes.nn.Linear8bitLt(dense.in_features, dense.out_features, bias=False, has_fp16_weights=False)
        layer.load_state_dict(dense.state_dict())
        return layer.to("cpu")

    return _replaced(model, quantised)


def _qlora(model: nn.Module) -> nn.Module:
    base = _nf4(model)
    base.is_loaded_in_4bit = True
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def _torchao(name: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    def quantise(model: nn.Module) -> nn.Module:
        torchao = pytest.importorskip("torchao.quantization")
        given = {name: value(torchao) if callable(value) else value for name, value in options.items()}
        torchao.quantize_(model.model, getattr(torchao, name)(**given))
        return model

    return quantise


def _replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """The layers of `model`, without its head."""
    for name, module in list(model.model.named_modules()):
        if type(module) is nn.Linear:
            owner, _, attribute = name.rpartition(".")
            setattr(model.model.get_submodule(owner), attribute, make(module))
    return model


KINDS: dict[str, tuple[Callable[[Any], Any], torch.dtype, float]] = {
    "gptq": (_gptq, torch.float32, 1e-5),
    "nf4": (_nf4, torch.float32, 2e-3),
    "qlora": (_qlora, torch.float32, 2e-3),
    "int8": (_int8, torch.bfloat16, 0.06),
    "torchao int8": (_torchao("Int8WeightOnlyConfig"), torch.bfloat16, 0.06),
    "torchao int4": (
        _torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=lambda ao: ao.PerGroup(32)),
        torch.bfloat16,
        0.06,
    ),
    "torchao float8": (_torchao("Float8WeightOnlyConfig"), torch.bfloat16, 0.06),
}
"""Kind → how a model is quantised, the dtype of its activations, and how far log-probs may be from the module's forward:
kernels of bitsandbytes and torchao round otherwise for another number of rows."""


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_policies_are_sampled_as_they_compute_and_trained(kind):
    quantise, dtype, tolerance = KINDS[kind]
    model = quantise(make_model("qwen3", dtype=dtype, **SIZE))
    manager = make_rollout(model)
    trained = [each for name, each in model.named_parameters() if "lm_head" in name or "lora" in name]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    attach_optimizer(optimizer, manager)
    losses = []
    for step in range(3):
        batch = manager.generate(PROMPTS, SamplingParams(n=4, max_tokens=8, seed=1, ignore_eos=True))
        logprobs = trainer_logprobs_of(model, batch)
        difference = (logprobs.detach().float() - batch.logprobs)[batch.response_mask].abs().max()
        assert float(difference) < tolerance
        assert batch.policy_versions[batch.response_mask].unique().tolist() == [step]
        losses.append(-logprobs[batch.response_mask].mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert manager.policy_version == 3
    assert_nothing_leaked(manager)
    manager.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1] == torch.float32])
def test_generate_of_a_quantised_policy_runs_on_the_engine(kind):
    model = KINDS[kind][0](make_model("qwen3", **SIZE))
    prompts = torch.tensor(PROMPTS[:1] * 2)
    expected = model.generate(prompts, max_new_tokens=8, do_sample=False)
    manager = make_rollout(model)
    with attach_generate(model, manager, fallback="raise"):
        assert torch.equal(model.generate(prompts, max_new_tokens=8, do_sample=False), expected)
    manager.close()
