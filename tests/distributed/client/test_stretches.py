"""Tests of a client's session: stretches of one or several ranks become results without gaps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.distributed.protocol import messages as wire
from rollout.distributed.protocol.fields import LostFramesError
from rollout.distributed.protocol.messages import Status as StatusAnswer
from rollout.distributed.protocol.outcome import outcome as outcome_of
from rollout.distributed.protocol.outcome import pack
from rollout.distributed.protocol.stretch import ENTRIES_TOGETHER
from rollout.errors import ConnectionLostError, InvalidRequestError, SerializationError
from rollout.requests.events import pack_events
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.spans import VersionSpans
from rollout.requests.token_columns import pack_top_n
from rollout.sampling_params import SamplingParams
from rollout.state import FinishReason, Status
from tests.distributed.client.lines import PROMPT, Line, floats, outcome, stretch
from tests.engines import at_random, make_engine, token_ids

# --- results ----------------------------------------------------------------------------------------------------------


def test_a_group_that_comes_whole_is_complete():
    line = Line()
    group = line.submit(n=3, priority=4)
    rows = {index: (0, [10 * index, 11]) for index in (2, 0, 1)}
    line.receive(wire.Update([stretch(0, rows, ended=(0, 1, 2), ttft=[0.1, 0.2, 0.3], text=["c", "a", "b"])]))
    assert line.done == [group]
    assert group.done
    assert not line.session._open
    result = group.result()
    assert len(result) == 3
    assert [each.generated_tokens for each in result] == [[0, 11], [10, 11], [20, 11]]
    assert [each.generated_text for each in result[:2]] == ["a", "b"]
    first = result[0]
    assert (first.request_id, first.sample_index, first.ttft, first.priority) == (0, 0, 0.2, 4)
    assert first.status is Status.COMPLETED
    assert first.finish_reason is FinishReason.LENGTH
    assert first.generated_log_probs == [0.0, -0.125]
    assert (first.prompt, first.prompt_tokens, first.arrival_time, first.seed) == (None, PROMPT, 1000.0, 42)
    assert first.prompt_tokens is result[1].prompt_tokens
    assert first.sampling_params is group.params


def test_a_sample_that_failed_is_a_failed_request_beside_the_others():
    line = Line()
    group = line.submit(n=2)
    ended = stretch(0, {0: (0, [1]), 1: (0, [])}, ended=(0, 1))
    ended.columns["outcome"][1] = pack(
        outcome(0, finish_reason="error", error="KeyError: x", policy_spans=VersionSpans(), kv_spans=VersionSpans())
    )
    line.receive(wire.Update([ended]))
    good, bad = group.result()
    assert good.succeeded()
    assert bad.failed()
    assert bad.error == "KeyError: x"
    assert bad.finish_reason is FinishReason.ERROR


def test_a_budget_that_the_engine_clamped_is_in_the_results_parameters():
    line = Line()
    group = line.session.submit(PROMPT, SamplingParams(max_tokens=50, min_tokens=40))
    ended = stretch(0, {0: (0, [1])}, ended=(0,))
    ended.columns["outcome"] = [pack(outcome(1, max_tokens=30))]
    line.receive(wire.Update([ended]))
    assert group.result()[0].sampling_params == SamplingParams(max_tokens=30, min_tokens=30)


def test_a_text_prompt_gets_its_tokens_from_the_coordinator():
    line = Line()
    group = line.submit("hello")
    line.receive(
        wire.Accepted(0, np.array(PROMPT, "<i4").tobytes()), wire.Update([stretch(0, {0: (0, [1])}, ended=(0,))])
    )
    (request,) = group.result()
    assert (request.prompt, request.prompt_tokens) == ("hello", PROMPT)


def test_a_result_whose_prompt_was_never_told_is_no_good():
    line = Line()
    line.submit("hello")
    with pytest.raises(SerializationError, match="the tokens of its prompt"):
        line.receive(wire.Update([stretch(0, {0: (0, [1])}, ended=(0,))]))


@pytest.mark.parametrize("mode", [None, "persist", "recompute"])
def test_results_are_what_a_direct_engine_says(mode):
    """Every field that travels, also of a group whose weights changed in the middle, which recompute splits in two."""
    engine = make_engine("llama", track_generated_token_events=mode == "persist")
    params = at_random(9, n=3, logprobs=2, prompt_logprobs=2)
    prompt = token_ids(7)
    engine.add_request(prompt, params, request_id=0, priority=1)
    records = []
    while engine.has_unfinished:
        records += engine.step()
        if mode and engine.inspection.counters["steps"] == 4 and not engine.policy_version:
            engine.pause()
            engine.suspend(mode)
            engine.weights_updated()
            engine.resume()
            engine.unpause()
    records.sort(key=lambda record: record.sample_index)
    merged = [record.merge() for record in records]
    line = Line()
    group = line.session.submit(prompt, params, priority=1, arrival_time=merged[0].arrival_time)
    for record, each in zip(records, merged, strict=True):
        cut = 4 + each.sample_index
        for start, stop in ((0, cut), (cut, 9)):
            rows = {each.sample_index: (start, each.generated_tokens[start:stop])}
            part = stretch(0, rows)
            part.log_probs = np.array(each.generated_log_probs[start:stop], "<f4").tobytes()
            if not start:
                part.columns["ttft"] = [each.ttft]
            part.columns["top_n"] = [pack_top_n(each.generated_top_n_logprobs[start:stop])]
            if stop == 9:
                part.columns["outcome"] = [pack(outcome_of(record))]
            part.columns["events"] = [pack_events(each.events[:3] if start == 0 else each.events[3:])]
            line.receive(wire.Update([part]))
    for ours, theirs in zip(group.result(), merged, strict=True):
        assert ours.serialize() == theirs.serialize() | {"arrival_time": ours.arrival_time}
        assert ours.precomputed_block_hashes == theirs.precomputed_block_hashes
        # A direct engine looks at its clock once per sample.
        assert ours.arrival_time == merged[0].arrival_time
        assert ours.policy_versions.tolist() == theirs.policy_versions.tolist()
        assert DynamicInferenceRequest.deserialize(ours.serialize()).generated_tokens == theirs.generated_tokens
    if mode:
        assert len(set(merged[0].policy_versions.tolist())) == 2
    assert len(records[0]) == (2 if mode == "recompute" else 1)


# --- contiguity -------------------------------------------------------------------------------------------------------


def test_a_sample_that_comes_token_by_token_is_kept_in_few_pieces_and_read_as_ever():
    """A stream brings one piece per token: 256 streams for a minute took hundreds of MB."""
    line = Line()
    group = line.submit(n=2)
    for number in range(1000):
        rows = {0: (number, [number]), 1: (number, [7])}
        line.receive(
            wire.Update([stretch(0, rows, version=number // 400, ttft=[None, None] if number else [0.5, 0.25])])
        )
    assert len(group._tokens.rows) <= ENTRIES_TOGETHER
    assert group.oldest_version() == 0
    line.receive(wire.Update([stretch(0, {0: (1000, [5]), 1: (1000, [])}, version=2, ended=(0, 1))]))
    first, second = group.result()
    assert first.generated_tokens == [*range(1000), 5]
    assert second.generated_tokens == [7] * 1000
    assert first.generated_log_probs == floats(1001).tolist()
    assert (first.ttft, second.ttft) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("second", "kind", "words"),
    [
        ({0: (3, [9])}, LostFramesError, "sample 0 continues at token 3: must be 2 or 0"),
        ({0: (1, [9])}, LostFramesError, "sample 0 continues at token 1: must be 2 or 0"),
        ({1: (1, [9])}, LostFramesError, "sample 1 continues at token 1: must be 0 or 0"),
        ({2: (0, [9])}, SerializationError, "sample 2, which is none of n=2"),
    ],
)
def test_tokens_that_do_not_follow_are_an_error_of_the_connection(second, kind, words):
    line = Line()
    group = line.submit(n=2)
    line.receive(wire.Update([stretch(0, {0: (0, [1, 2])})]))
    with pytest.raises(kind, match=words):
        line.receive(wire.Update([stretch(0, second)]))
    assert group.known()[0].token_ids == np.array([1, 2], "<i4").tobytes()


def test_tokens_of_a_sample_that_has_ended_are_an_error_of_the_connection():
    line = Line()
    line.submit(n=2)
    line.receive(wire.Update([stretch(0, {0: (0, [1])}, ended=(0,))]))
    with pytest.raises(SerializationError, match="sample 0, which has ended"):
        line.receive(wire.Update([stretch(0, {0: (0, [1])})]))


def test_messages_for_unknown_or_ended_groups_are_dropped():
    line = Line()
    group = line.submit()
    line.receive(wire.Update([stretch(0, {0: (0, [1])}, ended=(0,))]))
    line.receive(
        wire.Update([stretch(0, {0: (0, [1])}, ended=(0,)), stretch(77, {0: (0, [1])})]),
        wire.RequestFailed(0, "RankLostError", "late"),
        wire.RequestFailed(77, "RankLostError", "late"),
        wire.Accepted(77, b""),
        wire.ControlDone(5),
        StatusAnswer(5, {}),
        wire.BarrierDone(5),
        wire.Heartbeat(),
    )
    assert group.error is None
    assert len(line.done) == 1


@pytest.mark.parametrize(
    "message", [wire.Command(0, "pause", None), wire.Submit(0, b"", 1, b""), wire.Control(0, "stop", None, 1.0)]
)
def test_a_message_that_is_not_for_clients_is_refused(message):
    with pytest.raises(SerializationError, match=f"{type(message).__name__}: no message for a client"):
        Line().receive(message)


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Draw, for each sample of a group, its tokens in its last life, and the cuts of an earlier life and of this one."""
    return [
        (
            draw(st.lists(st.integers(0, 2**31 - 1), max_size=12)),
            draw(st.lists(st.integers(0, 12), max_size=4)),
            draw(st.integers(0, 5)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]


def pieces_of(tokens, cuts, lost):
    """(start, tokens, ended) of one sample, in order; `lost` tokens of an earlier life come first."""
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    earlier = [(0, [7] * lost, False)] if lost else []
    parts = [(low, tokens[low:high], high == len(tokens)) for low, high in pairwise(bounds)]
    return earlier + (parts or [(0, [], True)])


@settings(max_examples=100)
@given(lives(), st.data())
def test_any_order_of_stretches_becomes_the_right_results(samples, data):
    """Split anywhere, mixed between samples, restarted, handed to another session in the middle."""
    line = Line()
    group = line.submit(n=len(samples))
    todo = {index: pieces_of(*life) for index, life in enumerate(samples)}
    request_id, version = 0, data.draw(st.integers(0, 3))
    while todo:
        chosen = data.draw(st.lists(st.sampled_from(sorted(todo)), min_size=1, unique=True))
        rows, ended = {}, []
        for index in chosen:
            start, tokens, last = todo[index].pop(0)
            rows[index] = (start, tokens)
            if last:
                ended.append(index)
                del todo[index]
        line.receive(wire.Update([stretch(request_id, rows, version=version, ended=tuple(ended))]))
        if todo and data.draw(st.booleans()):
            line.session.lost(ConnectionLostError("gone"))
            line = Line()
            group = line.submit(n=len(samples), known=group.known())
            (submit,) = line.sent
            assert (submit.wanted or list(range(len(samples)))) == sorted(todo)
            assert {index for each in submit.known for index in each.indices} <= set(todo)
    assert line.done == [group]
    for (tokens, _, _), request in zip(samples, group.result(), strict=True):
        assert request.generated_tokens == tokens
        assert request.generated_log_probs == floats(len(tokens)).tolist()
        assert request.policy_spans == VersionSpans([(0, len(PROMPT) + len(tokens))])


# --- going on elsewhere -----------------------------------------------------------------------------------------------


def test_what_is_known_keeps_tokens_log_probs_versions_times_and_ends():
    line = Line()
    group = line.submit(n=3)
    assert group.known() == []
    line.receive(
        wire.Update(
            [stretch(0, {0: (0, [1, 2]), 1: (0, [3])}, ttft=[0.1, 0.2], top_n=[pack_top_n([[(1, -0.5)]] * 2), None])]
        ),
        wire.Update([stretch(0, {1: (1, [4])}, version=1, ended=(1,), text=["bye"])]),
        wire.Update([stretch(0, {0: (2, [5])}, top_n=[pack_top_n([[(5, -0.25)]])])]),
    )
    line.session.lost(ConnectionLostError("gone"))
    (known,) = group.known()
    known.check()
    assert (known.indices, known.starts, known.counts) == ([0, 1], [0, 0], [3, 2])
    assert known.token_ids == np.array([1, 2, 5, 3, 4], "<i4").tobytes()
    assert known.log_probs == floats(3).tobytes() + floats(2).tobytes()
    assert known.versions == [[0, 0, 3], [0, 0, 1, 1, 1]]
    assert known.columns["ttft"] == [0.1, 0.2]
    assert known.columns["text"] == [None, "bye"]
    first, second = known.deltas()
    assert first.top_n_rows() == [[(1, -0.5)], [(1, -0.5)], [(5, -0.25)]]
    assert second.top_n is None
    other = Line()
    again = other.submit(n=3, known=group.known())
    (submit,) = other.sent
    assert submit.wanted == [0, 2]
    assert [each.indices for each in submit.known] == [[0]]
    other.receive(wire.Update([stretch(0, {0: (3, [6]), 2: (0, [8])}, ended=(0, 2))]))
    assert [each.generated_tokens for each in again.result()] == [[1, 2, 5, 6], [3, 4], [8]]
    assert again.result()[1].generated_text == "bye"


def test_only_the_wanted_samples_are_asked_for_and_waited_for():
    line = Line()
    group = line.submit(n=4, wanted={1, 2}, known=[stretch(9, {0: (0, [5]), 1: (0, [6]), 3: (0, [7])}, ended=(0,))])
    (submit,) = line.sent
    assert (submit.n, submit.wanted) == (4, [1, 2])
    assert [each.indices for each in submit.known] == [[1]]
    with pytest.raises(SerializationError, match="sample 3, which is none of n=4 or was not asked for"):
        line.receive(wire.Update([stretch(0, {3: (1, [8])})]))
    line.receive(wire.Update([stretch(0, {1: (1, [8]), 2: (0, [])}, ended=(1, 2))]))
    assert line.done == [group]
    result = group.result()
    assert [each.generated_tokens for each in result] == [[5], [6, 8], []]
    with pytest.raises(RuntimeError, match="sample 3 has not ended, or was not asked for"):
        group.request(3)
    with pytest.raises(InvalidRequestError, match=r"wanted=\[4, -1\]: must be samples in \[0, n=2\)"):
        line.submit(n=2, wanted=[0, 4, -1])
    with pytest.raises(InvalidRequestError, match="nothing is left to compute"):
        line.submit(n=2, wanted=[])


def test_the_oldest_version_is_of_tokens_that_are_still_needed():
    line = Line()
    group = line.submit(n=3)
    assert group.oldest_version() is None
    line.receive(wire.Update([stretch(0, {0: (0, [1]), 1: (0, [1])}, version=1)]))
    line.receive(wire.Update([stretch(0, {0: (1, [2])}, version=3), stretch(0, {2: (0, [2])}, version=2)]))
    assert group.oldest_version() == 1
    line.receive(wire.Update([stretch(0, {0: (2, [2]), 1: (1, [])}, version=3, ended=(0, 1))]))
    assert group.oldest_version() == 2


def test_known_that_does_not_fit_is_refused_and_nothing_is_sent():
    line = Line()
    with pytest.raises(InvalidRequestError, match=r"known does not fit the request: .*sample 3, which is none of n=2"):
        line.submit(n=2, known=[stretch(0, {3: (0, [1])})])
    with pytest.raises(InvalidRequestError, match=r"sample 0 continues at token 2: must be 0 or 0"):
        line.submit(n=2, known=[stretch(0, {0: (2, [1])})])
    with pytest.raises(InvalidRequestError, match="nothing is left to compute"):
        line.submit(n=1, known=[stretch(0, {0: (0, [1])}, ended=(0,))])
    with pytest.raises(InvalidRequestError, match=r"does not fit the request: Stretch\.counts"):
        line.submit(n=1, known=[replace(stretch(0, {0: (0, [1])}), counts=[2])])
    assert line.sent == []
