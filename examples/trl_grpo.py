"""GRPO with TRL's own trainer: a small Qwen3 learns to sort digits, in a minute on a laptop's CPU.

    python examples/trl_grpo.py --seed 0

The loop is TRL's. Two marked lines make its GRPOTrainer sample with the engine instead of transformers, and correct its
loss by the sampling log-probs. Sampling options, lengths and group size come from GRPOConfig.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rollout import InferenceConfig, RolloutManager
from trainer_hooks.trl import attach

GROUP, DIGITS, EPOCHS, ROWS = 8, 8, 2, 64


def make_policy() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Build a Qwen3 of 0.2 million random parameters, and a tokenizer with one token per character."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<eos>", *"0123456789="])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def draw(count: int) -> list[str]:
    """Draw prompts: eight digits and `=`."""
    return ["".join(random.choices("0123456789", k=DIGITS)) + "=" for _ in range(count)]


def answer(prompt: str) -> str:
    """Return the digits of a prompt in order."""
    return "".join(sorted(prompt[:DIGITS]))


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Train on worked answers, so that some answers are right when GRPO begins."""
    optimizer = AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        texts = [f"{prompt}{answer(prompt)}<eos>" for prompt in draw(128)]
        ids = tokenizer(texts, return_tensors="pt").input_ids.to(model.device)
        labels = ids.clone()
        labels[:, : DIGITS + 1] = -100
        model(ids, labels=labels).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def is_right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Score completions, as TRL calls it: the columns of the data set are arguments."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def make_config(options: argparse.Namespace) -> GRPOConfig:
    """Build TRL's options: a round is one generation and two updates from it."""
    return GRPOConfig(
        output_dir="runs/trl_grpo", seed=options.seed, use_cpu=not torch.cuda.is_available(), bf16=False,
        num_generations=GROUP, max_completion_length=DIGITS + 1, num_iterations=EPOCHS,
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=options.prompts * GROUP // ROWS,
        max_steps=EPOCHS * options.rounds, learning_rate=6e-4, adam_beta2=0.99, warmup_steps=5 * EPOCHS, epsilon=0.2,
        epsilon_high=0.28, vllm_importance_sampling_mode="token_truncate", gradient_checkpointing=False,
        num_generations_eval=1, per_device_eval_batch_size=64, logging_steps=EPOCHS, save_strategy="no", report_to=[],
        disable_tqdm=True,
    )  # fmt: skip


def main() -> None:
    """Train from random weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--rounds", type=int, default=30, help=f"of GRPO: one generation, {EPOCHS} updates")
    parser.add_argument("--prompts", type=int, default=48, help=f"per round, {GROUP} samples each")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small rounds")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.prompts = 3, 8
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model, tokenizer = make_policy()
    warm_up(model, tokenizer, 5 if options.quick else 100)
    problems = [{"prompt": prompt, "answer": answer(prompt)} for prompt in draw(4096)]
    held_out = Dataset.from_list(problems[: 16 if options.quick else 256])
    trainer = GRPOTrainer(
        model, is_right, args=make_config(options), processing_class=tokenizer, eval_dataset=held_out,
        train_dataset=Dataset.from_list(problems[256:]),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    manager = RolloutManager(model, tokenizer, InferenceConfig(seed=options.seed))  # changed: the first line,
    attach(trainer, manager)  # and the second
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    for log in trainer.state.log_history:
        if "reward" in log:
            print(f"update {log['step']:3}: reward {log['reward']:.2f}")
    print(f"held-out, sampled {before:.2f} → {after:.2f}")
    print(f"{manager.policy_version} updates, {time.perf_counter() - started:.0f} s in all")
    manager.close()


if __name__ == "__main__":
    main()
