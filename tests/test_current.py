"""The manager of this process: `rollout.init` and the functions of the package that act on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rollout
from rollout import ConfigError, EngineStateError, InferenceConfig, RolloutManager, SamplingParams
from tests.models import make_model

PROMPTS = [[5, 6, 7], [8, 9]]


@pytest.fixture
def model() -> torch.nn.Module:
    return make_model("qwen3")


@pytest.fixture
def optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.fixture
def manager(model, optimizer) -> Iterator[RolloutManager]:
    with rollout.init(model, None, optimizer, kv_cache_blocks=64) as made:
        yield made


def test_five_lines_sample_train_and_count_the_update(model, optimizer, manager):
    batch = rollout.generate(PROMPTS, n=2, max_tokens=4)
    same = manager.generate(PROMPTS, SamplingParams(n=2, max_tokens=4))
    assert batch.input_ids.shape == same.input_ids.shape
    with rollout.suspended():
        model(batch.input_ids, attention_mask=batch.attention_mask).logits.sum().backward()
        optimizer.step()
    assert manager.policy_version == 1
    assert rollout.generate(PROMPTS, max_tokens=1).policy_versions.max() == 1
    assert rollout.weights_updated() == 2
    assert rollout.metrics()["rollout/policy_version"] == 2


def test_functions_act_on_the_manager_of_the_process(manager):
    assert rollout.submit(PROMPTS, max_tokens=2) == [0, 1]
    assert manager.groups_in_flight == 2
    rollout.suspend()
    with pytest.raises(EngineStateError, match="while suspended"):
        rollout.generate([])
    rollout.resume()
    batch = rollout.generate([], min_groups=2)
    assert len(batch) == 2
    assert torch.equal(rollout.score(batch).logprobs, manager.score(batch).logprobs)
    assert torch.allclose(rollout.score(manager.model, batch).logprobs, manager.score(batch).logprobs, atol=1e-5)


def test_without_a_manager_each_function_names_the_call_that_makes_one():
    for call in (lambda: rollout.generate(PROMPTS), rollout.suspended, rollout.metrics, lambda: rollout.score(PROMPTS)):
        with pytest.raises(EngineStateError, match=r"rollout\.init\(model, tokenizer, optimizer\)"):
            call()


def test_a_second_init_is_refused_until_the_first_manager_is_closed(manager):
    with pytest.raises(EngineStateError, match=r"rollout\.close\(\)"):
        rollout.init(manager.model)
    rollout.close()
    rollout.close()
    with pytest.raises(EngineStateError, match="has no manager"):
        rollout.generate(PROMPTS)
    with rollout.init(manager.model, kv_cache_blocks=64) as second:
        assert second.generate(PROMPTS, max_tokens=1).num_groups == 2


def test_init_takes_a_config_or_its_fields_and_a_failed_one_leaves_no_manager(model):
    with pytest.raises(ConfigError, match=r"config\.replace\(max_requests=4\)"):
        rollout.init(model, None, None, InferenceConfig(kv_cache_blocks=64), max_requests=4)
    with pytest.raises(ConfigError, match="did you mean kv_cache_memory_gb"):
        rollout.init(model, kv_cache_memory=1)
    other = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="none of them belongs"):
        rollout.init(model, None, torch.optim.SGD(other.parameters(), lr=0.1), kv_cache_blocks=64)
    rollout.init(model, kv_cache_blocks=64).close()
