"""GRPO with `rollout.generate()`: a small Qwen3 learns to add, in a few minutes on a laptop's CPU.

    python examples/grpo.py --seed 0

The model is first trained on a few thousand worked sums, enough to be right one time in five. Then GRPO begins: it samples
eight solutions of each problem, a program scores the answers, and solutions above their group's mean become likelier.
`grpo` is the whole algorithm; problems, policy and plot are in the files beside this one.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from arithmetic import Problems, reward, sums
from policy import add_truncation, character_tokenizer, exact_match, small_model, trapezoid, truncation, warm_up
from report import Report, Step
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from rollout import InferenceConfig, RolloutManager, RunLog, SamplingParams
from rollout import report as write_report
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach
from trainer_hooks.tree import attach as attach_tree
from trainer_hooks.wandb import WandbLogger

GROUP = 8
MAX_TOKENS = 32
EPOCHS = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def grpo(
    model: PreTrainedModel | DistributedDataParallel,
    manager: RolloutManager,
    problems: Problems,
    options: argparse.Namespace,
) -> Iterator[Step]:
    """Repeat: sample groups, score them, train twice on the batch, every prompt once for all of its samples."""
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, manager)
    attach_tree(manager.model)
    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS, **truncation(options))
    for _ in range(options.steps):
        asked = problems.sample(options.prompts)
        batch = manager.generate([p.prompt for p in asked], params, metadata=[p.answer for p in asked], progress=False)
        rewards = torch.tensor(list(map(reward, batch.texts, batch.metadata)), device=model.device)
        advantages = group_advantages(rewards, batch.group_ids)[:, None]
        mask, staleness = batch.response_mask, []
        packed = batch.tree()
        with manager.suspended():
            for epoch in range(EPOCHS):
                logprobs = batch.logprobs_of(model, packed)
                if epoch == 0:
                    manager.observe_logprobs(batch, logprobs)
                ratio = (logprobs - batch.logprobs).exp()
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                loss = -torch.minimum(ratio * advantages, clipped * advantages)[mask].mean()
                staleness.append((manager.policy_version - batch.policy_versions)[mask])
                optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        schedule.step()
        yield Step(rewards.mean().item(), loss.item(), torch.cat(staleness), int(mask.sum()), batch, rewards)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=100, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=64, help=f"per step, {GROUP} samples each")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate of GRPO")
    add_truncation(parser)
    parser.add_argument("--warm-up", type=float, default=0.3, help="loss that ends the supervised steps before it")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out problems")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/grpo"), help="folder of the picture and of wandb's files"
    )
    parser.add_argument(
        "--report", action="store_true", help="write report.html of the run, with traced steps, into --out"
    )
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.warm_up, options.every = 4, 8, 3.0, 2
    return options


def main() -> None:
    """Train from random weights and draw the plot."""
    started = time.perf_counter()
    options = parse_options()
    os.environ.setdefault("WANDB_SILENT", "true")
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=64, seed=options.seed)
    problems = Problems(sums(), held_out=64 if options.quick else 512, seed=options.seed)
    report = Report(f"GRPO: a small Qwen3 learns to add (seed {options.seed})", options.out)
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    config = InferenceConfig(max_requests=GROUP * options.prompts, seed=options.seed)
    log = RunLog(options.out / "log", title=report.title) if options.report else None
    with (
        RolloutManager(model, tokenizer, config) as manager,
        WandbLogger("rollout-grpo", config=vars(options), directory=options.out) as logger,
    ):

        def exam(greedy: bool = False) -> float:
            return exact_match(manager, problems.held_out, max_tokens=MAX_TOKENS, greedy=greedy)

        before, before_greedy = exam(), exam(greedy=True)
        report.say(f"{lessons} supervised steps: held-out {before:.2f} sampled, {before_greedy:.2f} greedy")
        training = grpo(model, manager, problems, options)
        for number in range(1, options.steps + 1):
            traced = log is not None and number % max(1, options.steps // 4) == 0
            with manager.trace(options.out / "log" / f"step-{number:04}.json.gz") if traced else nullcontext():
                step = next(training)
            metrics = manager.metrics()
            held_out = exam() if number % options.every == 0 or number in (1, options.steps) else None
            logger.log(
                number, {"train/reward": step.reward, "train/loss": step.loss, "train/held_out": held_out}, metrics
            )
            if held_out is not None and step.batch is not None and step.rewards is not None:
                logger.samples(number, step.batch, step.rewards.flatten(), tokenizer=tokenizer)
            report.row(number, step, held_out, metrics)
            if log is not None:
                log.step(number, metrics, batch=step.batch, rewards=step.rewards, tokenizer=tokenizer)
        after, after_greedy = exam(), exam(greedy=True)
        if log is not None:
            page = write_report(log.folder)
            logger.report(options.steps, page)
            report.say(f"report: {page}")
        report.say(f"wandb: {logger.run.url or logger.run.dir}")
    report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    report.say(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
