"""Tests of completions with OpenAI's client: prompts of every kind, echo, log-probs, streams, disconnects."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types import Completion as TheirReply

from rollout.distributed.client.text_stream import TextDelta
from rollout.errors import InvalidRequestError
from rollout.server.openai.samples import merged
from rollout.server.openai.sse import bursts
from tests.engines import PATIENCE_S
from tests.server.chat_templates import byte_level
from tests.server.scripted import ScriptedLLM, joined, scripted, spoken

TOKENIZER = byte_level("qwen2.5")


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@pytest.fixture
def llm(stage: tuple[ScriptedLLM, OpenAI]) -> ScriptedLLM:
    """Answers " in Oslo 🙂" unless told otherwise."""
    return stage[0].begin(spoken(TOKENIZER, " in Oslo 🙂"))


def ask(client: OpenAI, **fields: Any) -> TheirReply:
    return client.completions.create(**({"model": "m", "prompt": "the weather"} | fields))


def read(client: OpenAI, **fields: Any) -> list[TheirReply]:
    return list(ask(client, stream=True, **fields))  # type: ignore[call-overload]


def text(chunks: list[TheirReply], index: int = 0) -> str:
    return "".join(c.text for chunk in chunks for c in chunk.choices if c.index == index)


def test_a_prompt_is_tokenised_as_when_the_server_was_built_whatever_a_trainer_does_to_its_tokenizer():
    tokenizer = copy.deepcopy(TOKENIZER)
    with scripted(tokenizer, served_model_name="m") as (llm, client):
        llm.script = spoken(TOKENIZER, "x")
        tokenizer.add_tokens(["weather"])
        assert tokenizer("the weather")["input_ids"] != ids("the weather")
        ask(client)
        assert llm.submitted[0][0] == ids("the weather")


# --- whole replies ----------------------------------------------------------------------------------------------------


def test_a_reply_has_openais_shape_and_our_ids(llm: ScriptedLLM, client: OpenAI):
    reply = ask(client)
    TheirReply.model_validate(reply.model_dump())
    (choice,) = reply.choices
    assert (choice.text, choice.finish_reason) == (" in Oslo 🙂", "stop")
    assert reply.id.startswith("cmpl-")
    assert choice.rollout["prompt_token_ids"] == ids("the weather") == llm.submitted[0][0]
    assert choice.rollout["token_ids"] == ids(" in Oslo 🙂")
    assert llm.submitted[0][1].max_tokens == 16, "OpenAI's default"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a b", [ids("a b")]),
        ([5, 6], [[5, 6]]),
        (["a", "b"], [ids("a"), ids("b")]),
        ([[5], [6, 7], [8]], [[5], [6, 7], [8]]),
    ],
)
def test_prompts_are_text_or_ids_one_or_many(llm: ScriptedLLM, client: OpenAI, prompt: Any, prompts: list[list[int]]):
    llm.script = spoken(TOKENIZER, "x", sample=0) + spoken(TOKENIZER, "y", sample=1)
    reply = ask(client, prompt=prompt, n=2)
    assert [asked for asked, *_ in llm.submitted] == prompts
    assert [(c.index, c.text) for c in reply.choices] == [(i, "xy"[i % 2]) for i in range(2 * len(prompts))]
    assert [c.rollout["prompt_token_ids"] for c in reply.choices[::2]] == prompts
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == sum(map(len, prompts))
    assert reply.usage.completion_tokens == 2 * len(prompts)
    assert {text(read(client, prompt=prompt, n=2), c.index) for c in reply.choices[::2]} == {"x"}


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompt_that_cannot_be_served_refuses_them_all(llm: ScriptedLLM, client: OpenAI, stream: bool):
    llm.hold()
    try:
        with pytest.raises(openai.BadRequestError, match="prompt 1 of 2") as caught:
            ask(client, prompt=["good", ""], stream=stream)
        assert caught.value.param == "prompt"
        assert not llm.open, "the first one goes on"
        llm.refuse_with = InvalidRequestError("logit_bias of token 97: must lie in [0, 97)")
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, logit_bias={"97": 1}, stream=stream)
        assert caught.value.param == "logit_bias"
    finally:
        llm.release()


# --- echo and log-probs -----------------------------------------------------------------------------------------------


def test_echo_puts_the_prompt_first(llm: ScriptedLLM, client: OpenAI):
    assert ask(client, echo=True).choices[0].text == "the weather in Oslo 🙂"
    assert llm.submitted[-1][1].prompt_logprobs is None
    assert ask(client, echo=True, prompt=ids("the weather")).choices[0].text == "the weather in Oslo 🙂"
    assert text(read(client, echo=True)) == "the weather in Oslo 🙂"


def test_log_probs_are_columns_of_every_token(llm: ScriptedLLM, client: OpenAI):
    llm.script = spoken(TOKENIZER, "a€", top=[(ids("b")[0], -0.25)])
    found = ask(client, logprobs=1).choices[0].logprobs
    assert found is not None
    assert found.tokens == ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert found.token_logprobs == [-0.5] * 4
    assert found.text_offset == [0, 1, 1, 1]
    assert found.top_logprobs == [{"b": -0.25, name: -0.5} for name in found.tokens]


@pytest.mark.parametrize("count", [0, 1])
def test_with_echo_the_prompts_log_probs_come_first(llm: ScriptedLLM, client: OpenAI, count: int):
    llm.script = spoken(TOKENIZER, " in Oslo 🙂", top=[(7, -0.125)] if count else None)
    (choice,) = ask(client, echo=True, logprobs=count).choices
    found = choice.logprobs
    assert found is not None
    prompt = ids("the weather")
    assert llm.submitted[-1][1].prompt_logprobs == count
    assert found.token_logprobs == [None, *[-0.25] * (len(prompt) - 1), *[-0.5] * len(choice.rollout["token_ids"])]
    assert found.top_logprobs[0] is None
    assert found.text_offset[: len(prompt) + 1][-1] == len("the weather")
    with pytest.raises(openai.BadRequestError, match="logprobs with echo"):
        read(client, echo=True, logprobs=count)


@pytest.mark.parametrize("top", [0, 1, 25, -1])
def test_log_probs_of_the_prompt_have_vllms_shape(llm: ScriptedLLM, client: OpenAI, top: int):
    choice = ask(client, extra_body={"prompt_logprobs": top}).choices[0]
    assert choice.logprobs is None
    prompt, params, *_ = llm.submitted[0]
    assert params.prompt_logprobs == (len(TOKENIZER) if top < 0 else top)
    first, *others = choice.prompt_logprobs
    assert first is None
    assert len(others) == len(prompt) - 1
    for token, entries in zip(prompt[1:], others, strict=True):
        own = {"logprob": -0.25, "rank": 2 if top else 1, "decoded_token": TOKENIZER.decode([token])}
        listed = {"7": {"logprob": -0.125, "rank": 1, "decoded_token": TOKENIZER.decode([7])}} if top else {}
        assert entries == {str(token): own} | listed


def test_more_log_probs_of_prompts_than_a_reply_can_hold_are_refused(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="more than 1000000 entries") as caught:
        ask(client, prompt=[[5] * 4000], extra_body={"prompt_logprobs": 20000})
    assert caught.value.param == "prompt_logprobs"


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_reply(client: OpenAI):
    (whole,) = ask(client).choices
    chunks = read(client, stream_options={"include_usage": True})
    assert text(chunks) == whole.text
    assert "\ufffd" not in "".join(c.text for chunk in chunks for c in chunk.choices)
    for name in ("prompt_token_ids", "token_ids", "log_probs", "policy_versions", "policy_staleness"):
        assert joined(chunks, name) == whole.rollout[name]
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(whole.rollout["token_ids"])


def test_what_waited_together_is_one_delta_per_sample_and_a_restart_makes_the_rest_void():
    begun, more = TextDelta(0, "old", [1], [-1.0], [0]), TextDelta(0, "w", [3], [-1.0], [1])
    (delta,) = merged([begun, TextDelta(0, "ne", [2], [-1.0], [1], restarted=True), more])
    assert (delta.text, delta.token_ids, delta.restarted) == ("new", [2, 3], True)
    one, two = spoken(TOKENIZER, "abc", top=[(5, -1.0)]), spoken(TOKENIZER, "de", sample=1, version=4)
    first, second = merged([one[0], two[0], *one[1:], two[1]])
    assert (first.text, first.token_ids, first.log_probs) == ("abc", ids("a") + ids("b") + ids("c"), [-0.5] * 3)
    assert first.top_log_probs == [[(5, -1.0)]] * 3
    assert first.finish_reason == "stop"
    assert (second.sample_index, second.text, second.policy_versions, second.finish_reason) == (1, "de", [4, 4], None)


class Listed:
    """A stream of what it is given; the rest waits whenever somebody looks."""

    def __init__(self, *deltas: TextDelta, error: Exception | None = None) -> None:
        self.waiting = list(deltas)
        self.error = error
        self.closed = False

    def take_waiting(self) -> list[TextDelta]:
        taken, self.waiting = self.waiting, []
        return taken

    async def __aiter__(self) -> Any:
        while self.waiting:
            yield self.waiting.pop(0)
        if self.error is not None:
            raise self.error

    async def aclose(self) -> None:
        self.closed = True


def test_a_slow_socket_gets_what_piled_up_at_once():
    async def run() -> list[Any]:
        return [burst async for burst in bursts([Listed(*spoken(TOKENIZER, "abcdef"))])]

    ((position, delta),) = asyncio.run(run())[0]
    assert (position, delta.text) == (0, "abcdef")


def test_many_streams_are_one_and_all_are_closed_when_one_fails():
    good, bad = Listed(*spoken(TOKENIZER, "ab")), Listed(error=RuntimeError("broken"))

    async def run() -> None:
        async for _ in bursts([good, bad]):
            pass

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(run())
    assert (good.closed, bad.closed) == (True, True)


# --- clients that go away ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]], ids=["one prompt", "three prompts"])
@pytest.mark.parametrize("when", ["not streaming", "before the first chunk", "in the stream"])
def test_a_client_that_goes_away_ends_all_it_asked_for(llm: ScriptedLLM, client: OpenAI, prompt: Any, when: str):
    llm.hold()
    llm.hang = True
    llm.script = spoken(TOKENIZER, "on and on", reason=None) if when == "in the stream" else []
    body = {"model": "m", "prompt": prompt, "stream": when != "not streaming"}

    async def ask_until_a_chunk() -> None:
        async with (
            httpx.AsyncClient(timeout=PATIENCE_S) as plain,
            plain.stream("POST", f"{client.base_url}completions", json=body) as reply,
        ):
            await anext(reply.aiter_lines())

    async def leave() -> None:
        asking = asyncio.ensure_future(ask_until_a_chunk())
        while len(llm.submitted) < (1 if isinstance(prompt, str) else len(prompt)):
            await asyncio.sleep(0.01)
        if when != "in the stream":
            asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    try:
        asyncio.run(asyncio.wait_for(leave(), PATIENCE_S))
        ended = {llm.aborted.get(timeout=PATIENCE_S) for _ in llm.submitted}
        assert len(ended) == len(llm.submitted)
    finally:
        llm.hang = False
        llm.release()
