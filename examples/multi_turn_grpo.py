"""GRPO on episodes of many turns: a small Qwen3 learns to find a number by asking, in a minute on a laptop's CPU.

    python examples/multi_turn_grpo.py --seed 0

    start 9 lower 3 higher 5 found      the environment wrote the words, the model the numbers

The environment thinks of a number below 16, and the model may guess five times. The model is random when it starts. All
that it learns, it learns from the reward of whole episodes: 1 if it found the number. The environment answers slowly, as
tools do; meanwhile other episodes are sampled. A row of the batch is a whole episode, and `response_mask` marks what the
model wrote.

With `--thoughts 3` the model writes three tokens before each guess, and no later turn sees them: many chat templates drop
earlier thinking. Every turn is then a row of its own. `batch.tree()` trains once what rows have in common.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import Qwen3Config, Qwen3ForCausalLM

import rollout
from rollout.algorithms import group_advantages, masked_mean
from trainer_hooks.tree import attach as attach_tree

GROUP, TURNS, NUMBERS, EPOCHS, CLIP_LOW, CLIP_HIGH = 16, 5, 16, 2, 0.2, 0.28
HIGHER, LOWER, START = NUMBERS, NUMBERS + 1, NUMBERS + 2
"""Tokens are the numbers, two answers, and the first word of an episode."""


class Guessing:
    """Environment of one episode: thinks of a number and answers guesses."""

    async def reset(self, number: int) -> list[int]:
        """Begin; return the first prompt."""
        self.number = number
        return [START]

    async def step(self, turn: rollout.DynamicInferenceRequest) -> rollout.StepResult:
        """Answer a guess."""
        await asyncio.sleep(random.uniform(0, 0.02))
        guess = turn.generated_tokens[-1]
        if guess == self.number:
            return rollout.StepResult(reward=1.0, done=True)
        return rollout.StepResult([HIGHER if guess < self.number else LOWER])


async def think_and_guess(episode: rollout.Episode) -> float:
    """Play an episode whose prompts have the earlier guesses and answers, but not the thoughts before the guesses."""
    game = Guessing()
    prompt = await game.reset(episode.task)
    for _ in range(TURNS):
        turn = await episode.sample(prompt)
        answer = await game.step(turn)
        if answer.done:
            return answer.reward
        prompt = [*prompt, turn.generated_tokens[-1], *answer.observation]
    return 0.0


def make_model(thoughts: int) -> Qwen3ForCausalLM:
    """Build a Qwen3 of 0.1 million random parameters."""
    config = Qwen3Config(
        vocab_size=START + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2 * TURNS + 2 + thoughts, eos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).to("cuda" if torch.cuda.is_available() else "cpu")


def grpo(model: Qwen3ForCausalLM, optimizer: AdamW, batch: rollout.EpisodeBatch) -> None:
    """Train twice on groups of episodes; the tokens of the environment are context, not targets."""
    groups = torch.arange(len(batch.episodes), device=batch.rewards.device) // GROUP
    advantages = group_advantages(batch.rewards, groups)[batch.episode_ids, None]
    packed = batch.tree()
    with rollout.suspended():
        for _ in range(EPOCHS):
            ratio = (batch.logprobs_of(model, packed) - batch.logprobs).exp()
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            loss = -masked_mean(torch.minimum(ratio * advantages, clipped * advantages), batch.response_mask)
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def shown(batch: rollout.EpisodeBatch) -> str:
    """Return the first episode in words."""
    words = {HIGHER: "higher", LOWER: "lower", START: "start"}
    tokens = batch.input_ids[0][batch.attention_mask[0].bool()].tolist()
    return " ".join(words.get(token, str(token)) for token in tokens)


def main() -> None:
    """Train from random weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the numbers and the sampling")
    parser.add_argument("--steps", type=int, default=80, help="of GRPO")
    parser.add_argument("--tasks", type=int, default=32, help=f"per step, {GROUP} episodes each")
    parser.add_argument(
        "--thoughts", type=int, default=0, help="tokens before each guess, which later turns do not see"
    )
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.tasks = 3, 4
    started = time.perf_counter()
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = make_model(options.thoughts)
    attach_tree(model)
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), weight_decay=0.0)
    # Prompts grow by two tokens a turn: small blocks let a turn find the tokens of the turn before.
    config = rollout.InferenceConfig(
        max_requests=GROUP * options.tasks, seed=options.seed, advanced=rollout.Advanced(block_size_tokens=4)
    )
    manager = rollout.init(model, None, optimizer, config)
    params = rollout.SamplingParams(max_tokens=1 + options.thoughts)
    game = think_and_guess if options.thoughts else Guessing
    for step in range(1, options.steps + 1):
        tasks = random.choices(range(NUMBERS), k=options.tasks)
        batch = manager.run(tasks, game, params, n=GROUP, max_turns=TURNS, progress=False)
        grpo(model, optimizer, batch)
        if step % 5 == 0 or step in (1, options.steps):
            turns = sum(len(episode.turns) for episode in batch.episodes) / len(batch.episodes)
            print(f"step {step:3}: found {batch.rewards.mean():.2f} in {turns:.1f} turns   {shown(batch)}")
            print(f"          {batch.tree()}")
    every = manager.run(range(NUMBERS), game, params.replace(temperature=0.0), max_turns=TURNS, progress=False)
    print(f"greedy, found {every.rewards.mean():.2f} of the {NUMBERS} numbers")
    rollout.close()
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
