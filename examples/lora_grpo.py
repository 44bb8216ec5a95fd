"""GRPO with LoRA: a small Qwen3 learns to add by training an adapter; the base model is the KL reference.

    python examples/lora_grpo.py --seed 0

After supervised training the model is frozen and gets an adapter. The rollout samples with the adapter active, without
merging or copying weights, and a step changes the adapter only. A KL term keeps the policy near the base model: the same
module computes the reference log-probs with the adapter disabled. At the end the base model is evaluated again and has
not changed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from arithmetic import Problems, reward, sums
from peft import LoraConfig, PeftModel, get_peft_model
from policy import character_tokenizer, exact_match, small_model, trapezoid, warm_up
from report import Report, Step
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from rollout import InferenceConfig, RolloutManager, SamplingParams
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach
from trainer_hooks.peft import adapter
from trainer_hooks.wandb import WandbLogger

GROUP = 8
MAX_TOKENS = 32
EPOCHS = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


def grpo(
    model: PeftModel, manager: RolloutManager, problems: Problems, options: argparse.Namespace
) -> Iterator[tuple[Step, float]]:
    """Repeat: sample groups, score them, train the adapter; each step has its KL from the reference."""
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = AdamW(adapters, lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, manager)
    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    for _ in range(options.steps):
        asked = problems.sample(options.prompts)
        batch = manager.generate([p.prompt for p in asked], params, metadata=[p.answer for p in asked], progress=False)
        rewards = torch.tensor(list(map(reward, batch.texts, batch.metadata)), device=model.device)
        advantages = group_advantages(rewards, batch.group_ids)[:, None]
        mask, staleness = batch.response_mask, []
        with manager.suspended():
            with adapter(manager, None), torch.no_grad():
                reference = batch.logprobs_of(model)
            for epoch in range(EPOCHS):
                logprobs = batch.logprobs_of(model)
                if epoch == 0:
                    manager.observe_logprobs(batch, logprobs)
                ratio = (logprobs - batch.logprobs).exp()
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                gain = torch.minimum(ratio * advantages, clipped * advantages)
                # Schulman's k3, http://joschu.net/blog/kl-approx.html: never negative, and on average the KL.
                away = (reference - logprobs)[mask]
                kl = (away.exp() - 1 - away).mean()
                loss = -gain[mask].mean() + options.kl * kl
                staleness.append((manager.policy_version - batch.policy_versions)[mask])
                optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(adapters, 1.0)
                optimizer.step()
        schedule.step()
        yield Step(rewards.mean().item(), loss.item(), torch.cat(staleness), tokens=int(mask.sum())), kl.item()


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=50, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step, {GROUP} samples each")
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--lr", type=float, default=4e-3, help="highest learning rate of the adapter")
    parser.add_argument("--kl", type=float, default=0.01, help="weight of the KL from the reference in the loss")
    parser.add_argument("--warm-up", type=float, default=0.3, help="loss that ends the supervised steps before it")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out problems")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/lora_grpo"), help="folder of the picture and of wandb's files"
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
    problems = Problems(sums(), held_out=64 if options.quick else 256, seed=options.seed)
    report = Report(f"GRPO with LoRA: a small Qwen3 learns to add (seed {options.seed})", options.out, extra="KL")
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    lora = LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(model, lora)
    trained, every = policy.get_nb_trainable_parameters()
    config = InferenceConfig(max_requests=GROUP * options.prompts, seed=options.seed)
    with (
        RolloutManager(policy, tokenizer, config) as manager,
        WandbLogger("rollout-lora-grpo", config=vars(options), directory=options.out) as logger,
    ):

        def exam(greedy: bool = False) -> float:
            return exact_match(manager, problems.held_out, max_tokens=MAX_TOKENS, greedy=greedy)

        before, before_greedy = exam(), exam(greedy=True)
        report.say(f"{lessons} supervised steps: held-out {before:.2f} sampled, {before_greedy:.2f} greedy")
        report.say(f"the adapter has {trained:,} parameters, the model underneath {every - trained:,}")
        for number, (step, kl) in enumerate(grpo(policy, manager, problems, options), 1):
            metrics = manager.metrics()
            held_out = exam() if number % options.every == 0 or number in (1, options.steps) else None
            point = {"train/reward": step.reward, "train/loss": step.loss, "train/kl": kl, "train/held_out": held_out}
            logger.log(number, point, metrics)
            report.row(number, step, held_out, metrics, f"{kl:.3f}")
        after, after_greedy = exam(), exam(greedy=True)
        with adapter(manager, None):
            underneath = exam(greedy=True)
        report.say(f"wandb: {logger.run.url or logger.run.dir}")
    report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    report.say(f"the model underneath, greedy: {before_greedy:.2f} → {underneath:.2f}")
    report.say(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
