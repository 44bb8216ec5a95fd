"""PPO: a value head on the policy's trunk, generalised advantage estimation, the clipped objective.

    python examples/ppo.py --seed 0

The task is to sort digits, from random weights. Unlike GRPO it samples each problem once: the baseline of a token is not
the other samples of its prompt but a value function learned from the policy's hidden states. The engine evaluates the value
head while it samples (`batch.token_values`), so no second pass computes values. The optimizer steps `ActorCritic`; the
engine samples with the language model inside it. A small penalty on the divergence from the sampling policy limits each
update.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollout
from rollout.algorithms import masked_mean, rollout_kl

DIGITS, EPOCHS, MINIBATCHES, CLIP_LOW, CLIP_HIGH, VALUE_COST, KL_COST = 8, 2, 2, 0.2, 0.28, 0.5, 0.01
GAMMA, LAMBDA = 1.0, 0.95
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


def rewards_of(batch: rollout.RolloutBatch) -> Tensor:
    """Return float32 [N]: the share of digits in the right place."""
    pairs = [zip(each.generated_tokens, sorted(each.prompt_tokens[:DIGITS]), strict=True) for each in batch]
    shares = [sum(said == right for said, right in pair) / DIGITS for pair in pairs]
    return torch.tensor(shares, device=batch.input_ids.device)


class ActorCritic(nn.Module):
    """A policy with a value head."""

    def __init__(self, policy: Qwen3ForCausalLM) -> None:
        super().__init__()
        self.policy = policy
        self.value_head = nn.Linear(policy.config.hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 [rows, T] twice: log-prob of every token, and value of the state in which it was chosen."""
        hidden = self.policy.model(ids, attention_mask=mask).last_hidden_state[:, :-1]  # a token is chosen before it
        logprobs = self.policy.lm_head(hidden).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return pad(logprobs, (1, 0)), pad(self.value_head(hidden).squeeze(-1), (1, 0))


def estimate_advantages(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return generalised advantages [N, T] (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    `rewards` [N] are earned with the last token of `mask` [N, T]; `values` [N, T] are of the states before each token.
    """
    advantages = torch.zeros_like(values)
    ahead = value_ahead = torch.zeros_like(rewards)
    earned = rewards
    for t in reversed(range(values.shape[1])):
        inside = mask[:, t]
        surprise = earned + GAMMA * value_ahead - values[:, t]
        ahead = torch.where(inside, surprise + GAMMA * LAMBDA * ahead, ahead)
        value_ahead = torch.where(inside, values[:, t], value_ahead)
        earned = torch.where(inside, 0, earned)
        advantages[:, t] = torch.where(inside, ahead, 0)
    return advantages


def ppo(model: ActorCritic, optimizer: AdamW, batch: rollout.RolloutBatch, rewards: Tensor) -> float:
    """Train on minibatches of a batch; return the share of the returns' variance that the values explain."""
    assert batch.token_values is not None
    mask, values = batch.response_mask, batch.token_values[..., 0]
    advantages = estimate_advantages(rewards, values, mask)
    returns = values + advantages
    explained = 1 - advantages[mask].var() / returns[mask].var().clamp(min=1e-8)
    advantages = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-6)
    with rollout.suspended():
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(batch)).to(mask.device).chunk(MINIBATCHES):
                logprobs, now = model(batch.input_ids[rows], batch.attention_mask[rows])
                ratio = (logprobs - batch.logprobs[rows]).exp()
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                gain = torch.minimum(ratio * advantages[rows], clipped * advantages[rows])
                error = (now - returns[rows]).square()
                divergence = rollout_kl(logprobs, batch.logprobs[rows], mask[rows], detach=False)
                masked_mean(VALUE_COST * error + KL_COST * divergence - gain, mask[rows]).backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return explained.item()


def exam(prompts: list[list[int]]) -> float:
    """Return the mean reward of greedy answers."""
    return rewards_of(rollout.generate(prompts, max_tokens=DIGITS, temperature=0.0, progress=False)).mean().item()


def main() -> None:
    """Train from random weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=60, help="of PPO")
    parser.add_argument("--prompts", type=int, default=512, help="per step, one sample each")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 3, 32
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = ActorCritic(make_model())
    optimizer = AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.99), weight_decay=0.0)
    config = rollout.InferenceConfig(max_requests=options.prompts, seed=options.seed)
    rollout.init(model.policy, None, optimizer, config, token_values=model.value_head)
    held_out = draw(16 if options.quick else 256)
    before = exam(held_out)
    for step in range(1, options.steps + 1):
        batch = rollout.generate(draw(options.prompts), max_tokens=DIGITS, progress=False)
        rewards = rewards_of(batch)
        explained = ppo(model, optimizer, batch, rewards)
        print(f"step {step:3}: reward {rewards.mean():.2f}, values explain {explained:.0%} of the returns")
    print(f"held-out {before:.2f} → {exam(held_out):.2f}, {time.perf_counter() - started:.0f} s in all")
    rollout.close()


if __name__ == "__main__":
    main()
