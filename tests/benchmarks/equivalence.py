"""Equal learning: one GRPO loop, sampling with the engine or with `model.generate`, from the same weights, many seeds.

    python -m tests.benchmarks.equivalence --seeds 10 --json equivalence.json --picture docs/equivalence.png

A model of 0.25 million parameters learns to sort eight digits and to name each once, so answers differ in length. Every seed
has its own warmed-up policy, problems and random numbers; its variants share policy and problems. What is compared is the
mean reward over the last quarter of the steps.
Stated in advance: a variant is equivalent to `model.generate` if the 90 % confidence interval of the mean paired difference
lies within ±`BOUND` (two one-sided t-tests at 5 %, Schuirmann 1987).
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout import InferenceConfig, RolloutManager, exact
from rollout.algorithms import group_advantages, masked_mean
from tests.benchmarks import tables
from tests.benchmarks.common import finish, parse
from trainer_hooks.optimizer import attach
from trainer_hooks.tree import attach as attach_tree

BOUND = 0.05
"""Largest difference of the mean reward that counts as equal."""
GROUP, DIGITS, EQUALS, END, CLIP_LOW, CLIP_HIGH = 8, 8, 10, 11, 0.2, 0.28
QUANTILE = {1: 6.314, 2: 2.920, 4: 2.132, 9: 1.833, 14: 1.761, 19: 1.729}
"""95 % quantiles of Student's t by degrees of freedom."""
VARIANTS: dict[str, dict[str, Any]] = {
    "generate": {},
    "engine": {},
    "engine, recompute": {"kv_cache_management_mode": "recompute"},
    "engine, partial": {"max_staleness": 2},
    "engine, trees": {},
    "engine, exact": {"exact": True},
}
"""Samplers, with the options of their engines. `partial`: a step trains on the first 24 of 32 groups in flight."""
Sampled = tuple[Tensor, Tensor, Tensor, Callable[[], Tensor]]
"""ids [N, T], response mask [N, T], sampler's log-probs [N, T], and a function to the trainer's current log-probs."""


def make_model() -> Qwen3ForCausalLM:
    """Random weights."""
    config = Qwen3Config(
        vocab_size=12, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=2 * DIGITS + 2, eos_token_id=END,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def draw(dice: random.Random, count: int) -> list[list[int]]:
    """Prompts: digits, then `=`."""
    return [[*dice.choices(range(10), k=DIGITS), EQUALS] for _ in range(count)]


def warm_up(model: Qwen3ForCausalLM, dice: random.Random, steps: int) -> None:
    """Train on worked answers."""
    optimizer = AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        rows = [prompt + answer_of(prompt) for prompt in draw(dice, 128)]
        ids = torch.tensor([row + [END] * (2 * DIGITS + 2 - len(row)) for row in rows])
        labels = ids.masked_fill(~response_of(ids), -100)
        model(ids, labels=labels).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def answer_of(prompt: Sequence[int]) -> list[int]:
    """Return the right answer."""
    return [*sorted(set(prompt[:DIGITS])), END]


def response_of(ids: Tensor) -> Tensor:
    """bool [N, T]: the tokens after the prompt, up to the first `END`."""
    ended = (ids[:, DIGITS + 1 :] == END).long().cumsum(1)
    return torch.nn.functional.pad(ended - (ids[:, DIGITS + 1 :] == END).long() == 0, (DIGITS + 1, 0))


def rewards_of(ids: Tensor, mask: Tensor) -> Tensor:
    """[N]: share of the answer's tokens in the right place."""
    rewards = []
    for row, sampled in zip(ids.tolist(), mask, strict=True):
        right, given = answer_of(row), row[DIGITS + 1 : DIGITS + 1 + int(sampled.sum())]
        rewards.append(sum(a == b for a, b in zip(right, given, strict=False)) / max(len(right), len(given)))
    return torch.tensor(rewards)


def logprobs_of(model: Qwen3ForCausalLM, ids: Tensor) -> Tensor:
    """float32 [N, T] by the model's own forward, 0 for the first token."""
    logits = model(ids, use_cache=False).logits[:, :-1].float()
    return torch.nn.functional.pad(logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1), (1, 0))


def by_generate(model: Qwen3ForCausalLM, prompts: Sequence[list[int]]) -> Sampled:
    """Sample with transformers, whose log-probs are those of a forward before the first update."""
    rows = torch.tensor([prompt for prompt in prompts for _ in range(GROUP)])
    # Without a mask, transformers would leave out prompt tokens that equal the padding.
    ids = model.generate(
        rows, attention_mask=torch.ones_like(rows), do_sample=True, top_k=0, max_new_tokens=DIGITS + 1, pad_token_id=END
    )
    with torch.no_grad():
        return ids, response_of(ids), logprobs_of(model, ids), lambda: logprobs_of(model, ids)


def by_engine(model: Qwen3ForCausalLM, manager: RolloutManager, prompts: Sequence[list[int]], variant: str) -> Sampled:
    """Sample with the engine; in `partial` only what is missing is asked for, and the first groups to end are trained on."""
    partial = variant == "engine, partial"
    asked = prompts[: len(prompts) - manager.groups_in_flight]
    batch = manager.generate(
        asked, n=GROUP, max_tokens=DIGITS + 1, min_groups=3 * len(prompts) // 4 if partial else None, progress=False
    )
    packed = batch.tree() if variant == "engine, trees" else None

    def logprobs() -> Tensor:
        if variant == "engine, exact":
            with exact(model):
                return logprobs_of(model, batch.input_ids)
        return batch.logprobs_of(model, packed)

    return batch.input_ids, batch.response_mask, batch.logprobs, logprobs


def train(variant: str, policy: Qwen3ForCausalLM, seed: int, steps: int, prompts: int) -> dict[str, list[float]]:
    """Run the loop; mean reward and seconds of every step."""
    model, dice, found = deepcopy(policy), random.Random(seed), {"reward": list[float](), "seconds": list[float]()}
    torch.manual_seed(seed)
    optimizer = AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.99), weight_decay=0.0)
    manager = None
    if variant != "generate":
        manager = RolloutManager(
            model, None, InferenceConfig(max_requests=GROUP * prompts, seed=seed, **VARIANTS[variant])
        )
        attach(optimizer, manager)
        attach_tree(model)
    for _ in range(steps):
        started = time.perf_counter()
        asked = draw(dice, prompts)
        if manager is None:
            ids, mask, before, logprobs = by_generate(model, asked)
        else:
            ids, mask, before, logprobs = by_engine(model, manager, asked, variant)
        rewards = rewards_of(ids, mask)
        advantages = group_advantages(rewards, torch.arange(len(ids)) // GROUP)[:, None]
        with manager.suspended() if manager else nullcontext():
            for _ in range(2):
                ratio = (logprobs() - before).exp()
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                masked_mean(-torch.minimum(ratio * advantages, clipped * advantages), mask).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        found["reward"].append(rewards.mean().item())
        found["seconds"].append(time.perf_counter() - started)
    if manager is not None:
        with warnings.catch_warnings():
            # `partial` ends with groups in flight.
            warnings.simplefilter("ignore")
            manager.close()
    return found


def last_quarter(rewards: Sequence[float]) -> float:
    """Mean over the last quarter of the steps."""
    return statistics.mean(rewards[-max(1, len(rewards) // 4) :])


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """90 % confidence interval of the mean."""
    count = len(differences)
    half = QUANTILE[count - 1] * statistics.stdev(differences) / math.sqrt(count)
    return statistics.mean(differences) - half, statistics.mean(differences) + half


def picture(found: dict[str, list[dict[str, list[float]]]], path: Path) -> None:
    """Draw the mean reward of every step, with a band of one standard deviation over the seeds."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for variant, runs in found.items():
            rewards = torch.tensor([run["reward"] for run in runs])
            steps, mean, spread = range(1, rewards.shape[1] + 1), rewards.mean(0), rewards.std(0)
            (line,) = axes.plot(steps, mean, label=variant, linewidth=2 if variant == "generate" else 1.2)
            axes.fill_between(steps, mean - spread, mean + spread, alpha=0.12, linewidth=0, color=line.get_color())
        axes.set(xlabel="step", ylabel="mean reward of the samples", ylim=(None, 1))
        axes.legend(loc="lower right")
        figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, save. Returns the exit status: 1 if a variant is not shown to be equivalent."""
    options = parse(
        __doc__, arguments, seeds={"default": 10, "choices": [each + 1 for each in QUANTILE]}, steps=40, prompts=32,
        lessons=30, variants={"default": list(VARIANTS), "choices": list(VARIANTS)},
        picture={"default": None, "type": Path},
    )  # fmt: skip
    found: dict[str, list[dict[str, list[float]]]] = {
        variant: [] for variant in dict.fromkeys(["generate", *options.variants])
    }
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        policy, order = make_model(), list(found)
        warm_up(policy, random.Random(seed), options.lessons)
        for variant in order[seed % len(order) :] + order[: seed % len(order)]:
            found[variant].append(train(variant, policy, seed, options.steps, options.prompts))
            print(f"seed {seed}, {variant}: {last_quarter(found[variant][-1]['reward']):.3f}", file=sys.stderr)
    base = [last_quarter(run["reward"]) for run in found["generate"]]
    intervals = {
        variant: interval([last_quarter(run["reward"]) - other for run, other in zip(runs, base, strict=True)])
        for variant, runs in found.items()
    }
    equal = {variant: max(-low, high) < BOUND for variant, (low, high) in intervals.items()}
    result = {"bound": BOUND, "equivalent": equal, "intervals": intervals, "runs": found}
    finish(options.json, result, tables.equivalence(result))
    if options.picture is not None:
        picture(found, options.picture)
    return 0 if all(equal.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
