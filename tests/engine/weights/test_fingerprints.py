"""Tests of weight fingerprints: unannounced changes are detected and named; announced or neutral ones are not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from rollout.config import Advanced, InferenceConfig
from rollout.engine.weights.fingerprints import SAMPLES, Fingerprints, persistent_tensors, samples_of
from rollout.errors import WeightsChangedError
from rollout.llm.llm import LLM
from tests.engines import greedily, token_ids
from tests.models import make_model
from tests.rollouts import make_rollout, update
from trainer_hooks.optimizer import attach
from trainer_hooks.peft import adapter

UP = "model.layers.1.mlp.up_proj.weight"
PROMPTS = [token_ids(5, 1)]


def of(model: nn.Module, name: str = UP) -> nn.Parameter:
    return model.get_parameter(name)


def replace(model: nn.Module, value: torch.Tensor) -> None:
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(value)


def swap(model: nn.Module) -> None:
    first, second = model.model.layers[0].mlp, model.model.layers[1].mlp
    first.up_proj.weight, second.up_proj.weight = second.up_proj.weight, first.up_proj.weight


def fused_step(model: nn.Module) -> None:
    update_by(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), model)


def update_by(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    optimizer.step()
    optimizer.zero_grad()


def other_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value + 1 for name, value in model.state_dict().items()}


CORRUPTIONS: dict[str, Callable[[Any], object]] = {
    "an optimizer without the hook": fused_step,
    "load_state_dict by assignment": lambda model: model.load_state_dict(other_weights(model), assign=True),
    "a copy into .data": lambda model: of(model).data.copy_(of(model).data + 1),
    "a new parameter": lambda model: replace(model, of(model).detach() * 2),
    "another shape": lambda model: replace(model, of(model).detach()[:-1]),
    "another dtype": lambda model: model.to(torch.bfloat16),
    "a dtype and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "set_": lambda model: torch.no_grad()(of(model).set_)((of(model) * 1.01).detach()),
    "its storage": lambda model: of(model).untyped_storage().copy_((of(model).detach() * 1.01).untyped_storage()),
    "in inference mode": lambda model: torch.inference_mode()(lambda: of(model).data.mul_(1.01))(),
    "two tensors swapped": swap,
    "a parameter that is gone": lambda model: delattr(model.model.layers[1].mlp.up_proj, "weight"),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_every_way_of_changing_a_tensor_is_found_and_named(what: str) -> None:
    model = make_model("llama")
    fingerprints = Fingerprints(lambda: persistent_tensors(model))
    fingerprints.take()
    assert not fingerprints.changed()
    CORRUPTIONS[what](model)
    assert UP in fingerprints.changed()


def test_a_tied_tensor_that_is_replaced_is_found_under_its_own_name_and_looked_at_from_then_on() -> None:
    model = make_model("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    fingerprints = Fingerprints(lambda: persistent_tensors(model))
    fingerprints.take()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert not fingerprints.changed(), "untied, and the same values"
    model.lm_head.weight.data.mul_(1.01)
    assert fingerprints.changed() == ["lm_head.weight"]
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 2)
    assert fingerprints.changed() == ["lm_head.weight"]
    fingerprints.take()
    model.added = nn.Linear(2, 2)
    assert not fingerprints.changed()
    model.added.weight.data.mul_(2)
    assert fingerprints.changed() == ["added.weight"], "new ones are looked at, too"
    model.model.embed_tokens.weight.data.mul_(1.01)
    assert fingerprints.changed() == ["model.embed_tokens.weight", "added.weight"]


HARMLESS: dict[str, Callable[[Any], object]] = {
    "share_memory_": lambda model: model.share_memory(),
    "a wider dtype and back": lambda model: model.to(torch.float64).to(torch.float32),
    "the same values": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "the same values by assignment": lambda model: model.load_state_dict(
        copy.deepcopy(model.state_dict()), assign=True
    ),
    "a step by nothing": lambda model: update_by(torch.optim.SGD(model.parameters(), lr=0.0), model),
    "a new layer": lambda model: model.register_module("added", nn.Linear(2, 2)),
    "a forward and a backward": lambda model: model(torch.tensor(PROMPTS), labels=torch.tensor(PROMPTS)).loss.backward(),
    "clipping and averaging": lambda model: (
        nn.utils.clip_grad_norm_(model.parameters(), 1.0), torch.optim.swa_utils.AveragedModel(model),
    ),
    "frozen": lambda model: model.requires_grad_(False),
}  # fmt: skip


@pytest.mark.parametrize("what", HARMLESS)
def test_what_leaves_the_values_as_they_are_is_no_change(what: str) -> None:
    model = make_model("llama")
    fingerprints = Fingerprints(lambda: persistent_tensors(model))
    fingerprints.take()
    HARMLESS[what](model)
    assert not fingerprints.changed()


def test_samples_come_by_every_element_in_time_also_of_a_transposed_tensor() -> None:
    values = torch.arange(20 * SAMPLES + 7)
    seen = torch.cat([each for turn in range(20) for _, each in samples_of([("a", values)], turn)])
    assert len(seen.unique()) == 20 * SAMPLES
    for few in (torch.arange(3.0), torch.arange(12.0).view(3, 4).T):
        ((_, each),) = samples_of([("a", few)], 0)
        assert each.tolist() == few.flatten().tolist()


def test_running_statistics_are_no_weights_and_tied_ones_come_once() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.BatchNorm1d(2), layer)
    model.register_buffer("kept", torch.zeros(1))
    model.register_buffer("made", torch.zeros(1), persistent=False)
    assert [name for name, _ in persistent_tensors(model)] == ["kept", "0.weight", "0.bias", "1.weight", "1.bias"]


# --- in the engine ----------------------------------------------------------------------------------------------------


def test_a_thousand_updates_raise_no_false_alarm() -> None:
    """Fused steps, of which some are skipped for an overflow, checkpoints of the optimizer, moves and reloads between."""
    model = make_model("llama", num_hidden_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with make_rollout(model) as rollout:
        attachment = attach(optimizer, rollout, mode="recompute")
        for step in range(1000):
            optimizer.found_inf = torch.tensor(float(step % 10 == 9))
            optimizer.grad_scale = None
            update_by(optimizer, model)
            if step % 100 == 50:
                model.share_memory()
                model.load_state_dict(copy.deepcopy(model.state_dict()))
                rollout.load_state_dict(rollout.state_dict())
            rollout.engine.check_weights()
        assert attachment.steps == 900
        rollout.generate(PROMPTS, greedily(2))


def test_generating_with_weights_that_nobody_announced_is_refused_until_they_are() -> None:
    model = make_model("llama")
    with make_rollout(model) as rollout:
        rollout.generate(PROMPTS, greedily(2))
        of(model).data.add_(1.0)
        with pytest.raises(
            WeightsChangedError, match=rf"{UP} changed since policy version 0.*weights_updated\(\)"
        ) as said:
            rollout.generate(PROMPTS, greedily(2))
        assert said.value.tensors == (UP,)
        assert rollout.groups_in_flight == 0
        rollout.submit(PROMPTS, greedily(2))
        with pytest.raises(WeightsChangedError):
            next(rollout.as_completed())
        with pytest.raises(WeightsChangedError):
            rollout.engine.generate(PROMPTS, greedily(2))
        rollout.weights_updated()
        assert len(list(rollout.as_completed())) == 1


def test_an_llm_looks_when_it_begins_to_generate_unless_it_is_told_not_to() -> None:
    model = make_model("llama")
    unchecked = InferenceConfig(kv_cache_blocks=64, advanced=Advanced(weight_fingerprints="off"))
    with LLM(model) as llm, LLM(model, None, unchecked) as careless:
        for each in (llm, careless):
            each.generate(PROMPTS, greedily(2))
        of(model).data.add_(1.0)
        careless.generate(PROMPTS, greedily(2))
        with pytest.raises(WeightsChangedError, match=UP):
            llm.generate(PROMPTS, greedily(2))
        llm.weights_updated()
        llm.generate(PROMPTS, greedily(2))


def test_a_step_that_raises_midway_counts_as_a_change_that_nobody_announced() -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            raise ArithmeticError

    model = make_model("llama")
    with make_rollout(model) as rollout:
        optimizer = Breaks(model.parameters(), lr=0.1)
        update(model, rollout)
        optimizer.register_step_post_hook(lambda *_: None)
        with pytest.raises(ArithmeticError):
            update_by(optimizer, model)
        with pytest.raises(WeightsChangedError, match=r"and \d+ more"):
            rollout.generate(PROMPTS, greedily(2))


def test_a_checkpoint_may_be_loaded_before_the_first_generate_and_with_a_state() -> None:
    model = make_model("llama")
    with make_rollout(model) as rollout:
        update(model)
        rollout.generate(PROMPTS, greedily(2))
        update(model)
        with pytest.raises(WeightsChangedError):
            rollout.generate(PROMPTS, greedily(2))
        rollout.weights_updated()
        state = rollout.state_dict()
    with make_rollout(model) as rollout:
        update(model)
        rollout.load_state_dict(state)
        rollout.generate(PROMPTS, greedily(2))


# --- adapters ---------------------------------------------------------------------------------------------------------


def lora_model() -> Any:
    options = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(make_model("qwen3"), options)
    model.add_adapter("other", options)
    return model


def test_switching_adapters_is_no_change_and_neither_is_a_new_one() -> None:
    model = lora_model()
    with make_rollout(model) as rollout:
        for name in (None, "other", "default"):
            with adapter(rollout, name):
                rollout.generate(PROMPTS, greedily(2))
        with model.disable_adapter():
            rollout.generate(PROMPTS, greedily(2))
        model.add_adapter("third", LoraConfig(r=2, target_modules=["q_proj"]))
        rollout.generate(PROMPTS, greedily(2))


def merge_again(model: Any) -> None:
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer.weight.data += layer.get_delta_weight("default")


@pytest.mark.parametrize(("merged", "what"), [
    (False, lambda model: model.merge_adapter()), (False, lambda model: model.delete_adapter("other")),
    (False, lambda model: model.unload()), (True, merge_again),
], ids=["merged", "deleted", "taken out", "merged twice"])  # fmt: skip
def test_an_adapter_that_is_merged_or_gone_is_named(merged: bool, what: Callable[[Any], object]) -> None:
    model = lora_model()
    with make_rollout(model) as rollout:
        rollout.generate(PROMPTS, greedily(2))
        if merged:
            model.merge_adapter()
            rollout.weights_updated()
        what(model)
        with pytest.raises(WeightsChangedError, match=r"layers\.\d\.self_attn\.q_proj"):
            rollout.generate(PROMPTS, greedily(2))


# --- tensor subclasses ------------------------------------------------------------------------------------------------


class Opaque(torch.Tensor):
    """A tensor that cannot be read."""

    @staticmethod
    def __new__(cls) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_tensor_subclasses_are_compared_by_what_they_are_made_of_or_by_identity() -> None:
    made_of_two = TwoTensor(torch.ones(3, 2), torch.zeros(3, 2))
    tensors: list[Any] = [("parts", made_of_two), ("unread", Opaque())]
    fingerprints = Fingerprints(lambda: tensors)
    fingerprints.take()
    assert not fingerprints.changed()
    made_of_two.b.add_(1)
    assert fingerprints.changed() == ["parts.b"]
    fingerprints.take()
    tensors[1] = ("unread", Opaque())
    assert fingerprints.changed() == ["unread"]
