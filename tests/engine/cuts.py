"""Events in the life of a request that must not change a token: chunks, preemption, suspends, restarts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout.engine.engine import DynamicInferenceEngine
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from tests.engines import Key, finish, pass_suspended
from tests.invariants import check_scheduler

Make = Callable[..., DynamicInferenceEngine]
"""Makes an engine with these options."""


def nothing(engine: DynamicInferenceEngine, make: Make) -> DynamicInferenceEngine:
    return engine


def suspended(mode: str) -> Callable[[DynamicInferenceEngine, Make], DynamicInferenceEngine]:
    def suspend(engine: DynamicInferenceEngine, make: Make) -> DynamicInferenceEngine:
        pass_suspended(engine, mode)
        return engine

    return suspend


def restarted(engine: DynamicInferenceEngine, make: Make) -> DynamicInferenceEngine:
    """After every third step another engine, with blocks of another size, that continues what is unfinished."""
    if engine.stats()["steps"] % 3:
        return engine
    other = make(block_size_tokens=11 - engine.config.advanced.block_size_tokens)
    for record in engine.snapshot():
        again = DynamicInferenceRequestRecord.deserialize(record.serialize())
        other.parts.intake.check_record(again)
        other.add_record(again)
    return other


@dataclass(frozen=True)
class Cut:
    """One way to cut the lives of requests."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine."""
    between: Callable[[DynamicInferenceEngine, Make], DynamicInferenceEngine] = nothing
    """Called after every step; returns the engine that goes on."""
    rounds: int = 1
    """How many times everything is asked, one round after the other."""
    ahead: bool = False
    """Make runs of several decode steps."""
    counter: str = "steps"
    """A counter of the engine that shows that the cut took place."""


CUTS = {
    "chunks": Cut({"max_tokens_per_step": 5, "max_requests": 4}),
    "runs": Cut(ahead=True),
    "little memory": Cut({"kv_cache_blocks": 10}, counter="preemptions"),
    "little memory in chunks": Cut(
        {"kv_cache_blocks": 8, "max_tokens_per_step": 8, "max_requests": 6}, counter="preemptions"
    ),
    "prefix hits": Cut(rounds=2, counter="prefill_tokens_saved"),
    "no prefix cache": Cut({"enable_prefix_caching": False}, rounds=2),
    "persist": Cut(between=suspended("persist")),
    "offload": Cut({"max_tokens_per_step": 12}, between=suspended("offload")),
    # A step must hold a whole prompt, or nothing would ever get done.
    "recompute": Cut(between=suspended("recompute")),
    "restarts": Cut(between=restarted),
}


def lived(
    make: Make, ask: Callable[[DynamicInferenceEngine], object], cut: Cut
) -> tuple[dict[Key, DynamicInferenceRequest], DynamicInferenceEngine]:
    """Run the requests that `ask` adds to their end under a cut; returns those of the last round, and the engine."""
    engine = make(**cut.options)
    for _ in range(cut.rounds):
        ask(engine)
        ended: list[DynamicInferenceRequestRecord] = []
        while engine.has_unfinished:
            ended += engine.step(ahead=cut.ahead)
            check_scheduler(engine.context.scheduler)
            engine = cut.between(engine, make)
        done = finish(engine, ended)
    return done, engine
