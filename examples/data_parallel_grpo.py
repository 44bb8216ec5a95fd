"""GRPO on several ranks: each rank has its own problems, and all ranks share the sampling work.

    torchrun --nproc-per-node 2 examples/data_parallel_grpo.py --seed 0
    python examples/data_parallel_grpo.py --ray 2          the same ranks as workers of Ray Train

The task is to sort digits. Rank 0 has the shortest problems and the last rank the longest, so without load balancing the
first ranks would wait. Every rank builds a manager, which finds the others; gradients go through
`DistributedDataParallel`. The last columns of the table show the tokens that each rank requested and computed.
"""

from __future__ import annotations

import argparse
import os
import random
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollout
from rollout.algorithms import group_advantages, masked_mean

GROUP, LONGEST, EPOCHS, CLIP_LOW, CLIP_HIGH = 8, 18, 2, 0.2, 0.28
EQUALS, EOS, PAD = 10, 11, 12
"""Tokens are the digits themselves, `=`, the end and padding."""


def make_model() -> Qwen3ForCausalLM:
    """Build a Qwen3 of 0.2 million random parameters."""
    config = Qwen3Config(
        vocab_size=13, hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=48, pad_token_id=PAD, eos_token_id=EOS,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def draw(count: int, shortest: int, longest: int) -> list[list[int]]:
    """Draw prompts: digits, then `=`."""
    lengths = random.choices(range(shortest, longest + 1), k=count)
    return [[*random.choices(range(10), k=length), EQUALS] for length in lengths]


def answer(prompt: list[int]) -> list[int]:
    """Return the tokens of the right answer."""
    return [*sorted(prompt[:-1]), EOS]


def warm_up(model: Qwen3ForCausalLM, steps: int) -> None:
    """Train on worked answers, so that some answers are right when GRPO begins."""
    optimizer = AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 20)
        rows = [torch.tensor(prompt + answer(prompt)) for prompt in draw(64, 3, LONGEST)]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD).to(model.device)
        taught = ((ids == EQUALS).cumsum(1) > 0) & (ids != PAD) & (ids != EQUALS)
        model(ids, attention_mask=ids != PAD, labels=ids.masked_fill(~taught, -100)).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def rewards_of(batch: rollout.RolloutBatch) -> Tensor:
    """Return float32 [N]: 1 for a right answer, else 0."""
    return torch.tensor([float(each.generated_tokens == answer(each.prompt_tokens)) for each in batch])


def grpo(model: nn.Module, optimizer: AdamW, batch: rollout.RolloutBatch, rewards: Tensor) -> None:
    """Train twice on a batch."""
    advantages = group_advantages(rewards, batch.group_ids)[:, None]
    with rollout.suspended():
        for _ in range(EPOCHS):
            ratio = (batch.logprobs_of(model) - batch.logprobs).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -masked_mean(torch.minimum(ratio * advantages, clipped * advantages), batch.response_mask)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def over_ranks(*values: float) -> Tensor:
    """Return float64 [values, ranks]: each value of each rank."""
    gathered = [torch.empty(len(values), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor(values, dtype=torch.float64))
    return torch.stack(gathered, 1)


def train(options: argparse.Namespace) -> None:
    """Train from random weights as one rank of the process group."""
    started = time.perf_counter()
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = make_model()
    warm_up(model, 5 if options.quick else 250)
    random.seed(f"{options.seed} {rank}")
    span = (LONGEST - 3) // size
    shortest = 3 + span * rank
    model, optimizer = DistributedDataParallel(model), AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    config = rollout.InferenceConfig(max_requests=GROUP * options.prompts, seed=options.seed)
    manager = rollout.init(model, None, optimizer, config)
    for step in range(1, options.steps + 1):
        prompts = draw(options.prompts, shortest, shortest + span)
        manager.metrics()
        batch = rollout.generate(prompts, n=GROUP, max_tokens=LONGEST + 1, progress=False)
        rewards = rewards_of(batch)
        grpo(model, optimizer, batch, rewards.to(batch.input_ids.device))
        computed = manager.metrics()["rollout/generated_tokens"]
        means, asked, computed = over_ranks(rewards.mean().item(), batch.response_mask.sum().item(), computed)
        if rank == 0:
            print(f"step {step:3}: reward {means.mean():.2f}, tokens by rank {asked.tolist()} → {computed.tolist()}")
    rollout.close()
    if rank == 0:
        print(f"{time.perf_counter() - started:.0f} s in all on {size} ranks")


def main() -> None:
    """Join the process group of the launcher, or start Ray's workers, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=32, help=f"per step and rank, {GROUP} samples each")
    parser.add_argument("--ray", type=int, metavar="WORKERS", help="train on this many workers of Ray Train")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 3, 4
    if options.ray is not None:
        from ray.train import ScalingConfig
        from ray.train.torch import TorchTrainer

        scaling = ScalingConfig(num_workers=options.ray, use_gpu=torch.cuda.is_available())
        TorchTrainer(lambda: train(options), scaling_config=scaling).fit()
        return
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
