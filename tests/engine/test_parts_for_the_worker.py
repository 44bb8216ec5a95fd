"""Tests of the engine's interface for the worker: parts of a group, progress, cache changes, step boundary."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.blocks.index import NO_BLOCK
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import InvalidRequestError
from rollout.requests.delta import DeltaJoin, SampleDelta, growth
from rollout.requests.events import unpack_events
from rollout.requests.spans import VersionSpans
from rollout.state import EngineState, StalenessPolicy
from tests.engines import (
    Key,
    assert_greedy,
    at_random,
    finish,
    greedily,
    make_engine,
    pass_suspended,
    steps,
    suspended,
    token_ids,
)
from tests.invariants import check_scheduler
from tests.models import make_tokenizer

# --- parts of a group -------------------------------------------------------------------------------------------------


def test_some_samples_of_a_group_are_what_the_whole_group_has_of_them() -> None:
    prompt, params = token_ids(7), at_random(6, n=4)
    whole = make_engine("qwen3")
    whole.add_request(prompt, params, request_id=3)
    part = make_engine("qwen3")
    part.add_request(prompt, params, request_id=3, samples=[1, 3])
    everything, some = finish(whole), finish(part)
    assert sorted(some) == [(3, 1), (3, 3)]
    assert part.stats()["prefill_tokens_computed"] == 7
    assert all(some[key].generated_tokens == everything[key].generated_tokens for key in some)


def test_the_rest_of_a_group_may_come_later_and_a_sample_that_is_here_may_not() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(5), greedily(4, n=3), request_id=1, samples=[2])
    with pytest.raises(InvalidRequestError, match=r"request 1 samples \[2\] are here already"):
        engine.add_request(token_ids(5), greedily(4, n=3), request_id=1, samples=[1, 2])
    engine.add_request(token_ids(5), greedily(4, n=3), request_id=1, samples=[1, 0])
    assert sorted(finish(engine)) == [(1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("samples", [[], [0, 0], [3], [-1]])
def test_samples_that_cannot_be_of_the_group_are_refused(samples: list[int]) -> None:
    engine = make_engine("qwen3")
    with pytest.raises(InvalidRequestError, match="must be different ones of the n=3, at least one"):
        engine.add_request(token_ids(5), greedily(4, n=3), samples=samples)
    assert not engine.has_unfinished


def test_a_request_that_was_checked_is_not_queued() -> None:
    engine = make_engine("qwen3")
    assert engine.check_request(token_ids(5), greedily(4, n=8)) == token_ids(5)
    assert not engine.has_unfinished
    assert engine.parts.intake.next_request_id == 0


# --- progress ---------------------------------------------------------------------------------------------------------


class Listener:
    """Puts together what `progress` tells."""

    def __init__(self) -> None:
        self.known: dict[Key, tuple[int, int, int]] = {}
        self.heard: dict[Key, DeltaJoin] = {}
        self.restarts = 0

    def hear(self, rows: list[SampleDelta]) -> None:
        for row in rows:
            key = (row.request_id, row.sample_index)
            count, prompt_version, _ = self.known[key]
            assert row.start in (0, count)
            assert not row.start or (row.prompt_version, row.ttft) == (prompt_version, None)
            assert row.count == len(row.log_prob_list()) == len(row.policy_versions())
            self.restarts += row.start < count
            self.heard.setdefault(key, DeltaJoin(*key)).add_delta(row)
            self.known[key] = (row.start + row.count, row.prompt_version, row.num_events)


def listen(
    engine: DynamicInferenceEngine, every: int, disturb: Callable[[int], None] = lambda step: None
) -> tuple[Listener, dict[Key, SampleDelta]]:
    """Run to the end, asking for progress every so many steps; what was heard of each sample is what it has."""
    listener, ended, count = Listener(), [], 0
    while engine.has_unfinished:
        for sample in engine.context.scheduler:
            listener.known.setdefault(sample.key, (0, 0, 0))
        ended += engine.step()
        count += 1
        if count % every == 0:
            listener.hear(engine.progress(listener.known))
            assert engine.progress(listener.known) == []
        disturb(count - 1)
        check_scheduler(engine.context.scheduler)
    found = {}
    for record in ended:
        key, request = (record.request_id, record.sample_index), record.merge()
        listener.hear([growth(record, *listener.known[key])])
        found[key] = heard = listener.heard[key].delta()
        assert (heard.start, heard.token_list()) == (0, request.generated_tokens)
        assert heard.log_prob_list() == request.generated_log_probs
        versions = request.policy_versions.tolist()
        assert [heard.prompt_version, *heard.policy_versions()] == versions[:1] + versions[len(request.prompt_tokens) :]
        assert (heard.ttft, heard.top_n_rows()) == (request.ttft, request.generated_top_n_logprobs)
        assert unpack_events(heard.events or b"") == request.events
    return listener, found


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_progress_is_exact_across_updates_suspends_and_evictions(mode: str, every: int) -> None:
    engine = make_engine("qwen3", kv_cache_blocks=12, max_requests=5)
    for seed in range(4):
        engine.add_request(token_ids(6, seed), at_random(12, n=2, seed=seed, logprobs=1))

    def disturb(step: int) -> None:
        if step % 4 == 3:
            pass_suspended(engine, mode)
        if step % 5 == 2:
            engine.weights_updated()

    _, found = listen(engine, every, disturb)
    assert mode == "recompute" or engine.stats()["preemptions"] > 0
    assert any(len(set(heard.policy_versions())) > 2 for heard in found.values())


@pytest.mark.parametrize("every", [1, 4, 7])
def test_samples_that_start_afresh_are_told_from_their_beginning(every: int) -> None:
    engine = make_engine("qwen3", max_staleness=0, staleness_policy=StalenessPolicy.REQUEUE, max_requests=2)
    engine.add_request(token_ids(6), at_random(12, n=2))
    engine.add_request(token_ids(6), at_random(12, n=2, seed=5))
    listener, found = listen(engine, every, lambda step: engine.weights_updated() if step in (4, 8) else None)
    assert listener.restarts > 0
    assert all(set(heard.policy_versions()) == {heard.prompt_version} for heard in found.values())


def test_a_sample_that_starts_afresh_is_told_before_it_has_a_token() -> None:
    engine = make_engine("qwen3", max_staleness=0, staleness_policy=StalenessPolicy.REQUEUE)
    engine.add_request(token_ids(6), greedily(8), request_id=5)
    steps(engine, 3)
    engine.weights_updated()
    (row,) = engine.progress({(5, 0): (3, 0, 0)})
    assert (row.start, row.count, row.prompt_version, row.versions.runs) == (0, 0, 1, ())
    assert engine.progress({(5, 0): (0, 1, 0)}) == []


def test_progress_leaves_the_records_alone_and_out_what_was_not_asked_for() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(6), greedily(8), request_id=5)
    engine.add_request(token_ids(6, 1), greedily(8), request_id=6)
    steps(engine, 3)
    rows = engine.progress({(5, 0): (1, 0, 0), (9, 9): (0, 0, 0)})
    assert [(row.request_id, row.start, row.count) for row in rows] == [(5, 1, 2)]
    for sample in engine.context.scheduler:
        assert sample.request.generated_tokens == []
    for request in finish(engine).values():
        assert_greedy("qwen3", request)


def test_an_ended_sample_with_a_stop_string_has_the_tokens_up_to_it() -> None:
    engine = make_engine("qwen3", tokenizer := make_tokenizer())
    (request,) = engine.generate([token_ids(6)], greedily(12))
    engine.add_request(token_ids(6), greedily(12, stop=tokenizer.decode(request.generated_tokens)[3:6]))
    _, found = listen(engine, 2)
    (heard,) = found.values()
    assert 4 <= heard.count <= 6


# --- windows of spans -------------------------------------------------------------------------------------------------

runs_of_versions = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), max_size=6)


@given(runs_of_versions, st.integers(0, 30), st.integers(0, 30))
def test_a_window_of_spans_is_that_part_of_the_dense_versions(
    runs: list[tuple[int, int]], start: int, stop: int
) -> None:
    spans = VersionSpans(runs)
    window = spans.window(start, stop)
    assert VersionSpans(window).dense().tolist() == spans.dense().tolist()[start:stop]
    assert all(count > 0 for _, count in window)


# --- cache changes ----------------------------------------------------------------------------------------------------


def test_a_held_block_is_registered_under_one_hash() -> None:
    allocator = BlockAllocator(2, 2)
    (block,) = allocator.allocate(1)
    tokens = np.array([1, 2], np.int32)
    assert allocator.register(block, 7, NO_BLOCK, tokens) == allocator.register(block, 7, NO_BLOCK, tokens) == block
    with pytest.raises(RuntimeError, match=r"register\(block 0, hash 8\): it is registered under 7"):
        allocator.register(block, 8, NO_BLOCK, tokens)
    assert list(allocator.index.current) == [7]


# --- one boundary, and who hears of it ----------------------------------------------------------------------------------


def test_what_is_done_under_the_lock_is_done_between_two_steps() -> None:
    engine = make_engine("qwen3")
    engine.add_request(token_ids(6), greedily(240))
    going, done = threading.Event(), threading.Event()
    seen: list[float] = []

    def serve() -> None:
        going.wait(120)
        for _ in range(20):
            with engine.locked():
                seen.append(engine.inspection.counters["steps"])
                engine.add_request(token_ids(4), greedily(1))
                engine.add_request(token_ids(4), greedily(1))
                assert engine.inspection.counters["steps"] == seen[-1]
        done.set()

    thread = threading.Thread(target=serve)
    thread.start()
    while not done.is_set() and engine.has_unfinished:
        engine.step()
        going.set()
    thread.join(120)
    assert done.is_set()
    assert seen == sorted(seen)
    finish(engine)


def test_whoever_watches_hears_of_every_move_and_may_use_the_engine_then() -> None:
    engine = make_engine("qwen3")
    heard: list[tuple[EngineState, int]] = []
    engine.lifecycle.on_move = lambda: heard.append((engine.state, engine.policy_version))
    with suspended(engine, "offload"):
        engine.weights_updated()
    engine.pause()
    engine.stop()
    assert heard == [
        (EngineState.PAUSED, 0),
        (EngineState.SUSPENDED, 0),
        (EngineState.SUSPENDED, 1),
        (EngineState.PAUSED, 1),
        (EngineState.RUNNING, 1),
        (EngineState.PAUSED, 1),
        (EngineState.STOPPED, 1),
    ]


def test_records_that_have_ended_can_be_taken_by_their_keys_and_the_others_stay() -> None:
    engine = make_engine("qwen3")
    for number in (1, 2):
        engine.add_request(token_ids(4), greedily(4, n=2), request_id=number)
        engine.abort_request(number)
    taken = engine.take_ended(lambda key: key == (1, 1))
    assert [(record.request_id, record.sample_index) for record in taken] == [(1, 1)]
    assert [(record.request_id, record.sample_index) for record in engine.step()] == [(1, 0), (2, 0), (2, 1)]
