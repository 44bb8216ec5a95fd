"""On-policy distillation: a small model learns from a larger one on its own samples, with no reward.

    python examples/distill.py --seed 0

The task is to sort eight digits. A teacher learns it from worked answers. Then a random student of an eighth of its size
samples answers, the teacher scores every sampled token (`score`), and the loss is the reverse KL over the teacher's
most likely tokens (`rollout.algorithms.reverse_kl`). A reward comes once per answer; this loss says at every token what
would have been better.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollout
from rollout.algorithms import masked_mean, reverse_kl

DIGITS, EQUALS, PAD = 8, 10, 11
"""Tokens are the digits themselves, `=` and padding."""


def make_model(width: int, layers: int) -> Qwen3ForCausalLM:
    """Build a Qwen3 of random weights."""
    config = Qwen3Config(
        vocab_size=12, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=width // 4, max_position_embeddings=2 * DIGITS + 1, pad_token_id=PAD,
        eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def problems(count: int) -> list[list[int]]:
    """Draw prompts: digits, then `=`."""
    return [[*random.choices(range(10), k=DIGITS), EQUALS] for _ in range(count)]


def teach(model: Qwen3ForCausalLM, steps: int) -> None:
    """Train on worked answers."""
    optimizer = AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20, 4 * (steps - step) / steps)
        rows = [[*prompt, *sorted(prompt[:DIGITS])] for prompt in problems(128)]
        ids = torch.tensor(rows, device=model.device)
        labels = ids.clone()
        labels[:, : DIGITS + 1] = -100
        model(ids, labels=labels).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def accuracy(manager: rollout.RolloutManager, prompts: list[list[int]]) -> float:
    """Return the share of prompts whose greedy answer is right."""
    batch = manager.generate(prompts, max_tokens=DIGITS, temperature=0.0, progress=False)
    return sum(each.generated_tokens == sorted(each.prompt_tokens[:DIGITS]) for each in batch) / len(batch)


def distill(
    student: Qwen3ForCausalLM, teacher: rollout.RolloutManager, optimizer: AdamW, options: argparse.Namespace
) -> None:
    """Repeat: sample from the student, score under the teacher, lower the reverse KL of every sampled token."""
    for step in range(1, options.steps + 1):
        optimizer.param_groups[0]["lr"] = options.lr * min(1.0, step / 10, 2 * (1 - (step - 1) / options.steps))
        batch = rollout.generate(problems(options.prompts), max_tokens=DIGITS, progress=False)
        scores = teacher.score(batch, temperature=1.0, top_k=options.top_k)
        assert scores.top_ids is not None
        assert scores.top_logprobs is not None
        with rollout.suspended():  # the student's KV cache is off the device in here
            own = batch.scores_of(student, temperature=1.0, top_k=scores.top_ids)
            assert own.top_logprobs is not None
            loss = masked_mean(
                reverse_kl(own.top_logprobs, scores.top_logprobs, batch.response_mask), batch.response_mask
            )
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
        if step % max(1, options.steps // 10) == 0:
            likely = scores.logprobs[scores.mask].mean()
            print(f"step {step:4}: reverse KL {loss:.3f} nats per token, log-prob under the teacher {likely:.2f}")


def main() -> None:
    """Train the teacher, distill the student, compare them on new problems."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=300, help="of distillation")
    parser.add_argument("--prompts", type=int, default=128, help="per step, one sample each")
    parser.add_argument("--top-k", type=int, default=4, help="tokens of the teacher that the loss compares one by one")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate of the student")
    parser.add_argument("--lessons", type=int, default=400, help="supervised steps of the teacher")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.lessons = 10, 16, 10
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    teacher, student = make_model(width=128, layers=4), make_model(width=64, layers=2)
    sizes = [sum(each.numel() for each in model.parameters()) for model in (teacher, student)]
    teach(teacher, options.lessons)
    optimizer = AdamW(student.parameters(), lr=options.lr)
    config = rollout.InferenceConfig(kv_cache_memory_gb=0.05, seed=options.seed)
    unseen = problems(256)
    manager = rollout.init(student, None, optimizer, config)
    with rollout.RolloutManager(teacher, None, config) as scorer:
        before, of_teacher = accuracy(manager, unseen), accuracy(scorer, unseen)
        print(f"teacher: {sizes[0]:,} parameters, {of_teacher:.2f} right; student: {sizes[1]:,}, {before:.2f} right")
        distill(student, scorer, optimizer, options)
        print(f"student: {before:.2f} → {accuracy(manager, unseen):.2f} right, teacher {of_teacher:.2f}")
    rollout.close()
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
