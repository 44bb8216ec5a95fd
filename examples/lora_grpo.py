"""GRPO with LoRA: a small Qwen3 learns to sort by training an adapter; the base model is the KL reference.

    python examples/lora_grpo.py --seed 0

After supervised training the model is frozen and gets an adapter. The engine samples with the adapter active, without
merging or copying weights, and a step changes the adapter only. A KL term keeps the policy near the base model: the same
module computes the reference log-probs with the adapter disabled. At the end the base model is evaluated again and has not
changed.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollout
from rollout.algorithms import group_advantages, masked_mean
from trainer_hooks.peft import adapter

GROUP, DIGITS, EPOCHS, CLIP_LOW, CLIP_HIGH, KL = 8, 8, 2, 0.2, 0.28, 0.01
EQUALS = 10
"""Tokens are the digits themselves and `=`."""


def make_model() -> Qwen3ForCausalLM:
    """Build a Qwen3 of 0.2 million random parameters."""
    config = Qwen3Config(
        vocab_size=11, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=2 * DIGITS + 1, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


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


def grpo(
    model: PeftModel, manager: rollout.RolloutManager, optimizer: AdamW, batch: rollout.RolloutBatch, rewards: Tensor
) -> float:
    """Train the adapter twice on a batch; return the KL from the base model, in nats per token."""
    advantages, mask = group_advantages(rewards, batch.group_ids)[:, None], batch.response_mask
    with rollout.suspended():
        with adapter(manager, None), torch.no_grad():
            reference = batch.logprobs_of(model)
        for _ in range(EPOCHS):
            logprobs = batch.logprobs_of(model)
            ratio = (logprobs - batch.logprobs).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            # Schulman's k3, http://joschu.net/blog/kl-approx.html: never negative, and on average the KL.
            away = reference - logprobs
            kl = masked_mean(away.exp() - 1 - away, mask)
            loss = KL * kl - masked_mean(torch.minimum(ratio * advantages, clipped * advantages), mask)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return kl.item()


def exam(prompts: list[list[int]]) -> float:
    """Return the share of greedy answers that are right."""
    batch = rollout.generate(prompts, max_tokens=DIGITS, temperature=0.0, progress=False)
    return rewards_of(batch).mean().item()


def main() -> None:
    """Train an adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=48, help=f"per step, {GROUP} samples each")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 3, 4
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    base = make_model()
    warm_up(base, 5 if options.quick else 120)
    lora = LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    trained, every = model.get_nb_trainable_parameters()
    print(f"the adapter has {trained:,} parameters, the model underneath {every - trained:,}")
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=2e-3, weight_decay=0.0)
    config = rollout.InferenceConfig(max_requests=GROUP * options.prompts, seed=options.seed)
    manager = rollout.init(model, None, optimizer, config)
    held_out = draw(16 if options.quick else 256)
    before = exam(held_out)
    for step in range(1, options.steps + 1):
        batch = rollout.generate(draw(options.prompts), n=GROUP, max_tokens=DIGITS, progress=False)
        rewards = rewards_of(batch)
        kl = grpo(model, manager, optimizer, batch, rewards)
        print(f"step {step:3}: reward {rewards.mean():.2f}, KL {kl:.3f}")
    after = exam(held_out)
    with adapter(manager, None):
        underneath = exam(held_out)
    rollout.close()
    print(f"held-out {before:.2f} → {after:.2f}; the model underneath {before:.2f} → {underneath:.2f}")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
