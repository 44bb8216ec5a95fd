"""GRPO with `rollout.generate()`: a small Qwen3 learns to add two numbers, in a few minutes on a laptop's CPU.

    python examples/grpo.py --seed 0

The model first sees a few thousand worked sums, enough to be right one time in five. Then nobody shows it anything
any more: it samples eight solutions of each problem, a program marks the answers, and what did better than its group
becomes likelier. `grpo` below is all there is to it; model, problems and picture are in the files beside this one.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from arithmetic import Problem, Problems, reward, sums
from policy import character_tokenizer, small_model, token_logprobs, trapezoid, warm_up
from report import Report
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from rollout import InferenceConfig, RolloutManager, SamplingParams
from trainer_hooks.optimizer import attach
from trainer_hooks.wandb import WandbLogger

GROUP = 8
MAX_TOKENS = 32
EPOCHS = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def grpo(
    model: PreTrainedModel,
    rollout: RolloutManager,
    problems: Problems,
    report: Report,
    logger: WandbLogger,
    options: argparse.Namespace,
) -> None:
    """The loop: sample groups, mark them, train twice on what came out."""
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, rollout)
    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    for step in range(1, options.steps + 1):
        asked = problems.sample(options.prompts)
        batch = rollout.generate([p.prompt for p in asked], params, metadata=[p.answer for p in asked])
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


def exact_match(rollout: RolloutManager, problems: list[Problem], temperature: float = 1.0) -> float:
    """Share of the problems that one completion each gets right. Its time is left out of the metrics."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature)
    batch = rollout.generate([p.prompt for p in problems], params)
    rollout.metrics()
    return sum(map(reward, batch.texts, (p.answer for p in problems))) / len(problems)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=80, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=64, help="per step, eight samples each")
    parser.add_argument("--lr", type=float, default=4e-4, help="learning rate of GRPO")
    parser.add_argument("--warm-up", type=float, default=0.3, help="loss at which the supervised steps before it end")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out problems")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/grpo"), help="folder of the picture and of wandb's files"
    )
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.warm_up, options.every = 4, 8, 2.0, 2
    return options


def main() -> None:
    options = parse_options()
    started = time.perf_counter()
    problems = Problems(sums(), held_out=64 if options.quick else 512, seed=options.seed)
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=64, seed=options.seed)
    report = Report(f"GRPO: a small Qwen3 learns to add (seed {options.seed})", options.out)
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up)
    config = InferenceConfig(max_requests=max(512, GROUP * options.prompts), seed=options.seed)
    with (
        RolloutManager(model, tokenizer, config) as rollout,
        WandbLogger("rollout-grpo", config=vars(options), directory=options.out) as logger,
    ):
        before = exact_match(rollout, problems.held_out), exact_match(rollout, problems.held_out, temperature=0)
        report.say(f"after {lessons} supervised steps: held-out {before[0]:.2f} sampled, {before[1]:.2f} greedy")
        grpo(model, rollout, problems, report, logger, options)
        after = exact_match(rollout, problems.held_out), exact_match(rollout, problems.held_out, temperature=0)
    report.say(f"held-out, sampled: {before[0]:.2f} → {after[0]:.2f}   greedy: {before[1]:.2f} → {after[1]:.2f}")
    report.say(f"{report.picture(f'seed-{options.seed}')}, {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
