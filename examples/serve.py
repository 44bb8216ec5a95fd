"""HTTP server over a model in training: evaluation without a checkpoint or a second copy of the weights.

    python examples/serve.py --seed 0

A small model learns to sort digits by GRPO in this thread. Meanwhile a client asks the same model over the OpenAI API of
`llm.serve`. Every reply contains the policy version of each token; a reply in progress during a weight update is finished
with the new weights.
"""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch
from openai import OpenAI
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollout import LLM, InferenceConfig, RolloutBatch, SamplingParams, ServerConfig
from rollout.algorithms import group_advantages, masked_mean
from trainer_hooks.optimizer import attach

GROUP, DIGITS, AT_ONCE, EPOCHS, CLIP_LOW, CLIP_HIGH = 8, 8, 8, 2, 0.2, 0.28


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


def grpo(model: Qwen3ForCausalLM, optimizer: AdamW, llm: LLM, prompts: list[str]) -> float:
    """Sample groups, score them, train twice on the batch; return the mean reward."""
    batch = RolloutBatch.from_requests(
        llm.generate(prompts, SamplingParams(n=GROUP, max_tokens=DIGITS + 1)),
        policy_version=llm.policy_version, pad_token_id=0, device=model.device,
    )  # fmt: skip
    asked = [prompt for prompt in prompts for _ in range(GROUP)]
    rewards = torch.tensor([float(text == answer(prompt)) for text, prompt in zip(batch.texts, asked, strict=True)])
    advantages = group_advantages(rewards.to(model.device), batch.group_ids)[:, None]
    with llm.suspended():  # HTTP requests wait: the trainer and the engine take turns with the module
        for _ in range(EPOCHS):
            ratio = (batch.logprobs_of(model) - batch.logprobs).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -masked_mean(torch.minimum(ratio * advantages, clipped * advantages), batch.response_mask)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return rewards.mean().item()


def ask(url: str, answers: list[tuple[bool, list[int]]], enough: Event) -> None:
    """Ask a few problems at a time; append for each reply whether it is right, and the version of each token."""
    with OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        model = client.models.list().data[0].id
        while not enough.wait(0.02):
            asked = draw(AT_ONCE)
            reply = client.completions.create(model=model, prompt=asked, max_tokens=DIGITS + 1, temperature=0)
            for prompt, choice in zip(asked, reply.choices, strict=True):
                answers.append((choice.text == answer(prompt), choice.rollout["policy_versions"]))


def main() -> None:
    """Warm up, then run GRPO with concurrent HTTP requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=40, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=48, help=f"per step, {GROUP} samples each")
    parser.add_argument("--port", type=int, default=0, help="to serve on; 0: a free one")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts = 4, 8
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    started = time.perf_counter()
    model, tokenizer = make_policy()
    warm_up(model, tokenizer, 5 if options.quick else 100)
    optimizer = AdamW(model.parameters(), lr=4e-4, betas=(0.9, 0.99), weight_decay=0.0)
    config = InferenceConfig(max_requests=GROUP * options.prompts + AT_ONCE, seed=options.seed)
    answers: list[tuple[bool, list[int]]] = []
    enough = Event()
    with LLM(model, tokenizer, config) as llm, ThreadPoolExecutor(1) as beside:
        attach(optimizer, llm)
        server = llm.serve(ServerConfig(port=options.port), blocking=False)
        print(f"serving at {server.url}")
        visitor = beside.submit(ask, server.url, answers, enough)
        try:
            for step in range(1, options.steps + 1):
                reward = grpo(model, optimizer, llm, draw(options.prompts))
                print(f"step {step:3}: reward {reward:.2f}, {len(answers)} answers over HTTP so far")
        finally:
            enough.set()
        visitor.result()
        server.close()
    quarter = -(-len(answers) // 4)
    first, last = (sum(right for right, _ in some) / quarter for some in (answers[:quarter], answers[-quarter:]))
    mixed = sum(len(set(versions)) > 1 for _, versions in answers)
    print(f"{len(answers)} answers over HTTP from versions 0 to {max(answers[-1][1])}, {mixed} across an update")
    print(
        f"right, first quarter of them → last: {first:.2f} → {last:.2f}, {time.perf_counter() - started:.0f} s in all"
    )


if __name__ == "__main__":
    main()
