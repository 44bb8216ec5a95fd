"""Episodes of TRL's `environment_factory`, in which a slow tool does not delay other episodes.

play = environment_play(WeatherEnvironment, tokenizer)  # a class with reset(**row), tools as methods, and get_reward()
batch = manager.run(rows_of_the_dataset, play, SamplingParams(max_tokens=256), n=8)

Or inside `GRPOTrainer`, in place of its argument `environment_factory`, which runs the turns of all episodes in lock step:

GRPOTrainer(model, episode_reward, args=config, train_dataset=data, rollout_func=episode_rollout_func(manager, play, params))
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers.utils import get_json_schema

from rollout.errors import InvalidRequestError
from rollout.manager.episodes.environment import Play, called
from rollout.manager.episodes.episode import Episode
from rollout.requests.prompt import plain_arguments
from rollout.server.chat_template.conversation import Conversation, RenderedPrompt


def environment_play(factory: Callable[[], Any], tokenizer: Any, max_turns: int = 16) -> Play:
    """Return a coroutine function for `RolloutManager.run` that plays TRL's `environment_factory` (TRL 1.16).

    A task is a prompt, or a row of the dataset. The row is passed to `reset(**row)`, and the text that `reset` returns is
    appended to the last message of the row's `prompt`. Tools are the environment's public methods. Tool calls are parsed in
    the format of the tokenizer's chat template. If a method raises or does not exist, the tool result is the error. Methods
    that are not coroutines run on threads. The reward is `get_reward()`, or 0 if there is no such method. The episode ends
    after the first reply without a tool call, after `max_turns`, or if the next prompt would not fit.
    """
    conversation = Conversation(tokenizer)

    async def play(episode: Episode) -> float:
        environment = factory()
        row = episode.task if isinstance(episode.task, Mapping) else {"prompt": episode.task}
        seen = await called(partial(environment.reset, **row))
        *before, asked = row.get("prompt") or [{"role": "user", "content": ""}]
        messages = [*before, {**asked, "content": asked["content"] + (seen or "")}]
        tools = {name: getattr(environment, name) for name, _ in inspect.getmembers(type(environment), inspect.isfunction)
                 if name not in ("reset", "get_reward") and not name.startswith("_")}  # fmt: skip
        schemas = [get_json_schema(tool) for tool in tools.values()]
        for turn in range(max_turns):
            try:
                prompt = conversation.render(messages, tools=schemas)
                sample = await episode.sample(prompt.token_ids)
            except InvalidRequestError:
                if not turn:
                    raise
                break
            reply = _reply(conversation, schemas, prompt, sample.generated_tokens, tokenizer)
            results = await asyncio.gather(*(_result(tools, call["function"]) for call in reply["tool_calls"]))
            messages += [reply, *results]
            if not results:
                break
        return float(await called(environment.get_reward)) if hasattr(environment, "get_reward") else 0.0

    return play


async def _result(tools: Mapping[str, Callable[..., Any]], call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        if call["name"] not in tools:
            raise ValueError(f"Tool {call['name']} not found.")
        result = await called(partial(tools[call["name"]], **plain_arguments(call["arguments"])))
    except Exception as exc:  # noqa: BLE001 - the model sees the error, as in TRL
        result = {"error": str(exc)}
    return {"role": "tool", "name": call["name"], "content": str(result)}


def _reply(
    conversation: Conversation, schemas: list[Any], prompt: RenderedPrompt, token_ids: list[int], tokenizer: Any
) -> dict[str, Any]:
    """Return a completion as an assistant message, with the token ids that let the next prompt continue it exactly."""
    reader = conversation.reader_for(prompt, schemas, reasons=False)()
    _, content, calls = reader.push(tokenizer.decode(token_ids, skip_special_tokens=True), ended=True)
    calls = [{"type": "function", "function": call["function"]} for call in calls]
    rollout = {"prompt_token_ids": prompt.token_ids, "prompt_digest": prompt.digest, "token_ids": token_ids,
               "content_digest": reader.digest()}  # fmt: skip
    return {"role": "assistant", "content": content, "tool_calls": calls, "rollout": rollout}
