"""Offline inference without a training loop: a list of prompts, concurrent prompts, and several ranks.

    python examples/offline.py --model Qwen/Qwen3-0.6B
    python examples/offline.py
    torchrun --nproc-per-node 2 examples/offline.py

Without `--model` the model is small and random, prompts are token ids, and completions have no text. On several ranks, rank
0 submits the prompts and every rank computes a share; the other ranks wait until rank 0 has finished.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout import LLM, AsyncLLM, InferenceConfig, SamplingParams


def a_list_at_once(llm: LLM, prompts: list[Any], params: SamplingParams) -> None:
    """Print results in the order of the prompts, the samples of a prompt side by side."""
    for result in llm.generate(prompts, params):
        said = result.generated_text if result.generated_text else result.generated_tokens
        print(f"{result.prompt or result.prompt_tokens} → {said!r}  {len(result.generated_tokens)} tokens")


async def as_they_come(options: dict[str, Any], prompts: list[Any], params: SamplingParams) -> None:
    """Ask concurrently on one event loop, and read one more answer as a stream."""
    async with AsyncLLM(**options) as llm:

        async def ask(prompt: Any) -> None:
            result = await llm.generate(prompt, params)
            print(f"{prompt} answered after {result.latency:.2f} s")

        async def read_along(prompt: Any) -> None:
            pieces = [len(delta.token_ids) async for delta in llm.stream(prompt, params)]
            print(f"{prompt} came in {len(pieces)} pieces, {sum(pieces)} tokens")

        await asyncio.gather(*map(ask, prompts), read_along(prompts[0]))


def over_ranks(options: dict[str, Any], prompts: list[Any], params: SamplingParams) -> None:
    """Answer the prompts on all ranks. Every rank calls this; rank 0 is the primary one."""
    dist.init_process_group()
    with LLM(**options, use_coordinator=True) as llm:
        dist.barrier()  # the primary rank must not end the job before the others have joined
        if llm.is_primary_rank:
            a_list_at_once(llm, prompts, params)
        else:
            llm.wait_for_shutdown()
        print(f"rank {dist.get_rank()} computed {llm.engine.stats()['generated_tokens']:.0f} tokens")
    dist.destroy_process_group()


def main() -> None:
    """Answer the prompts, alone in both ways or once on several ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name on the Hugging Face hub; default: a small random one")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a completion")
    chosen = parser.parse_args()
    params = SamplingParams(max_tokens=chosen.max_tokens, temperature=0.8)
    options: dict[str, Any] = {"inference_config": InferenceConfig(kv_cache_memory_gb=0.25)}
    prompts: list[Any] = ["The capital of France is", "2 + 2 =", "Once upon a time", "To be or"]
    if chosen.model is not None:
        options["model"] = chosen.model
    else:
        sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128}
        options["model"] = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))
        prompts = [[7, 8, 9], [12, 7, 3], [1], [2, 4, 8, 16]]
    if "WORLD_SIZE" in os.environ:
        over_ranks(options, prompts, params.replace(n=2))
        return
    with LLM(**options) as llm:
        a_list_at_once(llm, prompts, params.replace(n=2))
    asyncio.run(as_they_come(options, prompts, params))


if __name__ == "__main__":
    main()
