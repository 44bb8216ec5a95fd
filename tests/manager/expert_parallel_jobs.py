"""Jobs of `tests.manager.test_expert_parallel`: each runs on every rank, over gloo."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from rollout.llm.llm import LLM
from rollout.manager.batch.batch import RolloutBatch
from rollout.manager.batch.replay import replay
from tests.manager.tensor_parallel_jobs import DRAWN, GREEDY, PROMPTS, load, said, shown
from tests.models import scale_weights
from tests.rollouts import logprob_error, make_rollout


def routes_of(batch: RolloutBatch) -> Any:
    """The recorded experts, as a list."""
    assert batch.routed_experts is not None
    return batch.routed_experts.tolist()


def shares_every_batch(rank: int, folders: list[str]) -> list[dict[str, Any]]:
    """One batch of each model, whose experts are split over the ranks that split its other layers too."""
    told = []
    for folder in folders:
        model = load(folder, tp_size=2, ep_size=2)
        with make_rollout(model, verify_model=True, record_routes=True) as rollout:
            batch = rollout.generate(PROMPTS, GREEDY)
            error = logprob_error(model, batch)
            with replay(batch, model):
                replayed = logprob_error(model, batch)
            local = model.model.layers[0].mlp.experts.down_proj.to_local().shape[0]
            told.append(
                {"told": shown(batch), "routes": routes_of(batch), "errors": [error, replayed], "local experts": local}
            )
    return told


def of_rank(rank: int) -> list[list[int]]:
    """Prompts of one rank: of other lengths, and another number."""
    return PROMPTS[1:] if rank else PROMPTS[:1]


def exchanges(rank: int, folder: str) -> dict[str, Any]:
    """A life of two ranks with prompts of their own, and with prompts on one of them only."""
    model = load(folder, fsdp_size=2, ep_size=2)
    told: dict[str, Any] = {}
    with make_rollout(model, verify_model=True, record_routes=True, control_timeout_s=60.0) as rollout:
        batch = rollout.generate(of_rank(rank), GREEDY)
        told["own"], told["routes"] = shown(batch), routes_of(batch)
        told["one rank's"] = shown(rollout.generate(PROMPTS if rank == 0 else [], GREEDY))
        rollout.submit(of_rank(rank), DRAWN)
        rollout.generate([], min_groups=1)
        with rollout.suspended():
            scale_weights(model, 1.02)
            rollout.weights_updated()
        rollout.generate([], min_groups=rollout.groups_in_flight)
        batch = rollout.generate(of_rank(rank), GREEDY)
        told["updated"] = shown(batch)
        # The trainer's forward exchanges tokens too: both ranks call it, with batches of their own.
        told["error"] = logprob_error(model, batch)
        told["explained"] = str(rollout.explain())
        rest = [batch.routed_experts is not None, rollout.groups_in_flight]
        told["rest"] = rest
    return told


def fails(rank: int, folder: str) -> dict[str, Any]:
    """Make calls that fail on a rank of an exchange; return what the ranks raise."""
    model: PreTrainedModel = load(folder, fsdp_size=2, ep_size=2)
    told: dict[str, Any] = {}
    with make_rollout(model, coordinator=False, control_timeout_s=60.0) as rollout:
        told["step"] = said(rollout.engine.step)
        told["score"] = said(lambda: rollout.score([[5, 6, 7, 8]], prompt_lengths=2))
        told["as_completed"] = said(lambda: rollout.as_completed())
        told["run"] = said(lambda: rollout.run([1], environment=None))
        told["llm"] = said(lambda: LLM(model, None))

        def fail(*_: Any) -> None:
            hook.remove()
            raise ArithmeticError("no such number")

        if rank:
            hook = model.model.layers[1].register_forward_pre_hook(fail)
        batch = rollout.generate(of_rank(rank), GREEDY, on_error="mask")
        told["failed"] = [str(each) for each in batch.errors]
        told["beside it"] = shown(batch)
        told["late"] = said(lambda: rollout.generate(of_rank(rank), GREEDY, timeout_s=None if rank else 0.0))
        told["in flight"] = rollout.groups_in_flight
        told["after it"] = shown(rollout.generate([], min_groups=rollout.groups_in_flight))
    return told
