"""Largest difference between the log-probs of a rollout and of a trainer that replays kept tokens and expert routes.

    python -m tests.replay_table

Per architecture (small, random weights, float32) and per cut of a request's life. Sampling is truncated (top_p), and the
trainer's forward is transformers' own over padded rows, inside `rollout.replay` where the model has routers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

import rollout
from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.models.routers import routers_of
from rollout.errors import UnsupportedModelError
from rollout.manager.batch.batch import RolloutBatch
from rollout.requests.request import DynamicInferenceRequest
from tests.engine import cuts as cuts_of
from tests.engine.cuts import lived
from tests.engines import at_random, finish, make_engine, steps, suspended, token_ids
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


def ask(engine: DynamicInferenceEngine) -> None:
    """Prompts that begin alike for several lengths, one of them for two samples."""
    stem = token_ids(13, 3)
    for shared in (0, 3, 4, 9, 13):
        engine.add_request(stem[:shared] + token_ids(5, 40 + shared), DRAWN.replace(n=1 + (shared == 4)))


def at_cuts(*cuts: str) -> Callable[[PreTrainedModel], float]:
    """The difference in requests that live through these events."""
    return lambda model: max(
        difference(model, lived(partial(engine_of, model), ask, cuts_of.CUTS[cut])[0].values()) for cut in cuts
    )


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
    with suspended(engine, mode):
        # Larger ones make larger logits, which round more.
        update(model, size=0.05)
        engine.weights_updated()
    done = list(finish(engine, ended).values())
    assert all({0, 1} <= set(request.policy_versions.tolist()) for request in done)
    return done


CUTS: dict[str, Callable[[PreTrainedModel], float]] = {
    "chunks, n samples": at_cuts("chunks"),
    "prefix hits": at_cuts("prefix hits"),
    "preemption": at_cuts("little memory"),
    "suspension in each mode": at_cuts("persist", "offload", "recompute"),
    "restart": at_cuts("restarts"),
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
