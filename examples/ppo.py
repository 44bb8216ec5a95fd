"""PPO: a value head on the policy's trunk, generalised advantage estimation, the clipped objective.

    python examples/ppo.py --seed 0

Unlike GRPO it samples each problem once: the baseline of a token is not the other samples of its prompt but a value
function learnt from the policy's hidden states. The rollout evaluates the value head while it samples
(`batch.token_values`), so no second pass computes values. The optimizer steps `ActorCritic`, and the rollout samples with
the language model inside it, without a second copy to synchronise. Besides the clip, a small penalty on the divergence
from the sampling policy limits each update.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from arithmetic import Problems, reward, sums
from policy import add_truncation, character_tokenizer, exact_match, small_model, trapezoid, truncation, warm_up
from report import Report, Step
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from rollout import InferenceConfig, RolloutBatch, RolloutManager, SamplingParams
from rollout.algorithms import masked_mean, rollout_kl
from trainer_hooks.optimizer import attach
from trainer_hooks.wandb import WandbLogger

MAX_TOKENS = 32
EPOCHS, MINIBATCHES = 2, 2
GAMMA, LAMBDA = 1.0, 0.95
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
VALUE_COST, KL_COST = 0.1, 0.01


class ActorCritic(nn.Module):
    """A policy with a value head."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.policy = policy
        self.value_head = nn.Linear(policy.config.hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, batch: RolloutBatch, rows: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [rows, T] twice: of every token its log-prob, and the value of the state in which it was chosen."""
        ids, mask, positions = (each[rows] for each in (batch.input_ids, batch.attention_mask, batch.position_ids))
        hidden = self.policy.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
        # A token is chosen in the state before it.
        values = pad(self.value_head(hidden[:, :-1]).squeeze(2).float(), (1, 0))
        return batch.logprobs_of(self.policy, rows, hidden=hidden), values


def estimate_advantages(scores: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, equation 16).

    Args:
        scores: float32 [N]; a completion earns it with its last token.
        values: float32 [N, T], of the state in which a token was chosen.
        mask: bool [N, T], tokens of completions.

    Returns:
        float32 [N, T], 0 where masked out.
    """
    advantages = torch.zeros_like(values)
    ahead = value_ahead = torch.zeros_like(scores)
    earned = scores
    for t in reversed(range(values.shape[1])):
        inside = mask[:, t]
        surprise = earned + GAMMA * value_ahead - values[:, t]
        ahead = torch.where(inside, surprise + GAMMA * LAMBDA * ahead, ahead)
        value_ahead = torch.where(inside, values[:, t], value_ahead)
        earned = torch.where(inside, 0, earned)
        advantages[:, t] = torch.where(inside, ahead, 0)
    return advantages


@dataclass(frozen=True)
class Update:
    """One training step with its batch and results."""

    step: Step
    batch: RolloutBatch
    rewards: Tensor
    """float32 [N]."""
    scores: dict[str, float]
    """Scores of the value head, and the distance that the policy moved."""


def ppo(
    actor_critic: ActorCritic, manager: RolloutManager, problems: Problems, options: argparse.Namespace
) -> Iterator[Update]:
    """Repeat: sample each problem once, score it, estimate advantages, train on minibatches."""
    optimizer = AdamW(actor_critic.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, manager)
    params = SamplingParams(max_tokens=MAX_TOKENS, **truncation(options))
    for _ in range(options.steps):
        asked = problems.sample(options.prompts)
        batch = manager.generate([p.prompt for p in asked], params, metadata=[p.answer for p in asked], progress=False)
        mask, values = batch.response_mask, batch.token_values[..., 0]
        rewards = torch.tensor(list(map(reward, batch.texts, batch.metadata)), device=mask.device)
        with manager.suspended():
            advantages = estimate_advantages(rewards, values, mask)
            returns = values + advantages
            unexplained = advantages[mask].var() / returns[mask].var().clamp(min=1e-8)
            advantages = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-6)
            losses, divergences, staleness = [], [], []
            for _ in range(EPOCHS):
                for rows in torch.randperm(len(batch)).to(mask.device).chunk(MINIBATCHES):
                    chosen = mask[rows]
                    logprobs, values = actor_critic(batch, rows)
                    if not losses:
                        manager.observe_logprobs(batch, logprobs, rows)
                    ratio = (logprobs - batch.logprobs[rows]).exp()
                    clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                    gain = torch.minimum(ratio * advantages[rows], clipped * advantages[rows])
                    error = (values - returns[rows]).square()
                    divergence = rollout_kl(logprobs, batch.logprobs[rows], chosen, detach=False)
                    loss = masked_mean(VALUE_COST * error + KL_COST * divergence - gain, chosen)
                    staleness.append((manager.policy_version - batch.policy_versions[rows])[chosen])
                    losses.append(loss.item())
                    divergences.append(masked_mean(divergence, chosen).item())
                    optimizer.zero_grad()
                    loss.backward()
                    clip_grad_norm_(actor_critic.parameters(), 1.0)
                    optimizer.step()
        schedule.step()
        scores = {"train/value_explains": 1 - unexplained.item(), "train/rollout_kl": divergences[-1]}
        step = Step(rewards.mean().item(), losses[-1], torch.cat(staleness), tokens=int(mask.sum()))
        yield Update(step, batch, rewards, scores)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=60, help="of PPO")
    parser.add_argument("--prompts", type=int, default=512, help="per step, one sample each")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate of PPO")
    add_truncation(parser)
    parser.add_argument("--warm-up", type=float, default=0.3, help="loss that ends the supervised steps before it")
    parser.add_argument("--every", type=int, default=5, help="steps between two looks at the held-out problems")
    parser.add_argument("--out", type=Path, default=Path("runs/ppo"), help="folder of the picture and of wandb's files")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.warm_up, options.every = 4, 64, 3.0, 2
    return options


def main() -> None:
    """Train from random weights and draw the plot."""
    started = time.perf_counter()
    options = parse_options()
    os.environ.setdefault("WANDB_SILENT", "true")
    tokenizer = character_tokenizer()
    policy = small_model(tokenizer, max_length=64, seed=options.seed)
    problems = Problems(sums(), held_out=64 if options.quick else 512, seed=options.seed)
    report = Report(f"PPO: a small Qwen3 learns to add (seed {options.seed})", options.out, extra="value   KL")
    lessons = warm_up(policy, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    actor_critic = ActorCritic(policy)
    config = InferenceConfig(max_requests=options.prompts, seed=options.seed)
    with (
        RolloutManager(policy, tokenizer, config, token_values=actor_critic.value_head) as manager,
        WandbLogger("rollout-ppo", config=vars(options), directory=options.out) as logger,
    ):

        def exam(greedy: bool = False) -> float:
            return exact_match(manager, problems.held_out, max_tokens=MAX_TOKENS, greedy=greedy)

        before, before_greedy = exam(), exam(greedy=True)
        report.say(f"{lessons} supervised steps: held-out {before:.2f} sampled, {before_greedy:.2f} greedy")
        for number, update in enumerate(ppo(actor_critic, manager, problems, options), 1):
            metrics = manager.metrics()
            measured = number % options.every == 0 or number in (1, options.steps)
            held_out = exam() if measured else None
            scores = {"train/reward": update.step.reward, "train/loss": update.step.loss, "train/held_out": held_out}
            logger.log(number, scores, update.scores, metrics)
            if measured:
                logger.samples(number, update.batch, update.rewards, tokenizer=tokenizer)
            explains, divergence = update.scores.values()
            report.row(number, update.step, held_out, metrics, f"{explains:>5.0%}  {divergence:.0e}")
        after, after_greedy = exam(), exam(greedy=True)
        report.say(f"wandb: {logger.run.url or logger.run.dir}")
    report.say(f"picture: {report.picture(f'seed-{options.seed}')}")
    report.say(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    report.say(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
