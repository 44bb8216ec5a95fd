"""Tests of an `LLM` on the trainer's live module, while its weights are updated."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from rollout.errors import RequestTimeoutError, WeightsChangedError
from rollout.llm.llm import LLM
from rollout.state import EngineState
from tests.configs import coordinator_config
from tests.engines import PATIENCE_S, at_random, gated, greedily, shared_model, token_ids, until
from tests.llm.asking import ENDLESS, blocking, by_the_trainer, options
from tests.models import make_model, make_tokenizer
from trainer_hooks.optimizer import attach


def test_the_module_is_the_trainers_again_before_anybody_hears_of_a_result() -> None:
    model = make_model("gpt2")
    before = model.config._attn_implementation
    with blocking(model) as llm:
        for length in range(1, 30):
            llm.generate("abc", greedily(length))
            assert model.config._attn_implementation == before
            assert all(module.training for module in model.modules())
            assert torch.is_grad_enabled()


def test_a_step_of_the_optimizer_under_running_requests_splits_their_tokens_at_the_very_version() -> None:
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    weights = [{name: value.clone() for name, value in model.state_dict().items()}]
    with blocking(model, kv_cache_management_mode="recompute") as llm, attach(optimizer, llm, mode="recompute"):
        with gated(llm.engine, 0) as gate:
            pending = [llm.submit(token_ids(6, seed=seed), at_random(400, seed=seed, logprobs=1)) for seed in range(3)]
            for _ in range(3):
                gate.tokens += 60
                until(lambda: llm.stats()["generated_tokens"] >= gate.tokens)
                optimizer.step()
                weights.append({name: value.clone() for name, value in model.state_dict().items()})
        samples = [each.result(PATIENCE_S)[0] for each in pending]
    for sample in samples:
        versions = sample.policy_versions[len(sample.prompt_tokens) :]
        assert sorted(set(versions.tolist())) == [0, 1, 2, 3]
        for version, then in enumerate(weights):
            model.load_state_dict(then)
            expected = by_the_trainer(model, sample)
            for token in (versions == version).nonzero()[0]:
                assert sample.generated_log_probs[token] == pytest.approx(expected[token], abs=1e-4)


def test_suspended_takes_the_cache_off_the_device_and_requests_go_on_afterwards() -> None:
    with blocking() as llm:
        with gated(llm.engine):
            pending = llm.submit("abc", ENDLESS)
            until(lambda: llm.stats()["generated_tokens"] > 10)
            with llm.suspended():
                assert llm.state is EngineState.SUSPENDED
                assert llm.stats()["kv_device_bytes"] == 0
                llm.weights_updated()
                assert llm.state is EngineState.SUSPENDED
        assert llm.state is EngineState.RUNNING
        sample = pending.result(PATIENCE_S)[0]
        assert set(sample.policy_versions.tolist()) == {0, 1}
        llm.engine.pause()
        with llm.suspended("persist"):
            pass
        assert llm.state is EngineState.PAUSED, "what the caller has paused by himself stays so"
        llm.engine.unpause()


@pytest.mark.parametrize("mode", [None, "persist", "recompute"])
def test_before_an_optimizer_step_the_cache_leaves_the_device_as_configured_unless_a_mode_is_given(mode: Any) -> None:
    with blocking(kv_cache_management_mode="offload") as llm:
        with gated(llm.engine):
            pending = llm.submit("abc", ENDLESS)
            until(lambda: llm.stats()["generated_tokens"] > 10)
            llm.before_optimizer_step(mode)
        assert llm.state is EngineState.SUSPENDED
        assert (llm.stats()["kv_device_bytes"] > 0) is (mode == "persist")
        assert (llm.stats()["kv_host_bytes"] > 0) is (mode is None)
        llm.weights_updated()
        assert set(pending.result(PATIENCE_S)[0].policy_versions.tolist()) == {0, 1}


def test_no_step_is_made_in_an_update_though_somebody_sets_the_engine_going() -> None:
    with blocking() as llm:
        llm.engine.pause()
        pending = llm.submit("abc", greedily(5))
        llm.before_optimizer_step()
        llm.engine.resume()
        llm.engine.unpause()
        time.sleep(0.2)
        assert not pending.done()
        assert llm.stats()["generated_tokens"] == 0
        llm.weights_updated()
        assert set(pending.result(PATIENCE_S)[0].policy_versions.tolist()) == {1}


@pytest.mark.parametrize("suspend", [False, True])
def test_a_control_call_in_a_suspended_block_is_undone_by_its_counterpart_after_it(suspend: bool) -> None:
    with LLM(shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True) as llm:
        with llm.suspended():
            llm.pause()
            if suspend:
                llm.suspend()
        assert llm.state is (EngineState.SUSPENDED if suspend else EngineState.PAUSED)
        if suspend:
            llm.resume()
        with llm.suspended():
            llm.unpause()
        assert llm.generate(token_ids(5), greedily(5))


def test_a_thread_of_steps_that_fails_leaves_its_requests_to_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = coordinator_config(no_rank_timeout_s=0.2)
    with LLM(
        shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True, coordinator_config=coordinator
    ) as llm:

        def fail(**_: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(llm.engine, "step", fail)
        with pytest.raises(RequestTimeoutError, match="rank"):
            llm.submit("abc").result(PATIENCE_S)
        with pytest.raises(AssertionError, match="a bug"):
            llm.wait_for_shutdown(PATIENCE_S)


def test_weights_that_changed_without_a_word_are_refused_at_every_door_but_not_while_they_are_being_changed() -> None:
    model = make_model("qwen3")
    with blocking(model) as llm:
        llm.generate("abc", greedily(2))
        weight = model.model.layers[0].mlp.up_proj.weight
        with llm.suspended():
            weight.data.mul_(1.5)
            # Nobody has had the chance to say so yet, and a request from elsewhere must not raise.
            pending = llm.submit("abc", greedily(2))
            llm.weights_updated()
        assert pending.result(PATIENCE_S)[0].policy_versions[-1] == 1
        weight.data.mul_(1.5)
        for door in (llm.submit, llm.stream, llm.generate):
            with pytest.raises(WeightsChangedError, match=r"layers\.0\.mlp\.up_proj\.weight"):
                door("abc", greedily(2))  # type: ignore[operator]
        llm.weights_updated()
        assert llm.generate("abc", greedily(2))
