"""Tests of `explain`: what it says is what the engine does, and every reason is named."""

from __future__ import annotations

import os

import pytest
import torch

from rollout import RolloutManager, SamplingParams
from rollout.engine.kernels import cpu_library
from rollout.engine.parts.explain import decode_trial, usable_cores
from tests.engines import make_engine, shared_model
from tests.models import VOCAB, make_model

needs_compiler = pytest.mark.skipif(cpu_library.load() is None, reason="no C++ compiler")


@needs_compiler
def test_a_manager_says_what_its_engine_does_and_samples_on_unchanged():
    params = SamplingParams(max_tokens=4, seed=3)
    with RolloutManager(shared_model("qwen3")) as manager:
        before = manager.generate([[5, 6, 7]], params).input_ids
        found = manager.explain()
        assert torch.equal(before, manager.generate([[5, 6, 7]], params).input_ids)
        tokens = manager.engine.cache.num_blocks * manager.engine.cache.block_size
    assert found.fused
    page = str(found)
    for part in (
        "3 × Qwen3Attention: 4 query heads over 2 KV heads of 16", "fused C++", "attention   C++", "g++",
        f"{3 * 2 * 2 * 16 * 4} bytes per token; {tokens:,} tokens fit",
        "off; InferenceConfig(exact=True) runs C++ operations",
    ):  # fmt: skip
        assert part in page
    assert found.as_dict()["fused"] is True


@needs_compiler
def test_a_suspended_engine_says_what_is_known():
    with RolloutManager(shared_model("llama")) as rollout:
        rollout.suspend()
        suspended = rollout.explain()
        assert suspended.fused is None
        assert "when weights are gathered and the engine is resumed" in str(suspended)
        rollout.resume()
        assert rollout.explain().fused is not None


def test_layers_of_different_kinds_and_the_reason_against_the_fused_forward_are_named():
    found = make_engine("gpt_oss").explain()
    kinds = found.as_dict()["layers"]
    assert sum(int(kind.split()[0]) for kind in kinds) == 3
    assert any("a window of 8 tokens" in kind for kind in kinds)
    assert "GptOssForCausalLM is none of the families" in found.why_not_fused
    assert any("GptOssForCausalLM is none of the families" in each for each in found.advice)
    assert "off, and refused: GptOssForCausalLM is none of the families of exact mode" in str(found)
    assert "exact mode  on: C++ operations" in str(make_engine("qwen3", exact=True).explain())


@needs_compiler
def test_a_hook_or_an_option_that_turns_the_fused_forward_off_is_named_and_the_hooks_removal_seen():
    model = make_model("qwen3")
    engine = make_engine(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert "Qwen3MLP has forward hooks" in engine.explain().why_not_fused
    handle.remove()
    assert engine.explain().fused
    assert "fused_forward=False" in make_engine("qwen3", fused_forward=False).explain().why_not_fused


def test_without_a_compiler_the_page_says_why_and_what_it_costs(monkeypatch):
    nothing = cpu_library.Kernels(None, "there is no C++ compiler (g++)")
    monkeypatch.setattr(cpu_library, "status", lambda: nothing)
    found = make_engine("qwen3").explain()
    assert found.fused is False
    assert found.why_not_fused == "there is no C++ compiler (g++)"
    assert "attention   plain torch" in str(found)
    assert sum("plain torch" in each or "no C++ compiler" in each for each in found.advice) == 2


def test_a_small_pool_too_many_threads_and_a_load_above_the_cores_are_advised_against(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    monkeypatch.setattr(os, "getloadavg", lambda: (999.0, 0.0, 0.0))
    found = make_engine("qwen3", kv_cache_blocks=4).explain()
    assert "0 sequences of 512 tokens at once" in str(found)
    assert any("max_sequence_length=512 fits" in each for each in found.advice)
    assert any(f"64 × {torch.get_num_threads()} threads share" in each for each in found.advice)


def test_a_trial_times_a_decode_and_leaves_nothing_behind():
    engine = make_engine("qwen3", kv_cache_blocks=256)
    # Seconds: two of the long generation, two of the short one.
    ticks = iter([0.0, 3.0, 3.0, 6.0, 6.0, 7.0, 7.0, 8.0])
    speed = decode_trial(engine.generate, engine.context.scheduler, VOCAB, 512, lambda: next(ticks))
    assert speed == "decode of 8 sequences of 32 tokens: 128 tokens/s"
    assert not engine.has_unfinished
    assert "not measured" in decode_trial(engine.generate, engine.context.scheduler, VOCAB, 48)
    small = make_engine("qwen3", kv_cache_blocks=2)
    assert "not measured" in decode_trial(small.generate, small.context.scheduler, VOCAB, 512)


def test_a_control_groups_quota_limits_the_cores(tmp_path):
    unlimited = usable_cores(tmp_path)
    assert unlimited >= 1
    (tmp_path / "cpu.max").write_text("50000 100000")
    assert usable_cores(tmp_path) == 0.5
    (tmp_path / "cpu.max").write_text("max 100000")
    assert usable_cores(tmp_path) == unlimited
