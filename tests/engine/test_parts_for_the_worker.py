"""Tests of the engine's interface for the worker: parts of a group, progress, cache changes, step boundary."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.engine.blocks.allocator import BlockAllocator
from rollout.engine.blocks.index import NO_BLOCK, CacheChanges
from rollout.engine.engine import DynamicInferenceEngine
from rollout.errors import ConfigError, InvalidRequestError
from rollout.requests.delta import SampleDelta, growth
from rollout.requests.events import unpack_events
from rollout.requests.spans import VersionSpans
from rollout.state import EngineState, StalenessPolicy
from tests.engines import Key, assert_greedy, at_random, finish, greedily, make_engine, pass_suspended, steps, token_ids
from tests.invariants import check_scheduler
from tests.models import make_model, make_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

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


def test_a_request_can_be_checked_without_being_queued() -> None:
    engine = make_engine("qwen3")
    assert engine.check_request(token_ids(5), greedily(4, n=8)) == token_ids(5)
    with pytest.raises(InvalidRequestError, match="n=100 samples exceed max_requests=8"):
        engine.check_request(token_ids(5), greedily(4, n=100))
    with pytest.raises(InvalidRequestError, match="prompt token 5000"):
        engine.check_request([5000])
    with pytest.raises(InvalidRequestError, match="KV blocks"):
        engine.check_request(token_ids(5), greedily(400))
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        engine.check_request(token_ids(5), greedily(4, stop="x"))
    assert not engine.has_unfinished
    assert engine.parts.intake.next_request_id == 0


def test_times_count_from_the_arrival_that_was_given() -> None:
    engine = make_engine("qwen3")
    engine.parts.intake._clock = engine.parts.ledger._clock = engine.context.scheduler.clock = lambda: 100.0
    engine.add_request(token_ids(5), greedily(2), request_id=0, arrival_time=40.0)
    (request,) = finish(engine).values()
    assert (request.arrival_time, request.ttft, request.latency) == (40.0, 60.0, 60.0)


# --- progress ---------------------------------------------------------------------------------------------------------


class Listener:
    """Puts together what `progress` tells."""

    def __init__(self) -> None:
        self.known: dict[Key, tuple[int, int, int]] = {}
        self.events: defaultdict[Key, list[Any]] = defaultdict(list)
        self.tokens: dict[Key, list[int]] = {}
        self.log_probs: dict[Key, list[float]] = {}
        self.versions: dict[Key, list[int]] = {}
        self.prompt_version: dict[Key, int] = {}
        self.top_n: dict[Key, list[Any]] = {}
        self.ttft: dict[Key, float | None] = {}
        self.restarts = 0

    def expect(self, engine: DynamicInferenceEngine) -> None:
        for sample in engine.context.scheduler:
            self.known.setdefault(sample.key, (0, 0, 0))

    def hear(self, rows: list[SampleDelta]) -> None:
        for row in rows:
            key = (row.request_id, row.sample_index)
            count, prompt_version, _ = self.known[key]
            assert row.start in (0, count)
            self.restarts += row.start < count
            tokens, log_probs, versions = row.token_list(), row.log_prob_list(), row.policy_versions()
            assert len(tokens) == len(log_probs) == len(versions) == row.count
            if not row.start:
                for column in (self.tokens, self.log_probs, self.versions, self.top_n):
                    column[key] = []
                self.prompt_version[key], self.ttft[key] = row.prompt_version, row.ttft
            else:
                assert row.prompt_version == prompt_version
                assert row.ttft is None
            self.tokens[key] += tokens
            self.log_probs[key] += log_probs
            self.versions[key] += versions
            self.top_n[key] += row.top_n_rows()
            self.known[key] = (row.start + row.count, row.prompt_version, row.num_events)
            self.events[key] += unpack_events(row.events or b"")
            assert len(self.events[key]) == row.num_events


def listen(engine: DynamicInferenceEngine, every: int, events: Iterator[Any] | None = None) -> tuple[Listener, Any]:
    """Run to the end, asking for progress every so many steps; between them, what `events` does."""
    listener, ended, count = Listener(), [], 0
    while engine.has_unfinished:
        listener.expect(engine)
        ended += engine.step()
        count += 1
        if count % every == 0:
            listener.hear(engine.progress(listener.known))
            assert engine.progress(listener.known) == []
        if events is not None:
            next(events, None)
        check_scheduler(engine.context.scheduler)
    for record in ended:
        listener.hear([growth(record, *listener.known[record.request_id, record.sample_index])])
    return listener, {(record.request_id, record.sample_index): record.merge() for record in ended}


def assert_heard_everything(listener: Listener, requests: dict[Key, Any]) -> None:
    assert listener.tokens == {key: request.generated_tokens for key, request in requests.items()}
    assert listener.log_probs == {key: request.generated_log_probs for key, request in requests.items()}
    for key, request in requests.items():
        versions = request.policy_versions.tolist()
        assert listener.versions[key] == versions[len(request.prompt_tokens) :]
        assert listener.prompt_version[key] == versions[0]
        assert listener.ttft[key] == request.ttft
        assert listener.top_n[key] == request.generated_top_n_logprobs
        assert listener.events[key] == request.events


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
@pytest.mark.parametrize("every", [1, 2, 5])
def test_progress_is_exact_across_updates_suspends_and_evictions(mode: str, every: int) -> None:
    engine = make_engine("qwen3", kv_cache_blocks=12, max_requests=5)
    for seed in range(4):
        engine.add_request(token_ids(6, seed), at_random(12, n=2, seed=seed, logprobs=1))

    def disturb() -> Iterator[None]:
        for round_ in range(100):
            if round_ % 4 == 3:
                pass_suspended(engine, mode)
            if round_ % 5 == 2:
                engine.weights_updated()
            yield

    listener, requests = listen(engine, every, disturb())
    assert_heard_everything(listener, requests)
    assert mode == "recompute" or engine.stats()["preemptions"] > 0
    assert any(len(set(versions)) > 2 for versions in listener.versions.values())


@pytest.mark.parametrize("every", [1, 4, 7])
def test_samples_that_start_afresh_are_told_from_their_beginning(every: int) -> None:
    engine = make_engine(make_model("qwen3"), max_staleness=0, staleness_policy=StalenessPolicy.REQUEUE, max_requests=2)
    engine.add_request(token_ids(6), at_random(12, n=2))
    engine.add_request(token_ids(6), at_random(12, n=2, seed=5))

    def update() -> Iterator[None]:
        for round_ in range(100):
            if round_ in (4, 8):
                engine.weights_updated()
            yield

    listener, requests = listen(engine, every, update())
    assert_heard_everything(listener, requests)
    assert listener.restarts > 0
    assert all(set(versions) == {listener.prompt_version[key]} for key, versions in listener.versions.items())


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
    tokenizer = make_tokenizer()
    engine = make_engine("qwen3", tokenizer)
    text = tokenizer.decode(finish_text(engine))
    engine.add_request(token_ids(6), greedily(12, stop=text[3:6]))
    listener, requests = listen(engine, 2)
    assert_heard_everything(listener, requests)
    (tokens,) = listener.tokens.values()
    assert 4 <= len(tokens) <= 6
    assert requests[1, 0].finish_reason == "stop"


def finish_text(engine: DynamicInferenceEngine) -> list[int]:
    engine.add_request(token_ids(6), greedily(12))
    (request,) = finish(engine).values()
    return request.generated_tokens


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


class Mirror:
    """The hashes that a remote reader takes for cached, who gets the changes now and then."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.found: set[int] = set(allocator.index.current)
        self.changes = allocator.index.changes = CacheChanges()

    def hear(self) -> None:
        taken = self.changes.take()
        if taken.flushed:
            self.found.clear()
        assert taken.removed <= self.found, "something was removed that was not there"
        self.found -= taken.removed
        assert not taken.added & self.found, "something was added that was there"
        self.found |= taken.added
        assert self.found == set(self.allocator.index.current)


@given(st.data())
def test_the_changes_of_the_cache_tell_what_can_be_found_after_any_operations(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(["lru", "ref_zero"]))
    allocator = BlockAllocator(6, 2, eviction_policy=policy)
    mirror, held = Mirror(allocator), []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(
            st.sampled_from(["take", "take", "give", "give", "move", "drop", "unlist", "resize", "hear"])
        )
        if action == "take" and allocator.can_allocate(1):
            (block,) = allocator.allocate(1)
            name = data.draw(st.integers(1, 5))
            held.append(allocator.register(block, name, NO_BLOCK, np.array([name, name], np.int32)))
        elif action == "give" and held:
            block = held.pop(data.draw(st.integers(0, len(held) - 1)))
            allocator.release(np.array([block], np.int32))
        elif action == "move":
            allocator.outdate()
        elif action == "drop":
            allocator.drop_cached()
        elif action == "unlist" and held:
            allocator.unregister(np.array([data.draw(st.sampled_from(held))], np.int32))
        elif action == "resize":
            size = data.draw(st.integers(3, 6))
            if len(allocator.pages.live()) <= size:
                allocator.pages.resize(size)
        elif action == "hear":
            mirror.hear()
    mirror.hear()


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
    engine.pause()
    engine.suspend("offload")
    engine.weights_updated()
    engine.resume()
    engine.unpause()
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
