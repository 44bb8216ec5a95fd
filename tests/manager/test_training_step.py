"""End-to-end test: rollouts, a loss, an optimizer step through the hook, and rollouts again."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
from transformers import PreTrainedModel

from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.manager import RolloutManager
from rollout.observe.metric_table import LOGGED
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from tests.models import greedy, make_model, make_tokenizer
from tests.rollouts import completions, logprob_error, make_rollout, trainer_logprobs_of
from trainer_hooks.optimizer import attach

PROMPTS = [[5, 6, 7], [11], list(range(20, 39))]
SAMPLED = SamplingParams(n=4, max_tokens=12)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
WANTED = 42
"""The token a trivial reward asks for."""


def reward_of(batch: RolloutBatch) -> torch.Tensor:
    """[N], the share of wanted tokens."""
    hits = (batch.input_ids == WANTED) & batch.response_mask
    return hits.sum(1) / batch.response_mask.sum(1)


def reinforce_loss(model: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
    """REINFORCE with the group's mean as baseline."""
    rewards = reward_of(batch)
    baseline = torch.stack([rewards[batch.group_ids == group].mean() for group in batch.group_ids])
    logprobs = trainer_logprobs_of(model, batch)
    return -((rewards - baseline)[:, None] * logprobs)[batch.response_mask].sum() / len(batch)


def fresh_greedy(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy completions of a new engine."""
    return completions(make_rollout(model).generate(prompts, GREEDY))


@pytest.mark.parametrize("mode", ["offload", "persist", "recompute"])
def test_every_step_of_the_optimizer_is_a_version_and_the_next_rollout_is_of_the_new_weights(mode):
    model = make_model("qwen3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rollout = make_rollout(model, kv_cache_management_mode=mode)
    attachment = attach(optimizer, rollout)
    seen = []
    for step in range(4):
        batch = rollout.generate(PROMPTS, SAMPLED)
        assert batch.policy_version == rollout.policy_version == attachment.steps == step
        assert logprob_error(model, batch) <= 1e-5
        assert batch.logprobs.dtype == torch.float32
        assert batch.policy_staleness.max() == 0
        optimizer.zero_grad()
        reinforce_loss(model, batch).backward()
        optimizer.step()
        again = rollout.generate(PROMPTS, GREEDY)
        seen.append(completions(again))
        assert seen[-1] == fresh_greedy(model, PROMPTS) == [greedy(model, prompt, 8) for prompt in PROMPTS]
        assert logprob_error(model, again) <= 1e-5
    assert seen[0] != seen[-1]


class Watch:
    """KV bytes on the device at the moment the weights change."""

    def __init__(self, optimizer: torch.optim.Optimizer, rollout: RolloutManager) -> None:
        self.bytes: list[float] = []
        self._rollout = rollout
        optimizer.register_step_pre_hook(self._note)
        optimizer.register_step_post_hook(self._note)

    def _note(self, *args: Any) -> None:
        self.bytes.append(self._rollout.engine.stats()["kv_device_bytes"])


@pytest.mark.parametrize("mode", ["offload", "recompute"])
def test_no_kv_is_on_the_device_from_the_step_to_the_next_generate(mode):
    model = make_model("qwen3", num_hidden_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rollout = make_rollout(model)
    attach(optimizer, rollout, mode=mode)
    watch = Watch(optimizer, rollout)
    device_bytes = rollout.engine.stats()["kv_device_bytes"]
    for _ in range(3):
        batch = rollout.generate(PROMPTS, SamplingParams(n=2, max_tokens=20, ignore_eos=True), min_groups=1)
        assert rollout.engine.stats()["kv_device_bytes"] == device_bytes > 0
        reinforce_loss(model, batch).backward()
        optimizer.step()
        assert rollout.engine.state is EngineState.SUSPENDED
        assert rollout.engine.stats()["kv_device_bytes"] == 0
        rollout.submit([[8]], GREEDY)
    assert watch.bytes == [0] * 6
    assert rollout.generate([], min_groups=99).num_groups > 0


def test_the_trainers_forward_of_a_left_padded_batch_is_the_same_before_and_after_bit_for_bit():
    model = make_model("qwen3", num_hidden_layers=2)
    rollout = make_rollout(model)
    ids = torch.tensor([[0, 0, 0, 5, 6, 7], [8, 9, 10, 11, 12, 13]])
    mask = (ids > 0).long()
    before = model(ids, attention_mask=mask).logits
    rollout.generate(PROMPTS, SAMPLED, min_groups=1)
    assert torch.equal(model(ids, attention_mask=mask).logits, before)
    with rollout.suspended():
        assert torch.equal(model(ids, attention_mask=mask).logits, before)
    assert before.requires_grad


def tables_of(rollout: RolloutManager) -> dict[str, Any]:
    """Sizes of everything in the engine that could grow."""
    engine = rollout.engine
    scheduler, allocator, table = engine.context.scheduler, engine.context.allocator, engine.context.scheduler.table
    return {
        "capacity": table.capacity,
        "columns": table.columns,
        "stop_ids": table.stop_ids.shape,
        "host_bytes": engine.cache.host_bytes,
        "live": len(engine.parts.ledger.live),
        "ended": len(engine.parts.ledger.ended),
        "queues": len(scheduler.waiting) + len(scheduler.decoding) + len(scheduler.prefilling),
        "blocks": allocator.num_used,
        "cached": len(allocator.index.current) + len(allocator.index.outdated),
        "groups": rollout.groups_in_flight,
    }


def test_two_hundred_steps_with_requests_in_flight_grow_nothing():
    model = make_model("qwen3", num_hidden_layers=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    rollout = make_rollout(model, kv_cache_blocks=2048, max_staleness=4)
    attach(optimizer, rollout)
    short, tail = SamplingParams(n=2, max_tokens=3), SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
    process = psutil.Process()
    live, resident, tables = 0, [], []
    for step in range(200):
        batch = rollout.generate([[5 + step % 80, 6], [7]], [short, tail], min_groups=1)
        live += rollout.groups_in_flight > 0
        with rollout.suspended():
            loss = trainer_logprobs_of(model, batch)[batch.response_mask].sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rollout.metrics()
        if step % 20 == 19:
            gc.collect()
            resident.append(process.memory_info().rss)
            tables.append(tables_of(rollout))
    assert rollout.policy_version == 200
    assert live > 150
    steady = tables[2]
    assert steady["host_bytes"] < rollout.engine.cache.block_bytes * 200
    for later in tables[3:]:
        for name in ("capacity", "columns", "stop_ids", "host_bytes"):
            assert later[name] == steady[name], name
        for name in ("live", "queues", "groups", "blocks", "ended", "cached"):
            assert later[name] <= 64, name
    assert min(resident[-2:]) - resident[2] < 8 * 2**20


def test_two_steps_fill_every_metric_that_was_promised():
    model = make_model("qwen3", num_hidden_layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rollout = make_rollout(model, make_tokenizer())
    attach(optimizer, rollout)
    for _ in range(2):
        batch = rollout.generate(["a", "some prompt", "b"], [SAMPLED, SAMPLED, GREEDY], min_groups=2)
        rollout.observe_logprobs(batch, trainer_logprobs_of(model, batch))
        with rollout.suspended():
            reinforce_loss(model, batch).backward()
            optimizer.step()
    metrics = rollout.metrics()
    assert set(metrics) == set(LOGGED)
    assert all(isinstance(value, float) for value in metrics.values())
    assert metrics["rollout/logprob_diff_max"] <= 1e-4
    assert metrics["rollout/policy_version"] == 2
    assert metrics["rollout/groups_in_flight"] == rollout.groups_in_flight
