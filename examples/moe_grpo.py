"""GRPO on a mixture of experts: the trainer replays the experts that the rollout chose; log-prob gap with and without.

    python examples/moe_grpo.py --seed 0

The task is to sort digits. The engine samples from a bfloat16 copy of the weights (`inference_dtype`), as a second engine
would; the trainer computes in float32. Rounding alone then sends some tokens to other experts. Every step measures the gap
between the log-probs of the two with the recorded routes (`rollout.replay`) and without; training uses them. What bfloat16
loses elsewhere is in both gaps; tokens that went to other experts have the largest gaps without replay.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import rollout
from rollout.algorithms import group_advantages, masked_mean

GROUP, DIGITS = 8, 8
EQUALS = 10
"""Tokens are the digits themselves and `=`."""


def make_model() -> Qwen3MoeForCausalLM:
    """Build a Qwen3-MoE of 0.2 million random parameters: two layers of 16 experts, two of them for each token."""
    config = Qwen3MoeConfig(
        vocab_size=11, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        max_position_embeddings=2 * DIGITS + 1, eos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    config._experts_implementation = "eager"  # so few rows per expert are slow to group on a CPU
    return Qwen3MoeForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def draw(count: int) -> list[list[int]]:
    """Draw prompts: digits, then `=`."""
    return [[*random.choices(range(10), k=DIGITS), EQUALS] for _ in range(count)]


def warm_up(model: nn.Module, steps: int) -> None:
    """Train on worked answers, so that some answers are right when GRPO begins."""
    optimizer = AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        ids = torch.tensor([[*prompt, *sorted(prompt[:DIGITS])] for prompt in draw(128)], device=model.device)
        labels = ids.clone()
        labels[:, : DIGITS + 1] = -100
        model(ids, labels=labels).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def rewards_of(batch: rollout.RolloutBatch) -> Tensor:
    """Return float32 [N]: 1 for a right answer, else 0."""
    right = [each.generated_tokens == sorted(each.prompt_tokens[:DIGITS]) for each in batch]
    return torch.tensor(right, dtype=torch.float32, device=batch.input_ids.device)


def gap(logprobs: Tensor, batch: rollout.RolloutBatch) -> tuple[float, float]:
    """Return mean and largest difference to the sampler's log-probs, in nats."""
    differences = (logprobs - batch.logprobs)[batch.response_mask].abs()
    return differences.mean().item(), differences.max().item()


def grpo(model: Qwen3MoeForCausalLM, optimizer: AdamW, batch: rollout.RolloutBatch, rewards: Tensor) -> Tensor:
    """Train on a batch with the rollout's routes; return their log-probs [N, T] before the update."""
    advantages = group_advantages(rewards, batch.group_ids)[:, None]
    with rollout.suspended(), rollout.replay(batch, model):
        logprobs = batch.logprobs_of(model)
        ratio = (logprobs - batch.logprobs).exp()
        masked_mean(-ratio * advantages, batch.response_mask).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return logprobs.detach()


def exam(prompts: list[list[int]]) -> float:
    """Return the share of greedy answers that are right."""
    batch = rollout.generate(prompts, max_tokens=DIGITS, temperature=0.0, progress=False)
    return rewards_of(batch).mean().item()


def main() -> None:
    """Train from random weights and print the gaps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step, {GROUP} samples each")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 3, 4
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = make_model()
    warm_up(model, 5 if options.quick else 120)
    optimizer = AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.99), weight_decay=0.0)
    config = rollout.InferenceConfig(
        max_requests=GROUP * options.prompts, seed=options.seed, inference_dtype="bfloat16", record_routes=True
    )
    rollout.init(model, None, optimizer, config)
    held_out, gaps = draw(16 if options.quick else 256), []
    before = exam(held_out)
    for step in range(1, options.steps + 1):
        batch = rollout.generate(draw(options.prompts), n=GROUP, max_tokens=DIGITS, progress=False)
        rewards = rewards_of(batch)
        with torch.no_grad():
            live = gap(batch.logprobs_of(model), batch)
        replayed = gap(grpo(model, optimizer, batch, rewards), batch)
        gaps.append([*live, *replayed])
        print(
            f"step {step:3}: reward {rewards.mean():.2f}, mean gap {live[0]:.4f} live and {replayed[0]:.4f} replayed, "
            f"largest {live[1]:.3f} and {replayed[1]:.3f}"
        )
    mean, largest, replayed_mean, replayed_largest = torch.tensor(gaps).mean(0).tolist()
    print(f"mean gap of a step: {mean:.4f} routed live, {replayed_mean:.4f} with replay")
    print(f"largest gap of a step: {largest:.4f} routed live, {replayed_largest:.4f} with replay")
    print(f"held-out {before:.2f} → {exam(held_out):.2f}, {time.perf_counter() - started:.0f} s in all")
    rollout.close()


if __name__ == "__main__":
    main()
