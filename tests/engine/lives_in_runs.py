"""A seeded life of an engine whose decode steps are made in runs of given lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.scheduling.step import ScheduledStep
from rollout.requests.record import DynamicInferenceRequestRecord
from tests.engines import at_random, pass_suspended, token_ids


def life_in_runs(
    engine: DynamicInferenceEngine, events: Sequence[tuple[int, str]], most: Callable[[], int]
) -> dict[tuple[int, int], Any]:
    """The `outcome` of every sample of a few requests.

    Args:
        events: (steps made before it, kind), in order; a kind is "update", "abort", "add" or one of `pass_suspended`.
        most: steps of the next run at most.
    """
    scheduler, left, found = engine.context.scheduler, list(events), {}
    lengthen = scheduler.run_ahead

    def until_the_next_event(step: ScheduledStep) -> ScheduledStep:
        limit = left[0][0] - engine.stats()["steps"] if left else 99
        return replace(step, ahead=max(1, min(lengthen(step).ahead, int(limit), most())))

    scheduler.run_ahead = until_the_next_event  # type: ignore[method-assign]
    for number in range(3):
        engine.add_request(token_ids(6 + number, number), at_random(30, n=2))
    while engine.has_unfinished or left:
        if left and (engine.stats()["steps"] >= left[0][0] or not engine.has_unfinished):
            after, kind = left.pop(0)
            if kind == "update":
                with torch.no_grad():
                    engine.weights.trained.lm_head.weight.mul_(0.97)  # type: ignore[operator, union-attr]
                engine.weights_updated()
            elif kind == "abort":
                engine.abort_request(1, 0)
            elif kind == "add":
                engine.add_request(token_ids(9, after), at_random(12))
            else:
                pass_suspended(engine, kind)
        elif engine.has_unfinished:
            for record in engine.step(ahead=True):
                found[record.request_id, record.sample_index] = outcome(record)
    return found


def outcome(record: DynamicInferenceRequestRecord) -> tuple[Any, ...]:
    """Tokens and log-probs, why the sample ended, its policy and KV spans, and its error."""
    one = record.merge()
    return (
        one.generated_tokens, one.generated_log_probs, one.finish_reason, one.stop_reason, one.policy_spans, one.kv_spans,
        one.error,
    )  # fmt: skip
