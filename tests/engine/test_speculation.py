"""Speculation changes neither a token nor a bit of a log-prob, whatever else happens; it only makes fewer steps.

The clock of these engines stands still, so that every draft seems to pay and as many as possible are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward import model_runner
from rollout.engine.scheduling.step import ScheduledStep, StepTokens
from rollout.sampling_params import SamplingParams
from rollout.structured_output import StructuredOutput
from tests.engines import at_random, finish, greedily, make_engine, pass_suspended, steps, token_ids
from tests.models import make_model, make_tokenizer

Event = Callable[[DynamicInferenceEngine], object]


def engine_for(
    speculation: bool, model: Any = "qwen3", tokenizer: Any = None, **options: Any
) -> DynamicInferenceEngine:
    options = {"kv_cache_blocks": 80, "speculation": speculation} | options
    return make_engine(model, tokenizer, clock=lambda: 0.0, **options)


def results(
    engine: DynamicInferenceEngine, params: SamplingParams, events: dict[int, Event] | None = None
) -> tuple[list[Any], dict[str, float]]:
    """Everything sampled in two epochs over two prompts, and the counters; `events` come after these steps of an epoch."""
    found = []
    for _ in range(2):
        for seed in range(2):
            engine.add_request(token_ids(7, seed), params)
        ended, made = [], 0
        for after, event in (events or {}).items():
            ended += steps(engine, after - made)
            made = after
            event(engine)
        for key, merged in sorted(finish(engine, ended).items()):
            found.append(
                (key, merged.generated_tokens, merged.generated_log_probs, merged.generated_top_n_logprobs,
                 merged.finish_reason, merged.stop_reason)
            )  # fmt: skip
    return found, engine.stats()


def assert_same(params: SamplingParams, events: dict[int, Event] | None = None, **options: Any) -> dict[str, float]:
    """Both ways sample the same, the speculative one in fewer steps; returns its counters."""
    plain, without = results(engine_for(False, **options), params, events)
    ours, stats = results(engine_for(True, **options), params, events)
    assert ours == plain
    assert stats["draft_tokens_accepted"] > 0
    assert stats["steps"] < without["steps"]
    assert stats["generated_tokens"] == without["generated_tokens"]
    return stats


@pytest.mark.parametrize(
    "params",
    [
        greedily(30, n=2),
        at_random(30, n=3),
        at_random(24, n=3, temperature=0.7, logprobs=3, top_k=8, top_p=0.95),
        at_random(24, n=2, temperature=0.5, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1),
        at_random(30, n=2, temperature=0.5, stop_token_ids=list(range(3, 60)), min_tokens=9, logprobs_mode="raw"),
    ],
    ids=["greedy", "sampled", "filters and top log-probs", "penalties", "stop ids and min_tokens"],
)
def test_tokens_and_log_probs_are_those_of_plain_decoding_to_the_bit(params: SamplingParams) -> None:
    assert_same(params)


def test_a_stop_string_inside_an_accepted_draft_ends_the_sample_there() -> None:
    tokenizer = make_tokenizer()
    plain, _ = results(engine_for(False, tokenizer=tokenizer), greedily(30))
    text = tokenizer.decode(plain[0][1])
    assert_same(greedily(30, stop=[text[20:22]], n=2), tokenizer=tokenizer)


def test_samples_are_the_same_when_blocks_run_out() -> None:
    stats = assert_same(at_random(28, n=4), kv_cache_blocks=24)
    assert stats["preemptions"] > 0


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_samples_are_the_same_over_a_suspend(mode: str) -> None:
    assert_same(at_random(28, n=3), {3: lambda engine: pass_suspended(engine, mode)})


def test_samples_are_the_same_in_exact_mode_and_without_prefix_cache() -> None:
    assert_same(at_random(20, n=2), exact=True, enable_prefix_caching=False)


def test_drafts_of_older_weights_are_only_guesses() -> None:
    """After an update the history holds completions of the old policy; tokens follow the new one."""
    model = make_model("qwen3", seed=3)
    engine = engine_for(True, model)
    before, _ = results(engine, at_random(20, n=2))
    engine.pause()
    engine.suspend("recompute")
    with torch.no_grad():
        model.lm_head.weight.mul_(0.8)
    engine.weights_updated()
    engine.resume()
    engine.unpause()
    after, stats = results(engine, at_random(20, n=2))
    fresh, _ = results(engine_for(False, model), at_random(20, n=2))
    assert [each[1:] for each in after] == [each[1:] for each in fresh]
    assert [each[1] for each in after] != [each[1] for each in before]
    assert stats["draft_tokens"] > stats["draft_tokens_accepted"] > 0


def test_a_constrained_sample_gets_no_drafts_and_its_neighbours_do() -> None:
    pytest.importorskip("llguidance")
    constrained = SamplingParams(structured=StructuredOutput(regex="(ab){9}"), max_tokens=30, seed=1)
    found = {}
    for speculation in (False, True):
        engine = engine_for(speculation, tokenizer=make_tokenizer())
        engine.add_request(token_ids(7), constrained)
        engine.add_request(token_ids(7), greedily(30, n=2))
        ended = finish(engine)
        found[speculation] = [(each.generated_tokens, each.generated_log_probs) for each in ended.values()]
        assert {"ababababababababab"} == {
            make_tokenizer().decode(ended[0, 0].generated_tokens, skip_special_tokens=True)
        }
        assert (engine.stats()["draft_tokens_accepted"] > 0) is speculation
    assert sorted(found[True]) == sorted(found[False])


def test_a_nan_behind_a_rejected_draft_is_wiped_and_reaches_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = results(engine_for(False), at_random(30, n=2))
    engine = engine_for(True)
    runner, table, wiped = engine.controller.runner, engine.context.scheduler.table, []
    sample, zero_slots = model_runner.sample_step, runner.cache.zero_slots

    def sample_with_nan(step: ScheduledStep, *parts: Any, **options: Any) -> StepTokens:
        found = sample(step, *parts, **options)
        if step.depths is not None:
            rows = step.sampled_rows
            rejected = table.tokens[rows, table.length[rows] + step.depths] != found.token_ids
            for index in np.flatnonzero(rejected[:-1] & (step.depths[1:] > 0)) + 1:
                found.logprobs[index] = np.nan
        return found

    def note(slots: np.ndarray) -> None:
        zero_slots(slots)
        for keys, values in map(runner.cache.layer, range(3)):
            assert not keys.flatten(0, 1)[slots].any()
            assert not values.flatten(0, 1)[slots].any()
        wiped.extend(slots.tolist())

    monkeypatch.setattr(model_runner, "sample_step", sample_with_nan)
    monkeypatch.setattr(runner.cache, "zero_slots", note)
    ours, _ = results(engine, at_random(30, n=2))
    assert ours == plain
    assert wiped
