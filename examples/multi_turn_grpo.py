"""GRPO on episodes of many turns: a small Qwen3 learns to add with a calculator, in a few minutes on a laptop's CPU.

    python examples/multi_turn_grpo.py --seed 0

    27+8+41=  27+8:35 35+41:76 = 76    the model's words, but for the numbers behind a colon, which the tool wrote

The model writes a call, ends it with a colon, reads the result, and goes on until it writes the answer. While the slow tool
answers, other episodes are sampled. The model is first trained on a few of a teacher's transcripts, and then only on
whether its answers are right: `grpo` is the algorithm, and `batch` has the masks of all turns.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from arithmetic import Problem, Problems
from policy import character_tokenizer, small_model, trapezoid, warm_up
from report import Report, Step
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from rollout import Advanced, DynamicInferenceRequest, InferenceConfig, RolloutManager, SamplingParams, StepResult
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach
from trainer_hooks.wandb import WandbLogger

GROUP = 8
TURNS = 5
MAX_TOKENS = 10
EPOCHS = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TOOL_S = 0.02


class Calculator:
    """Environment with a tool that adds two numbers, which takes up to `2 * TOOL_S`."""

    async def reset(self, problem: Problem) -> str:
        """The question."""
        self.answer = problem.answer
        return problem.prompt

    async def step(self, turn: DynamicInferenceRequest) -> StepResult:
        """The tool's result where the completion is a call; otherwise the end, with 1 for the right answer."""
        text = turn.generated_text or ""
        if not text.endswith(":"):
            return StepResult(reward=float(text.split("=")[-1].strip() == self.answer), done=True)
        await asyncio.sleep(random.uniform(0, 2 * TOOL_S))
        left, plus, right = text[:-1].partition("+")
        result = str(int(left) + int(right)) if plus and left.strip().isdigit() and right.isdigit() else "*"
        return StepResult(f"{result} ")


def problems_of_three() -> list[Problem]:
    """Sums of three numbers, with what a teacher would write and the tool would answer."""
    rng = random.Random(0)
    every = []
    for _ in range(4000):
        a, b, c = (rng.randint(1, 99) for _ in range(3))
        every.append(Problem(f"{a}+{b}+{c}=", f"{a}+{b}:{a + b} {a + b}+{c}:{a + b + c} = {a + b + c}"))
    return every


def turn_params(manager: RolloutManager, **options: float) -> SamplingParams:
    """A turn ends with a call's colon or with the answer."""
    (colon,) = manager.tokenizer(":", add_special_tokens=False)["input_ids"]
    return SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=[colon], **options)


def grpo(
    model: PreTrainedModel, manager: RolloutManager, problems: Problems, options: argparse.Namespace
) -> Iterator[Step]:
    """Repeat: play groups of episodes, train twice on what was sampled in them."""
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, manager)
    params = turn_params(manager)
    for _ in range(options.steps):
        tasks = problems.sample(options.prompts)
        batch = manager.run(tasks, Calculator, params, n=GROUP, max_turns=TURNS, progress=False)
        groups = torch.arange(len(batch.episodes), device=model.device) // GROUP
        advantages = group_advantages(batch.rewards, groups)[batch.episode_ids, None]
        mask, staleness = batch.response_mask, []
        with manager.suspended():
            for epoch in range(EPOCHS):
                logprobs = batch.logprobs_of(model)
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
        yield Step(batch.rewards.mean().item(), loss.item(), torch.cat(staleness), tokens=int(mask.sum()))


def exam(manager: RolloutManager, held_out: Sequence[Problem], greedy: bool = False) -> float:
    """Share of the problems answered rightly. Resets the metrics."""
    params = turn_params(manager, temperature=0.0 if greedy else 1.0)
    batch = manager.run(held_out, Calculator, params, max_turns=TURNS, progress=False)
    manager.metrics()
    return batch.rewards.mean().item()


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step, {GROUP} episodes each")
    parser.add_argument("--lr", type=float, default=4e-4, help="highest learning rate of GRPO")
    parser.add_argument("--warm-up", type=float, default=0.95, help="loss that ends the supervised steps before it")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out problems")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/multi_turn"), help="folder of the picture and of wandb's files"
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
    model = small_model(tokenizer, max_length=96, seed=options.seed)
    problems = Problems(problems_of_three(), held_out=64 if options.quick else 256, seed=options.seed)
    report = Report(f"Multi-turn GRPO: a small Qwen3 and its calculator (seed {options.seed})", options.out)
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    config = InferenceConfig(
        max_requests=GROUP * options.prompts, seed=options.seed, advanced=Advanced(block_size_tokens=4)
    )
    with (
        RolloutManager(model, tokenizer, config) as manager,
        WandbLogger("rollout-multi-turn", config=vars(options), directory=options.out) as logger,
    ):
        before, before_greedy = exam(manager, problems.held_out), exam(manager, problems.held_out, greedy=True)
        report.say(f"{lessons} supervised steps: held-out {before:.2f} sampled, {before_greedy:.2f} greedy")
        for number, step in enumerate(grpo(model, manager, problems, options), 1):
            metrics = manager.metrics()
            due = number % options.every == 0 or number in (1, options.steps)
            held_out = exam(manager, problems.held_out) if due else None
            values = {"train/reward": step.reward, "train/loss": step.loss, "train/held_out": held_out}
            logger.log(number, values, metrics)
            report.row(number, step, held_out, metrics)
        after, after_greedy = exam(manager, problems.held_out), exam(manager, problems.held_out, greedy=True)
        report.say(f"wandb: {logger.run.url or logger.run.dir}")
    report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    report.say(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
