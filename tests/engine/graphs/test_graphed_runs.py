"""Tests of runs of decode steps that are replays of one graph, on a pretended device.

The draw is that of the CPU. test_triton_steps.py has runs of the kernels of Triton, test_on_a_gpu.py those of a GPU.
"""

from __future__ import annotations

import random
from itertools import groupby
from typing import Any

import numpy as np
import pytest
import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.forward.model_runner import DecodeRuns
from rollout.engine.graphs import cuda_graphs
from rollout.engine.graphs.cuda_graphs import GraphedDecode
from rollout.engine.graphs.graphed_runs import LEAD, GraphedRuns
from rollout.engine.kernels import decode_parts
from rollout.engine.memory import block_pool
from rollout.engine.memory.host_pool import HostBlocks
from rollout.sampling_params import SamplingParams
from tests.engine.graphs.recorded_graphs import Plain, Recorder
from tests.engine.lives_in_runs import life_in_runs, outcome
from tests.engine.memory.test_kv_transfer import Queues
from tests.engines import at_random, greedily, make_engine, pass_suspended, steps, token_ids
from tests.invariants import check_scheduler
from tests.models import make_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

ENDS = at_random(12, n=2, ignore_eos=False, stop_token_ids=list(range(3, 13)))
"""Rows end by a stop id within runs, and those left by their length."""


def small(name: str = "qwen3", layers: int = 1) -> Any:
    return make_model(name, num_hidden_layers=layers)


def engine_for(model: Any, **options: Any) -> tuple[DynamicInferenceEngine, Recorder]:
    """An engine whose decode steps are recorded on a pretended device; its clock stands still, so that runs are long."""
    engine = make_engine(model, fused_forward=False, **({"kv_cache_blocks": 120} | options))
    engine.context.scheduler.clock = lambda: 0.0
    runner = engine.controller.runner
    recorder = Recorder()
    runner.graphs = GraphedDecode(
        runner.model, runner.layout, engine.cache, engine.config.max_requests, recorder, Plain(engine.cache)
    )
    maker = GraphedRuns(runner.forward, runner.graphs, runner.layout.device)
    runner.runs = DecodeRuns(maker, runner, engine.lifecycle.lock.asked)
    return engine, recorder


def results(
    engine: DynamicInferenceEngine, params: SamplingParams, *, ahead: bool = True, prompts: int = 3
) -> tuple[dict[Any, Any], list[int]]:
    """Everything sampled over some prompts, by sample, and how many decode steps each call has made."""
    for seed in range(prompts):
        engine.add_request(token_ids(7 + seed, seed), params)
    found, made = {}, []
    while engine.has_unfinished:
        for record in engine.step(ahead=ahead):
            found[record.request_id, record.sample_index] = outcome(record)
        made.append(engine.parts.stepper.made)
        check_scheduler(engine.context.scheduler)
    assert engine.context.allocator.num_used == 0, "a block leaked"
    return found, made


def assert_same(ours: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    """The same samples; log-probs but for what a graph of another number of rows rounds otherwise."""
    assert {key: (each[0], *each[2:]) for key, each in ours.items()} == {
        key: (each[0], *each[2:]) for key, each in wanted.items()
    }
    for key, each in ours.items():
        assert each[1] == pytest.approx(wanted[key][1], abs=1e-6)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_runs_sample_what_one_step_at_a_time_does_although_rows_end_within_them(name: str) -> None:
    model = small(name, 1 if name == "qwen3" else 2)
    (plain, _), (ahead, recorder) = engine_for(model), engine_for(model)
    wanted, singly = results(plain, ENDS, ahead=False)
    drawn, execute = [], ahead.controller.runner.execute
    ahead.controller.runner.execute = lambda step: drawn.append(execute(step)) or drawn[-1]  # type: ignore[method-assign]
    ours, made = results(ahead, ENDS)
    assert_same(ours, wanted)
    assert {reason for _, _, reason, *_ in ours.values()} == {"stop", "length"}
    assert len(made) < len(singly)
    assert sum(len(each.token_ids) for each in drawn) > ahead.stats()["generated_tokens"], "no row ended within a run"
    assert recorder.replays == ahead.stats()["steps"] - made.count(0) - 1, "but for the step of the prompts"


def test_log_probs_are_the_bits_of_one_step_at_a_time_where_the_graph_is_the_same() -> None:
    model = small()
    found = [results(engine_for(model)[0], at_random(30), ahead=ahead) for ahead in (False, True)]
    assert found[0][0] == found[1][0]
    assert found[1][1] == [1, 1, 28]


def test_a_row_that_ends_is_seen_so_many_steps_later_and_the_others_keep_what_they_drew() -> None:
    model = small()
    (tokens, *_), _ = results(engine_for(model)[0], greedily(20), prompts=1)[0][0, 0], None
    at = next(index for index in range(4, 16) if tokens[index] not in tokens[:index])
    engine, _ = engine_for(model)
    engine.add_request(token_ids(7), greedily(20, ignore_eos=False, stop_token_ids=[tokens[at]]))
    engine.add_request(token_ids(8, 1), greedily(20))
    made, ended = [], []
    while engine.has_unfinished:
        ended += engine.step(ahead=True)
        made.append(engine.parts.stepper.made)
    assert made == [1, 1, at - 1 + LEAD, 20 - 1 - 1 - (at - 1 + LEAD)]
    assert [len(each.merge().generated_tokens) for each in ended] == [at + 1, 20]


def test_a_run_that_is_asked_to_end_queues_no_further_step_and_frees_what_it_reserved() -> None:
    engine, recorder = engine_for(small())
    engine.add_request(token_ids(6), greedily(60))
    engine.step(ahead=True)
    engine.step(ahead=True)
    replay, before = recorder._replay, recorder.replays

    def replayed(record: Any) -> None:
        replay(record)
        if recorder.replays == before + 4:
            engine.ask_for_boundary()

    recorder._replay = replayed  # type: ignore[method-assign]
    engine.step(ahead=True)
    assert engine.parts.stepper.made == 4
    assert engine.context.allocator.num_used == 3, "positions 0 to 11"


def test_what_is_computed_behind_an_end_leaves_no_nan_in_the_pool() -> None:
    model = small()
    (tokens, *_) = results(engine_for(model)[0], greedily(20))[0][0, 0]
    at = next(index for index in range(4, 16) if tokens[index] not in tokens[:index])
    engine, _ = engine_for(model)
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.clone()
        model.get_input_embeddings().weight[tokens[at]] = torch.nan
    ends = greedily(20, ignore_eos=False, stop_token_ids=[tokens[at]])
    engine.add_request(token_ids(7), ends)
    poisoned, zero = [], engine.cache.zero_slots
    engine.cache.zero_slots = lambda slots: poisoned.append(slots) or zero(slots)  # type: ignore[method-assign]
    while engine.has_unfinished:
        engine.step(ahead=True)
    assert len(np.concatenate(poisoned)) == LEAD
    assert all(torch.isfinite(part).all() for part in engine.cache.layer(0))


def test_a_run_is_as_long_as_its_graph_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_parts, "SPLIT", 8)
    monkeypatch.setattr(cuda_graphs, "LEAST_WORKSPACE", 0)
    model = small()
    wanted, _ = results(engine_for(model)[0], greedily(40), ahead=False, prompts=1)
    engine, _ = engine_for(model)
    ours, made = results(engine, greedily(40), prompts=1)
    assert_same(ours, wanted)
    assert made == [1, 1, 8, 16, 14], "up to 16 and 32 positions, and to the end"
    graphs = engine.controller.runner.graphs
    assert graphs._parts == 8
    assert graphs.last is not None
    graphs.release()
    assert graphs.last is None, "it would keep what the graphs have read"


def test_a_run_without_memory_is_made_again_in_a_smaller_pool() -> None:
    model = small()
    wanted, _ = results(engine_for(model)[0], greedily(20))
    engine, recorder = engine_for(model)
    replay, calls = recorder._replay, []

    def replayed(record: Any) -> None:
        calls.append(record)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no room")
        replay(record)

    recorder._replay = replayed  # type: ignore[method-assign]
    ours, made = results(engine, greedily(20))
    assert 0 in made
    assert engine.stats()["kv_pool_shrinks"] == 1
    assert {key: each[0] for key, each in ours.items()} == {key: each[0] for key, each in wanted.items()}


def test_without_graphs_steps_are_made_one_at_a_time(monkeypatch, caplog) -> None:
    engine, recorder = engine_for(small())
    monkeypatch.setattr(recorder, "capture", lambda work: 1 / 0)
    ours, made = results(engine, greedily(12), prompts=1)
    assert max(made) == 1
    assert len(ours[0, 0][0]) == 12
    assert not recorder.replays


def test_runs_of_any_length_equal_their_steps_whatever_happens_between_them() -> None:
    """Suspends, weight updates, and other requests' comings and goings, after the same number of steps."""
    draw = random.Random(1)
    kinds = "update", "offload", "recompute", "abort", "add"
    events = sorted((draw.randrange(4, 28), kind) for kind in kinds)
    ours, wanted = (
        life_in_runs(engine_for(make_model("qwen3", seed=3, num_hidden_layers=1))[0], events, most)
        for most in (lambda: draw.randint(1, 9), lambda: 1)
    )
    assert_same(ours, wanted)
    assert any(len(spans.runs) > 1 for *_, spans, _, _ in ours.values())


def on_recorded_streams(
    engine: DynamicInferenceEngine, recorder: Recorder, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queue the copies of an engine per stream, in a random order among those that their events permit.

    What this engine computes at once is behind the work of its own stream on a device, and behind nothing else.
    """
    queues, cache = Queues(seed), engine.cache
    cache._tier = HostBlocks(
        cache._tier.num_blocks, cache._widths, cache.dtype, pinned=False, stage=queues.stage, copies=queues.copies,
        limit=2 * cache.block_bytes,
    )  # fmt: skip
    monkeypatch.setattr(block_pool, "current_stream", lambda device: queues.compute)
    cache._transfer = lambda: queues.transfer(300)
    drop = cache.drop

    def dropped() -> int:
        held = list(cache._parts)
        cache._release = lambda: (queues.compute.finish(), [part.fill_(torch.nan) for part in held])
        return drop()

    def behind_its_stream(work: Any) -> Any:
        return lambda *given: (queues.compute.finish(), work(*given))[1]

    copy_blocks = cache.copy_blocks

    def copied(pairs: list[tuple[int, int]]) -> None:
        for on_device, run in groupby(pairs, lambda pair: min(pair) >= 0):
            if on_device:
                queues.compute.finish()
            copy_blocks(list(run))

    cache.drop, cache.copy_blocks = dropped, copied  # type: ignore[method-assign,assignment]
    owners: list[tuple[Any, str]] = [
        (engine.controller.runner, "forward"), (cache, "zero_slots"), (cache, "zero_blocks"), (recorder, "_replay"),
    ]  # fmt: skip
    for owner, name in owners:
        setattr(owner, name, behind_its_stream(getattr(owner, name)))


@pytest.mark.parametrize("seed", range(4))
def test_runs_between_copies_of_the_host_tier_and_suspends_are_exact_in_every_order_of_the_streams(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = small(), []
    for recorded in (False, True):
        engine, recorder = engine_for(model, kv_cache_blocks=14, kv_cache_host_memory_gb=0.01)
        if recorded:
            on_recorded_streams(engine, recorder, seed, monkeypatch)
        said: list[list[int]] = []
        for turn in range(8):
            earlier = [*said[turn - 4], *token_ids(3, 90)] if turn > 3 else token_ids(17, turn)
            engine.add_request(earlier, at_random(6))
            ended = steps(engine, 2) if turn in (2, 5, 6) else []
            if turn in (2, 5, 6):
                pass_suspended(engine, "offload", keep_prefix_cache=True)
            while engine.has_unfinished:
                ended += engine.step(ahead=True)
            (request,) = (each.merge() for each in ended)
            said.append([*request.prompt_tokens, *request.generated_tokens])
            found.append((request.generated_tokens, request.generated_log_probs))
        assert engine.stats()["kv_blocks_loaded"] > 3
        assert recorder.replays > 8
    assert found[:8] == found[8:]
