"""Offline inference without a training loop: a list of prompts, concurrent prompts, and several ranks.

    python examples/offline.py
    python examples/offline.py --model Qwen/Qwen3-0.6B
    torchrun --nproc-per-node 2 examples/offline.py

Without `--model` the model is small and random, and so is its output. On several ranks, rank 0 submits the prompts and
every rank computes a share; the other ranks wait until rank 0 has finished.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import torch.distributed as dist
from policy import character_tokenizer, small_model

from rollout import LLM, AsyncLLM, InferenceConfig, SamplingParams

PROMPTS = ["7+8=", "12+7*3=", "100+1=", "2*2="]


def model_and_tokenizer(name: str | None) -> dict[str, Any]:
    """Return the arguments of `LLM`: the name of a model, or a model and its tokenizer."""
    if name is not None:
        return {"model": name}
    tokenizer = character_tokenizer()
    return {"model": small_model(tokenizer, max_length=128, seed=0), "tokenizer": tokenizer}


def a_list_at_once(llm: LLM, params: SamplingParams) -> None:
    """Results in the order of the prompts, the samples of a prompt side by side."""
    for result in llm.generate(PROMPTS, params):
        why = result.finish_reason.value if result.finish_reason else "?"
        print(f"{result.prompt} → {result.generated_text!r}  {len(result.generated_tokens)} tokens, {why}")


async def as_they_come(options: dict[str, Any], params: SamplingParams) -> None:
    """Concurrent requests on one event loop, one of them streamed."""
    async with AsyncLLM(**options) as llm:

        async def ask(prompt: str) -> None:
            result = await llm.generate(prompt, params.replace(n=1))
            print(f"{prompt} answered after {result.latency:.2f} s")

        async def read_along(prompt: str) -> None:
            pieces = [delta.text async for delta in llm.stream(prompt, params.replace(n=1))]
            print(f"{prompt} came in {len(pieces)} pieces")

        await asyncio.gather(*(ask(prompt) for prompt in PROMPTS), read_along(PROMPTS[0]))


def over_ranks(options: dict[str, Any], params: SamplingParams) -> None:
    """Every rank calls this; rank 0 is the primary one."""
    with LLM(**options, use_coordinator=True) as llm:
        if llm.is_primary_rank:
            a_list_at_once(llm, params)
        else:
            llm.wait_for_shutdown()
        print(f"rank {dist.get_rank()} computed {llm.engine.stats()['generated_tokens']:.0f} tokens")


def main() -> None:
    """Answer the prompts, alone in both ways or once on several ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, or a name on the Hugging Face hub; default: a small random one")
    parser.add_argument("--max-tokens", type=int, default=24, help="of a completion")
    chosen = parser.parse_args()
    params = SamplingParams(n=2, max_tokens=chosen.max_tokens, temperature=0.8)
    options = model_and_tokenizer(chosen.model) | {"inference_config": InferenceConfig(kv_cache_memory_gb=0.25)}
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group()
        over_ranks(options, params)
        dist.destroy_process_group()
        return
    with LLM(**options) as llm:
        a_list_at_once(llm, params)
    asyncio.run(as_they_come(options, params))


if __name__ == "__main__":
    main()
