"""Tool-using agent over the OpenAI API, whose conversations are training data, token for token.

    python examples/agent_over_http.py --seed 0

A small model adds three numbers with a tool that adds two: it calls the tool, reads the result, calls it again, and gives
the answer, in an ordinary loop around OpenAI's client. Each reply contains, besides its text, the token ids of prompt and
reply, their log-probs and policy versions (`message.rollout`). Sent back in the next turn, the conversation continues from
exactly those ids, so that the last turn's ids begin with everything sampled before: the transcript is training data
without being tokenised again.

The model is first trained on a few of a teacher's conversations, then only on whether its answers are right.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from openai import AsyncOpenAI
from policy import small_model, trapezoid
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import AdamW
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rollout import LLM, InferenceConfig, ServerConfig
from rollout.algorithms import group_advantages
from trainer_hooks.optimizer import attach

GROUP = 8
TURNS = 4
MAX_TOKENS = 12
EPOCHS = 2
CLIP_LOW, CLIP_HIGH = 0.2, 0.28

# --- the tool, and how the model writes a call of it --------------------------------------------------------------------

CALL, CALLED = '<tool_call>\n{"name": "add", "arguments": {"sum": "', '"}}\n</tool_call>'
WORDS = ("<pad>", "<end>", "<user>", "<assistant>", "<tool>")
TEMPLATE = """
{%- for message in messages -%}
    <{{ message.role }}>{{ message.content or "" }}
    {%- for call in message.tool_calls or [] -%}
        <tool_call>{{ '\\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor -%}
    <end>
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "The sum of two numbers, written 12+34.",
        "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]},
    },
}


def add(arguments: str) -> str:
    """The tool: the sum of two numbers, or a question mark."""
    asked = re.fullmatch(r"(\d+)\+(\d+)", str(json.loads(arguments).get("sum")))
    return str(int(asked[1]) + int(asked[2])) if asked else "?"


def agents_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character, one for each role, and one each for what stands before and behind a call's argument."""
    vocabulary = {word: index for index, word in enumerate([*WORDS, *"0123456789+?", CALL, CALLED])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    tokenizer.decoder = Fuse()
    tokenizer.add_tokens([CALL, CALLED])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE,
        additional_special_tokens=list(WORDS[2:]),
    )  # fmt: skip


# --- conversations as training data -------------------------------------------------------------------------------------


@dataclass
class Transcript:
    """One conversation as token ids, as the model read and generated them."""

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Log-prob of each token when it was sampled; 0 for a token that was not sampled."""
    sampled: list[bool] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)
    """Policy versions that sampled its tokens."""
    answer: str | None = None

    def add(
        self,
        prompt_token_ids: list[int],
        token_ids: list[int],
        log_probs: list[float],
        policy_versions: Sequence[int] = (),
        **_: Any,
    ) -> None:
        """One more turn.

        Raises:
            ValueError: its prompt does not begin with all turns before it.
        """
        known = len(self.ids)
        if prompt_token_ids[:known] != self.ids:
            raise ValueError(f"the prompt {prompt_token_ids} does not go on from the transcript {self.ids}")
        between = prompt_token_ids[known:]
        self.ids += between + token_ids
        self.log_probs += [0.0] * len(between) + log_probs
        self.sampled += [False] * len(between) + [True] * len(token_ids)
        self.versions.update(policy_versions)


def token_logprobs(model: PreTrainedModel, transcripts: Sequence[Transcript]) -> Tensor:
    """float32 [N, T]: the model's log-prob of every token of each transcript; 0 on the first one and on padding."""
    ids = _padded([torch.tensor(each.ids) for each in transcripts], model)
    mask = _padded([torch.ones(len(each.ids)) for each in transcripts], model)
    logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, :-1].float()
    log_probs = logits.gather(2, ids[:, 1:, None]).squeeze(2) - logits.logsumexp(2)
    return torch.nn.functional.pad(log_probs * mask[:, 1:], (1, 0))


def _padded(rows: list[Tensor], model: PreTrainedModel) -> Tensor:
    return pad_sequence(rows, batch_first=True).to(model.device)


# --- the agent ----------------------------------------------------------------------------------------------------------

Question = tuple[int, int, int]


async def solve(client: AsyncOpenAI, model: str, question: Question) -> Transcript:
    """The tool-using loop: ask, do what the model calls for, ask again, until it calls for nothing."""
    messages: list[Any] = [{"role": "user", "content": "+".join(map(str, question))}]
    transcript = Transcript()
    for _ in range(TURNS):
        reply = await client.chat.completions.create(
            model=model, messages=messages, tools=[ADD], max_tokens=MAX_TOKENS, temperature=1
        )
        message = reply.choices[0].message
        transcript.add(**message.rollout)
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            transcript.answer = message.content
            break
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call.function.arguments)})
    return transcript


async def solve_all(url: str, questions: Sequence[Question]) -> list[Transcript]:
    """One conversation about each question, all at once."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as client:
        model = (await client.models.list()).data[0].id
        return await asyncio.gather(*(solve(client, model, question) for question in questions))


# --- training -----------------------------------------------------------------------------------------------------------


def teachers(tokenizer: PreTrainedTokenizerFast, question: Question) -> Transcript:
    """The conversation that a teacher would have about a question."""
    a, b, c = question
    transcript, text = Transcript(), f"<user>{a}+{b}+{c}<end><assistant>"
    for said, heard in (
        (f"{CALL}{a}+{b}{CALLED}<end>", f"<tool>{a + b}<end><assistant>"),
        (f"{CALL}{a + b}+{c}{CALLED}<end>", f"<tool>{a + b + c}<end><assistant>"),
        (f"{a + b + c}<end>", ""),
    ):
        turn = tokenizer.encode(said)
        transcript.add(tokenizer.encode(text), turn, [0.0] * len(turn))
        text += said + heard
    return transcript


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    dice: random.Random,
    *,
    until: float,
    fall: int = 15,
    batch_size: int = 64,
) -> int:
    """Lessons from the teacher, until the loss (nats per token that he says) has come below `until`, and `fall` more.

    Returns:
        How many lessons.
    """
    optimizer = AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95))
    running, step, left = 3.0, 0, fall
    while left:
        step += 1
        left -= running < until or left < fall
        optimizer.param_groups[0]["lr"] = 3e-3 * min(step / 20, left / fall)
        lesson = [teachers(tokenizer, some_question(dice)) for _ in range(batch_size)]
        said = _padded([torch.tensor(each.sampled) for each in lesson], model)
        loss = -token_logprobs(model, lesson)[said].mean()
        _step(optimizer, loss)
        running = 0.8 * running + 0.2 * loss.item()
    return step


def learn(model: PreTrainedModel, optimizer: AdamW, transcripts: Sequence[Transcript], rewards: Tensor) -> float:
    """Policy gradient: what did better than the rest of its group becomes likelier.

    Args:
        rewards: float32 [N], the conversations about one question side by side.

    Returns:
        The largest difference between a log-prob that came over HTTP and the trainer's own.
    """
    advantages = group_advantages(rewards, torch.arange(len(rewards), device=rewards.device) // GROUP)[:, None]
    sampled = _padded([torch.tensor(each.sampled) for each in transcripts], model)
    before = _padded([torch.tensor(each.log_probs) for each in transcripts], model)
    differences = []
    for _ in range(EPOCHS):
        log_probs = token_logprobs(model, transcripts)
        differences.append((log_probs - before)[sampled].abs().max().item())
        ratio = (log_probs - before).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        _step(optimizer, -torch.minimum(ratio * advantages, clipped * advantages)[sampled].mean())
    return differences[0]


def _step(optimizer: AdamW, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def some_question(dice: random.Random) -> Question:
    """Three numbers below 100."""
    return dice.randrange(100), dice.randrange(100), dice.randrange(100)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the questions and the sampling")
    parser.add_argument("--steps", type=int, default=30, help="of policy gradient")
    parser.add_argument("--questions", type=int, default=16, help=f"per step, {GROUP} conversations about each")
    parser.add_argument("--lr", type=float, default=3e-4, help="highest learning rate of policy gradient")
    parser.add_argument("--warm-up", type=float, default=0.4, help="loss that ends the teacher's lessons")
    parser.add_argument("--quick", action="store_true", help="only see that it runs: few, small steps")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.questions, options.warm_up = 3, 4, 1.5
    return options


def main() -> None:
    """Warm-up, then conversations and training on them."""
    started = time.perf_counter()
    options = parse_options()
    dice = random.Random(options.seed)
    tokenizer = agents_tokenizer()
    model = small_model(tokenizer, max_length=128, seed=options.seed)
    lessons = warm_up(model, tokenizer, dice, until=options.warm_up, batch_size=8 if options.quick else 64)
    print(f"{lessons} lessons in {time.perf_counter() - started:.0f} s")
    optimizer = AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = trapezoid(optimizer, options.steps, rise=3, fall=1.0)
    means: list[float] = []
    with LLM(model, tokenizer, InferenceConfig(max_requests=GROUP * options.questions, seed=options.seed)) as llm:
        attach(optimizer, llm)
        server = llm.serve(ServerConfig(port=0), blocking=False)
        print(f"serving at {server.url}\n\n step  reward            tokens  Δlogp  weights  a conversation")
        for number in range(1, options.steps + 1):
            questions = [some_question(dice) for _ in range(options.questions)]
            asked = [question for question in questions for _ in range(GROUP)]
            transcripts = asyncio.run(solve_all(server.url, asked))
            rewards = torch.tensor(
                [float(each.answer == str(sum(q))) for each, q in zip(transcripts, asked, strict=True)]
            )
            with llm.suspended():
                difference = learn(model, optimizer, transcripts, rewards.to(model.device))
            schedule.step()
            means.append(rewards.mean().item())
            said = tokenizer.decode(transcripts[0].ids).replace(CALL, "⟨").replace(CALLED, "⟩")
            tokens = sum(sum(each.sampled) for each in transcripts)
            versions = "–".join(map(str, sorted({version for each in transcripts for version in each.versions})))
            bar = "█" * round(10 * means[-1])
            print(f"{number:5}  {means[-1]:6.2f} {bar:10} {tokens:6}  {difference:.0e}  {versions:>7}  {said}")
        server.close()
    fifth = max(1, len(means) // 5)
    first, last = sum(means[:fifth]) / fifth, sum(means[-fifth:]) / fifth
    print(f"\nreward, first fifth of the steps → last: {first:.2f} → {last:.2f}")
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
