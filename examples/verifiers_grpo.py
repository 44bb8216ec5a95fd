"""GRPO on an environment of verifiers 0.4: a small Qwen3 learns to add with a calculator.

    pip install -e '.[serve,verifiers]' && python examples/verifiers_grpo.py --seed 0

The environment is `verifiers_sums.py`, an ordinary module of verifiers: its harness asks a model over HTTP, and verifiers'
training client, which turns messages to token ids itself, asks this process's server. The traces become one batch
(`trainer_hooks.verifiers.trace_batch`), in which every sampled token has the log-prob it was sampled with.

The model is first trained on a few of a teacher's conversations, and then only on whether its answers are right.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import verifiers.v1 as vf
from arithmetic import Problem, Problems
from policy import character_tokenizer, small_model, token_logprobs, trapezoid, warm_up
from renderers import DefaultRendererConfig
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from verifiers.v1.utils.loaders import load_environment

from rollout import LLM, EpisodeBatch, InferenceConfig, ServerConfig
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach
from trainer_hooks.verifiers import trace_batch

GROUP = 8
MAX_TOKENS = 10
EPOCHS = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
TEMPLATE = """
{{- bos_token }}
{%- for message in messages %}
    {{- message.content + (eos_token if message.role == 'assistant' else ' ') }}
{%- endfor %}"""


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character; a space ends what the user says, <eos> what the assistant says."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def teachers_conversations(eos: str) -> list[Problem]:
    """Sums of three numbers, with what a teacher would say and the calculator would answer."""
    dice, every = random.Random(1), []
    for _ in range(4000):
        a, b, c = (dice.randint(1, 99) for _ in range(3))
        every.append(Problem(f"{a}+{b}+{c}= ", f"{a}+{b}{eos}{a + b} {a + b}+{c}{eos}{a + b + c} {a + b + c}"))
    return every


class Player:
    """Plays groups of episodes of the environment against a server."""

    def __init__(self, url: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        tokenizer.save_pretrained(folder)
        agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "verifiers_sums"}}
        self._environment = load_environment(
            vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": "verifiers_sums"}, "agent": agent})
        )
        self._tasks = iter(self._environment.taskset)
        client = vf.TrainClientConfig(
            base_url=f"{url}/v1", renderer=DefaultRendererConfig(), renderer_model_name=str(folder)
        )
        sampling = vf.SamplingConfig(temperature=1.0, max_tokens=MAX_TOKENS)
        self._context = vf.ModelContext(model="policy", client=client, sampling=sampling)

    def play(self, prompts: int) -> list[vf.Trace]:
        """Traces of `GROUP` episodes of each of the next tasks, those of a task side by side."""
        return asyncio.run(self._play([next(self._tasks) for _ in range(prompts)]))

    async def _play(self, tasks: Sequence[vf.Task]) -> list[vf.Trace]:
        async with self._environment.serving():
            episodes = await asyncio.gather(
                *(self._environment.run_episode(task, self._context) for task in tasks for _ in range(GROUP))
            )
        return [trace for episode in episodes for trace in episode.traces]


def learn(model: PreTrainedModel, optimizer: AdamW, batch: EpisodeBatch) -> float:
    """Train on a batch. Returns the largest difference between a log-prob that came over HTTP and the trainer's own."""
    groups = torch.arange(len(batch.episodes), device=model.device) // GROUP
    advantages = group_advantages(batch.rewards, groups, valid=batch.rewards.isfinite())[batch.episode_ids, None]
    mask, differences = batch.response_mask, []
    for _ in range(EPOCHS):
        logprobs = token_logprobs(model, batch)
        differences.append((logprobs - batch.logprobs)[mask].abs().max().item())
        ratio = (logprobs - batch.logprobs).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return differences[0]


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the sampling")
    parser.add_argument("--steps", type=int, default=30, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=16, help=f"per step, {GROUP} episodes each")
    parser.add_argument("--lr", type=float, default=4e-4, help="highest learning rate of GRPO")
    parser.add_argument("--warm-up", type=float, default=0.8, help="loss that ends the teacher's lessons")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.warm_up = 2, 2, 2.0
    return options


def main() -> None:
    """Warm-up, then episodes and training on them."""
    started = time.perf_counter()
    options = parse_options()
    tokenizer = chat_tokenizer()
    model = small_model(tokenizer, max_length=96, seed=options.seed)
    lessons = Problems(teachers_conversations(tokenizer.eos_token), held_out=0, seed=options.seed)
    print(f"{warm_up(model, tokenizer, lessons, until=options.warm_up)} lessons")
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    config = InferenceConfig(max_requests=GROUP * options.prompts, block_size_tokens=4, seed=options.seed)
    means: list[float] = []
    with LLM(model, tokenizer, config) as llm, tempfile.TemporaryDirectory() as folder:
        attach(optimizer, llm)
        server = llm.serve(ServerConfig(port=0, served_model_name="policy"), blocking=False)
        player = Player(server.url, tokenizer, Path(folder))
        print(f"serving at {server.url}\n\n step  reward            tokens  Δlogp  a conversation")
        for number in range(1, options.steps + 1):
            version = llm.policy_version
            traces = player.play(options.prompts)
            batch = trace_batch(traces, policy_version=version, pad_token_id=tokenizer.pad_token_id, n=GROUP)
            batch = batch.to(model.device)
            with llm.suspended():
                difference = learn(model, optimizer, batch)
            schedule.step()
            means.append(batch.rewards.nanmean().item())
            bar = "█" * round(10 * means[-1])
            said = " ".join(str(node.message.content) for node in traces[0].nodes)
            print(f"{number:5}  {means[-1]:6.2f} {bar:10} {int(batch.response_mask.sum()):6}  {difference:.0e}  {said}")
        server.stop()
    fifth = max(1, len(means) // 5)
    first, last = sum(means[:fifth]) / fifth, sum(means[-fifth:]) / fifth
    print(f"\nreward, first fifth of the steps → last: {first:.2f} → {last:.2f}")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
