"""Agent over the OpenAI API, whose conversations are training data, token for token.

    python examples/agent_over_http.py --seed 0
    start 9 lower 3 higher 5      the agent's program wrote the words, the model the numbers

The program thinks of a number below 16; the model guesses it in an ordinary loop around OpenAI's client. Each reply has
token ids, log-probs and policy versions (`message.rollout`). Sent back in the next turn, the conversation continues from
exactly those ids: the transcript is training data and is not tokenised again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from openai import AsyncOpenAI
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout import LLM, InferenceConfig, ServerConfig, pack_tree
from rollout.algorithms import group_advantages, masked_mean
from trainer_hooks.optimizer import attach
from trainer_hooks.tree import attach as attach_tree

GROUP, TURNS, NUMBERS, EPOCHS, CLIP_LOW, CLIP_HIGH = 16, 5, 16, 2, 0.2, 0.28
WORDS = ["<pad>", "<eos>", "start", "higher", "lower", *map(str, range(NUMBERS))]
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


@dataclass
class Transcript:
    """One conversation as token ids, as the model read and generated them."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each token when it was sampled; 0 for a token that was not sampled."""
    sampled: list[bool] = field(default_factory=list)
    reward: float = 0.0

    def add(self, prompt_token_ids: list[int], token_ids: list[int], log_probs: list[float], **_: Any) -> None:
        """Append one turn, whose prompt begins with all turns before it."""
        assert prompt_token_ids[: len(self.ids)] == self.ids
        between = prompt_token_ids[len(self.ids) :]
        self.ids += between + token_ids
        self.logprobs += [0.0] * len(between) + log_probs
        self.sampled += [False] * len(between) + [True] * len(token_ids)


def make_policy() -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Build a Qwen3 of 0.1 million random parameters, and a tokenizer with one token per word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", chat_template=TEMPLATE
    )
    config = Qwen3Config(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


async def play(client: AsyncOpenAI, number: int) -> Transcript:
    """Let the model guess a number: ask, answer, ask again."""
    messages: list[Any] = [{"role": "user", "content": "start"}]
    transcript = Transcript()
    for _ in range(TURNS):
        reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=1, temperature=1)
        message = reply.choices[0].message
        transcript.add(**message.rollout)
        said = message.content or ""
        if said == str(number):
            transcript.reward = 1.0
            break
        answer = "higher" if said.isdigit() and int(said) < number else "lower"
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": answer}]
    return transcript


async def play_all(url: str, numbers: list[int]) -> list[Transcript]:
    """Play about each number, all at once."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        return await asyncio.gather(*(play(client, number) for number in numbers))


def grpo(model: Qwen3ForCausalLM, optimizer: AdamW, transcripts: list[Transcript]) -> float:
    """Train twice; return the largest difference between a log-prob that came over HTTP and the trainer's own."""

    def padded(name: str, fill: int = 0) -> Tensor:
        rows = [torch.tensor(getattr(each, name), device=model.device) for each in transcripts]
        return pad_sequence(rows, batch_first=True, padding_value=fill)

    ids, before, sampled = padded("ids", -1), padded("logprobs"), padded("sampled")
    packed = pack_tree(ids, ids >= 0, sampled)  # what conversations have in common is trained once
    rewards = torch.tensor([each.reward for each in transcripts], device=model.device)
    advantages = group_advantages(rewards, torch.arange(len(rewards), device=model.device) // GROUP)[:, None]
    differences = []
    for _ in range(EPOCHS):
        logprobs = packed.logprobs_of(model)
        differences.append((logprobs - before)[sampled].abs().max().item())
        ratio = (logprobs - before).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        (-masked_mean(torch.minimum(ratio * advantages, clipped * advantages), sampled)).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return differences[0]


def main() -> None:
    """Serve the model, play with it over HTTP, train it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the numbers and the sampling")
    parser.add_argument("--steps", type=int, default=60, help="of GRPO")
    parser.add_argument("--tasks", type=int, default=16, help=f"per step, {GROUP} conversations about each")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.tasks = 3, 2
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model, tokenizer = make_policy()
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    with LLM(model, tokenizer, InferenceConfig(max_requests=GROUP * options.tasks, seed=options.seed)) as llm:
        attach(optimizer, llm)
        attach_tree(model)
        server = llm.serve(ServerConfig(port=0, served_model_name="policy"), blocking=False)
        for step in range(1, options.steps + 1):
            numbers = [number for number in random.choices(range(NUMBERS), k=options.tasks) for _ in range(GROUP)]
            transcripts = asyncio.run(play_all(server.url, numbers))
            with llm.suspended():
                difference = grpo(model, optimizer, transcripts)
            mean = sum(each.reward for each in transcripts) / len(transcripts)
            print(f"step {step:3}: found {mean:.2f}, Δlogp {difference:.0e}   {tokenizer.decode(transcripts[0].ids)}")
        server.close()
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
