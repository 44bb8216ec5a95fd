"""GRPO on GSM8K: `--model` learns to solve grade-school word problems, as practitioners train it.

    python examples/gsm8k.py --model Qwen/Qwen2.5-0.5B-Instruct --data train.jsonl --test test.jsonl

A line of the files is `{"question": "...", "answer": "... #### 72"}`, the format of github.com/openai/grade-school-math
(its `grade_school_math/data/train.jsonl` and `test.jsonl`). The model thinks step by step and ends with `#### number`.
Reward: 1 if the number is right, plus 0.1 if there is one. Eight samples per question, advantages normalised in the group,
two clipped steps per batch, no KL term. The weights are float32, because steps of 1e-6 vanish in bfloat16; sampling and
training compute under autocast. At 0.5 B parameters, weights, gradients and optimizer take 8 GB.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer

import rollout
from rollout.algorithms import group_advantages
from trainer_hooks.tree import attach as attach_tree

SYSTEM = "Solve the problem step by step. End with the answer alone on the last line, as in: #### 42"
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
Problem = tuple[list[dict[str, str]], str]
"""The messages of a prompt, and the right answer."""


def read_problems(path: Path) -> list[Problem]:
    """Read the problems of a JSONL file.

    Raises:
        ValueError: a line is not a question with an answer behind `####`.
    """
    problems: list[Problem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            question, answer = row["question"], last_number(row["answer"])
        except (KeyError, TypeError, json.JSONDecodeError):
            question = answer = None
        if question is None or answer is None:
            raise ValueError(
                f'{path}:{number}: must be {{"question": "...", "answer": "... #### 72"}}, is {line[:80]!r}'
            )
        problems.append(([{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}], answer))
    return problems


def last_number(text: str) -> str | None:
    """Return the number behind the last `####`, without thousands separators and trailing zeros."""
    found = re.findall(r"####\s*\$?(-?[\d,]*\.?\d+)", text)
    return f"{float(found[-1].replace(',', '')):g}" if found else None


def reward(text: str | None, answer: str) -> float:
    """Return 1.1 for the right number, 0.1 for another one in the right format, else 0."""
    number = last_number(text or "")
    return (number == answer) + 0.1 * (number is not None)


def accuracy(problems: list[Problem], max_tokens: int) -> float:
    """Return the share of problems that one greedy completion each solves."""
    prompts, answers = map(list, zip(*problems, strict=True))
    batch = rollout.generate(prompts, max_tokens=max_tokens, temperature=0.0)
    return sum(reward(*each) > 1 for each in zip(batch.texts, answers, strict=True)) / len(problems)


def train_step(model: Any, optimizer: AdamW, batch: rollout.RolloutBatch, rewards: torch.Tensor, size: int) -> float:
    """Step twice on a batch, `size` rows per forward; returns the norm of the last gradient."""
    advantages, mask = group_advantages(rewards, batch.group_ids)[:, None], batch.response_mask
    with rollout.suspended():
        for _ in range(2):
            for rows in torch.arange(len(batch), device=mask.device).split(size):
                with torch.autocast(model.device.type, torch.bfloat16):
                    logprobs = batch.logprobs_of(model, batch.tree(rows))
                ratio = (logprobs - batch.logprobs[rows]).exp()
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                gain = torch.minimum(ratio * advantages[rows], clipped * advantages[rows])
                (-gain[mask[rows]].sum() / mask.sum()).backward()
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return float(norm)


def main() -> None:
    """Train, and evaluate before, meanwhile and afterwards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder of a chat model")
    parser.add_argument("--data", type=Path, required=True, help="JSONL file of the training problems")
    parser.add_argument("--test", type=Path, help="JSONL file of the test problems (default: 5 %% of --data)")
    parser.add_argument("--steps", type=int, default=200, help="batches")
    parser.add_argument("--prompts", type=int, default=64, help="questions per batch")
    parser.add_argument("--samples", type=int, default=8, help="per question")
    parser.add_argument("--max-tokens", type=int, default=400, help="of a solution")
    parser.add_argument("--micro-batch", type=int, default=8, help="questions per forward and backward")
    parser.add_argument("--lr", type=float, default=1e-6, help="learning rate of AdamW")
    parser.add_argument("--every", type=int, default=20, help="batches between two evaluations")
    parser.add_argument("--kv-gb", type=float, default=2.0, help="size of the KV cache")
    parser.add_argument("--out", type=Path, default=Path("runs/gsm8k"), help="folder of the trained model")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the problems and of the sampling")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: two small batches")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.samples, options.max_tokens, options.every = 2, 4, 4, 16, 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    attach_tree(model)
    model.train().gradient_checkpointing_enable()
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)
    memory = options.kv_gb
    rollout.init(model, tokenizer, optimizer, kv_cache_memory_gb=memory, seed=options.seed, autocast_dtype="bfloat16")
    train = read_problems(options.data)
    random.Random(options.seed).shuffle(train)
    cut = 0 if options.test else len(train) // 20 + 1
    held_out, train = read_problems(options.test) if options.test else train[:cut], train[cut:]
    print(f"{len(train)} problems, {len(held_out)} held out; accuracy {accuracy(held_out, options.max_tokens):.3f}")
    for step in range(1, options.steps + 1):
        started = time.perf_counter()
        problems = [train[((step - 1) * options.prompts + index) % len(train)] for index in range(options.prompts)]
        prompts, answers = map(list, zip(*problems, strict=True))
        batch = rollout.generate(prompts, n=options.samples, max_tokens=options.max_tokens, metadata=answers)
        rewards = torch.tensor(list(map(reward, batch.texts, batch.metadata)), device=device)
        sampled = time.perf_counter()
        norm = train_step(model, optimizer, batch, rewards, options.micro_batch * options.samples)
        print(
            f"step {step}: reward {rewards.mean():.3f}, {batch.response_lengths.float().mean():.0f} tokens per sample, "
            f"gradient {norm:.2f}; {sampled - started:.1f} s sampling, {time.perf_counter() - sampled:.1f} s training"
        )
        if step % options.every == 0 or step == options.steps:
            print(f"accuracy {accuracy(held_out, options.max_tokens):.3f} after {step} steps")
    rollout.close()
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"saved in {options.out}")


if __name__ == "__main__":
    main()
