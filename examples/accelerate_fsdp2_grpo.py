"""GRPO with Hugging Face accelerate and FSDP2: weights are sharded over the ranks and gathered for sampling.

    torchrun --nproc-per-node 2 examples/accelerate_fsdp2_grpo.py --seed 0

The loop of `examples/grpo.py` in a training script of accelerate. The manager is constructed with the module that
`accelerator.prepare` has sharded, and `attach` hooks the optimizer, so that the policy version counts its steps. `generate`
gathers the weights once on all ranks, samples, and shards them again; in between, the ranks' forwards are independent and
may differ in number.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from arithmetic import Problems, reward, sums
from data_parallel_grpo import mean, over_ranks
from grpo import CLIP_HIGH, CLIP_LOW, EPOCHS, GROUP, MAX_TOKENS
from policy import character_tokenizer, exact_match, small_model, trapezoid, warm_up
from report import Report, Step
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from rollout import InferenceConfig, RolloutManager, SamplingParams
from rollout.algorithms import group_advantages
from trainer_hooks.accelerate import attach
from trainer_hooks.wandb import WandbLogger


def sharding_accelerator() -> Accelerator:
    """Return the accelerator of `accelerate launch --use_fsdp --fsdp_version 2`, on a CPU too."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if torch.cuda.is_available():
        return Accelerator(fsdp_plugin=plugin)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for shared in (PartialState, AcceleratorState):
        shared._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return accelerator


def megabytes(model: nn.Module) -> float:
    """Size of this rank's parameters, in MB."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]
    return sum(each.nbytes for each in local) / 1e6


def grpo(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    manager: RolloutManager,
    problems: Problems,
    options: argparse.Namespace,
) -> Iterator[Step]:
    """Repeat: sample groups, score them, train twice on the batch."""
    schedule = trapezoid(optimizer.optimizer, options.steps, rise=5, fall=1.0)
    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    for _ in range(options.steps):
        asked = problems.sample(options.prompts)
        batch = manager.generate([p.prompt for p in asked], params, metadata=[p.answer for p in asked], progress=False)
        rewards = torch.tensor(list(map(reward, batch.texts, batch.metadata)), device=accelerator.device)
        advantages = group_advantages(rewards, batch.group_ids)[:, None]
        mask, staleness = batch.response_mask, []
        with manager.suspended():
            for epoch in range(EPOCHS):
                # A forward of sharded weights is a call of all ranks: one for the whole batch, whatever its lengths are.
                logprobs = batch.logprobs_of(model)
                if epoch == 0:
                    manager.observe_logprobs(batch, logprobs)
                ratio = (logprobs - batch.logprobs).exp()
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                loss = -torch.minimum(ratio * advantages, clipped * advantages)[mask].mean()
                staleness.append((manager.policy_version - batch.policy_versions)[mask])
                optimizer.zero_grad()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        schedule.step()
        yield Step(rewards.mean().item(), loss.item(), torch.cat(staleness), tokens=int(mask.sum()))


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step and rank, {GROUP} samples each")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate of GRPO")
    parser.add_argument("--warm-up", type=float, default=0.3, help="loss that ends the supervised steps before it")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out problems")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/accelerate_fsdp2_grpo"), help="folder of picture and wandb"
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
    accelerator = sharding_accelerator()
    rank, size = accelerator.process_index, accelerator.num_processes
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=64, seed=options.seed)
    problems = Problems(sums(), held_out=64 if options.quick else 512, seed=options.seed)
    title = f"GRPO: a small Qwen3 learns to add, sharded over {size} ranks (seed {options.seed})"
    report = Report(title, options.out, silent=not accelerator.is_main_process)
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    problems = problems.share(rank, size, seed=options.seed)
    whole = megabytes(model)
    model, optimizer = accelerator.prepare(
        model, AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    )
    config = InferenceConfig(max_requests=GROUP * options.prompts, seed=options.seed)
    with (
        RolloutManager(model, tokenizer, config) as manager,
        attach(accelerator, manager),
        WandbLogger(
            "rollout-accelerate-fsdp2-grpo",
            config=vars(options),
            directory=options.out,
            mode=None if accelerator.is_main_process else "disabled",
        ) as logger,
    ):

        def exam(greedy: bool = False) -> float:
            solved = exact_match(manager, problems.held_out, max_tokens=MAX_TOKENS, greedy=greedy)
            return mean(over_ranks(solved)[0])

        before, before_greedy = exam(), exam(greedy=True)
        report.say(f"{lessons} supervised steps: held-out {before:.2f} sampled, {before_greedy:.2f} greedy")
        for number, step in enumerate(grpo(accelerator, model, optimizer, manager, problems, options), 1):
            metrics = manager.metrics()
            step = replace(step, reward=mean(over_ranks(step.reward)[0]))
            held_out = exam() if number % options.every == 0 or number in (1, options.steps) else None
            logger.log(
                number, {"train/reward": step.reward, "train/loss": step.loss, "train/held_out": held_out}, metrics
            )
            report.row(number, step, held_out, metrics)
        after, after_greedy = exam(), exam(greedy=True)
        report.say(f"parameters: {whole:.2f} MB whole, {megabytes(model):.2f} MB on this rank")
    if accelerator.is_main_process:
        report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    report.say(f"{time.perf_counter() - started:.0f} s in all")
    accelerator.end_training()


if __name__ == "__main__":
    main()
