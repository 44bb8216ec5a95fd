"""Partial rollouts: do not wait for the longest answers; they go on after the weight update.

    python examples/partial_rollouts.py --seed 0

The model learns sums, column by column; most have one or two columns, a few have eight. A loop that waits for every answer
of a batch spends much of its time on the last ones. Here `rollout.generate(..., min_groups=k)` returns as soon as k groups
have ended. The others stay in flight, keep their tokens and KV, and are continued by the next call under the new weights: so
a completion may hold tokens of several policy versions. Each token keeps the log-prob of the very policy that sampled it,
which is what the clipped ratio of the loss needs, and `max_staleness` bounds how old it may be.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from arithmetic import Problem, Problems, long_tailed_sums, reward
from policy import character_tokenizer, small_model, token_logprobs, trapezoid, warm_up
from report import Report
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from rollout import InferenceConfig, RolloutManager, SamplingParams
from trainer_hooks.optimizer import attach
from trainer_hooks.wandb import WandbLogger

GROUP = 8
MAX_TOKENS = 96
EPOCHS = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def train(
    model: PreTrainedModel,
    rollout: RolloutManager,
    problems: Problems,
    report: Report,
    logger: WandbLogger,
    options: argparse.Namespace,
) -> None:
    """The loop: take what has ended, leave the rest in flight, learn, go on."""
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, rollout)
    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    for step in range(1, options.steps + 1):
        new = problems.sample(options.groups + options.extra - rollout.groups_in_flight)
        batch = rollout.generate(
            [p.prompt for p in new], params, min_groups=options.groups, metadata=[p.answer for p in new]
        )
        marks = [reward(text, answer) for text, answer in zip(batch.texts, batch.metadata, strict=True)]
        groups = torch.tensor(marks, device=model.device).view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        advantages = advantages.view(-1, 1)
        ages = []
        with rollout.suspended():
            for epoch in range(EPOCHS):
                logprobs = token_logprobs(model, batch)
                if epoch == 0:
                    rollout.observe_logprobs(batch, logprobs)
                ratio = (logprobs - batch.logprobs).exp()
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                loss = -torch.minimum(ratio * advantages, clipped * advantages)[batch.response_mask].mean()
                ages.append((rollout.policy_version - batch.policy_versions)[batch.response_mask])
                optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        schedule.step()
        metrics = rollout.metrics()
        measured = step % options.every == 0 or step in (1, options.steps)
        held_out = exact_match(rollout, problems.held_out) if measured else None
        logger.log(step, {"train/reward": groups.mean(), "train/held_out": held_out, "train/loss": loss}, metrics)
        report.row(step, float(groups.mean()), held_out, metrics, torch.cat(ages))


def exact_match(rollout: RolloutManager, problems: list[Problem]) -> float:
    """Share of the problems that one sampled completion each gets right; what is in flight stays in flight."""
    batch = rollout.generate([p.prompt for p in problems], SamplingParams(max_tokens=MAX_TOKENS))
    rollout.metrics()
    return sum(map(reward, batch.texts, (p.answer for p in problems))) / len(problems)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=60, help="weight updates")
    parser.add_argument("--groups", type=int, default=32, help="groups that a step waits for, eight samples each")
    parser.add_argument("--extra", type=int, default=32, help="groups beside them that are always in flight")
    parser.add_argument("--max-staleness", type=int, default=6, help="most updates a token may be old when it is used")
    parser.add_argument("--lr", type=float, default=4e-4, help="learning rate")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out problems")
    parser.add_argument("--out", type=Path, default=Path("runs/partial_rollouts"), help="folder of picture and wandb")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.groups, options.extra, options.every = 4, 4, 4, 2
    return options


def main() -> None:
    options = parse_options()
    started = time.perf_counter()
    problems = Problems(long_tailed_sums(), held_out=64 if options.quick else 256, seed=options.seed)
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=128, seed=options.seed)
    report = Report(f"Partial rollouts: a small Qwen3 learns long sums (seed {options.seed})", options.out)
    lessons = warm_up(model, tokenizer, problems, until=2.0 if options.quick else 0.35)
    config = InferenceConfig(max_requests=1024, max_staleness=options.max_staleness, seed=options.seed)
    with (
        RolloutManager(model, tokenizer, config) as rollout,
        WandbLogger("rollout-partial", config=vars(options), directory=options.out) as logger,
    ):
        before = exact_match(rollout, problems.held_out)
        report.say(f"after {lessons} supervised steps: held-out {before:.2f} sampled")
        train(model, rollout, problems, report, logger, options)
        left = rollout.groups_in_flight
        rollout.generate([], min_groups=left)
        after = exact_match(rollout, problems.held_out)
    report.say(f"held-out, sampled: {before:.2f} → {after:.2f}   {left} groups were still in flight, and were finished")
    report.say(f"{report.picture(f'seed-{options.seed}')}, {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
