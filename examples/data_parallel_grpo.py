"""GRPO on several ranks: each rank has its own problems, and all ranks share the sampling work.

    torchrun --nproc-per-node 2 examples/data_parallel_grpo.py --seed 0

The loop of `examples/grpo.py` with three differences. Gradients go through `DistributedDataParallel`. Every rank builds a
`RolloutManager`, which finds the others. The ranks' problems differ in length, so without load balancing the ranks with
short answers would wait. The last columns of the table show how many tokens each rank
requested and computed.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from arithmetic import Problems, sums
from grpo import GROUP, MAX_TOKENS, grpo
from policy import add_truncation, character_tokenizer, exact_match, small_model, warm_up
from report import Report
from torch.nn.parallel import DistributedDataParallel

from rollout import InferenceConfig, RolloutManager
from trainer_hooks.wandb import WandbLogger


def over_ranks(*values: float) -> list[list[float]]:
    """Each value of each rank: one list per value, in the order of the ranks."""
    mine = torch.tensor(values, dtype=torch.float64)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return torch.stack(gathered, 1).tolist()


def mean(values: list[float]) -> float:
    """Mean over the ranks."""
    return sum(values) / len(values)


def balance(asked: list[float], computed: list[float]) -> str:
    """Columns of the table: tokens requested and computed per rank, and the busiest rank relative to the mean."""
    shares = " ".join(f"{share:,.0f}" for share in asked), " ".join(f"{share:,.0f}" for share in computed)
    return f"{shares[0]} → {shares[1]}  {max(asked) / mean(asked):.2f} → {max(computed) / mean(computed):.2f}"


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the options to a parser, and parse the command line."""
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step and rank, {GROUP} samples each")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate of GRPO")
    add_truncation(parser)
    parser.add_argument("--warm-up", type=float, default=0.3, help="loss that ends the supervised steps before it")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out problems")
    parser.add_argument("--out", type=Path, default=Path("runs/data_parallel_grpo"), help="folder of picture and wandb")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.warm_up, options.every = 4, 8, 3.0, 2
    return options


def train(options: argparse.Namespace) -> None:
    """Train from random weights as one rank of the process group; rank 0 draws the plot."""
    started = time.perf_counter()
    os.environ.setdefault("WANDB_SILENT", "true")
    rank, size = dist.get_rank(), dist.get_world_size()
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=64, seed=options.seed)
    problems = Problems(sums(), held_out=64 if options.quick else 512, seed=options.seed)
    title = f"GRPO: a small Qwen3 learns to add on {size} ranks (seed {options.seed})"
    report = Report(title, options.out, extra="tokens asked → computed by rank, max/mean", silent=rank > 0)
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    problems = problems.share(rank, size, seed=options.seed)
    config = InferenceConfig(max_requests=GROUP * options.prompts, seed=options.seed)
    with (
        RolloutManager(model, tokenizer, config) as manager,
        WandbLogger(
            "rollout-data-parallel-grpo",
            config=vars(options),
            directory=options.out,
            mode=None if rank == 0 else "disabled",
        ) as logger,
    ):

        def exam(greedy: bool = False) -> float:
            solved = exact_match(manager, problems.held_out, max_tokens=MAX_TOKENS, greedy=greedy)
            return mean(over_ranks(solved)[0])

        before, before_greedy = exam(), exam(greedy=True)
        report.say(f"{lessons} supervised steps: held-out {before:.2f} sampled, {before_greedy:.2f} greedy")
        for number, step in enumerate(grpo(DistributedDataParallel(model), manager, problems, options), 1):
            metrics = manager.metrics()
            rewards, asked_by, computed_by = over_ranks(step.reward, step.tokens, metrics["rollout/generated_tokens"])
            held_out = exam() if number % options.every == 0 or number in (1, options.steps) else None
            step = replace(step, reward=mean(rewards))
            logger.log(
                number, {"train/reward": step.reward, "train/loss": step.loss, "train/held_out": held_out}, metrics
            )
            report.row(number, step, held_out, metrics, balance(asked_by, computed_by))
        after, after_greedy = exam(), exam(greedy=True)
    if rank == 0:
        report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    report.say(f"{time.perf_counter() - started:.0f} s in all")


def main() -> None:
    """Join the process group of the launcher, and train."""
    options = parse_options(
        argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    )
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
