"""GRPO on a mixture of experts: the trainer replays the experts that the rollout chose; log-prob gap with and without.

    python examples/moe_grpo.py --seed 0

The rollout samples from a bfloat16 copy of the weights (`inference_dtype`), as a second engine would; the trainer computes
in float32. Rounding alone then sends some tokens to other experts. Every step measures the gap between the log-probs of the
two with the recorded routes (`rollout.replay`) and without; training uses them. What bfloat16 loses elsewhere is in both
gaps; the tokens that went to other experts are the largest of those without.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import torch
from arithmetic import Problems, reward, sums
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from policy import character_tokenizer, exact_match, trapezoid, warm_up
from report import BLUE, FAINT, STYLE
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rollout import InferenceConfig, RolloutBatch, RolloutManager, SamplingParams, replay
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach

GROUP = 8
MAX_TOKENS = 32


@dataclass(frozen=True)
class Step:
    """Results of one training step; gaps are (mean, largest) |trainer's - sampler's log-prob| of the sampled tokens."""

    reward: float
    replayed: tuple[float, float]
    live: tuple[float, float]
    rerouted: float
    """Share of the chosen experts that the trainer's own routers would not have chosen."""


def small_moe(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3MoeForCausalLM:
    """A Qwen3-MoE of 0.2 million random parameters: two layers of 16 experts, two of them for each token."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    # So few rows per expert are slow to group on a CPU.
    config._experts_implementation = "eager"
    return Qwen3MoeForCausalLM(config)


def gap(logprobs: Tensor, batch: RolloutBatch) -> tuple[float, float]:
    """Mean and largest difference to the sampler's log-probs, in nats."""
    differences = (logprobs - batch.logprobs)[batch.response_mask].abs()
    return differences.mean().item(), differences.max().item()


@torch.no_grad()
def own_routes(model: Qwen3MoeForCausalLM, batch: RolloutBatch) -> float:
    """Share of the recorded experts that the model's own routers do not choose now."""
    assert batch.routed_experts is not None
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    logits = model(**inputs, output_router_logits=True, use_cache=False).router_logits
    scores = torch.stack(logits, 1).view(*batch.input_ids.shape, len(logits), -1)
    recorded = batch.routed_experts.long()
    own = scores.topk(recorded.shape[-1], dim=-1).indices
    missing = ~(recorded.unsqueeze(-1) == own.unsqueeze(-2)).any(-1)
    return missing[recorded >= 0].float().mean().item()


def grpo(
    model: Qwen3MoeForCausalLM, manager: RolloutManager, problems: Problems, options: argparse.Namespace
) -> Iterator[Step]:
    """Repeat: sample groups, score them, train on them with the rollout's routes."""
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, manager)
    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    for _ in range(options.steps):
        asked = problems.sample(options.prompts)
        batch = manager.generate([p.prompt for p in asked], params, metadata=[p.answer for p in asked], progress=False)
        rewards = torch.tensor(list(map(reward, batch.texts, batch.metadata)))
        advantages = group_advantages(rewards, batch.group_ids)[:, None]
        with torch.no_grad():
            live = gap(batch.logprobs_of(model), batch)
        rerouted = own_routes(model, batch)
        with replay(batch, model):
            logprobs = batch.logprobs_of(model)
            ratio = (logprobs - batch.logprobs).exp()
            loss = -(ratio * advantages)[batch.response_mask].mean()
            optimizer.zero_grad()
            loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        yield Step(rewards.mean().item(), gap(logprobs.detach(), batch), live, rerouted)


def picture(steps: list[Step], path: Path) -> Path:
    """Draw the mean and the largest gap of every step, with replay and without."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        numbers = range(1, len(steps) + 1)
        for which, (axes, name) in enumerate(zip(figure.subplots(1, 2), ("Mean", "Largest"), strict=True)):
            axes.plot(numbers, [step.live[which] for step in steps], color=FAINT, label="routed live")
            axes.plot(numbers, [step.replayed[which] for step in steps], color=BLUE, label="routes replayed")
            axes.set(title=f"{name} gap of trainer and sampler", xlabel="step", ylabel="|Δ log-prob|")
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend(loc="lower left", bbox_to_anchor=(-0.015, 0.985), ncols=2)
        figure.savefig(path, dpi=150)
    return path


def main() -> None:
    """Train from random weights and draw the plot."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=16, help=f"per step, {GROUP} samples each")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate of GRPO")
    parser.add_argument("--warm-up", type=float, default=0.3, help="loss that ends the supervised steps before it")
    parser.add_argument("--out", type=Path, default=Path("runs/moe_grpo"), help="folder of the picture")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.warm_up = 3, 4, 3.0
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer = character_tokenizer()
    model = small_moe(tokenizer, options.seed)
    problems = Problems(sums(), held_out=32 if options.quick else 256, seed=options.seed)
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    print(f"{lessons} supervised steps")
    config = InferenceConfig(
        max_requests=GROUP * options.prompts, seed=options.seed, inference_dtype="bfloat16", record_routes=True
    )
    steps: list[Step] = []
    with RolloutManager(model, tokenizer, config) as manager:
        before = exact_match(manager, problems.held_out, max_tokens=MAX_TOKENS)
        for number, step in enumerate(grpo(model, manager, problems, options), 1):
            steps.append(step)
            print(
                f"step {number}: reward {step.reward:.2f}, mean gap {step.live[0]:.4f} live, {step.replayed[0]:.4f} "
                f"replayed, largest {step.live[1]:.3f} and {step.replayed[1]:.3f}; {step.rerouted:.2%} of experts rerouted"
            )
        after = exact_match(manager, problems.held_out, max_tokens=MAX_TOKENS)
    for which, name in enumerate(("mean", "largest")):
        live, replayed = (
            sum(gaps) / len(steps) for gaps in zip(*((s.live[which], s.replayed[which]) for s in steps), strict=True)
        )
        print(
            f"{name} gap of a step: {live:.4f} routed live, {replayed:.4f} with replay, {live / replayed:.1f} times less"
        )
    print(f"held-out {before:.2f} → {after:.2f}")
    print(f"picture: {picture(steps, options.out / f'seed-{options.seed}.png')}")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
