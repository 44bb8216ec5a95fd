"""GRPO with Hugging Face accelerate and FSDP2: weights are sharded over the ranks and gathered for sampling.

    torchrun --nproc-per-node 2 examples/accelerate_fsdp2_grpo.py --seed 0

The task is to sort digits. The manager is built with the module that `accelerator.prepare` has sharded, and `attach` hooks
the optimizer, so that the policy version counts its steps. `generate` gathers the weights once on all ranks, samples, and
shards them again; in between, the ranks' forwards are independent and may differ in number.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollout
from rollout.algorithms import group_advantages, masked_mean
from trainer_hooks.accelerate import attach

GROUP, DIGITS, EPOCHS, CLIP_LOW, CLIP_HIGH = 8, 8, 2, 0.2, 0.28
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


def sharding_accelerator() -> Accelerator:
    """Return the accelerator of `accelerate launch --use_fsdp --fsdp_version 2`, on a CPU too."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    if torch.cuda.is_available():
        return Accelerator(fsdp_plugin=plugin)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    for shared in (PartialState, AcceleratorState):
        shared._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    return accelerator


def grpo(accelerator: Accelerator, model: nn.Module, optimizer: AdamW, batch: rollout.RolloutBatch) -> None:
    """Train twice on a batch."""
    advantages = group_advantages(rewards_of(batch), batch.group_ids)[:, None]
    with rollout.suspended():
        for _ in range(EPOCHS):
            ratio = (batch.logprobs_of(model) - batch.logprobs).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -masked_mean(torch.minimum(ratio * advantages, clipped * advantages), batch.response_mask)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def exam(accelerator: Accelerator, prompts: list[list[int]]) -> float:
    """Return the share of greedy answers that are right, over all ranks."""
    batch = rollout.generate(prompts, max_tokens=DIGITS, temperature=0.0, progress=False)
    return accelerator.reduce(rewards_of(batch).mean(), "mean").item()


def main() -> None:
    """Train from random weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step and rank, {GROUP} samples each")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 3, 4
    started = time.perf_counter()
    accelerator = sharding_accelerator()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = make_model()
    warm_up(model, 5 if options.quick else 120)
    whole = sum(each.nbytes for each in model.parameters()) / 1e6
    random.seed(f"{options.seed} {accelerator.process_index}")
    optimizer = AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.99), weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    kept = sum(each.to_local().nbytes for each in model.parameters() if isinstance(each, DTensor)) / 1e6
    accelerator.print(f"parameters: {whole:.2f} MB whole, {kept:.2f} MB on each of {accelerator.num_processes} ranks")
    manager = rollout.init(model, None, config=rollout.InferenceConfig(max_requests=GROUP * options.prompts))
    held_out = draw(16 if options.quick else 128)
    with attach(accelerator, manager):
        before = exam(accelerator, held_out)
        for step in range(1, options.steps + 1):
            batch = rollout.generate(draw(options.prompts), n=GROUP, max_tokens=DIGITS, progress=False)
            mean = accelerator.reduce(rewards_of(batch).mean(), "mean")
            grpo(accelerator, model, optimizer, batch)
            accelerator.print(f"step {step:3}: reward {mean:.2f}, policy version {manager.policy_version}")
        after = exam(accelerator, held_out)
    rollout.close()
    accelerator.print(f"held-out {before:.2f} → {after:.2f}, {time.perf_counter() - started:.0f} s in all")
    accelerator.end_training()


if __name__ == "__main__":
    main()
