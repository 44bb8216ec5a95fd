"""Numbers read off the logits of a forward equal those of the whole logits, with gradient, for every kind of head."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, CohereForCausalLM, PreTrainedModel

from rollout.engine.training import head
from rollout.engine.training.head import LogitReader
from rollout.errors import UnsupportedModelError
from tests.models import SMALL, VOCAB, make_model
from tests.trees import distance

IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
ROWS = torch.tensor([0, 0, 3, 8, 17, 3])
TEMPERATURE = torch.tensor([1.0, 1.0, 0.7, 1.3, 1.0, 1.0])
TOKENS, TARGETS = torch.tensor([0, 1, 1, 2, 3, 4, 5, 5]), torch.tensor([5, 5, 6, 90, 0, VOCAB - 1, 7, 7])
WHOLE = torch.tensor([0, 2, 3, 5])
TOP = 3


def with_bias() -> PreTrainedModel:
    model = make_model("llama")
    model.lm_head = nn.Linear(48, VOCAB)
    return model


def with_unlikely_tokens() -> PreTrainedModel:
    model = with_bias()
    model.lm_head.bias.data[[4, 50]] = -torch.inf
    model.lm_head.bias.data[:8].fill_(-torch.inf)
    return model


def adapted(**options: Any) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False, **options)
    return peft.get_peft_model(make_model("llama"), config)


def frozen_head() -> PreTrainedModel:
    model = make_model("llama")
    model.lm_head.weight.requires_grad_(False)
    return model


HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: make_model("llama"),
    "bias": with_bias,
    "minus infinity": with_unlikely_tokens,
    "tied": lambda: make_model("llama", tie_word_embeddings=True),
    "frozen": frozen_head,
    "soft cap": lambda: make_model("gemma2", final_logit_softcapping=0.5),
    "scale": lambda: CohereForCausalLM(CohereConfig(**SMALL, logit_scale=0.25)),
    "LoRA": adapted,
    "checkpointed": lambda: checkpointed(make_model("llama")),
}


def checkpointed(model: PreTrainedModel) -> PreTrainedModel:
    model.gradient_checkpointing_enable()
    return model.train()


def read(model: nn.Module, top_k: int | Tensor = TOP) -> tuple[Tensor, ...]:
    reader = LogitReader(model, lambda _: model(input_ids=IDS, use_cache=False).logits, entropy=True, top_k=top_k)
    single, sums = reader.read(ROWS, TEMPERATURE, TOKENS, TARGETS, WHOLE)
    return single, sums, reader.entropies, reader.top_logprobs


def read_given(model: nn.Module) -> tuple[Tensor, ...]:
    """The same, of tokens that another reader has found to be the most likely."""
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits.flatten(0, 1)[ROWS]
    return read(model, logits.topk(TOP).indices)


def whole(model: nn.Module) -> tuple[Tensor, ...]:
    logits = model(input_ids=IDS, use_cache=False).logits.flatten(0, 1)[ROWS]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = (logits / TEMPERATURE[:, None].to(logits)).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)
    sums = (logits / TEMPERATURE[:, None].to(logits)).logsumexp(-1)
    return logits[TOKENS, TARGETS], sums[WHOLE], entropies, logprobs.topk(TOP).values


def outcome(model: nn.Module, of: Callable[[nn.Module], tuple[Tensor, ...]]) -> tuple[list[Tensor], Tensor]:
    """The values, and the gradient of all parameters by a sum with weights of both signs."""
    model.zero_grad()
    values = of(model)
    flat = torch.cat([each.flatten() for each in values])
    finite = flat[flat.isfinite()]
    (finite * torch.linspace(-1, 1.5, len(finite)).to(finite)).sum().backward()
    gradient = torch.cat([each.grad.flatten().double() for each in model.parameters() if each.grad is not None])
    return [each.detach() for each in values], gradient


@pytest.mark.parametrize("elements", [7, 60, 1 << 21])
@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_those_of_the_whole_logits(monkeypatch, name: str, elements: int) -> None:
    monkeypatch.setitem(head.TILE_ELEMENTS, "cpu", elements)
    torch.manual_seed(0)
    model = HEADS[name]()
    values, gradient = outcome(model, read_given if name == "bias" else read)
    right, right_gradient = outcome(copy.deepcopy(model).double(), whole)
    for mine, theirs in zip(values, right, strict=True):
        torch.testing.assert_close(mine.double(), theirs, atol=1e-6, rtol=1e-6)
    rounding = distance(outcome(model, whole)[1], right_gradient)
    assert distance(gradient, right_gradient) < max(1e-6, 1.5 * rounding)


@pytest.mark.parametrize("name", ["linear", "tied", "LoRA"])
def test_under_autocast_they_are_as_near_to_float64_as_the_whole_logits(name: str) -> None:
    torch.manual_seed(0)
    model = HEADS[name]()
    right, right_gradient = outcome(copy.deepcopy(model).double(), whole)
    errors = []
    for of in (read, whole):

        def cast(model: nn.Module, of: Any = of) -> tuple[Tensor, ...]:
            with torch.autocast("cpu", torch.bfloat16):
                return tuple(each.float() for each in of(model))

        values, gradient = outcome(model, cast)
        errors.append(
            (
                max(float((mine - theirs).abs().max()) for mine, theirs in zip(values, right, strict=True)),
                distance(gradient, right_gradient),
            )
        )
    mine, theirs = errors
    assert mine[0] < 1.5 * theirs[0]
    assert mine[1] < 1.5 * theirs[1]


def test_dropout_of_an_adapter_is_the_same_in_the_backward() -> None:
    """The gradient is that of the very function that gave the value: a step along it changes the value by as much."""
    torch.manual_seed(0)
    model = adapted(lora_dropout=0.5).double().train()
    parameter = model.get_output_embeddings().lora_B["default"].weight

    def value() -> Tensor:
        torch.manual_seed(1)
        return read(model)[1].sum()

    value().backward()
    direction = parameter.grad.clone()
    with torch.no_grad():
        before = value()
        parameter.add_(1e-6 * direction)
        after = value()
    assert float((after - before) / 1e-6) == pytest.approx(float(direction.square().sum()), rel=1e-4)


def test_the_model_gets_one_row_of_logits_and_its_own_forward_back(monkeypatch) -> None:
    monkeypatch.setitem(head.TILE_ELEMENTS, "cpu", 16)
    model, seen = make_model("llama"), []
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: seen.append(output.shape[:-1]))
    read(model)
    hook.remove()
    assert seen == [(1, 1)]
    assert "forward" not in vars(model.lm_head)
    with torch.no_grad():
        assert not read(model)[0].requires_grad


def test_a_model_that_does_something_else_to_its_logits_is_refused(monkeypatch) -> None:
    model = make_model("llama")
    unchanged = model.forward

    def squared(**inputs: Any) -> Any:
        output = unchanged(**inputs)
        output.logits = output.logits.square()
        return output

    monkeypatch.setattr(model, "forward", squared)
    with pytest.raises(UnsupportedModelError, match="more to the output of its head than its configuration says"):
        read(model)
    with pytest.raises(UnsupportedModelError, match="ran its output embeddings 0 times"):
        LogitReader(model, lambda _: torch.zeros(1, 1, VOCAB)).read(ROWS, 1.0, TOKENS, TARGETS, WHOLE)
    with pytest.raises(UnsupportedModelError, match="Linear has no output embeddings"):
        LogitReader(nn.Linear(2, 2), lambda _: torch.zeros(1))
