"""Benchmark of episodes with slow tools: how busy the engine is, and `run` against turns in lock step.

    python -m tests.benchmarks.episodes

Episodes of `turns` turns; a completion is drawn from 8 to `longest` tokens, a tool takes 0 to `tool_s` seconds and
answers with 8 tokens. Lengths and delays are the same both ways.

    run         `RolloutManager.run`: tools of some episodes overlap with the tokens of others
    steady      the same with every episode that ends replaced by a new one, as in training with `min_groups`; the ratio of
                its tokens per second to those of lock step (a `run` of a fixed set ends with its slowest tools)
    lock step   `generate` for turn k of all episodes, then all their tools at once (the slowest ends the turn)

    busy        share of the time in which the engine has work (a completion is open) that is spent in its steps
    recomputed  prompt tokens of later turns that were computed, not found in the prefix cache, though an earlier turn of the
                episode had them (those of a last, partly filled block), as a share of all of them
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from rollout.config import Advanced, InferenceConfig
from rollout.manager.manager import RolloutManager
from rollout.sampling_params import SamplingParams
from tests.benchmarks import tables
from tests.benchmarks.common import finish, parse
from tests.benchmarks.subject import make_subject

OBSERVATION = list(range(10, 18))
PROMPT = 32


class Plan:
    """Prompts, completion lengths and tool times of all episodes."""

    def __init__(self, episodes: int, turns: int, longest: int, tool_s: float) -> None:
        rng = random.Random(0)
        self.prompts = [[rng.randrange(100, 8000) for _ in range(PROMPT)] for _ in range(episodes)]
        self.lengths = [[rng.randint(8, longest) for _ in range(turns)] for _ in range(episodes)]
        self.tools = [[rng.uniform(0, tool_s) for _ in range(turns)] for _ in range(episodes)]
        self.tokens = sum(map(sum, self.lengths))

    def params(self, episode: int, turn: int) -> SamplingParams:
        """Return the sampling parameters of one completion."""
        return SamplingParams(max_tokens=self.lengths[episode][turn], ignore_eos=True)

    async def play(self, episode: Any) -> float:
        """One episode; tasks beyond the last start again with the first."""
        number = episode.task % len(self.prompts)
        prompt = self.prompts[number]
        for turn, tool_s in enumerate(self.tools[number]):
            await episode.sample(prompt, self.params(number, turn))
            await asyncio.sleep(tool_s)
            prompt = [*episode.tokens, *OBSERVATION]
        return 0.0


class Busy:
    """Measures the time in which completions are open, and that of the steps within it."""

    def __init__(self, rollout: RolloutManager) -> None:
        self.steps_s = self.open_s = 0.0
        self._rollout, self._advance = rollout, rollout._rounds.backend.step
        self._open_since: float | None = None
        rollout._rounds.backend.step = self._timed  # type: ignore[method-assign]
        samples = rollout._rounds.loop.samples
        self._complete, self._take = samples.completion, samples.take
        samples.completion, samples.take = self._opened, self._taken  # type: ignore[method-assign]

    def _timed(self) -> Any:
        start = time.perf_counter()
        try:
            return self._advance()
        finally:
            self.steps_s += time.perf_counter() - start

    async def _opened(self, *args: Any, **named: Any) -> Any:
        if self._open_since is None:
            self._open_since = time.perf_counter()
        return await self._complete(*args, **named)

    def _taken(self, result: Any) -> Any:
        taken = self._take(result)
        if not len(self._rollout._rounds.loop.samples) and self._open_since is not None:
            self.open_s += time.perf_counter() - self._open_since
            self._open_since = None
        return taken


def overlapped(rollout: RolloutManager, plan: Plan) -> tuple[float, float, float]:
    """Seconds, busy share, recomputed share."""
    busy = Busy(rollout)

    started = time.perf_counter()
    batch = rollout.run(range(len(plan.prompts)), plan.play, progress=False)
    seconds = time.perf_counter() - started
    assert int(batch.response_mask.sum()) == plan.tokens
    pairs = [pair for episode in batch.episodes for pair in pairwise(episode.turns)]
    known = sum(earlier.total_length - 1 for earlier, _ in pairs)
    recomputed = sum(earlier.total_length - 1 - turn.num_cached_tokens for earlier, turn in pairs)
    return seconds, busy.steps_s / busy.open_s, recomputed / known


def steady(rollout: RolloutManager, plan: Plan) -> float:
    """Tokens per second while all episodes that end are replaced by new ones."""
    tasks, quarter = itertools.count(), max(1, len(plan.prompts) // 4)

    def more() -> None:
        rollout.run(tasks, plan.play, min_groups=quarter, max_groups=len(plan.prompts), progress=False)

    more()
    rollout.metrics()
    started = time.perf_counter()
    for _ in range(4):
        more()
    return rollout.metrics()["rollout/generated_tokens"] / (time.perf_counter() - started)


def in_lock_step(rollout: RolloutManager, plan: Plan) -> float:
    """Seconds."""
    started = time.perf_counter()
    prompts = [list(prompt) for prompt in plan.prompts]
    for turn in range(len(plan.tools[0])):
        batch = rollout.generate(prompts, [plan.params(each, turn) for each in range(len(prompts))], progress=False)
        prompts = [[*each.prompt_tokens, *each.generated_tokens, *OBSERVATION] for each in batch]
        time.sleep(max(tools[turn] for tools in plan.tools))
    return time.perf_counter() - started


def round_of(model: Any, plan: Plan, config: InferenceConfig) -> dict[str, float]:
    """Figures of one round of the three ways."""
    with RolloutManager(model, config=config) as rollout:
        rollout.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        seconds, busy, recomputed = overlapped(rollout, plan)
    with RolloutManager(model, config=config) as rollout, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rate = steady(rollout, plan)
        rollout.close()
    with RolloutManager(model, config=config) as rollout:
        rollout.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        lock_step = in_lock_step(rollout, plan)
    print(
        f"run {seconds:.1f} s, {plan.tokens / seconds:.0f} tokens/s, busy {busy:.1%}, recomputed {recomputed:.2%}; "
        f"lock step {lock_step:.1f} s, {plan.tokens / lock_step:.0f} tokens/s; ratio {lock_step / seconds:.2f}; "
        f"steady {rate:.0f} tokens/s, ratio {rate * lock_step / plan.tokens:.2f}"
    )
    return {
        "run_s": seconds, "lock_step_s": lock_step, "steady_ratio": rate * lock_step / plan.tokens, "busy": busy,
        "recomputed": recomputed,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print seconds, tokens per second and the ratio of both ways, in alternating rounds."""
    options = parse(
        __doc__, arguments, episodes=256, turns=8, longest={"default": 56, "help": "tokens of a completion"},
        tool_s={"default": 2.0, "help": "longest time of a tool"}, max_requests=256, block=16, rounds=1,
        threads=2,
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    model = make_subject("10m", "float32", 2048, Path()).model
    plan = Plan(options.episodes, options.turns, options.longest, options.tool_s)
    config = InferenceConfig(
        kv_cache_memory_gb=4,
        max_requests=options.max_requests,
        advanced=Advanced(block_size_tokens=options.block, verify_model=False),
    )
    found = [round_of(model, plan, config) for _ in range(options.rounds)]
    finish(options.json, found, tables.episodes(found))


if __name__ == "__main__":
    main()
