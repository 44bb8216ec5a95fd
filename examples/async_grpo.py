"""Asynchronous GRPO: requests continue across weight updates with bounded staleness, and a killed run resumes.

    python examples/async_grpo.py --seed 0
    python examples/async_grpo.py --seed 0 --resume       after it was killed: from its last checkpoint

The task is to sort digits: mostly a few, sometimes thirty, so that a step that waited for the longest answers would leave
the engine mostly idle. A step trains on the groups that have finished; the others stay in flight, and their later tokens
come from newer weights. `max_staleness` bounds the number of updates between sampling a token and training on it, and
truncated importance weights correct for them. A checkpoint holds the requests in flight; a journal holds the groups that
finish between two checkpoints, so that they are not computed again after a restart.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollout
from rollout.algorithms import effective_sample_size, group_advantages, importance_weights, masked_mean

GROUP, LONGEST, HIGHEST_WEIGHT = 8, 30, 2.0
EQUALS, EOS, PAD = 10, 11, 12
"""Tokens are the digits themselves, `=`, the end and padding."""


def make_model() -> Qwen3ForCausalLM:
    """Build a Qwen3 of 0.2 million random parameters."""
    config = Qwen3Config(
        vocab_size=13, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=72, pad_token_id=PAD, eos_token_id=EOS,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def draw(count: int) -> list[list[int]]:
    """Draw prompts: digits, most often about five of them, then `=`."""
    lengths = [min(LONGEST, 3 + int(random.expovariate(0.25))) for _ in range(count)]
    return [[*random.choices(range(10), k=length), EQUALS] for length in lengths]


def answer(prompt: list[int]) -> list[int]:
    """Return the tokens of the right answer."""
    return [*sorted(prompt[:-1]), EOS]


def warm_up(model: Qwen3ForCausalLM, steps: int) -> None:
    """Train on worked answers, so that some answers are right when GRPO begins."""
    optimizer = AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        prompts = draw(64)
        rows = [torch.tensor(prompt + answer(prompt)) for prompt in prompts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(model.device)
        taught = ((ids == EQUALS).cumsum(1) > 0) & (ids != PAD) & (ids != EQUALS)
        model(ids, attention_mask=ids != PAD, labels=ids.masked_fill(~taught, -100)).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def train(model: Qwen3ForCausalLM, optimizer: AdamW, batch: rollout.RolloutBatch, rewards: torch.Tensor) -> float:
    """Train once on the finished groups; return the effective share of samples under the importance weights."""
    mask = batch.response_mask
    advantages = group_advantages(rewards, batch.group_ids, valid=mask.any(1))[:, None]
    with rollout.suspended():  # the groups in flight are in host memory in here
        logprobs = batch.logprobs_of(model)
        weights = importance_weights(logprobs, batch.logprobs, mask, cap=HIGHEST_WEIGHT)
        loss = -masked_mean(weights * advantages * logprobs, mask)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return effective_sample_size(weights, mask, normalized=True).item()


def accuracy(manager: rollout.RolloutManager, prompts: list[list[int]]) -> float:
    """Return the share of prompts whose greedy answer is right. Requests in flight stay in flight."""
    ids = manager.submit(prompts, rollout.SamplingParams(max_tokens=LONGEST + 1, temperature=0.0))
    samples = [batch[0] for batch in manager.as_completed(ids)]
    return sum(each.generated_tokens == answer(each.prompt_tokens) for each in samples) / len(samples)


def main() -> None:
    """Train from random weights, or continue from a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--groups", type=int, default=48, help=f"finished groups to wait for, {GROUP} samples each")
    parser.add_argument("--in-flight", type=int, default=80, help="groups in flight when a step begins to generate")
    parser.add_argument("--max-staleness", type=int, default=4, help="most updates between a token and its use")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out, if any")
    parser.add_argument("--out", type=Path, default=Path("runs/async_grpo"), help="folder of checkpoint and journal")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    save_every, lessons = 10, 250
    if options.quick:
        options.steps, options.groups, options.in_flight, save_every, lessons = 4, 3, 8, 3, 5
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    model, saved = make_model(), options.out / "checkpoint.pt"
    state = torch.load(saved, weights_only=True) if options.resume and saved.exists() else None
    if state is None:
        warm_up(model, lessons)
    optimizer = AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.0)
    config = rollout.InferenceConfig(
        max_requests=GROUP * options.in_flight, max_staleness=options.max_staleness, seed=options.seed
    )
    journal = rollout.Journal(options.out / "journal")
    manager, first = rollout.init(model, None, optimizer, config, journal=journal), 1
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        manager.load_state_dict(state["rollout"])
        first = state["step"] + 1
        print(f"resumed at step {state['step']} with {manager.groups_in_flight} groups in flight")
    held_out = draw(16 if options.quick else 256)
    before = accuracy(manager, held_out)
    for step in range(first, options.steps + 1):
        prompts = draw(options.in_flight - manager.groups_in_flight)
        params = rollout.SamplingParams(n=GROUP, max_tokens=LONGEST + 1)
        batch = rollout.generate(prompts, params, min_groups=options.groups, progress=False)
        rewards = torch.tensor([float(each.generated_tokens == answer(each.prompt_tokens)) for each in batch])
        staleness = batch.policy_staleness[batch.response_mask].float()
        share = train(model, optimizer, batch, rewards.to(model.device))
        print(
            f"step {step:3}: reward {rewards.mean():.2f}, {staleness.gt(0).float().mean():4.0%} of the tokens stale, "
            f"oldest {staleness.max():.0f} updates, {manager.groups_in_flight} groups in flight, "
            f"effective samples {share:.0%}"
        )
        if step % save_every == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rollout": manager.state_dict()}
            torch.save(state | {"step": step}, saved.with_suffix(".unfinished"))
            saved.with_suffix(".unfinished").replace(saved)  # a kill while it is written keeps the one before
    rollout.generate([], min_groups=manager.groups_in_flight, progress=False)
    print(f"held-out {before:.2f} → {accuracy(manager, held_out):.2f}, {time.perf_counter() - started:.0f} s in all")
    rollout.close()
    journal.close()


if __name__ == "__main__":
    main()
