"""Truncated sampling has ratio 1 on the first step: kept tokens through every cut of a request."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.errors import InvalidRequestError
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.columns import KeptSets
from rollout.requests.token_columns import KeptTokens
from rollout.sampling_params import SamplingParams
from tests.models import make_model
from tests.rollouts import make_rollout

NUCLEUS = SamplingParams(n=3, max_tokens=12, top_p=0.8, return_kept_tokens=True, ignore_eos=True)
SHAPED = SamplingParams(
    n=2, max_tokens=12, top_k=20, min_p=0.01, temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4,
    logit_bias={5: 2.0}, return_kept_tokens=True, ignore_eos=True,
)  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11], [12, 13, 14]]


def forward(model: Any, batch: RolloutBatch) -> Tensor:
    logits: Tensor = model(batch.input_ids, attention_mask=batch.attention_mask, position_ids=batch.position_ids).logits
    return logits


def largest_error(model: Any, batch: RolloutBatch) -> float:
    """Of the replayed log-probs, and the number of tokens that were truncated is not 0."""
    assert batch.kept_tokens is not None
    assert ((batch.kept_tokens.counts > 0) == batch.response_mask).all()
    difference = batch.replay_logprobs(forward(model, batch)) - batch.logprobs
    return float(difference.detach()[batch.response_mask].abs().max())


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("cut", ["none", "preempted", "suspended", "restarted"])
def test_the_first_steps_ratio_is_one_under_truncation_whatever_cut_a_request(name: str, cut: str) -> None:
    """Prefix hits are in all of them; versions rise between the rounds, with the weights as they were."""
    model = make_model(name, num_hidden_layers=1)
    options: dict[str, Any] = {"kv_cache_blocks": 10} if cut == "preempted" else {}
    rollout, batches = make_rollout(model, **options), []
    short = NUCLEUS.replace(max_tokens=3)
    batches.append(rollout.generate(PROMPTS, [short, SHAPED, NUCLEUS], min_groups=None if cut == "none" else 1))
    assert cut == "none" or rollout.groups_in_flight
    for _ in range(3):
        if cut == "suspended":
            rollout.suspend("recompute")
            rollout.resume()
        if cut == "restarted":
            state = rollout.state_dict()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rollout.close()
            rollout = make_rollout(model, **options)
            rollout.load_state_dict(state)
        rollout.weights_updated()
        batches.append(rollout.generate([PROMPTS[0]], short, min_groups=1))
    if rollout.groups_in_flight:
        batches.append(rollout.generate([], min_groups=rollout.groups_in_flight))
    metrics = rollout.metrics()
    assert cut != "preempted" or metrics["rollout/preemptions"] > 0
    assert metrics["rollout/kept_tokens_bytes_total"] > 0
    for each in batches:
        if len(each):
            assert largest_error(model, each) < 1e-5
    rollout.close()


def test_trees_packed_rollouts_and_parts_of_a_batch_hold_the_same_sets() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    rollout = make_rollout(model)
    batch = rollout.generate(PROMPTS, [NUCLEUS, SHAPED, NUCLEUS])
    rollout.close()
    kept, logits = batch.kept_tokens, forward(model, batch).detach()
    assert kept is not None
    whole = batch.replay_logprobs(logits)
    packed = batch.packed(multiple_of=8).kept_tokens
    assert packed is not None
    assert packed.counts[packed.counts > 0].tolist() == kept.counts[kept.counts > 0].tolist()
    rows = torch.tensor([4, 0, 6])
    tree = batch.tree(rows)
    by_tree = torch.zeros(1, len(tree), logits.shape[-1])
    where = tree.nodes >= 0
    by_tree[0, tree.nodes[where]] = logits[rows][:, : tree.nodes.shape[1]][where]
    found = batch.replay_logprobs(by_tree, tree)
    torch.testing.assert_close(found, whole[rows][:, : found.shape[1]])
    assert torch.equal(KeptSets.of_rows(kept, slice(0, 3)).ids, kept.ids[: int(kept.counts[:3].sum())])
    assert batch.to("cpu").kept_tokens is not None


def test_a_truncated_batch_without_kept_tokens_cannot_be_replayed_and_wrong_ones_are_refused() -> None:
    model = make_model("qwen3", num_hidden_layers=1)
    rollout = make_rollout(model)
    batch = rollout.generate([PROMPTS[0]], SamplingParams(top_p=0.8, max_tokens=3))
    with pytest.raises(ValueError, match="has no kept tokens"):
        batch.replay_logprobs(forward(model, batch))
    plain = rollout.generate([PROMPTS[0]], SamplingParams(max_tokens=3, temperature=0.7))
    torch.testing.assert_close(plain.replay_logprobs(forward(model, plain)), plain.logprobs, atol=1e-5, rtol=0)
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
