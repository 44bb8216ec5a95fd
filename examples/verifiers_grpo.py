"""GRPO on an environment of verifiers 0.4: a small Qwen3 learns to add with a calculator.

    pip install -e '.[serve,verifiers]' && python examples/verifiers_grpo.py --seed 0

The environment is `verifiers_sums.py`, an ordinary module of verifiers: its harness asks a model over HTTP, and verifiers'
training client, which turns messages to token ids itself, asks this process's server. The traces become one batch
(`trainer_hooks.verifiers.trace_batch`), in which every sampled token has the log-prob it was sampled with.

The model is first trained on a teacher's turns, up to the same loss for every seed, so that some of its answers are right,
and then only on whether they are.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import verifiers.v1 as vf
from arithmetic import Problem, Problems
from policy import character_tokenizer, small_model, trapezoid, warm_up
from renderers import DefaultRendererConfig
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from verifiers.v1.utils.loaders import load_environment

from rollout import LLM, Advanced, EpisodeBatch, InferenceConfig, ServerConfig
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach
from trainer_hooks.verifiers import trace_batch

GROUP = 8
MAX_TOKENS = 8
EPOCHS = 4
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


def teachers_turns(tasks: Iterable[vf.Task], eos: str) -> list[Problem]:
    """Every turn of a teacher's conversations about the tasks: what comes before it, and what the teacher says."""
    turns = []
    for task in tasks:
        a, b, c = map(int, task.data.prompt.rstrip("=").split("+"))
        asked = f"{task.data.prompt} "
        called = f"{asked}{a}+{b}{eos}{a + b} "
        called_again = f"{called}{a + b}+{c}{eos}{a + b + c} "
        turns += [Problem(asked, f"{a}+{b}"), Problem(called, f"{a + b}+{c}"), Problem(called_again, f"{a + b + c}")]
    return turns


def make_environment() -> vf.Env:
    """The environment of `verifiers_sums.py`, whose harness runs in this process."""
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "verifiers_sums"}}
    return load_environment(
        vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": "verifiers_sums"}, "agent": agent})
    )


class Player:
    """Plays episodes of the environment against a server.

    Args:
        environment: of `make_environment`.
        url: of the server.
        renderer: folder of the tokenizer, with which verifiers turns messages into token ids.
    """

    def __init__(self, environment: vf.Env, url: str, renderer: Path) -> None:
        self.environment = environment
        client = vf.TrainClientConfig(
            base_url=f"{url}/v1", renderer=DefaultRendererConfig(), renderer_model_name=str(renderer)
        )
        sampling = vf.SamplingConfig(temperature=1.0, max_tokens=MAX_TOKENS)
        self._context = vf.ModelContext(model="policy", client=client, sampling=sampling)

    async def play(self, tasks: Iterable[vf.Task], n: int) -> list[vf.Trace]:
        """Traces of n episodes of each task, those of a task side by side. Within `environment.serving()`."""
        episodes = await asyncio.gather(
            *(self.environment.run_episode(task, self._context) for task in tasks for _ in range(n))
        )
        return [episode.traces[0] for episode in episodes]

    async def exam(self, tasks: Iterable[vf.Task]) -> float:
        """Mean reward of one episode of each task."""
        traces = await self.play(tasks, 1)
        return sum(trace.reward for trace in traces) / len(traces)


def learn(model: PreTrainedModel, optimizer: AdamW, batch: EpisodeBatch) -> float:
    """Train on a batch. Returns the largest difference between a log-prob that came over HTTP and the trainer's own."""
    groups = torch.arange(len(batch.episodes), device=model.device) // GROUP
    advantages = group_advantages(batch.rewards, groups, valid=batch.rewards.isfinite())[batch.episode_ids, None]
    mask, differences = batch.response_mask, []
    for _ in range(EPOCHS):
        logprobs = batch.logprobs_of(model)
        differences.append((logprobs - batch.logprobs)[mask].abs().max().item())
        ratio = (logprobs - batch.logprobs).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)[mask].mean()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return differences[0]


async def grpo(llm: LLM, player: Player, options: argparse.Namespace) -> None:
    """Repeat: play groups of episodes, train on what was sampled in them, a few times since it is dear."""
    model, tokenizer = llm.model, llm.tokenizer
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=3, fall=1.0)
    attach(optimizer, llm)
    taskset = player.environment.taskset
    held_out, tasks = list(taskset.take(options.held_out)), list(taskset.skip(options.held_out))
    dice = random.Random(options.seed)
    async with player.environment.serving():
        before = await player.exam(held_out)
        print(f"held-out {before:.2f} sampled\n\n step  reward            tokens  Δlogp  a conversation")
        for number in range(1, options.steps + 1):
            traces = await player.play(dice.sample(tasks, options.prompts), GROUP)
            batch = trace_batch(
                traces, policy_version=llm.policy_version, pad_token_id=tokenizer.pad_token_id, n=GROUP,
                device=model.device,
            )  # fmt: skip
            with llm.suspended():
                difference = learn(model, optimizer, batch)
            schedule.step()
            reward = batch.rewards.nanmean().item()
            said = " ".join(str(node.message.content) for node in traces[0].nodes)
            tokens = int(batch.response_mask.sum())
            print(f"{number:5}  {reward:6.2f} {'█' * round(10 * reward):10} {tokens:6}  {difference:.0e}  {said}")
        print(f"\nheld-out, sampled {before:.2f} → {await player.exam(held_out):.2f}")


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the lessons and the sampling")
    parser.add_argument("--steps", type=int, default=20, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=16, help=f"per step, {GROUP} episodes each")
    parser.add_argument(
        "--held-out", type=int, default=128, help="tasks that are played before and after, and not trained on"
    )
    parser.add_argument("--lr", type=float, default=2e-4, help="highest learning rate of GRPO")
    parser.add_argument("--warm-up", type=float, default=0.4, help="loss that ends the teacher's lessons")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.held_out, options.warm_up = 2, 2, 4, 3.0
    return options


def main() -> None:
    """Warm-up, then episodes and training on them."""
    started = time.perf_counter()
    options = parse_options()
    tokenizer = chat_tokenizer()
    model = small_model(tokenizer, max_length=96, seed=options.seed)
    environment = make_environment()
    turns = teachers_turns(environment.taskset.skip(options.held_out), tokenizer.eos_token)
    lessons = Problems(turns, held_out=0, seed=options.seed)
    print(f"{warm_up(model, tokenizer, lessons, until=options.warm_up, fall=10)} lessons")
    config = InferenceConfig(
        max_requests=GROUP * options.prompts, seed=options.seed, advanced=Advanced(block_size_tokens=4)
    )
    with LLM(model, tokenizer, config) as llm, tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        server = llm.serve(ServerConfig(port=0, served_model_name="policy"), blocking=False)
        asyncio.run(grpo(llm, Player(environment, server.url, Path(folder)), options))
        server.close()
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
