"""GRPO with `rollout.generate()`: a small Qwen3 learns to add, in about two minutes on a laptop's CPU.

    python examples/grpo.py --seed 0

    47+38=    7+8=15 4+3+1=8 85      a sum, column by column from the right; only the last word is scored

The model is first trained on worked sums until it is right one time in five. Then GRPO begins: it samples eight solutions
of each problem, a program scores the answers, and solutions above their group's mean become more likely. `grpo` is the
whole algorithm. `report.html` in `--out` shows the run; wandb logs it.
"""

from __future__ import annotations

import argparse
import os
import random
import time

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import rollout
from rollout.algorithms import group_advantages, masked_mean
from trainer_hooks.tree import attach as attach_tree
from trainer_hooks.wandb import WandbLogger

GROUP, EPOCHS, CLIP_LOW, CLIP_HIGH, LEARNING_RATE = 8, 2, 0.2, 0.28, 6e-4
Problems = list[tuple[int, int]]


def solution(a: int, b: int) -> str:
    """Write a sum out, column by column from the right, with the answer as the last word."""
    total, carry, columns = a + b, 0, []
    while a or b or not columns:
        column = a % 10 + b % 10 + carry
        columns.append(f"{a % 10}+{b % 10}{'+1' * carry}={column}")
        a, b, carry = a // 10, b // 10, column // 10
    return " ".join([*columns, str(total)])


def reward(text: str, answer: int) -> float:
    """Return 1 if the last word of a completion is the answer, else 0."""
    return float(text.split(" ")[-1] == str(answer))


def make_policy() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Build a Qwen3 of 0.4 million random parameters, and a tokenizer with one token per character."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *"0123456789+= "])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Problems, until: float) -> None:
    """Train on worked sums until the running loss (nats per token) is below `until`."""
    optimizer, step, running = AdamW(model.parameters(), betas=(0.9, 0.95)), 0, 3.0
    while running > until:
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20)
        texts = [f"{a}+{b}={solution(a, b)}<eos>" for a, b in random.sample(problems, 64)]
        lesson = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(model.device)
        ids = lesson["input_ids"]
        taught = ((ids == tokenizer.convert_tokens_to_ids("=")).cumsum(1) > 0) & lesson["attention_mask"].bool()
        loss = model(ids, attention_mask=lesson["attention_mask"], labels=ids.masked_fill(~taught, -100)).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step, running = step + 1, 0.8 * running + 0.2 * loss.item()


def grpo(model: nn.Module, optimizer: AdamW, problems: Problems, prompts: int) -> tuple[rollout.RolloutBatch, Tensor]:
    """Make one step: sample groups, score them, train twice on the batch, every prompt once for all of its samples."""
    asked = random.sample(problems, prompts)
    batch = rollout.generate(
        [f"{a}+{b}=" for a, b in asked], n=GROUP, max_tokens=32, metadata=[a + b for a, b in asked], progress=False
    )
    rewards = torch.tensor(list(map(reward, batch.texts, batch.metadata)), device=batch.input_ids.device)
    advantages = group_advantages(rewards, batch.group_ids)[:, None]
    packed = batch.tree()
    with rollout.suspended():  # the KV cache is off the device in here
        for _ in range(EPOCHS):
            ratio = (batch.logprobs_of(model, packed) - batch.logprobs).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -masked_mean(torch.minimum(ratio * advantages, clipped * advantages), batch.response_mask)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # the policy version rises
            optimizer.zero_grad()
    return batch, rewards


def exam(problems: Problems, temperature: float) -> float:
    """Return the share of problems solved by one completion each."""
    batch = rollout.generate([f"{a}+{b}=" for a, b in problems], max_tokens=32, temperature=temperature, progress=False)
    return sum(map(reward, batch.texts, [a + b for a, b in problems])) / len(problems)


def main() -> None:
    """Train from random weights, log every step, write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=100, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=64, help=f"per step, {GROUP} samples each")
    parser.add_argument("--out", default="runs/grpo", help="folder of the report and of wandb's files")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 4, 8
    started = time.perf_counter()
    os.environ.setdefault("WANDB_SILENT", "true")
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    every = random.sample([(a, b) for a in range(100) for b in range(100)], 10_000)
    held_out, problems = every[:512], every[512:]
    model, tokenizer = make_policy()
    warm_up(model, tokenizer, problems, until=2.0 if options.quick else 0.15)
    optimizer = AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    attach_tree(model)
    config = rollout.InferenceConfig(max_requests=GROUP * options.prompts, seed=options.seed)
    manager = rollout.init(model, tokenizer, optimizer, config)
    log = rollout.RunLog(options.out, title=f"GRPO: a small Qwen3 learns to add (seed {options.seed})")
    before, before_greedy = exam(held_out, 1.0), exam(held_out, 0.0)
    print(f"after the warm-up: held-out {before:.2f} sampled, {before_greedy:.2f} greedy")
    with WandbLogger("rollout-grpo", config=vars(options), directory=options.out) as wandb:
        for step in range(1, options.steps + 1):
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, step / 5, 1 - (step - 1) / options.steps)
            batch, rewards = grpo(model, optimizer, problems, options.prompts)
            metrics = manager.metrics()
            wandb.log(step, {"train/reward": rewards.mean().item()}, metrics)
            log.step(step, metrics, batch=batch, rewards=rewards, tokenizer=tokenizer)
            print(f"step {step:3}: reward {rewards.mean():.2f} {'█' * round(30 * rewards.mean().item())}")
    after, after_greedy = exam(held_out, 1.0), exam(held_out, 0.0)
    rollout.close()
    print(f"held-out, sampled {before:.2f} → {after:.2f}, greedy {before_greedy:.2f} → {after_greedy:.2f}")
    print(f"report: {rollout.report(options.out)}, {time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
