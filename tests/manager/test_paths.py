"""A tree that is trained segment by segment gives the padded batch's log-probs and gradients, in the memory of one path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.engine.training import tree_forward
from rollout.engine.training.tree_forward import TreeAttachment
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.paths import _placed
from tests.engine.training.test_tree_forward import NOT_IN_TREES, model_of
from tests.engines import at_random, make_engine, token_ids
from tests.manager.test_batch import build, request
from tests.manager.test_tree import pack
from tests.models import CONFIGS, make_model
from tests.trees import distance, in_float64, make_batch, padded_logprobs, tree_logprobs


def weights(batch: RolloutBatch) -> torch.Tensor:
    """A weight for every token of every row, of both signs."""
    return torch.linspace(-1, 1, batch.logprobs.numel()).view_as(batch.logprobs)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten().double() for each in model.parameters() if each.grad is not None])


def outcome(model, batch: RolloutBatch, logprobs_of=padded_logprobs) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and the gradient of a loss that squares a row as a whole."""
    model.zero_grad()
    logprobs = logprobs_of(model, batch)
    ((logprobs * weights(batch).to(logprobs)).sum(1) ** 2).sum().backward()
    return logprobs.detach(), gradient(model)


def by_paths(model: torch.nn.Module, batch: RolloutBatch, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logprobs, seen = torch.zeros_like(batch.logprobs), []
    for rows, scores in batch.paths(model, limit):
        ((scores.logprobs * weights(batch)[rows].to(scores.logprobs)).sum(1) ** 2).sum().backward()
        logprobs[rows] = scores.logprobs.detach().float()
        seen += rows.tolist()
    assert sorted(seen) == list(range(len(batch)))
    return logprobs, gradient(model)


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(NOT_IN_TREES)))
def test_log_probs_and_gradients_of_a_tree_and_of_its_paths_are_those_of_the_padded_batch(name):
    model, batch = model_of(name), make_batch()
    right_model = in_float64(model)
    right = outcome(right_model, batch, padded_logprobs)
    rounding = distance(outcome(model, batch, padded_logprobs)[1], right[1])
    with TreeAttachment(model):
        tree, paths = outcome(model, batch, tree_logprobs), by_paths(model, batch, 9)
    for found in (tree, paths):
        assert distance(found[0], right[0]) < 1e-6
        assert distance(found[1], right[1]) < 1e-5
    assert distance(tree[1], right[1]) < 3 * rounding
    with TreeAttachment(right_model):
        assert distance(outcome(right_model, batch, tree_logprobs)[1], right[1]) < 1e-6
    assert not tree_forward._paths


@pytest.mark.parametrize("split", ["trees", "packs"])
def test_gradients_accumulated_over_parts_are_those_of_the_whole_batch(split):
    model, batch = make_model("qwen3", num_hidden_layers=2), make_batch()
    right = outcome(in_float64(model), batch)[1]
    with TreeAttachment(model):
        model.zero_grad()
        parts = list(getattr(batch, split)(40))
        for part in parts:
            ((batch.logprobs_of(model, part) * weights(batch)[part.rows]).sum(1) ** 2).sum().backward()
    assert len(parts) > 1
    assert torch.cat([part.rows for part in parts]).sort().values.tolist() == list(range(len(batch)))
    assert distance(gradient(model), right) < 1e-5


def test_every_row_is_read_in_the_distribution_it_was_drawn_from():
    model = make_model("qwen3", num_hidden_layers=2)
    engine, prompts = make_engine(model), [token_ids(9, 1), token_ids(5, 2)]
    truncated = at_random(9, temperature=0.9, top_p=0.8, return_kept_tokens=True, frequency_penalty=0.3)
    drawn = [
        *engine.generate(prompts, truncated.replace(n=3)),
        *engine.generate(prompts, at_random(9, temperature=0.5)),
    ]
    batch = RolloutBatch.from_requests(drawn, policy_version=0, pad_token_id=0)
    with TreeAttachment(model):
        found = by_paths(model, batch, 4)[0]
    assert float((found - batch.logprobs)[batch.response_mask].abs().max()) < 1e-4


@pytest.mark.parametrize("limit", [1, 3, 30, 1000])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_any_limit_gives_the_same_gradients_with_checkpointing_too(limit, checkpointed):
    model, batch = make_model("gemma3", num_hidden_layers=2), make_batch(seed=3)
    right = outcome(in_float64(model), batch)
    if checkpointed:
        model.gradient_checkpointing_enable()
    with TreeAttachment(model.train()):
        assert distance(by_paths(model, batch, limit)[1], right[1]) < 1e-5
        with torch.no_grad():
            assert all(not scores.logprobs.requires_grad for _, scores in batch.paths(model, limit))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(1, 9))
@settings(max_examples=100, deadline=None)
def test_segments_hold_every_token_once_within_the_limit_and_a_path_is_all_that_is_kept(rows, limit):
    """Chains of ancestors and one segment of whole subtrees are all that is kept at a time."""
    tree = pack(rows)
    ends, depths = tree.attention_mask[0, 0].numpy().astype(np.int64)
    spans = _placed(ends, depths, limit)
    segments = [(span.start, span.stop) for span in spans]
    assert [token for start, stop in segments for token in range(start, stop)] == list(range(len(tree)))
    assert all(stop - start <= limit for start, stop in segments)
    for start, stop in segments:
        continued = any(ends[token] > stop for token in range(start, stop))
        chain = all(depths[token] == depths[token - 1] + 1 for token in range(start + 1, stop))
        assert chain or not continued
    # Each segment begins at a multiple of 128 keys.
    assert max(span.place + span.stop - span.start for span in spans) <= 128 * (int(depths.max()) + 1) + limit


def test_what_paths_do_not_take_is_named():
    model = make_model("qwen2", num_hidden_layers=1)
    batch = build(request(0, 0, [1, 2], [3]))
    with TreeAttachment(model):
        with pytest.raises(ValueError, match="max_tokens=0: must be at least 1"):
            next(batch.paths(model, 0))
        assert list(build().paths(model, 8)) == []
        routed = build(request(0, 0, [1, 2], [3], routing_indices=np.zeros((2, 1, 1), np.int16)))
        with pytest.raises(ValueError, match="paths are of text without recorded routes"):
            next(routed.paths(model, 8))
