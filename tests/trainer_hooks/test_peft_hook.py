"""Tests of PEFT adapters: sampling uses the live adapter, and caches of different adapters stay separate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from torch import nn

from rollout.config import Advanced, InferenceConfig
from rollout.engine.scheduling.adapters import described, layers_with_adapters, variant_of
from rollout.errors import EngineStateError, UnsupportedModelError
from rollout.llm.llm import LLM
from rollout.manager.manager import RolloutManager
from tests.engines import assert_greedy, at_random, greedily, make_engine, steps, token_ids
from tests.invariants import check_scheduler
from tests.models import make_model
from tests.rollouts import assert_nothing_leaked, completions, logprob_error, make_rollout
from trainer_hooks.optimizer import attach
from trainer_hooks.peft import adapter

TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(**options: Any) -> LoraConfig:
    """Adapters that change a lot from the start, and drop half of their input while training."""
    defaults: dict[str, Any] = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.5, "target_modules": TARGETS}
    return LoraConfig(**(defaults | {"init_lora_weights": False} | options))


def peft_model(**options: Any) -> Any:
    """A Qwen3 with the adapters `default`, which trains, and `other`."""
    model = get_peft_model(make_model("qwen3"), lora(**options))
    model.add_adapter("other", lora(**options))
    return model.train()


def injected_model() -> nn.Module:
    """Adapters without a wrapper."""
    return inject_adapter_in_model(lora(), make_model("qwen3")).train()


MODELS = {
    "PeftModel": peft_model,
    "PeftModelForCausalLM": lambda: peft_model(task_type="CAUSAL_LM"),
    "injected": injected_model,
    "modules_to_save": lambda: peft_model(task_type="CAUSAL_LM", modules_to_save=["lm_head"]),
    "dora": lambda: peft_model(use_dora=True, lora_dropout=0.0),
}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off for the trainer's forward."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def error_of(model: Any, batch: Any) -> float:
    with evaluating(model):
        return logprob_error(model, batch)


def flags_of(model: nn.Module) -> list[object]:
    """Everything a switch could leave behind."""
    names = ("_active_adapter", "_disable_adapters", "active_adapter", "_adapters_disabled", "training")
    return [
        *((name, parameter.requires_grad) for name, parameter in model.named_parameters()),
        *(
            (name, key, str(vars(module)[key]))
            for name, module in model.named_modules()
            for key in names
            if key in vars(module)
        ),
    ]


def fail_unless(asserted: bool) -> None:
    """An exception inside a block, once something in it was seen to hold."""
    assert asserted
    raise KeyError("inside")


def bytes_of(model: nn.Module) -> dict[str, bytes]:
    return {name: parameter.detach().numpy().tobytes() for name, parameter in model.named_parameters()}


# --- live adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_the_rollout_samples_with_live_adapters_and_leaves_the_model_as_it_was(kind):
    model = MODELS[kind]()
    model.get_submodule(next(name for name, _ in model.named_modules() if name.endswith("v_proj"))).eval()
    flags, weights = flags_of(model), bytes_of(model)
    manager = make_rollout(model, verify_model=True)
    batch = manager.generate([token_ids(9), token_ids(6, seed=1)], at_random(8, n=2))
    assert flags_of(model) == flags
    assert bytes_of(model) == weights
    assert error_of(model, batch) <= 1e-5
    assert list(manager.engine.controller.eos_token_ids) == [2]
    assert manager.engine.parts.max_sequence_length == 512


def test_a_step_changes_adapter_bytes_only_and_the_next_generate_uses_them():
    model = peft_model()
    manager = make_rollout(model)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    attach(optimizer, manager)
    for step in range(3):
        batch = manager.generate([token_ids(9)], at_random(6, n=2))
        assert error_of(model, batch) <= 1e-5
        assert set(batch.policy_versions[batch.response_mask].tolist()) == {step}
        with adapter(manager, None), torch.no_grad():
            model(batch.input_ids)
        before = bytes_of(model)
        model(batch.input_ids, labels=batch.input_ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        changed = {name for name, value in bytes_of(model).items() if value != before[name]}
        assert changed == {name for name in before if ".default." in name}
    assert manager.policy_version == 3


def test_adapters_that_come_after_the_engine_are_used_from_the_next_prompt_on():
    model = make_model("qwen3")
    manager = make_rollout(model)
    plain = manager.generate([token_ids(9)], greedily(8))
    inject_adapter_in_model(lora(), model)
    manager.weights_updated()
    adapted = manager.generate([token_ids(9)], greedily(8))
    assert completions(adapted) != completions(plain)
    assert adapted[0].num_cached_tokens == 0
    assert error_of(model, adapted) <= 1e-5


# --- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_without_adapter_both_the_trainers_forward_and_the_rollout_are_the_base_model(kind):
    model, base = MODELS[kind](), make_rollout(make_model("qwen3"))
    manager = make_rollout(model)
    prompts, params = [token_ids(9), token_ids(7, seed=3)], greedily(8)
    adapted = manager.generate(prompts, params)
    flags = flags_of(model)
    with adapter(manager, None):
        batch = manager.generate(prompts, params)
        assert error_of(model, batch) <= 1e-5
        assert error_of(base.model, batch) <= 1e-5
    assert completions(batch) == completions(base.generate(prompts, params)) != completions(adapted)
    assert flags_of(model) == flags
    again = manager.generate(prompts, params)
    assert completions(again) == completions(adapted)


def test_an_exception_puts_everything_back_and_no_gradient_flag_moves_meanwhile():
    model = peft_model(task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    model.get_submodule("base_model.model.model.layers.1.self_attn.q_proj").enable_adapters(False)
    manager = make_rollout(model)
    flags = flags_of(model)
    asked = [parameter.requires_grad for parameter in model.parameters()]
    for name in ("other", None):
        with pytest.raises(KeyError, match="inside"), adapter(manager, "other"), adapter(manager, name):
            fail_unless([parameter.requires_grad for parameter in model.parameters()] == asked)
        assert flags_of(model) == flags


# --- the prefix cache -------------------------------------------------------------------------------------------------


def test_a_cached_prompt_serves_its_own_adapter_only():
    model = peft_model(task_type="CAUSAL_LM")
    manager = make_rollout(model)
    prompt = token_ids(16)

    def cached() -> int:
        batch = manager.generate([prompt], at_random(3))
        assert error_of(model, batch) <= 1e-5
        return batch[0].num_cached_tokens

    assert [cached(), cached()] == [0, 15]
    with adapter(manager, None):
        assert [cached(), cached()] == [0, 15]
    with adapter(manager, "other"):
        assert [cached(), cached()] == [0, 15]
    assert [cached(), cached()] == [0, 15]
    # PEFT's own switches count as well.
    with model.disable_adapter():
        assert [cached(), cached()] == [0, 15]
    model.set_adapter("other")
    assert [cached(), cached()] == [0, 15]
    manager.weights_updated()
    assert cached() == 0
    model.set_adapter("default")
    assert cached() == 0
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 0.5)
    assert cached() == 0


# --- requests in flight -----------------------------------------------------------------------------------------------


def watch(manager: RolloutManager) -> dict[tuple[int, int], set[str]]:
    """Which adapters acted in the steps that each sample took part in."""
    seen: dict[tuple[int, int], set[str]] = defaultdict(set)
    engine = manager.engine
    execute, layers = engine.controller.runner.execute, layers_with_adapters(engine.model)

    def noting(step: Any) -> Any:
        for sample in engine.context.scheduler.sequences_of(step):
            seen[sample.key].add(described(variant_of(layers)))
        return execute(step)

    engine.controller.runner.execute = noting  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_requests_in_flight_wait_while_another_adapter_acts_and_go_on_in_order(mode):
    model = peft_model(task_type="CAUSAL_LM")
    prompts = [token_ids(5 + index, seed=index) for index in range(6)]
    undisturbed = make_rollout(model, max_requests=4).generate(prompts, at_random(12, n=2, seed=3))
    manager = make_rollout(model, max_requests=4, kv_cache_management_mode=mode)
    seen = watch(manager)
    batches = [manager.generate(prompts, at_random(12, n=2, seed=3), min_groups=1)]
    in_flight = manager.groups_in_flight
    assert in_flight
    assert manager.engine.context.scheduler.waiting
    with adapter(manager, None):
        reference = manager.generate([token_ids(9, seed=20), token_ids(9, seed=21)], at_random(6, n=2))
        check_scheduler(manager.engine.context.scheduler)
        assert manager.groups_in_flight == in_flight
        assert error_of(model, reference) <= 1e-5
    with manager.suspended():
        pass
    with adapter(manager, "other"):
        manager.generate([token_ids(9, seed=22)], at_random(6))
    while manager.groups_in_flight:
        batches.append(manager.generate([], min_groups=1))
        check_scheduler(manager.engine.context.scheduler)
    assert_nothing_leaked(manager)
    assert {key: names for key, names in seen.items() if len(names) != 1} == {}
    rows = {int(group): [] for batch in batches for group in batch.group_ids}
    for batch in batches:
        assert error_of(model, batch) <= 1e-5
        for request in batch:
            rows[request.request_id].append(request.generated_tokens)
            assert seen[request.request_id, request.sample_index] == {"'default'"}
    assert [tokens for group in sorted(rows) for tokens in rows[group]] == completions(undisturbed)
    ends = [int(group) for batch in batches for group in batch.group_ids]
    assert ends == sorted(ends), "the order of arrival is lost"


def test_what_would_wait_for_ever_inside_the_block_is_an_error_and_nothing_is_lost():
    model = peft_model()
    manager = make_rollout(model, max_requests=4)
    manager.submit([token_ids(9)], at_random(4))
    with adapter(manager, "other"):
        with pytest.raises(EngineStateError, match=r"1 samples in flight.*'default'.*'other'.*leave the"):
            manager.generate([], min_groups=1)
        with pytest.raises(EngineStateError, match=r"snapshot\(\) with 1 samples.*outside of `with adapter"):
            manager.state_dict()
        manager.submit([token_ids(7)], at_random(4))
    with pytest.raises(EngineStateError, match="samples in flight"):
        manager.generate([], min_groups=2)
    with adapter(manager, "other"):
        assert len(manager.generate([], min_groups=2)) == 2
    assert_nothing_leaked(manager)


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_switches_steps_and_updates_leaves_every_sample_with_its_adapter(seed):
    random = np.random.default_rng(seed)
    model = peft_model(lora_dropout=0.0)
    engine = make_engine(model, kv_cache_blocks=24, max_requests=4, max_tokens_per_step=16)
    names: list[str | None] = ["default", "other", None]
    asked: dict[int, str | None] = {}
    ended = []
    for _ in range(60):
        name = names[random.integers(3)]
        with adapter(engine, name):
            for _ in range(random.integers(3)):
                prompt = token_ids(int(random.integers(4, 14)), seed=int(random.integers(3)))
                asked[
                    engine.add_request(prompt, at_random(int(random.integers(1, 9)), n=int(random.integers(1, 3))))
                ] = name
            ended += steps(engine, int(random.integers(8)))
            if random.random() < 0.05:
                engine.weights_updated()
            if random.random() < 0.05:
                engine.abort_request(int(random.choice(list(asked))))
    for name in names:
        with adapter(engine, name):
            ended += steps(engine, 500)
    done = {(record.request_id, record.sample_index): record.merge() for record in ended}
    assert len(done) == len(ended)
    assert {request_id for request_id, _ in done} == set(asked)
    assert engine.context.allocator.num_used == 0
    for (request_id, _), request in done.items():
        if request.error is None:
            with adapter(engine, asked[request_id]), evaluating(model), torch.no_grad():
                tokens = request.prompt_tokens + request.generated_tokens
                scores = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
            expected = scores.gather(1, torch.tensor(tokens[1:])[:, None])[len(request.prompt_tokens) - 1 :, 0]
            assert np.abs(expected.numpy() - request.generated_log_probs).max() <= 1e-5


def test_an_llm_on_its_own_thread_follows_the_switch():
    model = peft_model()
    base = make_rollout(make_model("qwen3")).generate([token_ids(9)], greedily(6))
    with LLM(
        model, None, InferenceConfig(kv_cache_blocks=64, max_requests=8, advanced=Advanced(block_size_tokens=4))
    ) as llm:
        (live,) = llm.generate([token_ids(9)], greedily(6))
        with adapter(llm.engine, None):
            (reference,) = llm.generate([token_ids(9)], greedily(6))
        (again,) = llm.generate([token_ids(9)], greedily(6))
    assert [reference.generated_tokens] == completions(base)
    assert live.generated_tokens == again.generated_tokens != reference.generated_tokens


def test_ranks_enter_and_leave_the_block_together_but_for_one_that_fails(monkeypatch):
    model = peft_model()
    manager = make_rollout(model)
    met: list[tuple[str, bool]] = []
    disabled = model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    monkeypatch.setattr(manager._rounds.backend, "barrier", lambda what: met.append((what, disabled.disable_adapters)))
    with adapter(manager, None):
        pass
    with pytest.raises(KeyError), adapter(manager, None):
        raise KeyError
    entering = ("entering no adapter: adapter", True)
    assert met == [entering, ("leaving no adapter: adapter", False), entering]
    assert not disabled.disable_adapters


# --- what is refused --------------------------------------------------------------------------------------------------


def test_what_cannot_be_switched_is_refused_with_the_cure():
    model = peft_model()
    manager = make_rollout(model)
    flags = flags_of(model)
    with pytest.raises(ValueError, match=r"adapter 'best': PeftModel has 'default', 'other'"), adapter(manager, "best"):
        pass
    plain = make_rollout(make_model("qwen3"))
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has no layer.*get_peft_model"), adapter(plain, None):
        pass
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"merged.*unmerge_adapter\(\)"), adapter(manager, None):
        pass
    model.unmerge_adapter()
    assert flags_of(model) == flags


@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_adapters_that_put_positions_before_the_prompt_are_refused(kind):
    model = get_peft_model(make_model("qwen3"), kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(UnsupportedModelError, match=r"gets 7 positions for 4 tokens.*LoRA"):
        make_engine(model)


def test_an_activated_lora_is_refused_while_it_is_active():
    plain, activated = (LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"]) for _ in range(2))
    activated.alora_invocation_tokens = [5, 9, 7]
    model = get_peft_model(make_model("qwen3"), plain)
    model.add_adapter("late", activated)
    with pytest.raises(UnsupportedModelError, match="adapter 'default' is an activated LoRA"):
        make_engine(get_peft_model(make_model("qwen3"), activated))
    engine = make_engine(model)
    prompt = [*token_ids(8, 1), 5, 9, 7, *token_ids(4, 2)]
    model.set_adapter("late")
    with pytest.raises(UnsupportedModelError, match=r"adapter 'late' is an activated LoRA.*set_adapter"):
        engine.generate([prompt], greedily(4))
    model.set_adapter("default")
    engine.weights_updated()
    (request,) = engine.generate([prompt], greedily(4))
    assert_greedy(model, request)


def test_every_way_to_change_the_active_adapters_changes_the_variant():
    model = peft_model()
    layers = layers_with_adapters(model)
    layer = next(each for each in model.modules() if hasattr(each, "lora_A"))
    changes = [
        lambda: model.base_model.set_adapter(["default", "other"]),
        lambda: layer.active_adapters.remove("default"),
        lambda: layer.scaling.update(other=3.0),
        lambda: layer.enable_adapters(False),
        lambda: layer.enable_adapters(True),
        lambda: model.base_model.set_adapter("default"),
        lambda: layer.scale_layer(0.5),
    ]
    before = variant_of(layers)
    for change in changes:
        change()
        assert variant_of(layers) != before
        before = variant_of(layers)
