"""Tests of a rank's session: fresh work, what is refused, the end of an assignment, control, state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from rollout.distributed.protocol.messages import Cancel, Command, CommandAck, Decline, EngineMoved, Progress, Stretch
from rollout.distributed.worker import session
from rollout.engine.parts.holds import COORDINATOR
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from tests.adapters import saved_adapter
from tests.distributed.worker.rank_sessions import Rank, assign, packed, put_together, undisturbed, welcome
from tests.engines import at_random, greedily, make_engine, token_ids
from tests.models import make_model

# --- fresh work -------------------------------------------------------------------------------------------------------


def test_a_group_comes_back_whole_with_everything_the_engine_knows_of_it() -> None:
    prompt, params = token_ids(7), at_random(9, n=3, logprobs=2, prompt_logprobs=1)
    rank = Rank(make_engine("qwen3"))
    rank.hears(assign(prompt, params))
    rank.finish()
    alone = undisturbed(prompt, params)
    told = put_together(rank.stretches())
    assert sorted(told) == [0, 1, 2]
    for index, sample in told.items():
        request = alone[index]
        assert sample.tokens == request.generated_tokens
        assert sample.log_probs == pytest.approx(request.generated_log_probs, abs=1e-6)
        assert [[token for token, _ in row] for row in sample.top_n] == [
            [token for token, _ in row] for row in request.generated_top_n_logprobs
        ]
        ended = sample.outcome
        assert ended is not None
        assert (ended.finish_reason, ended.error, ended.max_tokens, ended.seed) == ("length", None, 9, 11)
        assert ended.policy_spans == VersionSpans([(0, 16)])
        assert ended.kv_spans == VersionSpans([(0, 15)])
        assert len(ended.tpot) == 8
        assert ended.ttft == sample.ttft
        assert ended.ttft is not None
        assert ended.latency is not None
        assert ended.prompt_log_probs == pytest.approx(request.prompt_log_probs, abs=1e-6)
        assert ended.prompt_top_n is not None


def test_tokens_are_told_every_interval_and_those_of_a_group_in_one_stretch() -> None:
    rank = Rank(make_engine("qwen3"))
    rank.hears(assign(token_ids(7), greedily(10, n=2)))
    rank.step(3)
    assert rank.stretches() == []
    rank.step()
    rank.step(6)
    assert [(each.indices, each.starts, each.counts) for each in rank.stretches()] == [
        ([0, 1], [0, 0], [4, 4]),
        ([0, 1], [4, 4], [4, 4]),
        ([0, 1], [8, 8], [2, 2]),
    ]
    assert [not each.ended() for each in rank.stretches()] == [True, True, False]


# --- what is refused --------------------------------------------------------------------------------------------------


TWO_TOKENS = (np.array([5, 6], "<i4").tobytes(), np.array([-1, -1], "<f4").tobytes())


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"prompt": b""}, "InvalidRequestError", "the prompt is empty"),
        ({"prompt": np.array([5000], "<i4").tobytes()}, "InvalidRequestError", "prompt token 5000"),
        ({"params": b"\xc1"}, "SerializationError", "no msgpack"),
        ({"params": msgpack.packb({"temprature": 1})}, "ConfigError", "temprature"),
        ({"params": packed(greedily(4, n=2, stop="x"))}, "ConfigError", "needs a tokenizer"),
        ({"params": packed(greedily(4000, n=2))}, "InvalidRequestError", "KV blocks"),
        ({"indices": [0, 9]}, "InvalidRequestError", "must be different ones of the n=2"),
        ({"known": [Stretch(0, 1, [0], [3], [2], *TWO_TOKENS, [[0, 0, 2]])]}, "SerializationError", "known.starts"),
        (
            {"known": [Stretch(0, 1, [0], [0], [2], *TWO_TOKENS, [[0, 4, 2]])]},
            "InvalidRequestError",
            "policy version 4",
        ),
        (
            {
                "params": packed(greedily(4, n=2, logprobs=3)),
                "known": [Stretch(0, 1, [0], [0], [2], *TWO_TOKENS, [[0, 0, 2]])],
            },
            "SerializationError",
            "known.top_n",
        ),
        (
            {
                "params": packed(greedily(4, n=2, logprobs=3)),
                "known": [Stretch(0, 1, [0], [0], [2], *TWO_TOKENS, [[0, 0, 2]], {"top_n": [b"\x00"]})],
            },
            "SerializationError",
            "top_n",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.* is clamped")
def test_what_the_engine_refuses_is_declined_and_harms_nobody(changes: dict[str, Any], error: str, words: str) -> None:
    rank = Rank(make_engine("qwen3"))
    good = assign(token_ids(7), greedily(4, n=2), attempt=7, request_id=5)
    rank.hears(good, replace(assign(token_ids(7), greedily(4, n=2), attempt=8), **changes))
    (declined,) = rank.take(Decline)
    assert (declined.request_id, declined.attempt, declined.error) == (0, 8, error)
    assert words in declined.text
    assert rank.session.num_open == 2
    rank.finish()
    assert {stretch.attempt for stretch in rank.stretches()} == {7}


# --- the end of an assignment -----------------------------------------------------------------------------------------


def test_a_cancelled_assignment_frees_its_blocks_at_once_and_is_heard_of_no_more() -> None:
    rank = Rank(make_engine("qwen3"))
    rank.hears(assign(token_ids(9), greedily(20, n=3)))
    rank.step(3)
    assert rank.engine.context.allocator.num_used > 0
    rank.hears(Cancel(0, 1))
    assert rank.engine.context.allocator.num_used == 0
    assert rank.session.num_open == 0
    rank.finish()
    assert rank.stretches() == []


def test_a_newer_attempt_ends_the_older_one_for_its_samples_alone() -> None:
    rank = Rank(make_engine("qwen3"))
    rank.hears(assign(token_ids(9), at_random(6, n=3)))
    rank.step(2)
    rank.hears(assign(token_ids(9), at_random(6, n=3), attempt=4, indices=[1]))
    rank.hears(assign(token_ids(9), at_random(6, n=3), attempt=3, indices=[1]))
    rank.finish()
    attempts = {index: stretch.attempt for stretch in rank.stretches() for index in stretch.indices}
    assert attempts == {0: 1, 1: 4, 2: 1}
    alone = undisturbed(token_ids(9), at_random(6, n=3))
    by_attempt = [put_together([s for s in rank.stretches() if s.attempt == attempt]) for attempt in (1, 4)]
    for told in by_attempt:
        assert all(sample.tokens == alone[index].generated_tokens for index, sample in told.items())


def test_when_the_session_is_lost_its_samples_end() -> None:
    rank = Rank(make_engine("qwen3"))
    rank.hears(assign(token_ids(9), greedily(20, n=3)))
    rank.step(3)
    before = len(rank.said)
    rank.session.lost()
    assert rank.session.num_open == 0
    assert rank.engine.load == (0, 0)
    rank.step(20)
    assert not any(message.stretches for message in rank.said[before:] if isinstance(message, Progress))


# --- control ----------------------------------------------------------------------------------------------------------


def test_commands_are_done_acknowledged_and_harmless_when_repeated() -> None:
    rank = Rank(make_engine("qwen3"))
    rank.hears(assign(token_ids(9), greedily(12)))
    rank.step(2)
    for signal, argument, state, version in [
        ("unpause", None, "running", 0),
        ("pause", None, "paused", 0),
        ("pause", None, "paused", 0),
        ("suspend", "recompute", "suspended", 0),
        ("suspend", None, "suspended", 0),
        ("pause", None, "suspended", 0),
        ("set_version", 4, "suspended", 4),
        ("set_version", 4, "suspended", 4),
        ("set_version", 2, "suspended", 4),
        ("resume", None, "paused", 4),
        ("resume", None, "paused", 4),
        ("unpause", None, "running", 4),
    ]:
        rank.hears(Command(9, signal, argument))
        acknowledged = rank.said[-1]
        assert acknowledged == CommandAck(9, state, version, None), signal
    assert rank.take(EngineMoved) == []
    rank.finish()
    told = put_together(rank.stretches())[0]
    assert told.versions == [0, 0] + [4] * 10


@pytest.mark.parametrize(
    ("signal", "argument", "words"),
    [
        ("suspend", None, "EngineStateError: suspend() while running"),
        ("stop", None, "EngineStateError: stop() while running"),
        ("set_version", "seven", "EngineStateError: set_version('seven')"),
        ("set_version", None, "EngineStateError: set_version(None)"),
    ],
)
def test_a_command_that_cannot_be_done_is_acknowledged_with_the_reason(
    signal: str, argument: str | None, words: str
) -> None:
    rank = Rank(make_engine("qwen3"))
    rank.hears(Command(3, signal, argument))
    (acknowledged,) = rank.take(CommandAck)
    assert (acknowledged.state, acknowledged.policy_version) == ("running", 0)
    assert words in acknowledged.error


def test_stop_ends_every_sample_by_name_before_it_is_acknowledged() -> None:
    rank = Rank(make_engine("qwen3"))
    rank.hears(assign(token_ids(9), greedily(12, n=2)), assign(token_ids(9, 1), greedily(12), attempt=2, request_id=1))
    rank.step(3)
    rank.hears(Command(3, "pause", None), Command(4, "stop", None))
    assert rank.said[-1] == CommandAck(4, "stopped", 0, None)
    for request_id, samples in ((0, [0, 1]), (1, [0])):
        told = put_together([stretch for stretch in rank.stretches() if stretch.request_id == request_id])
        assert sorted(told) == samples
        for sample in told.values():
            assert 2 <= len(sample.tokens) <= 3
            assert sample.outcome is not None
            assert sample.outcome.finish_reason == "abort"
            assert sample.outcome.error == "RequestAbortedError: the engine was stopped"
    assert rank.session.num_open == 0


def test_after_a_stop_work_is_declined_and_an_engine_that_ended_by_itself_leaves_it_to_others() -> None:
    stopped = Rank(make_engine("qwen3"))
    stopped.hears(Command(3, "pause", None), Command(4, "stop", None), assign(token_ids(9), greedily(3)))
    assert stopped.take(Decline)[0].error == "EngineStateError"
    gone = Rank(make_engine("qwen3"))
    gone.engine.pause()
    gone.engine.stop()
    gone.session.moved()
    gone.hears(assign(token_ids(9), greedily(3)))
    assert gone.take(Decline) == []
    assert gone.session.num_open == 0


# --- state and version ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "reached"),
    [("running", "running"), ("paused", "paused"), ("suspended", "suspended"), ("stopping", "stopped")],
)
def test_a_rank_that_enters_reaches_version_and_state_before_it_says_so(state: str, reached: str) -> None:
    rank = Rank(make_engine("qwen3"), enter=False)
    rank.hears(welcome(state, 6))
    assert rank.said[-1] == EngineMoved(reached, 6)
    assert not rank.take(CommandAck)
    assert (rank.engine.state.value, rank.engine.policy_version) == (reached, 6)


def test_the_present_version_in_a_command_outdates_the_cache_and_in_a_welcome_it_does_not() -> None:
    engine = make_engine("qwen3")
    engine.generate([token_ids(9)], greedily(3))
    rank = Rank(engine, enter=False)
    rank.hears(welcome("running", 0))
    assert rank.cached == set(engine.context.allocator.index.current)
    assert rank.cached
    rank.hears(Command(1, "set_version", 0))
    assert rank.cached == set(engine.context.allocator.index.current) == set()
    assert engine.policy_version == 0


def test_nothing_is_said_before_the_engine_has_entered() -> None:
    rank = Rank(make_engine("qwen3"), enter=False)
    rank.engine.add_request(token_ids(9), greedily(3))
    rank.engine.weights_updated()
    rank.session.moved()
    rank.step(5)
    assert rank.said == []
    rank.hears(welcome("running", 0))
    assert rank.said[-1] == EngineMoved("running", 1)
    assert rank.cached == set(rank.engine.context.allocator.index.current)


@pytest.mark.parametrize("by_command", [False, True])
def test_a_new_session_wakes_an_engine_that_a_command_put_to_sleep_and_no_other(by_command: bool) -> None:
    engine = make_engine("qwen3")
    first = Rank(engine)
    if by_command:
        first.hears(Command(1, "pause", None), Command(2, "suspend", None))
    else:
        engine.pause()
        engine.suspend()
        first.session.moved()
    assert (COORDINATOR in engine.holds) is by_command
    second = Rank(engine, enter=False)
    second.hears(welcome("running"))
    state = "running" if by_command else "suspended"
    assert second.said[-1] == EngineMoved(state, 0)


def test_the_coordinators_picture_of_the_cache_stays_true() -> None:
    rank = Rank(make_engine("qwen3", kv_cache_blocks=16))
    commands = [("pause", None), ("suspend", "recompute"), ("set_version", 1), ("resume", None), ("unpause", None)]
    for number in range(20):
        rank.hears(assign(token_ids(9, number % 6), greedily(4), attempt=number, request_id=number))
        rank.step(3)
        if number % 4 == 3:
            signal, argument = commands[number // 4]
            rank.hears(Command(number, signal, argument))
        if rank.engine.state is not EngineState.RUNNING:
            continue
        rank.step(3)
        assert rank.cached == set(rank.engine.context.allocator.index.current)
    rank.finish()


def test_a_command_does_not_bring_back_what_the_training_loop_has_put_away() -> None:
    """Its optimizer is using the memory."""
    rank = Rank(make_engine("qwen3"))
    rank.engine.pause()
    rank.engine.suspend()
    wanted = []
    for number, signal in enumerate(["pause", "suspend", "resume", "unpause"]):
        rank.hears(Command(number, signal, None))
        assert rank.said[-1] == CommandAck(number, "suspended", 0, None)
        wanted.append(rank.engine.holds.level(COORDINATOR).name)
    assert wanted == ["PAUSED", "SUSPENDED", "PAUSED", "RUNNING"]


def test_a_training_loop_that_counts_its_own_updates_is_not_said_to_be_ahead() -> None:
    """Old weights under the label of the new ones, for a rank that came back while the others had updated."""
    rank = Rank(make_engine("qwen3"), enter=False, follows_version=False)
    rank.hears(welcome(version=4))
    assert rank.said == [EngineMoved("running", 0)]
    rank.engine.weights_updated()
    rank.session.moved()
    assert rank.said[-1] == EngineMoved("running", 1)


def test_whether_anybody_steps_the_engine_is_said_when_it_changes() -> None:
    rank = Rank(make_engine("qwen3"), enter=False)
    rank.idle = True
    rank.hears(welcome())
    assert rank.said == [EngineMoved("running", 0, True)]
    rank.idle = False
    rank.session.moved()
    rank.session.moved()
    assert rank.said[1:] == [EngineMoved("running", 0, False)]


def test_a_flush_is_told_with_its_blocks_and_they_are_gone_from_the_coordinators_table() -> None:
    rank = Rank(make_engine("qwen3"))
    rank.engine.generate([token_ids(20)], SamplingParams(max_tokens=2))
    rank.session.report(())
    assert rank.cached
    rank.hears(Command(3, "flush_prefix_cache", None))
    assert rank.said[-1] == CommandAck(3, "running", 0, None, 5)
    assert not rank.cached


def test_weights_of_a_folder_are_loaded_and_their_version_follows(tmp_path: Path) -> None:
    other = make_model("qwen3", seed=5)
    other.save_pretrained(tmp_path)
    rank = Rank(make_engine(make_model("qwen3")))
    rank.hears(Command(3, "load_weights", str(tmp_path)), Command(4, "set_version", 1))
    loaded, set_to = rank.take(CommandAck)
    assert (loaded.error, loaded.amount > 0, set_to.policy_version) == (None, True, 1)
    expected = other.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in rank.engine.model.state_dict().items())
    rank.hears(Command(5, "load_weights", str(tmp_path / "nowhere")))
    assert "must be a folder with model.safetensors" in (rank.take(CommandAck)[-1].error or "")


def test_an_adapter_is_loaded_and_its_requests_end_when_it_is_unloaded(tmp_path: Path) -> None:
    folder = saved_adapter(make_model("qwen3"), tmp_path / "a=b")
    rank = Rank(make_engine(make_model("qwen3")))
    rank.hears(Command(3, "load_adapter", f"x={folder}"), assign(token_ids(5), greedily(50, adapter="x", n=2)))
    rank.hears(assign(token_ids(5), greedily(3), attempt=2, request_id=2))
    rank.hears(Command(4, "unload_adapter", "x"), Command(5, "unload_adapter", "x"))
    loaded, *unloaded = rank.take(CommandAck)
    assert (loaded.error, loaded.amount) == (None, 9)
    assert [(ack.error, ack.amount) for ack in unloaded] == [(None, 2), (None, 0)]
    told = put_together([stretch for stretch in rank.stretches() if stretch.attempt == 1])
    assert all("adapter 'x' was unloaded" in str(each.outcome and each.outcome.error) for each in told.values())
    assert len(told) == 2
    rank.finish()


def test_a_report_of_more_requests_than_a_frame_may_hold_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went in one, which the coordinator refused: the rank lost its session for having too much work."""
    monkeypatch.setattr(session, "MAX_STRETCHES", 3)
    rank = Rank(make_engine("qwen3"))
    rank.hears(*(assign(token_ids(5, seed), greedily(4), attempt=1 + seed, request_id=seed) for seed in range(8)))
    rank.finish()
    sizes = [len(message.stretches) for message in rank.take(Progress)]
    assert max(sizes) == 3
    assert sizes.count(3) >= 2
    told = {stretch.request_id for stretch in rank.stretches() if stretch.ended()}
    assert told == set(range(8))
