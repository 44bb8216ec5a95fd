"""What the best schedule of a fixed set of episodes could take, from the measured cost of steps.

cost of a step = a + b · sampled tokens + c · prompt tokens, by least squares over the steps of a run

same      a step for whatever is ready, as `run` makes them, with no time between steps
bound     no schedule is faster than either of
              all tokens at the cost of full steps, and none of the tools
              the longest episode alone, its tools and steps of one row
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from rollout.tracing.recorder import StepRow
    from tests.benchmarks.episodes import Plan


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: `step + token · sampled + prompt · prompt tokens`."""

    step: float
    token: float
    prompt: float

    @classmethod
    def of(cls, rows: Sequence[StepRow]) -> StepCost:
        """The least-squares fit over the steps of a run."""
        work = np.array([(1.0, row.sampled, row.prefill_tokens) for row in rows])
        took = np.array([row.end - row.start for row in rows])
        step, token, prompt = np.maximum(np.linalg.lstsq(work, took, rcond=None)[0], 0.0).tolist()
        return cls(step, token, prompt)


def prompts_of(plan: Plan, observation: int) -> list[list[int]]:
    """[episode][turn] prompt tokens that are new to the engine: the last token sampled is among them."""
    return [[len(prompt), *[1 + observation] * (len(plan.tools[0]) - 1)] for prompt in plan.prompts]


def same_schedule(cost: StepCost, plan: Plan, observation: int) -> float:
    """Seconds of steps for whatever is ready, with no time between them."""
    prompts, turns = prompts_of(plan, observation), len(plan.tools[0])
    arrivals = [(0.0, episode, 0) for episode in range(len(plan.prompts))]
    left: dict[int, tuple[int, int]] = {}
    now = end = 0.0
    while arrivals or left:
        if not left and arrivals[0][0] > now:
            now = arrivals[0][0]
        new = 0
        while arrivals and arrivals[0][0] <= now:
            _, episode, turn = heapq.heappop(arrivals)
            left[episode] = turn, plan.lengths[episode][turn]
            new += prompts[episode][turn]
        now += cost.step + cost.token * len(left) + cost.prompt * new
        for episode, (turn, tokens) in list(left.items()):
            if tokens > 1:
                left[episode] = turn, tokens - 1
                continue
            del left[episode]
            answered = now + plan.tools[episode][turn]
            end = max(end, answered)
            if turn + 1 < turns:
                heapq.heappush(arrivals, (answered, episode, turn + 1))
    return end


def bound(cost: StepCost, plan: Plan, observation: int) -> tuple[float, float]:
    """(seconds of all tokens in full steps, seconds of the longest episode alone)."""
    prompts = prompts_of(plan, observation)
    tokens, fullest = plan.tokens, len(plan.prompts)
    work = cost.step * tokens / fullest + cost.token * tokens + cost.prompt * sum(map(sum, prompts))
    alone = max(
        sum(tools) + (cost.step + cost.token) * sum(lengths) + cost.prompt * sum(new)
        for tools, lengths, new in zip(plan.tools, plan.lengths, prompts, strict=True)
    )
    return work, alone
