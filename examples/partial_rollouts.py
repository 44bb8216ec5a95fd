"""Partial rollouts: train on finished groups while the long ones continue under newer weights.

    python examples/partial_rollouts.py --seed 0

The solutions have a long tail, and a step that waits for the longest leaves the engine mostly idle. So
`generate_scored(..., groups=, max_groups=)` keeps more groups in flight than it needs and returns as soon as enough are
complete; the rest are suspended while the optimizer steps, and continue afterwards. Their older tokens come from an older
policy: `batch.policy_staleness` holds the number of updates since, `batch.logprobs` the log-probs under the policy that
sampled them, and a truncated importance weight in the loss corrects the difference.

Groups are scored as they complete. With `--discard N` up to N groups of a step whose samples are all right, or all wrong,
are replaced by fresh ones, as in DAPO.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from arithmetic import Problems, repeated_sums, reward
from policy import character_tokenizer, exact_match, small_model, trapezoid, warm_up
from report import Report, Step
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from transformers import PreTrainedModel

from rollout import InferenceConfig, KVCacheManagementMode, PromptTask, RolloutManager, SamplingParams
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach
from trainer_hooks.wandb import WandbLogger

GROUP = 8
MAX_TOKENS = 112
HIGHEST_WEIGHT = 2.0


def partial_rollouts(
    model: PreTrainedModel,
    manager: RolloutManager,
    optimizer: Optimizer,
    problems: Problems,
    options: argparse.Namespace,
) -> Iterator[Step]:
    """Repeat: keep a number of groups in flight, train once on the complete ones."""
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    tasks = (PromptTask(problem.prompt, problem.answer) for problem in problems.endless())
    for _ in range(options.steps):
        batch = manager.generate_scored(
            tasks,
            lambda group: [reward(sample.generated_text, sample.metadata) for sample in group],
            params,
            groups=options.groups,
            max_groups=options.in_flight,
            max_discarded=options.discard,
            progress=False,
        )
        advantages = group_advantages(batch.rewards, batch.group_ids)[:, None]
        with manager.suspended():
            logprobs = batch.logprobs_of(model)
            manager.observe_logprobs(batch, logprobs)
            weights = (logprobs.detach() - batch.logprobs).exp().clamp(max=HIGHEST_WEIGHT)
            loss = -(weights * advantages * logprobs)[batch.response_mask].mean()
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        staleness = batch.policy_staleness[batch.response_mask]
        mean = torch.cat([batch.rewards, batch.discarded_rewards]).mean()
        yield Step(mean.item(), loss.item(), staleness, tokens=len(staleness))
    manager.generate([], min_groups=manager.groups_in_flight)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--groups", type=int, default=48, help=f"complete groups to wait for, {GROUP} samples each")
    parser.add_argument("--in-flight", type=int, default=80, help="groups in flight when a step begins to generate")
    parser.add_argument("--discard", type=int, default=0, help="groups of equal rewards to replace in a step, at most")
    parser.add_argument("--kv-mode", choices=[m.value for m in KVCacheManagementMode], default="offload",
                        help="what becomes of the unfinished groups' KV cache during an update")  # fmt: skip
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate")
    parser.add_argument("--warm-up", type=float, default=0.25, help="loss that ends the supervised steps before")
    parser.add_argument("--every", type=int, default=10, help="steps between two looks at the held-out problems")
    parser.add_argument("--out", type=Path, default=Path("runs/partial_rollouts"),
                        help="folder of the picture and of wandb's files")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.groups, options.in_flight, options.warm_up, options.every = 4, 4, 8, 3.0, 2
    return options


def main() -> None:
    """Train from random weights and draw the plot."""
    started = time.perf_counter()
    options = parse_options()
    os.environ.setdefault("WANDB_SILENT", "true")
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=128, seed=options.seed)
    problems = Problems(repeated_sums(), held_out=32 if options.quick else 256, seed=options.seed)
    report = Report(f"Partial rollouts: sums with a long tail (seed {options.seed})", options.out)
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 48)
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    config = InferenceConfig(
        max_requests=GROUP * options.in_flight, kv_cache_management_mode=options.kv_mode, seed=options.seed
    )
    with (
        RolloutManager(model, tokenizer, config) as manager,
        RolloutManager(model, tokenizer, config) as examiner,
        WandbLogger("rollout-partial", config=vars(options), directory=options.out) as logger,
    ):
        attach(optimizer, manager)
        attach(optimizer, examiner)

        def exam(greedy: bool = False) -> float:
            # With a manager of its own: a look at the held-out problems must not carry forward what is in flight.
            share = exact_match(examiner, problems.held_out, max_tokens=MAX_TOKENS, greedy=greedy)
            manager.metrics()
            return share

        before, before_greedy = exam(), exam(greedy=True)
        report.say(f"{lessons} supervised steps: held-out {before:.2f} sampled, {before_greedy:.2f} greedy")
        for number, step in enumerate(partial_rollouts(model, manager, optimizer, problems, options), 1):
            metrics = manager.metrics()
            held_out = exam() if number % options.every == 0 or number in (1, options.steps) else None
            logger.log(
                number, {"train/reward": step.reward, "train/loss": step.loss, "train/held_out": held_out}, metrics
            )
            report.row(number, step, held_out, metrics)
        after, after_greedy = exam(), exam(greedy=True)
        report.say(f"wandb: {logger.run.url or logger.run.dir}")
    report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    report.say(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
