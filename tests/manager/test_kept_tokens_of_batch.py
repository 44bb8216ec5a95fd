"""Truncated sampling has ratio 1 on the first step: kept tokens through every cut of a request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.algorithms import replay_logprobs
from rollout.engine.training.tree_forward import TreeAttachment
from rollout.errors import InvalidRequestError
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.columns import KeptSets
from rollout.manager.manager import RolloutManager
from rollout.requests.token_columns import KeptTokens
from rollout.sampling_params import SamplingParams
from tests.models import make_model
from tests.rollouts import batches_of_cut_requests, make_rollout

NUCLEUS = SamplingParams(n=3, max_tokens=12, top_p=0.8, return_kept_tokens=True, ignore_eos=True)
SHAPED = SamplingParams(
    n=2, max_tokens=12, top_k=20, min_p=0.01, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4,
    logit_bias={5: 2.0}, return_kept_tokens=True, ignore_eos=True,
)  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [12, 13, 14]]


def largest_error(model: Any, batch: RolloutBatch) -> float:
    """Largest error of the log-probs; some tokens were truncated."""
    assert batch.kept_tokens is not None
    assert ((batch.kept_tokens.counts > 0) == batch.response_mask).all()
    difference = batch.logprobs_of(model) - batch.logprobs
    return float(difference.detach()[batch.response_mask].abs().max())


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("cut", ["none", "preempted", "suspended", "restarted"])
def test_the_first_steps_ratio_is_one_under_truncation_whatever_cut_a_request(name: str, cut: str) -> None:
    """Prefix hits are in all of them; versions rise between the rounds, with the weights as they were."""
    model = make_model(name, num_hidden_layers=1)
    options: dict[str, Any] = {"kv_cache_blocks": 10} if cut == "preempted" else {}
    short = NUCLEUS.replace(max_tokens=3)
    batches = batches_of_cut_requests(
        cut, lambda: make_rollout(model, **options), [short, SHAPED, NUCLEUS], short, RolloutManager.weights_updated
    )
    for each in batches:
        assert largest_error(model, each) < 1e-5


def test_gradients_over_kept_tokens_are_those_of_the_whole_logits() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    with make_rollout(model) as rollout:
        batch = rollout.generate(PROMPTS, NUCLEUS)
        assert batch.kept_tokens is not None
        found = []
        for logprobs in (
            batch.logprobs_of(model),
            replay_logprobs(
                model(**batch.model_inputs()).logits, batch.kept_tokens, batch.input_ids, batch.response_mask
            ),
        ):
            model.zero_grad()
            logprobs.sum().backward()
            found.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_trees_packed_rollouts_and_parts_of_a_batch_hold_the_same_sets() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    rollout = make_rollout(model)
    batch = rollout.generate(PROMPTS, [NUCLEUS, SHAPED, NUCLEUS])
    rollout.close()
    kept = batch.kept_tokens
    assert kept is not None
    whole = batch.logprobs_of(model).detach()
    packed = batch.packed(multiple_of=8)
    end_to_end = batch.logprobs_of(model, packed).detach()
    torch.testing.assert_close(end_to_end, whole, atol=1e-5, rtol=0)
    rows = torch.tensor([4, 0, 6])
    with TreeAttachment(model):
        found = batch.logprobs_of(model, batch.tree(rows)).detach()
    torch.testing.assert_close(found, whole[rows], atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.logprobs_of(model, rows).detach(), whole[rows], atol=1e-5, rtol=0)
    assert torch.equal(KeptSets.of_rows(kept, slice(0, 3)).ids, kept.ids[: int(kept.counts[:3].sum())])
    assert batch.to("cpu").kept_tokens is not None


def test_a_truncated_batch_without_kept_tokens_cannot_be_replayed_and_wrong_ones_are_refused() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    rollout = make_rollout(model)
    batch = rollout.generate([PROMPTS[0]], SamplingParams(top_p=0.8, max_tokens=3))
    with pytest.raises(ValueError, match="has no kept tokens"):
        batch.logprobs_of(model)
    plain = rollout.generate([PROMPTS[0]], SamplingParams(max_tokens=3, temperature=0.7))
    torch.testing.assert_close(plain.logprobs_of(model).detach(), plain.logprobs, atol=1e-5, rtol=0)
    for mode in ("raw", "tempered"):
        params = NUCLEUS.replace(logprobs_mode=mode, temperature=0.7, presence_penalty=0.3, logit_bias={5: 1.0})
        both = rollout.generate([PROMPTS[0], PROMPTS[1]], [params, SHAPED])
        torch.testing.assert_close(both.logprobs_of(model).detach(), both.logprobs, atol=1e-5, rtol=0)
    engine = rollout.engine
    engine.add_request(PROMPTS[0], NUCLEUS.replace(n=1))
    for _ in range(3):
        engine.step()
    (record,) = engine.snapshot()
    engine.abort_request(record.request_id)
    engine.take_ended()
    for wrong in (None, KeptTokens.of([[1]] * record[-1].generated_length)):
        record[-1].generated_kept_tokens = wrong
        with pytest.raises(InvalidRequestError, match="generated_kept_tokens"):
            engine.add_record(record)
    rollout.close()
