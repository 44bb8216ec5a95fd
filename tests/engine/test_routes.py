"""Tests of expert routes: recorded beside K and V whatever happens to a request, and replayed in the trainer's forward.

The reference is transformers' own forward of the finished sequence: what its routers chose for each position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

import rollout
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.models.routers import routers_of
from rollout.errors import ConfigError, InvalidRequestError, UnsupportedModelError
from rollout.manager.batch.batch import RolloutBatch
from rollout.requests.delta import growth
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from tests import replay_table
from tests.engines import Room, finish, greedily, make_engine, shared_model, steps, suspended, token_ids
from tests.rollouts import joined_deltas, trainer_logprobs_of, update
from tests.routers import batch_of, elsewhere
from tests.zoo.small_models import build

REPLAYED_ONLY = ["qwen3_5_moe_text"]
"""The engine refuses them for other layers; a record from elsewhere can be replayed."""


@cache
def small(name: str) -> PreTrainedModel:
    return build(name)


@torch.no_grad()
def routes_of(model: PreTrainedModel, tokens: list[int]) -> NDArray[Any]:
    """[T - 1, layers, k], each row sorted, as the module itself chooses."""
    chosen: dict[int, torch.Tensor] = {}
    with routers_of(model).recorded(chosen.__setitem__):
        model(input_ids=torch.tensor([tokens]), use_cache=False)
    return torch.stack([chosen[layer] for layer in sorted(chosen)], 1)[:-1].sort(-1).values.numpy()


def assert_routes(model: PreTrainedModel, request: DynamicInferenceRequest) -> None:
    tokens = request.prompt_tokens + request.generated_tokens
    assert request.routing_indices is not None
    recorded = np.sort(request.routing_indices, -1)
    assert recorded.shape == (len(tokens) - 1, *recorded.shape[1:])
    np.testing.assert_array_equal(recorded, routes_of(model, tokens))


def moe_engine(**options: Any) -> DynamicInferenceEngine:
    return make_engine("qwen3_moe", record_routes=True, **options)


# --- every architecture -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", replay_table.MIXTURES)
def test_log_probs_of_a_forward_that_replays_routes_and_kept_tokens_are_those_of_the_rollout_at_every_cut(
    name: str,
) -> None:
    found = {title: cut(small(name)) for title, cut in replay_table.CUTS.items()}
    assert max(found.values()) < replay_table.BAR, found


@pytest.mark.parametrize("name", [*replay_table.MIXTURES, *REPLAYED_ONLY])
def test_the_routers_choose_what_is_replayed_with_their_own_weights(name: str) -> None:
    model = small(name)
    batch = batch_of(elsewhere(model, token_ids(5, 1), token_ids(4, 2), 0), elsewhere(model, [7, 8], [9], 1))
    assert batch.routed_experts is not None
    chosen: dict[int, torch.Tensor] = {}
    weights: list[torch.Tensor] = []
    routers = routers_of(model)
    hook = routers.modules[0].register_forward_hook(lambda _, inputs, output: weights.append(output[1]))
    with rollout.replay(batch, model), routers.recorded(chosen.__setitem__):
        model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    hook.remove()
    got = torch.stack([chosen[layer] for layer in sorted(chosen)], 1).view_as(batch.routed_experts)
    known = batch.routed_experts >= 0
    assert torch.equal(got[known], batch.routed_experts[known].long())
    assert (got >= 0).all(), "padding is routed live"
    assert weights[0].requires_grad, "weights are the live router's"
    assert "forward" not in vars(routers.modules[0])


# --- what can happen to a request -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_routes_are_readable_inside_a_suspend_and_survive_a_resume_in_less_memory(mode: str) -> None:
    room = Room()
    engine = moe_engine(allocate=room.allocate)
    for seed in range(4):
        engine.add_request(token_ids(5 + 3 * seed, seed), greedily(9, n=2))
    ended = steps(engine, 5)
    with suspended(engine, mode):
        inside = [record.merge() for record in engine.snapshot()]
        engine.abort_request(2)
        room.leave(10, engine)
    assert (engine.cache.num_blocks < 64) == (mode != "persist")
    done = {key: request for key, request in finish(engine, ended).items() if key[0] != 2}
    assert len(done) == 6
    for request in (*(each for each in inside if each.generated_tokens), *done.values()):
        assert_routes(shared_model("qwen3_moe"), request)


def pass_updated(engine: DynamicInferenceEngine, model: PreTrainedModel, mode: str) -> None:
    with suspended(engine, mode):
        update(model, size=0.2)
        engine.weights_updated()


@pytest.mark.parametrize("changed", [False, True])
def test_a_stream_of_deltas_carries_all_routes_and_those_computed_again(changed: bool) -> None:
    model = copy.deepcopy(shared_model("qwen3_moe"))
    engine = make_engine(model, record_routes=True, kv_cache_blocks=12)
    for seed in range(3):
        engine.add_request(token_ids(7, seed), greedily(14))
    known = {(number, 0): (0, 0, 0) for number in range(3)}
    parts: dict[int, list[Any]] = {number: [] for number in range(3)}
    ended: list[DynamicInferenceRequestRecord] = []
    while engine.has_unfinished:
        for delta in engine.progress(known):
            known[delta.request_id, 0] = (delta.start + delta.count, delta.prompt_version, 0)
            parts[delta.request_id].append(delta)
        ended += engine.step()
        if changed and engine.inspection.counters["steps"] == 6:
            pass_updated(engine, model, "recompute")
    assert changed or engine.stats()["preemptions"] > 0
    for record in ended:
        whole = record.merge()
        number = record.request_id
        joined = joined_deltas(*parts[number], growth(record, *known[number, 0]))
        assert whole.routing_indices is not None
        np.testing.assert_array_equal(joined.route_rows(whole.total_length - 1), whole.routing_indices)
        if changed:
            assert_routes(model, whole)


# --- the trainer's forward --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign() -> RolloutBatch:
    """Rows whose routes differ from what the routers would choose."""
    model = shared_model("qwen3_moe")
    return batch_of(*(elsewhere(model, token_ids(3 + seed, seed), token_ids(4, 9), seed) for seed in range(3)))


def logits_of(batch: RolloutBatch, **inputs: Any) -> torch.Tensor:
    logits: torch.Tensor = shared_model("qwen3_moe")(use_cache=False, **inputs).logits
    return logits


def test_padding_on_the_left_packing_and_rows_in_any_order_are_aligned_by_their_tokens(foreign: RolloutBatch) -> None:
    model = shared_model("qwen3_moe")
    lengths = foreign.attention_mask.sum(1).tolist()
    packed = foreign.packed(multiple_of=8)
    width = foreign.input_ids.shape[1]
    with torch.no_grad(), rollout.replay(foreign, model):
        padded = logits_of(foreign, input_ids=foreign.input_ids, attention_mask=foreign.attention_mask)
        flat = logits_of(foreign, input_ids=packed.input_ids[None], position_ids=packed.position_ids[None])[0]
        for row in (2, 0):
            left = torch.zeros(2, width, dtype=torch.long)
            mask = torch.zeros_like(left)
            for at, source in enumerate((row, 1)):
                left[at, width - lengths[source] :] = foreign.input_ids[source, : lengths[source]]
                mask[at, width - lengths[source] :] = 1
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            got = logits_of(foreign, input_ids=left, attention_mask=mask, position_ids=positions)
            torch.testing.assert_close(got[0, width - lengths[row] :], padded[row, : lengths[row]])
    live = logits_of(foreign, input_ids=foreign.input_ids, attention_mask=foreign.attention_mask).detach()
    for row, (start, length) in enumerate(zip(packed.cu_seqlens.tolist(), lengths, strict=False)):
        torch.testing.assert_close(flat[start : start + length], padded[row, :length])
        assert (padded[row, :length] - live[row, :length]).abs().max() > 0.1, "replay has an effect"


def test_gradients_under_checkpointing_are_those_without(foreign: RolloutBatch) -> None:
    def gradient(checkpointed: bool, outside: bool = False) -> torch.Tensor:
        model = copy.deepcopy(shared_model("qwen3_moe"))
        if checkpointed:
            model.gradient_checkpointing_enable()
        with rollout.replay(foreign, model):
            loss = trainer_logprobs_of(model, foreign).sum()
            if not outside:
                loss.backward()
        return model.model.layers[0].mlp.gate.weight.grad

    plain = gradient(False)
    assert float(plain.abs().max()) > 0
    torch.testing.assert_close(gradient(True), plain)
    with pytest.raises(RuntimeError, match="call backward inside of the block"):
        gradient(True, outside=True)


def test_an_engine_in_the_block_routes_live_and_does_not_disturb_what_is_replayed(foreign: RolloutBatch) -> None:
    def play(sampling: bool) -> tuple[torch.Tensor, list[int]]:
        model = copy.deepcopy(shared_model("qwen3_moe"))
        model.gradient_checkpointing_enable()
        engine = make_engine(model)
        engine.add_request(token_ids(5, 9), greedily(4))
        with rollout.replay(foreign, model):
            loss = trainer_logprobs_of(model, foreign).sum()
            inside = finish(engine) if sampling else None
            loss.backward()
        (done,) = (inside or finish(engine)).values()
        return model.model.layers[0].mlp.gate.weight.grad, done.generated_tokens

    (gradient, tokens), (expected, outside) = play(True), play(False)
    torch.testing.assert_close(gradient, expected)
    assert tokens == outside


def test_two_checkpointed_forwards_before_their_backward_are_refused(foreign: RolloutBatch) -> None:
    model = copy.deepcopy(shared_model("qwen3_moe"))
    model.gradient_checkpointing_enable()
    with pytest.raises(RuntimeError, match="call backward after each forward"), rollout.replay(foreign, model):
        (trainer_logprobs_of(model, foreign).sum() + trainer_logprobs_of(model, foreign).sum()).backward()
    assert all("forward" not in vars(router) for router in routers_of(model).modules)


# --- refused by name --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda r: setattr(r, "routing_indices", None),
            "no routed_experts; build the engine with .*record_routes=True",
        ),
        (
            lambda r: setattr(r, "routing_indices", r.routing_indices[:-1]),
            "row 0 of the batch has tokens without routes",
        ),
        (lambda r: setattr(r, "routing_indices", r.routing_indices[:, :2]), r"\(2, 2\), and the model has .* \(3, 2\)"),
    ],
)
def test_a_batch_without_these_routes_is_refused(
    foreign: RolloutBatch, spoil: Callable[[DynamicInferenceRequest], None], words: str
) -> None:
    request = copy.copy(foreign[0])
    spoil(request)
    with pytest.raises(ValueError, match=words), rollout.replay(batch_of(request), shared_model("qwen3_moe")):
        pass


def test_a_forward_of_other_tokens_is_refused(foreign: RolloutBatch) -> None:
    model = shared_model("qwen3_moe")
    with (
        rollout.replay(foreign, model),
        pytest.raises(ValueError, match="a sequence of 5 tokens that is not in the batch"),
    ):
        model(input_ids=torch.arange(5)[None])


def test_models_without_routers_or_with_unknown_ones_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="declares no routers"):
        make_engine("qwen3", record_routes=True)
    model = copy.deepcopy(shared_model("qwen3_moe"))
    for router in routers_of(model).modules:
        del router.num_experts
    with pytest.raises(UnsupportedModelError, match=r"Qwen3MoeTopKRouter .* must be the same two integers"):
        make_engine(model, record_routes=True)
    with pytest.raises(ConfigError, match="record_routes=True: must be False with exact=True"):
        make_engine("qwen3", exact=True, record_routes=True)


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (np.zeros((4, 3, 1), np.uint8), r"shape \[4, 3, 1\] is not \[at most 5, 3, 2\]"),
        (np.zeros((6, 3, 2), np.uint8), r"shape \[6, 3, 2\]"),
        (np.full((5, 3, 2), 4, np.uint8), "an expert outside of this model's 4"),
    ],
)
def test_records_with_routes_of_another_model_are_refused(routes: NDArray[Any], words: str) -> None:
    engine = moe_engine()
    request = DynamicInferenceRequest(
        request_id=1,
        prompt_tokens=token_ids(5),
        generated_tokens=[9],
        generated_log_probs=[-1.0],
        routing_indices=routes,
    )
    with pytest.raises(InvalidRequestError, match=words):
        engine.add_record(DynamicInferenceRequestRecord.from_request(request))


def test_routes_are_a_bounded_part_of_the_pool_and_counted() -> None:
    plain, engine = make_engine("qwen3_moe"), moe_engine()
    assert engine.cache.block_bytes - plain.cache.block_bytes == 4 * 3 * 2
    assert engine.stats()["kv_route_bytes"] == 64 * 4 * 3 * 2
    assert plain.stats()["kv_route_bytes"] == 0
    before = engine.cache.device_bytes
    engine.generate([token_ids(9)], greedily(20))
    assert engine.cache.device_bytes == before
