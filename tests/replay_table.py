"""Largest difference between the log-probs of a rollout and of a trainer that replays kept tokens and expert routes.

    python -m tests.replay_table

Per architecture (small, random weights, float32) and per cut of a request's life. Sampling is truncated (top_p), and the
trainer's forward is transformers' own over padded rows, inside `rollout.replay` where the model has routers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import msgpack
import torch
from transformers import PreTrainedModel

import rollout
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.models.routers import routers_of
from rollout.errors import UnsupportedModelError
from rollout.manager.batch.batch import RolloutBatch
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from tests.engines import at_random, finish, make_engine, pass_suspended, steps, token_ids
from tests.rollouts import update
from tests.zoo.small_models import build

MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe", "granitemoe", "ernie4_5_moe", "gpt_oss",
)  # fmt: skip
RECURRENT = ("qwen3_5_moe_text",)
"""Whose states are carried in float32 from chunk to chunk, which rounds more: near the bar, so not in CI."""
DENSE = ("qwen3", "llama", "gemma3_text")
BAR = 1e-5

DRAWN = at_random(9, temperature=0.9, top_p=0.8, return_kept_tokens=True)

Requests = Iterable[DynamicInferenceRequest]


def engine_of(model: PreTrainedModel, **options: Any) -> DynamicInferenceEngine:
    """One that records routes where the model has routers."""
    return make_engine(model, record_routes=has_routers(model), **options)


def has_routers(model: PreTrainedModel) -> bool:
    """Whether routes of the model can be recorded."""
    try:
        routers_of(model)
    except UnsupportedModelError:
        return False
    return True


def difference(model: PreTrainedModel, requests: Requests, version: int = 0) -> float:
    """Largest, over the tokens that `version` has sampled, of which `model` has the weights."""
    batch = RolloutBatch.from_requests(tuple(requests), policy_version=2, pad_token_id=0)

    with torch.no_grad():
        if batch.routed_experts is None:
            logprobs = batch.logprobs_of(model)
        else:
            with rollout.replay(batch, model):
                logprobs = batch.logprobs_of(model)
    mine = batch.response_mask & (batch.policy_versions == version)
    return float((logprobs - batch.logprobs)[mine].abs().max())


def chunks(model: PreTrainedModel) -> float:
    """Prompts in chunks of a few tokens, n samples of each."""
    engine = engine_of(model, max_tokens_per_step=8)
    return difference(model, engine.generate([token_ids(13, 1), token_ids(6, 2)], DRAWN.replace(n=2)))


def prefix_hits(model: PreTrainedModel) -> float:
    """A prefix hit at every offset of a prompt."""
    engine, stem = engine_of(model), token_ids(13, 3)
    engine.generate([stem], DRAWN)
    return difference(
        model, engine.generate([stem[:shared] + token_ids(5, 40 + shared) for shared in range(14)], DRAWN)
    )


def preemption(model: PreTrainedModel) -> float:
    """Too few blocks for all."""
    engine = engine_of(model, kv_cache_blocks=12)
    for seed in range(4):
        engine.add_request(token_ids(7, seed), DRAWN.replace(max_tokens=16))
    done = finish(engine).values()
    assert engine.stats()["preemptions"] > 0
    return difference(model, done)


def suspension(model: PreTrainedModel) -> float:
    """Suspended after every step, in each mode in turn."""
    engine = engine_of(model)
    for seed in range(3):
        engine.add_request(token_ids(5 + 4 * seed, seed), DRAWN)
    ended: list[DynamicInferenceRequestRecord] = []
    for mode in ("persist", "offload", "recompute") * 3:
        ended += steps(engine, 1)
        pass_suspended(engine, mode)
    return difference(model, finish(engine, ended).values())


def restart(model: PreTrainedModel) -> float:
    """Serialised in the middle, continued by an engine with other blocks."""
    engine, other = engine_of(model), engine_of(model, block_size_tokens=8)
    for seed in range(2):
        engine.add_request(token_ids(6 + seed, seed), DRAWN.replace(n=2))
    steps(engine, 4)
    for record in engine.snapshot():
        plain = msgpack.unpackb(msgpack.packb(record.serialize(), use_bin_type=True))
        other.add_record(DynamicInferenceRequestRecord.deserialize(plain))
    return difference(model, finish(other).values())


def update_on_kept_kv(model: PreTrainedModel) -> float:
    """Tokens of the earlier version, in requests that go on after an update on their KV: routes of both versions."""
    return difference(model, updated_in_the_middle(copy.deepcopy(model), "persist"))


def update_and_recomputation(model: PreTrainedModel) -> float:
    """Tokens of the later version, in requests whose KV was computed again after an update."""
    changing = copy.deepcopy(model)
    return difference(changing, updated_in_the_middle(changing, "recompute"), version=1)


def updated_in_the_middle(model: PreTrainedModel, mode: str) -> list[DynamicInferenceRequest]:
    """Requests with tokens of versions 0 and 1; changes the model."""
    engine = engine_of(model)
    for seed in range(3):
        engine.add_request(token_ids(9 + seed, seed), DRAWN)
    ended = steps(engine, 5)
    engine.pause()
    engine.suspend(mode)
    # Larger ones make larger logits, which round more.
    update(model, size=0.05)
    engine.weights_updated()
    engine.resume()
    engine.unpause()
    done = list(finish(engine, ended).values())
    assert all({0, 1} <= set(request.policy_versions.tolist()) for request in done)
    return done


CUTS: dict[str, Callable[[PreTrainedModel], float]] = {
    "chunks, n samples": chunks,
    "prefix hit at each offset": prefix_hits,
    "preemption": preemption,
    "suspension in each mode": suspension,
    "restart": restart,
    "update, KV kept": update_on_kept_kv,
    "update, KV recomputed": update_and_recomputation,
}


def main() -> None:
    """Print the table in Markdown."""
    warnings.simplefilter("ignore")
    print(f"| | {' | '.join(CUTS)} |\n|---|{'---|' * len(CUTS)}")
    worst = 0.0
    for name in (*MIXTURES, *RECURRENT, *DENSE):
        model = build(name)
        found = [cut(model) for cut in CUTS.values()]
        worst = max(worst, *found)
        print(f"| {name} | {' | '.join(f'{value:.1e}' for value in found)} |", flush=True)
    print(f"\nlargest {worst:.1e}, bar {BAR:.0e}")
    raise SystemExit(worst > BAR)


if __name__ == "__main__":
    main()
