"""Asynchronous GRPO: requests continue across weight updates with bounded staleness, and a killed run resumes.

    python examples/async_grpo.py --seed 0
    python examples/async_grpo.py --seed 0 --resume       after it was killed: from its last checkpoint

A step trains on the finished groups; the others stay in flight, and their later tokens come from newer weights.
`max_staleness` bounds the number of updates between sampling a token and training on it: `generate` waits for the groups
that would exceed it, so that no tokens are discarded. A truncated importance weight corrects for the updates in between.
`Run` holds everything a checkpoint needs: model, optimizer, position in the problems, requests in flight. A journal keeps
the groups that finish between two checkpoints, so that they are not computed again after a restart.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from arithmetic import Problems, repeated_sums, reward
from policy import character_tokenizer, exact_match, small_model, trapezoid, warm_up
from report import Report, Step
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from rollout import InferenceConfig, Journal, RolloutBatch, RolloutManager, SamplingParams
from rollout.algorithms import effective_sample_size, group_advantages, importance_weights, masked_mean, rollout_kl
from trainer_hooks.optimizer import attach
from trainer_hooks.wandb import WandbLogger

GROUP = 8
MAX_TOKENS = 112
HIGHEST_WEIGHT = 2.0


@dataclass
class Run:
    """State of a run: everything that a checkpoint contains."""

    model: PreTrainedModel
    optimizer: Optimizer
    schedule: LRScheduler
    problems: Problems
    manager: RolloutManager
    step: int = 0

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically: a kill during the write keeps the previous one."""
        state = {
            "step": self.step,
            "dealt": self.problems.dealt,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rollout": self.manager.state_dict(),
        }
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def load(self, path: Path) -> None:
        """Load a checkpoint, including the groups in flight."""
        state = torch.load(path, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.manager.load_state_dict(state["rollout"])
        self.step, self.problems.dealt = state["step"], state["dealt"]


@dataclass(frozen=True)
class Update:
    """One training step with its batch and results."""

    step: Step
    batch: RolloutBatch
    rewards: Tensor
    """float32 [N]."""
    importance: dict[str, float]
    """How far the policy that is trained was from those that sampled."""


def async_grpo(run: Run, options: argparse.Namespace) -> Iterator[Update]:
    """Repeat: keep a number of groups in flight, train once on the complete ones."""
    params = SamplingParams(n=GROUP, max_tokens=options.max_tokens)
    while run.step < options.steps:
        asked = run.problems.deal(options.in_flight - run.manager.groups_in_flight)
        batch = run.manager.generate(
            [p.prompt for p in asked],
            params,
            metadata=[p.answer for p in asked],
            min_groups=options.groups,
            progress=False,
        )
        mask = batch.response_mask
        rewards = torch.tensor(list(map(reward, batch.texts, batch.metadata)), device=mask.device)
        advantages = group_advantages(rewards, batch.group_ids, valid=mask.any(1))[:, None]
        with run.manager.suspended():
            logprobs = batch.logprobs_of(run.model)
            run.manager.observe_logprobs(batch, logprobs)
            weights = importance_weights(logprobs, batch.logprobs, mask, cap=HIGHEST_WEIGHT)
            loss = -masked_mean(weights * advantages * logprobs, mask)
            run.optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(run.model.parameters(), 1.0)
            run.optimizer.step()
        run.schedule.step()
        run.step += 1
        importance = {
            "train/effective_sample_share": effective_sample_size(weights, mask, normalized=True).item(),
            "train/rollout_kl": masked_mean(rollout_kl(logprobs, batch.logprobs, mask), mask).item(),
        }
        staleness = batch.policy_staleness[mask]
        yield Update(Step(rewards.mean().item(), loss.item(), staleness, len(staleness)), batch, rewards, importance)


def columns(update: Update, metrics: dict[str, float]) -> str:
    """Return the cells about staleness: share of stale tokens, oldest token, discarded requests, cost of the weights."""
    age = update.step.staleness.float()
    thrown_away = metrics["rollout/requests_stale"] + metrics["rollout/requests_requeued"]
    cells = (
        f"{(age > 0).float().mean():.0%}", f"{age.max():.0f}", f"{thrown_away:.0f}",
        f"{update.importance['train/effective_sample_share']:.0%}", f"{update.importance['train/rollout_kl']:.0e}",
    )  # fmt: skip
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, (4, 6, 6, 4, 6), strict=True))


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=110, help="of training")
    parser.add_argument("--groups", type=int, default=48, help=f"complete groups to wait for, {GROUP} samples each")
    parser.add_argument("--in-flight", type=int, default=80, help="groups in flight when a step begins to generate")
    parser.add_argument("--max-staleness", type=int, default=4, help="updates between a token and its use, at most")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of a completion")
    parser.add_argument("--lr", type=float, default=4e-4, help="highest learning rate")
    parser.add_argument("--warm-up", type=float, default=0.25, help="loss that ends the supervised steps before")
    parser.add_argument("--every", type=int, default=10, help="steps between two looks at the held-out problems")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of this --out, if any")
    parser.add_argument("--out", type=Path, default=Path("runs/async_grpo"),
                        help="folder of the checkpoint, the journal, the picture and wandb's files")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.groups, options.in_flight, options.warm_up, options.every = 4, 3, 8, 3.0, 2
        options.save_every = 3
    return options


def main() -> None:
    """Train from random weights or a checkpoint and draw the plot."""
    started = time.perf_counter()
    options = parse_options()
    os.environ.setdefault("WANDB_SILENT", "true")
    saved = options.out / f"seed-{options.seed}.pt"
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=128, seed=options.seed)
    problems = Problems(repeated_sums(), held_out=32 if options.quick else 256, seed=options.seed)
    title = f"Asynchronous GRPO: no token older than {options.max_staleness} updates (seed {options.seed})"
    report = Report(title, options.out, extra=" old  oldest thrown  ESS     KL")
    resumed = options.resume and saved.exists()
    if not resumed:
        lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 48)
        report.say(f"{lessons} supervised steps")
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    config = InferenceConfig(
        max_requests=GROUP * options.in_flight, max_staleness=options.max_staleness, seed=options.seed
    )
    with (
        Journal(options.out / f"seed-{options.seed}.journal") as journal,
        RolloutManager(model, tokenizer, config, journal=journal) as manager,
        RolloutManager(model, tokenizer, InferenceConfig(seed=options.seed)) as examiner,
        WandbLogger("rollout-async-grpo", config=vars(options), directory=options.out) as logger,
    ):
        run = Run(model, optimizer, schedule, problems, manager)
        if resumed:
            run.load(saved)
            examiner.weights_updated()
            report.say(f"resumed at step {run.step} with {manager.groups_in_flight} groups in flight")
        attach(optimizer, manager)
        attach(optimizer, examiner)

        def exam(greedy: bool = False) -> float:
            # With a manager of its own: a look at the held-out problems must not carry forward what is in flight.
            return exact_match(examiner, problems.held_out, max_tokens=MAX_TOKENS, greedy=greedy)

        before, before_greedy = exam(), exam(greedy=True)
        first = run.step + 1
        for update in async_grpo(run, options):
            metrics = manager.metrics()
            measured = run.step % options.every == 0 or run.step in (first, options.steps)
            held_out = exam() if measured else None
            scores = {"train/reward": update.step.reward, "train/loss": update.step.loss, "train/held_out": held_out}
            logger.log(run.step, scores, update.importance, metrics)
            if measured:
                logger.samples(run.step, update.batch, update.rewards, tokenizer=tokenizer)
            report.row(run.step, update.step, held_out, metrics, columns(update, metrics))
            if run.step % options.save_every == 0:
                run.save(saved)
        manager.generate([], min_groups=manager.groups_in_flight)
        after, after_greedy = exam(), exam(greedy=True)
        report.say(f"wandb: {logger.run.url or logger.run.dir}")
    if report.rows:
        report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    report.say(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
