"""Several decode steps in one call change neither a token nor a bit of a log-prob, whatever else happens.

The clock of these engines stands still unless a test says otherwise, so that runs are as long as they can be.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollout import LLM, RolloutManager
from rollout.config import Advanced, InferenceConfig
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.scheduling import run_ahead
from rollout.engine.scheduling.run_ahead import StepCost
from rollout.engine.scheduling.step import ScheduledStep
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.engines import at_random, greedily, make_engine, pass_suspended, shared_model, token_ids
from tests.invariants import check_scheduler
from tests.models import make_model, make_tokenizer

ENDS = at_random(40, n=2, temperature=0.8, ignore_eos=False, stop_token_ids=list(range(3, 13)), min_tokens=6)


def engine_for(
    model: Any = "qwen3", tokenizer: Any = None, clock: Callable[[], float] = lambda: 0.0, **options: Any
) -> Any:
    return make_engine(model, tokenizer, clock=clock, **({"kv_cache_blocks": 80} | options))


def results(engine: Any, ahead: bool, params: SamplingParams) -> dict[Any, Any]:
    """Everything sampled over three prompts, by sample."""
    for seed in range(3):
        engine.add_request(token_ids(7 + seed, seed), params)
    found = {}
    while engine.has_unfinished:
        for record in engine.step(ahead=ahead):
            merged = record.merge()
            found[record.request_id, record.sample_index] = (
                merged.generated_tokens, merged.generated_log_probs, merged.finish_reason, merged.stop_reason,
                merged.generated_text, len(merged.tpot), merged.error,
            )  # fmt: skip
        check_scheduler(engine.context.scheduler)
    assert engine.context.allocator.num_used == 0, "a block leaked"
    return found


def only_sample(engine: DynamicInferenceEngine) -> DynamicInferenceRequest:
    """Finish the only unfinished request, in runs, and return its result."""
    ended = []
    while engine.has_unfinished:
        ended += engine.step(ahead=True)
    [record] = ended
    return record.merge()


def assert_same(
    params: SamplingParams, model: Any = "qwen3", tokenizer: Any = None, **options: Any
) -> dict[str, float]:
    """Both ways sample the same in as many steps; returns the counters."""
    plain, ahead = engine_for(model, tokenizer, **options), engine_for(model, tokenizer, **options)
    wanted = results(plain, False, params)
    longest = []
    step = ahead.step

    def counted(**how: Any) -> Any:
        ended = step(**how)
        longest.append(ahead.parts.stepper.made)
        return ended

    ahead.step = counted
    assert results(ahead, True, params) == wanted
    ours, theirs = ahead.stats(), plain.stats()
    assert max(longest) > 1, "no run was made"
    assert ours["generated_tokens"] == theirs["generated_tokens"]
    if not (ours["preemptions"] or params.stop):
        assert ours["steps"] == theirs["steps"]
    return ours


@pytest.mark.parametrize("model", ["qwen3", "gemma3", "gpt2", "qwen3_next"])
@pytest.mark.parametrize("params", [greedily(30, n=2), at_random(41, n=2), ENDS], ids=["greedy", "sampled", "ends"])
def test_tokens_and_log_probs_are_those_of_one_step_at_a_time(model: str, params: SamplingParams) -> None:
    """Windows and recurrent states among the models."""
    assert_same(params, model)


def test_a_stop_string_cuts_what_was_computed_beyond_it() -> None:
    tokenizer = make_tokenizer()
    first = results(engine_for(tokenizer=tokenizer), False, greedily(30))[0, 0]
    text = tokenizer.decode(first[0])
    assert_same(greedily(30, stop=[text[20:22]], n=2), tokenizer=tokenizer)


def test_a_state_is_kept_only_with_the_tokens_that_led_to_it() -> None:
    tokenizer = make_tokenizer()
    options = {"model": "qwen3_next", "tokenizer": tokenizer, "block_size_tokens": 8}
    engine = engine_for(**options)
    text = tokenizer.decode(results(engine_for(**options), False, greedily(30))[0, 0][0])
    engine.add_request(token_ids(7, 0), greedily(30, stop=[text[20:22]]))
    told = [*token_ids(7, 0), *only_sample(engine).generated_tokens, 3, 4, 5]
    found = []
    for each in (engine, engine_for(**options)):
        each.add_request(told, greedily(6))
        found.append(only_sample(each))
    assert engine.stats()["prefill_tokens_saved"] > 0
    assert found[0].generated_tokens == found[1].generated_tokens
    assert found[0].generated_log_probs == pytest.approx(found[1].generated_log_probs, abs=1e-5)


def test_what_a_run_that_was_asked_to_end_has_reserved_is_free_again() -> None:
    engine = engine_for(kv_cache_blocks=24)
    engine.add_request(token_ids(6, 0), greedily(80))
    engine.step()
    engine.ask_for_boundary()
    engine.step(ahead=True)
    assert engine.parts.stepper.made == 1
    assert engine.context.allocator.num_used == 2
    engine.step(ahead=True)
    assert engine.parts.stepper.made > 1
    only_sample(engine)
    engine.step(ahead=True)
    assert engine.parts.stepper.made == 0


def test_samples_are_the_same_when_blocks_run_out() -> None:
    assert assert_same(at_random(30, n=2), kv_cache_blocks=30)["preemptions"] > 0


def test_what_a_run_evicts_reaches_the_host_before_it_is_overwritten() -> None:
    prompts, found = [token_ids(20, seed) for seed in range(3)], {}
    for ahead in (False, True):
        engine = engine_for(kv_cache_blocks=16, kv_cache_host_memory_gb=1e-3)
        found[ahead] = []
        for prompt in (*prompts, *prompts):
            engine.add_request(prompt, greedily(40 if len(found[ahead]) < 3 else 6))
            while engine.has_unfinished:
                found[ahead] += [each.merge().generated_log_probs for each in engine.step(ahead=ahead)]
        assert engine.stats()["kv_blocks_loaded"] > 0
    assert found[True] == found[False]
    fresh = engine_for(enable_prefix_caching=False)
    fresh.add_request(prompts[0], greedily(6))
    while fresh.has_unfinished:
        ended = fresh.step()
    assert np.abs(np.subtract(ended[0].merge().generated_log_probs, found[True][3])).max() < 1e-5


def test_events_of_tokens_have_the_times_of_their_steps() -> None:
    assert_same(at_random(30, n=2), track_generated_token_events=True)
    seconds = iter(np.arange(0, 1000, 0.0005))
    engine = engine_for(clock=lambda: float(next(seconds)))
    engine.add_request(token_ids(5), at_random(40))
    while engine.has_unfinished:
        ended = engine.step(ahead=True)
    assert engine.parts.stepper.made > 1
    assert min(ended[0].merge().tpot) > 0


def life_in_runs(engine: Any, events: list[tuple[int, str]], most: Callable[[], int]) -> dict[Any, Any]:
    """Run a few requests in runs of at most `most()` steps; return what every sample brings.

    Args:
        events: (steps made before it, kind), in order.
    """
    scheduler, left, found = engine.context.scheduler, list(events), {}
    lengthen = scheduler.run_ahead

    def until_the_next_event(step: ScheduledStep) -> ScheduledStep:
        limit = left[0][0] - engine.stats()["steps"] if left else 99
        return replace(step, ahead=max(1, min(lengthen(step).ahead, int(limit), most())))

    scheduler.run_ahead = until_the_next_event
    for number in range(3):
        engine.add_request(token_ids(6 + number, number), at_random(30, n=2))
    while engine.has_unfinished or left:
        if left and (engine.stats()["steps"] >= left[0][0] or not engine.has_unfinished):
            after, kind = left.pop(0)
            if kind == "update":
                with torch.no_grad():
                    engine.weights.trained.lm_head.weight.mul_(0.97)
                engine.weights_updated()
            elif kind == "abort":
                engine.abort_request(1, 0)
            elif kind == "add":
                engine.add_request(token_ids(9, after), at_random(12))
            else:
                pass_suspended(engine, kind)
        else:
            for record in engine.step(ahead=True):
                one = record.merge()
                found[record.request_id, record.sample_index] = (
                    one.generated_tokens, one.generated_log_probs, one.finish_reason, one.stop_reason, one.policy_spans,
                    one.kv_spans, one.error,
                )  # fmt: skip
    return found


@pytest.mark.parametrize("seed", range(4))
def test_runs_of_any_length_equal_their_steps_whatever_happens_between_them(seed: int) -> None:
    """Suspends, weight updates, and other requests' comings and goings, after the same number of steps."""
    draw = random.Random(seed)
    kinds = "update", "update", "offload", "recompute", "abort", "add", "add"
    events = sorted((draw.randrange(4, 28), kind) for kind in kinds)
    ours, wanted = (
        life_in_runs(engine_for(make_model("qwen3", seed=seed), kv_cache_blocks=120), events, most)
        for most in (lambda: draw.randint(1, 9), lambda: 1)
    )
    assert ours == wanted


def test_a_sample_without_finite_logits_fails_alone_where_it_would() -> None:
    model = make_model("qwen3", seed=5)
    wanted = results(engine_for(model), False, greedily(20))
    poison = wanted[0, 0][0][6]
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.clone()
        model.get_input_embeddings().weight[poison] = torch.nan
    plain, ahead = (results(engine_for(model), each, greedily(20)) for each in (False, True))
    assert ahead == plain
    assert any(len(each[0]) < 20 for each in ahead.values())


def test_what_needs_python_between_two_tokens_makes_one_step_at_a_time() -> None:
    for params in (
        greedily(12, logprobs=2), at_random(12, top_p=0.9), at_random(12, repetition_penalty=1.1),
        at_random(12, logit_bias={5: 1.0}), at_random(12, stop_token_ids=[1], min_tokens=12),
    ):  # fmt: skip
        engine = engine_for()
        engine.add_request(token_ids(5), params)
        while engine.has_unfinished:
            engine.step(ahead=True)
            assert engine.parts.stepper.made == 1, params


def test_a_run_takes_no_longer_than_it_may_and_leaves_a_block_to_each_sequence() -> None:
    engine = engine_for(kv_cache_blocks=14)
    engine.add_request(token_ids(5), greedily(40))
    scheduler = engine.context.scheduler
    engine.step()
    engine.step()
    step = scheduler.schedule()
    scheduler.cost = StepCost()
    assert scheduler.run_ahead(step).ahead == 1, "nothing is known of the time that a step takes"
    scheduler.cost.observe(1, 2.0)
    assert scheduler.run_ahead(step).ahead == 1, "a step that captured a graph"
    scheduler.cost.observe(1, 0.006)
    assert scheduler.run_ahead(step).ahead == 5
    scheduler.cost = StepCost()
    scheduler.cost.observe(1, 0.0)
    assert scheduler.run_ahead(step).ahead == 38
    scheduler.allocator.allocate(scheduler.allocator.num_free - 1)
    assert scheduler.run_ahead(step).ahead == 38, "these blocks are reserved"


def test_the_cost_of_a_step_follows_its_rows_and_hardly_one_slow_step() -> None:
    cost = StepCost()
    assert cost.step(4) == np.inf
    for _ in range(30):
        cost.observe(4, 0.01)
    assert (cost.step(1), cost.step(8)) == (pytest.approx(0.01), pytest.approx(0.02))
    cost.observe(4, 5.0)
    assert cost.step(4) < 0.02
    cost.observe(64, 0.002)
    assert cost.step(64) == pytest.approx(0.002), "the first steps of a batch may compile kernels"


@pytest.mark.parametrize("door", ["engine", "LLM", "manager"])
def test_every_loop_that_runs_requests_to_their_end_makes_runs(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is.
    monkeypatch.setattr(f"{run_ahead.__name__}.LONGEST_S", 1e9)
    model, config = (
        shared_model("qwen3"),
        InferenceConfig(kv_cache_blocks=80, advanced=Advanced(block_size_tokens=4, verify_model=False)),
    )
    maker: Any = {"engine": DynamicInferenceEngine, "LLM": LLM, "manager": RolloutManager}[door]
    made = maker(model, None, config)
    engine, calls = made if door == "engine" else made.engine, []
    execute = engine.controller.runner.execute
    monkeypatch.setattr(engine.controller.runner, "execute", lambda step: (calls.append(step), execute(step))[1])
    made.generate([token_ids(5)], greedily(40))
    if door != "engine":
        getattr(made, "shutdown" if door == "LLM" else "close")()
    assert engine.stats()["steps"] == 40
    assert len(calls) < 10, "no run was made"


def test_what_reaches_the_thread_of_an_llm_ends_the_run_that_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    config = InferenceConfig(kv_cache_blocks=80, advanced=Advanced(block_size_tokens=4, verify_model=False))
    with LLM(shared_model("qwen3"), None, config) as llm:
        monkeypatch.setattr(llm.engine, "ask_for_boundary", lambda: asked.append(True))
        future = llm.submit(token_ids(5), greedily(20))
        assert asked
        asked.clear()
        future.cancel()
        assert asked
