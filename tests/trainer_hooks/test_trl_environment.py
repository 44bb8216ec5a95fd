"""Tests of TRL's environments as episodes: tools are called and answered, and every turn continues from sampled ids."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from rollout import SamplingParams, StructuredOutput
from rollout.errors import InvalidRequestError
from rollout.requests.request import DynamicInferenceRequest
from tests.models import make_model
from tests.rollouts import make_rollout
from tests.server.chat_templates import byte_level
from trainer_hooks.trl_environment import environment_play
from trainer_hooks.trl_episodes import episode_reward, episode_rollout_func

TOKENIZER = byte_level("qwen2.5")


class Counter:
    """An environment as TRL documents them."""

    def reset(self, *, prompt: Any, start: int = 0, **_: Any) -> str | None:
        self.total, self.threads = start, set()
        return f" Start at {start}." if start else None

    def add(self, amount: int) -> int:
        """Add to the counter.

        Args:
            amount: What to add.
        """
        self.threads.add(threading.current_thread())
        self.total += amount
        return self.total

    async def fail(self) -> str:
        """Fail."""
        raise OSError("no such tool today")

    def get_reward(self) -> float:
        assert threading.main_thread() not in self.threads
        return float(self.total)


class Scripted:
    """An episode whose completions are given."""

    def __init__(self, task: Any, replies: list[str], room: int = 10**6) -> None:
        self.task, self.replies, self.room = task, replies, room
        self.prompts: list[list[int]] = []

    async def sample(self, prompt: list[int], params: Any = None) -> DynamicInferenceRequest:
        if len(prompt) > self.room:
            raise InvalidRequestError("too long")
        self.prompts.append(prompt)
        ids = TOKENIZER(self.replies[len(self.prompts) - 1], add_special_tokens=False)["input_ids"]
        return DynamicInferenceRequest(request_id=1, prompt_tokens=prompt, generated_tokens=ids)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(episode: Scripted, **options: Any) -> float:
    return asyncio.run(environment_play(Counter, TOKENIZER, **options)(episode))  # type: ignore[arg-type]


def test_tools_are_called_and_answered_until_a_reply_has_no_call() -> None:
    row = {"prompt": [{"role": "user", "content": "Count."}], "start": 2, "answer": "unused"}
    replies = [call("add", amount=3), call("fail") + call("gone"), call("add", wrong=1), "five", "never"]
    episode = Scripted(row, replies)
    assert played(episode) == 5.0
    texts = [TOKENIZER.decode(prompt) for prompt in episode.prompts]
    assert len(texts) == 4
    assert "Count. Start at 2." in texts[0]
    assert '"name": "add"' in texts[0]
    assert all(name not in texts[0] for name in ('"reset"', '"get_reward"'))
    for said, text in zip(("\n5\n", "no such tool today", "unexpected keyword argument"), texts[1:], strict=True):
        assert said in text
    assert "Tool gone not found." in texts[2]
    for before, reply, after in zip(episode.prompts, replies, episode.prompts[1:], strict=False):
        sampled = before + TOKENIZER(reply, add_special_tokens=False)["input_ids"]
        assert after[: len(sampled)] == sampled


COUNT = [{"role": "user", "content": "Count."}]


def test_an_episode_ends_after_its_turns() -> None:
    episode = Scripted(COUNT, [call("add", amount=1)] * 99)
    assert played(episode, max_turns=2) == 2.0
    assert len(episode.prompts) == 2


def test_an_episode_ends_where_the_next_prompt_does_not_fit() -> None:
    once = Scripted(COUNT, ["done"])
    played(once)
    episode = Scripted(COUNT, [call("add", amount=1)] * 99, room=len(once.prompts[0]))
    assert played(episode) == 1.0
    assert len(episode.prompts) == 1


def test_a_prompt_that_does_not_fit_fails_its_episode() -> None:
    with pytest.raises(InvalidRequestError, match="too long"):
        played(Scripted(COUNT, ["done"], room=3))


def test_grpos_rollout_func_gets_one_row_of_all_turns_with_the_tools_answers_masked() -> None:
    model = make_model("qwen3", vocab_size=len(TOKENIZER), num_hidden_layers=1, max_position_embeddings=4096)
    calls = StructuredOutput(regex=r'<tool_call>\n\{"name": "add", "arguments": \{"amount": [1-9]\}\}\n</tool_call>')
    prompts = [[{"role": "user", "content": text}] for text in ("Count.", "Go on.", "Count.")]
    with make_rollout(model, TOKENIZER, kv_cache_blocks=2048, max_tokens_per_step=512) as manager:
        play = environment_play(Counter, TOKENIZER, max_turns=3)
        func = episode_rollout_func(manager, play, SamplingParams(max_tokens=90, structured=calls))
        output = func(prompts, None)
    for ids, mask, logprobs, reward in zip(
        output["completion_ids"], output["env_mask"], output["logprobs"], episode_reward(**output), strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs)
        sampled = TOKENIZER.decode([token for token, ours in zip(ids, mask, strict=True) if ours])
        amounts = [int(part[0]) for part in sampled.split('"amount": ')[1:]]
        assert (len(amounts), float(sum(amounts))) == (3, reward)
        assert "tool_response" in TOKENIZER.decode([token for token, ours in zip(ids, mask, strict=True) if not ours])
