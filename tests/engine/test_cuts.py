"""Tests that every kind of model samples the same at every cut: what `generate` and the trainer's forward give."""

from __future__ import annotations

from functools import cache, partial

import pytest

from rollout.engine.engine import DynamicInferenceEngine
from rollout.requests.request import DynamicInferenceRequest
from tests.engine.cuts import CUTS, Cut, lived
from tests.engines import Key, assert_greedy, at_random, greedily, logprob_error, make_engine, token_ids

MODELS = ["qwen3", "gemma3", "gpt_oss", "qwen3_next", "falcon_h1", "lfm2"]
"""The fused forward; windows in some layers; the module, with sinks and experts; gated delta rule; state space and
attention in every layer; short convolutions."""
PROMPTS = [token_ids(length, seed) for seed, length in enumerate((1, 3, 4, 9, 17, 26))]
GROUP = token_ids(10, 7)


def ask(engine: DynamicInferenceEngine) -> None:
    for prompt in PROMPTS:
        engine.add_request(prompt, greedily(6))
    engine.add_request(GROUP, at_random(8, n=3))


@cache
def uncut(name: str) -> dict[Key, DynamicInferenceRequest]:
    return lived(partial(make_engine, name), ask, Cut())[0]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_changes_no_token_and_no_log_prob(name: str, cut: str) -> None:
    done, engine = lived(partial(make_engine, name), ask, CUTS[cut])
    assert len(done) == len(PROMPTS) + 3
    if cut == "chunks":
        # No position is computed twice, and the samples of the group share their prompt.
        assert engine.stats()["prefill_tokens_computed"] == sum(map(len, PROMPTS)) + len(GROUP)
    if cut != "restarts":
        assert engine.stats()[CUTS[cut].counter] > 0
    samples = [request for request in done.values() if request.sampling_params.n > 1]
    assert len({tuple(request.generated_tokens) for request in samples}) == 3
    for request in done.values():
        if request in samples:
            assert request.generated_tokens == uncut(name)[len(PROMPTS), request.sample_index].generated_tokens
            assert logprob_error(name, request) <= 1e-5
        else:
            assert_greedy(name, request)
