"""HTTP server over a model in training: evaluation without a checkpoint or a second copy of the weights.

    python examples/serve.py --seed 0

GRPO runs in this thread, as in `grpo.py` but with an `LLM`. Meanwhile a client asks the same model held-out sums over the
OpenAI API of `llm.serve`. Every reply contains the policy version of each token; a reply in progress during a weight
update is finished with the new weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from threading import Event

import torch
from arithmetic import Problem, Problems, reward, sums
from openai import OpenAI
from policy import character_tokenizer, small_model, trapezoid, warm_up
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from transformers import PreTrainedModel

from rollout import LLM, InferenceConfig, RolloutBatch, SamplingParams, ServerConfig
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach

GROUP = 8
MAX_TOKENS = 32
EPOCHS = 2
AT_ONCE = 8
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class Answer:
    """One reply received over HTTP."""

    problem: Problem
    text: str
    versions: list[int]
    """Policy version of each token."""

    @property
    def right(self) -> bool:
        """Whether the reply ends in the answer."""
        return reward(self.text, self.problem.answer) == 1

    def __str__(self) -> str:
        first, last = self.versions[0], self.versions[-1]
        made_by = f"version {first}" if first == last else f"versions {first} to {last}"
        return f"{self.problem.prompt} {self.text} {'✓' if self.right else '✗'}  by {made_by}"


def grpo(model: PreTrainedModel, llm: LLM, problems: Problems, options: argparse.Namespace) -> Iterator[float]:
    """Repeat: sample groups, score them, train twice on the batch; yield the mean reward of each step."""
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=5, fall=1.0)
    attach(optimizer, llm)
    params = SamplingParams(n=GROUP, max_tokens=MAX_TOKENS)
    for _ in range(options.steps):
        asked = problems.sample(options.prompts)
        samples = llm.generate([problem.prompt for problem in asked], params)
        batch = RolloutBatch.from_requests(
            samples, policy_version=llm.policy_version, pad_token_id=llm.tokenizer.pad_token_id, device=model.device
        )
        answers = [problem.answer for problem in asked for _ in range(GROUP)]
        rewards = torch.tensor(list(map(reward, batch.texts, answers)), device=model.device)
        advantages, mask = group_advantages(rewards, batch.group_ids)[:, None], batch.response_mask
        # HTTP requests wait meanwhile: the trainer and the engine take turns with the module.
        with llm.suspended():
            for _ in range(EPOCHS):
                ratio = (batch.logprobs_of(model) - batch.logprobs).exp()
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                loss = -torch.minimum(ratio * advantages, clipped * advantages)[mask].mean()
                optimizer.zero_grad()
                loss.backward()
                clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        schedule.step()
        yield rewards.mean().item()


def ask(url: str, problems: Sequence[Problem], answers: list[Answer], enough: Event) -> None:
    """Ask a few problems at a time over HTTP, with OpenAI's client."""
    with OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        model = client.models.list().data[0].id
        coming = cycle(problems)
        while True:
            asked = [next(coming) for _ in range(AT_ONCE)]
            reply = client.completions.create(
                model=model, prompt=[problem.prompt for problem in asked], max_tokens=MAX_TOKENS, temperature=0
            )
            for problem, choice in zip(asked, reply.choices, strict=True):
                answers.append(Answer(problem, choice.text, choice.rollout["policy_versions"]))
            if enough.wait(0.02):
                return


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the problems and the sampling")
    parser.add_argument("--steps", type=int, default=50, help="of GRPO")
    parser.add_argument("--prompts", type=int, default=48, help=f"per step, {GROUP} samples each")
    parser.add_argument("--lr", type=float, default=6e-4, help="highest learning rate of GRPO")
    parser.add_argument("--warm-up", type=float, default=0.2, help="loss that ends the supervised steps before it")
    parser.add_argument("--port", type=int, default=0, help="to serve on; 0: a free one")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.prompts, options.warm_up = 4, 8, 3.0
    return options


def main() -> None:
    """Warm-up, then GRPO with concurrent HTTP requests."""
    started = time.perf_counter()
    options = parse_options()
    tokenizer = character_tokenizer()
    model = small_model(tokenizer, max_length=64, seed=options.seed)
    problems = Problems(sums(), held_out=512, seed=options.seed)
    lessons = warm_up(model, tokenizer, problems, until=options.warm_up, batch_size=8 if options.quick else 64)
    print(f"{lessons} supervised steps in {time.perf_counter() - started:.0f} s")
    config = InferenceConfig(max_requests=GROUP * options.prompts + AT_ONCE, seed=options.seed)
    answers: list[Answer] = []
    with LLM(model, tokenizer, config) as llm, ThreadPoolExecutor(1) as beside:
        server = llm.serve(ServerConfig(port=options.port), blocking=False)
        print(f"serving at {server.url}\n\n step  reward              asked over HTTP meanwhile")
        enough = Event()
        visitor = beside.submit(ask, server.url, problems.held_out, answers, enough)
        try:
            for number, mean in enumerate(grpo(model, llm, problems, options), 1):
                last = f"{len(answers):5}: {answers[-1]}" if answers else ""
                print(f"{number:5}  {mean:6.2f} {'█' * round(mean * 10):10}  {last}")
        finally:
            enough.set()
        visitor.result()
        server.close()
    newest = [max(answer.versions) for answer in answers[::AT_ONCE]]
    assert newest == sorted(newest), "an answer came from older weights than the one before it"
    quarter = -(-len(answers) // 4)
    first, last = (sum(answer.right for answer in some) / quarter for some in (answers[:quarter], answers[-quarter:]))
    mixed = sum(len(set(answer.versions)) > 1 for answer in answers)
    print(f"\n{len(answers)} answers over HTTP from versions {newest[0]} to {newest[-1]}, {mixed} across an update")
    print(f"right, first quarter of them → last: {first:.2f} → {last:.2f}")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
