"""Tests that the trainer's model is unchanged whenever no call of the engine is running."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import RequestError, UnsupportedModelError
from tests.engines import assert_greedy, at_random, finish, greedily, make_engine, steps, token_ids
from tests.models import CONFIGS, make_model

PROMPTS = [token_ids(length, length) for length in (3, 9, 14)]


def left_padded() -> dict[str, torch.Tensor]:
    rows = [token_ids(length, 20 + length) for length in (4, 12, 7)]
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def trainer_forward(model: PreTrainedModel) -> torch.Tensor:
    """Run a trainer's forward: in training mode, with gradients, and with dropout from one seed."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        logits: torch.Tensor = model(**left_padded(), use_cache=False).logits
        return logits


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about the model and the process that a trainer may have set."""
    modules = list(model.modules())
    configs = {id(module.config): module.config for module in modules if hasattr(module, "config")}
    return {
        "attention": [config._attn_implementation for config in configs.values()],
        "use_cache": [config.use_cache for config in configs.values()],
        "configs": [config.to_dict() for config in configs.values()],
        "training": [module.training for module in modules],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in modules],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
        "attributes": [sorted(vars(module)) for module in modules],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grad": [parameter.grad for parameter in model.parameters()],
        "weights": [parameter._version for parameter in model.parameters()],
        "random": torch.get_rng_state().tolist(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def oddly_set(name: str = "qwen3", attention: str = "sdpa") -> PreTrainedModel:
    """A model whose flags are none of the defaults everywhere."""
    model = make_model(name)
    model.set_attn_implementation(attention)
    model.gradient_checkpointing_enable()
    model.config.use_cache = attention == "eager"
    for index, module in enumerate(model.modules()):
        if index % 5 == 3:
            module.training = False
    next(model.parameters()).requires_grad_(False)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_a_left_padded_forward_is_the_same_bit_for_bit_after_generating(name: str) -> None:
    model = make_model(name)
    before = trainer_forward(model)
    engine = make_engine(model, verify_model=True)
    engine.generate(PROMPTS, at_random(6, n=2))
    assert torch.equal(before, trainer_forward(model))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_flag_is_as_before_after_building_and_generating(attention: str) -> None:
    model = oddly_set(attention=attention)
    before, logits = state_of(model), trainer_forward(model)
    engine = make_engine(model, verify_model=True)
    assert state_of(model) == before
    engine.generate(PROMPTS, at_random(6, n=2))
    engine.add_request(PROMPTS[0], at_random(6))
    engine.step()
    assert state_of(model) == before, "between two steps nothing is installed"
    assert torch.equal(logits, trainer_forward(model))


class BrokenError(Exception):
    """Something in the model raises."""


@pytest.mark.parametrize("error", [BrokenError, KeyboardInterrupt, SystemExit, torch.OutOfMemoryError])
@pytest.mark.parametrize("call", ["generate", "step"])
def test_every_flag_is_as_before_after_an_exception_inside_the_forward(error: type[BaseException], call: str) -> None:
    model = oddly_set()
    engine = make_engine(model)
    before, logits = state_of(model), trainer_forward(model)

    def interrupt(*_: Any) -> None:
        raise error("inside the second layer")

    handle = model.model.layers[1].register_forward_pre_hook(interrupt)
    if call == "generate":
        with pytest.raises(RequestError if issubclass(error, Exception) else error):
            engine.generate(PROMPTS, at_random(6))
    else:
        engine.add_request(PROMPTS[0], at_random(6))
        if error is torch.OutOfMemoryError:
            assert engine.step() == [], "it is computed again in a smaller pool"
        elif issubclass(error, Exception):
            (record,) = engine.step()
            assert record[-1].failed()
        else:
            with pytest.raises(error):
                engine.step()
    handle.remove()
    assert state_of(model) == before
    assert torch.equal(logits, trainer_forward(model))
    finish(engine)
    (request,) = engine.generate([PROMPTS[1]], greedily(5))
    assert_greedy(model, request)


def test_every_flag_is_as_before_after_a_model_was_refused() -> None:
    model = oddly_set()
    model.model.layers[2].self_attn.is_causal = False
    before, logits = state_of(model), trainer_forward(model)
    with pytest.raises(UnsupportedModelError):
        DynamicInferenceEngine(model)
    assert state_of(model) == before
    assert torch.equal(logits, trainer_forward(model))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_between_two_steps_the_module_is_the_trainers(name: str, attention: str) -> None:
    model = make_model(name)
    model.set_attn_implementation(attention)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    twin = copy.deepcopy(model)
    engine = make_engine(model, fused_forward=attention == "sdpa")
    before = state_of(model)
    engine.add_request(PROMPTS[0], greedily(6))
    with engine.installation:
        engine.step()
        assert state_of(model) == before
        assert torch.equal(trainer_forward(model), trainer_forward(copy.deepcopy(model)))
        for each in (model, twin):
            optimizer = torch.optim.SGD(each.parameters(), 1e-2)
            trainer_forward(each).float().logsumexp(-1).mean().backward()
            assert all(parameter.grad is not None for parameter in each.parameters())
            optimizer.step()
        engine.weights_updated()
        engine.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(ours, theirs)
    assert len(finish(engine)) == 1
    assert_greedy(model, engine.generate([PROMPTS[1]], greedily(5))[0])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_other_threads_find_the_models_own_attention_inside_of_a_forward_of_ours(name: str, attention: str) -> None:
    model = make_model(name)
    model.set_attn_implementation(attention)
    logits = trainer_forward(model)
    engine = make_engine(model, fused_forward=False)
    found: list[Any] = []

    def look() -> None:
        found.append((model.config._attn_implementation, trainer_forward(model), trainer_forward(copy.deepcopy(model))))
        trainer_forward(model).logsumexp(-1).mean().backward()

    def in_another_thread(*_: Any) -> None:
        handle.remove()
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        found.append(copy.deepcopy(model))

    handle = model.model.layers[1].register_forward_pre_hook(in_another_thread)
    (request,) = engine.generate([PROMPTS[1]], greedily(5))
    assert_greedy(model, request)
    (named, with_ours, of_a_copy), copied = found
    assert named == attention
    assert torch.equal(with_ours, logits)
    assert torch.equal(of_a_copy, logits)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert type(copied.config._attn_implementation) is str
    assert torch.equal(trainer_forward(copied), logits)


def test_two_engines_of_one_model_may_step_in_two_threads() -> None:
    model = make_model("qwen3")
    engines = [make_engine(model, fused_forward=False) for _ in range(2)]
    results: dict[int, Any] = {}

    def generate(index: int) -> None:
        results[index] = engines[index].generate([PROMPTS[index]] * 2, greedily(24))

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        for request in results[index]:
            assert_greedy(model, request)
    assert type(model.config._attn_implementation) is str


def test_installing_nests_and_restores_once() -> None:
    model = oddly_set()
    engine = make_engine(model)
    before = state_of(model)
    with engine.installation, engine.installation.forward(), engine.installation.forward():
        assert model.config._attn_implementation == "sdpa", "outside of a forward"
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert state_of(model) == before


@pytest.mark.parametrize("call", ["generate", "step"])
def test_generating_in_a_hook_of_the_model_is_refused_by_name(call: str) -> None:
    model = make_model("qwen3")
    engine = make_engine(model)

    def again(*_: Any) -> None:
        if call == "generate":
            engine.generate([PROMPTS[0]], greedily(2))
        else:
            engine.step()

    handle = model.model.layers[1].register_forward_pre_hook(again)
    with pytest.raises(RequestError, match=r"EngineStateError: generate or score inside a forward of the model"):
        engine.generate([PROMPTS[1]], greedily(2))
    handle.remove()
    (request,) = engine.generate([PROMPTS[1]], greedily(5))
    assert_greedy(model, request)
    assert not engine.has_unfinished


def test_a_trainer_that_freezes_or_thaws_between_two_steps_is_followed() -> None:
    model = make_model("qwen3")
    engine = make_engine(model)
    engine.add_request(PROMPTS[0], greedily(6))
    steps(engine, 2)
    model.eval()
    model.set_attn_implementation("eager")
    steps(engine, 1)
    assert not model.training
    assert model.config._attn_implementation == "eager"
    (request,) = finish(engine).values()
    assert_greedy(model, request)
