"""Tests of a rank's session that continues samples of another rank."""

from __future__ import annotations

from typing import Any

import pytest

from rollout.distributed.protocol.messages import Command
from rollout.requests.spans import VersionSpans
from rollout.sampling_params import SamplingParams
from rollout.state import StalenessPolicy
from tests.distributed.worker.rank_sessions import Rank, Told, assign, put_together, undisturbed
from tests.engines import at_random, finish, greedily, make_engine, token_ids
from tests.models import make_tokenizer


def moved_after(steps: int, prompt: list[int], params: SamplingParams, tokenizer: Any = None) -> dict[int, Told]:
    """A group begun on one rank and ended on another, which gets what the first has told; the first is lost."""
    first = Rank(make_engine("qwen3", tokenizer))
    first.hears(assign(prompt, params, interval=1))
    first.step(steps)
    known = first.stretches()
    told = put_together(known)
    open_ = [index for index in range(params.n) if index not in told or told[index].outcome is None]
    second = Rank(make_engine("qwen3", tokenizer))
    second.hears(
        assign(prompt, params, attempt=2, indices=open_, known=[each.only(set(open_)) for each in known], interval=3)
    )
    second.finish()
    return put_together(second.stretches(), told)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize(
    "params", [greedily(9, n=2, logprobs=2), at_random(9, n=3, temperature=0.9, top_k=40, logprobs=1)]
)
def test_going_on_from_known_tokens_gives_the_tokens_of_an_undisturbed_run(steps: int, params: SamplingParams) -> None:
    prompt = token_ids(7)
    alone = undisturbed(prompt, params)
    told = moved_after(steps, prompt, params)
    assert sorted(told) == sorted(alone)
    for index, sample in told.items():
        assert sample.tokens == alone[index].generated_tokens
        assert sample.log_probs == pytest.approx(alone[index].generated_log_probs, abs=2e-5)
        assert sample.outcome is not None
        assert sample.outcome.finish_reason == "length"
        assert [token for row in sample.top_n for token, _ in row] == [
            token for row in alone[index].generated_top_n_logprobs for token, _ in row
        ]
        assert sample.restarts == 0
        assert sample.outcome.ttft == sample.ttft
        assert sample.outcome.max_tokens == 9


@pytest.mark.parametrize("steps", [2, 4])
def test_a_stop_string_that_straddles_two_ranks_is_found(steps: int) -> None:
    tokenizer = make_tokenizer()
    prompt = token_ids(6)
    text = tokenizer.decode(undisturbed(prompt, greedily(12))[0].generated_tokens)
    engine = make_engine("qwen3", tokenizer)
    params = greedily(12, stop=text[4:7], include_stop_str_in_output=True)
    engine.add_request(prompt, params.replace(seed=11), request_id=0)
    (alone,) = finish(engine).values()
    told = moved_after(steps, prompt, params, tokenizer)[0]
    assert told.tokens == alone.generated_tokens
    assert told.text == alone.generated_text
    assert told.outcome is not None
    assert (told.outcome.finish_reason, told.outcome.stop_reason) == ("stop", text[4:7])


def test_versions_are_exact_across_updates_and_ranks() -> None:
    prompt, params = token_ids(7), greedily(9)
    first, second = Rank(make_engine("qwen3")), Rank(make_engine("qwen3"))
    first.hears(assign(prompt, params, interval=1))
    first.step(2)
    first.engine.weights_updated(3)
    first.step(2)
    second.hears(Command(1, "set_version", 3), assign(prompt, params, attempt=2, known=first.stretches()))
    second.step(1)
    second.hears(Command(2, "set_version", 5))
    second.finish()
    told = put_together(second.stretches(), put_together(first.stretches()))[0]
    assert told.prompt_version == 0
    assert told.versions == [0, 0, 3, 3, 3, 5, 5, 5, 5]
    assert told.outcome is not None
    assert told.outcome.policy_spans == VersionSpans([(0, 9), (3, 3), (5, 4)])
    assert told.outcome.policy_version == 5


def test_samples_without_known_tokens_share_one_prefill_beside_those_with() -> None:
    prompt, params = token_ids(8), greedily(6, n=4)
    first = Rank(make_engine("qwen3"))
    first.hears(assign(prompt, params, interval=1))
    first.step(2)
    known = [each.only({2}) for each in first.stretches()]
    second = Rank(make_engine("qwen3", enable_prefix_caching=False))
    second.hears(assign(prompt, params, attempt=2, known=known))
    second.finish()
    assert second.engine.stats()["prefill_tokens_computed"] == 8 + 10
    assert [sample.tokens for sample in put_together(second.stretches(), put_together(known)).values()] == [
        undisturbed(prompt, params)[0].generated_tokens
    ] * 4


def test_what_was_known_before_a_fresh_start_counts_no_more() -> None:
    prompt, params = token_ids(7), at_random(8)
    first = Rank(make_engine("qwen3", max_staleness=0, staleness_policy=StalenessPolicy.REQUEUE))
    first.hears(assign(prompt, params, interval=1))
    first.step(5)
    first.engine.weights_updated()
    first.session.report([], steps=0)
    first.step(3)
    assert put_together(first.stretches())[0].restarts == 1
    assert put_together(first.stretches())[0].versions == [1, 1, 1]
    second = Rank(make_engine("qwen3"))
    second.hears(Command(1, "set_version", 1), assign(prompt, params, attempt=2, known=first.stretches()))
    second.finish()
    told = put_together(second.stretches(), put_together(first.stretches()))[0]
    assert told.tokens == undisturbed(prompt, params)[0].generated_tokens
    assert told.prompt_version == 1
