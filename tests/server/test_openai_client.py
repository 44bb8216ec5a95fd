"""Tests of OpenAI's client against the real server and a real model: replies equal the engine's in-process results."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rollout import LLM, Advanced, InferenceConfig, SamplingParams, ServerConfig
from rollout.server.server import Server
from tests.engines import BLOCK, gated
from tests.models import greedy, make_model, trainer_logprobs
from tests.server.chat_templates import byte_level
from tests.server.scripted import joined

PATIENCE_S = 60.0
"""Guards against hanging, no more."""

KEY = "sk-of-this-test"
TOKENIZER = byte_level("qwen2.5")
PROMPT = "the weather in"
HI: list[Any] = [{"role": "user", "content": "the weather in Paris?"}]
LETTERS = {str(TOKENIZER.convert_tokens_to_ids(letter)): 100 for letter in "abcdefghijklmnopqrstuvwxyz"}
"""`logit_bias` that leaves nothing but single letters."""

UNMERGED = {token: bias for token, bias in LETTERS.items() if TOKENIZER.decode(int(token)) in "the"}
"""The same of three letters, so that hardly any text of them is tokenised into what it was made of."""


Client = TypeVar("Client", OpenAI, AsyncOpenAI)


@dataclass
class House:
    """A model, its server, and clients of it."""

    llm: LLM
    server: Server

    def client(self, kind: type[Client] = OpenAI, **options: Any) -> Client:
        """One that holds every reply against its types, unless told not to."""
        defaults = {"max_retries": 0, "timeout": PATIENCE_S, "_strict_response_validation": True}
        return kind(**({"base_url": f"{self.server.url}/v1", "api_key": KEY} | defaults | options))

    def says(self, prompt: str | list[int], max_tokens: int, **params: Any) -> Any:
        """What the same question gives in this process."""
        return self.llm.generate(prompt, SamplingParams(max_tokens=max_tokens, **params))[0]

    def empties(self) -> None:
        """Nothing is computed any more."""
        deadline = time.monotonic() + PATIENCE_S
        while self.llm.num_open or self.llm.context.allocator.num_used:
            assert time.monotonic() < deadline, "a request outlived its client"
            time.sleep(0.005)


def an_llm(model: Any, **options: Any) -> LLM:
    config = InferenceConfig(
        kv_cache_blocks=1024,
        max_requests=16,
        max_tokens_per_step=256,
        advanced=Advanced(block_size_tokens=BLOCK, verify_model=False),
    )
    return LLM(model, TOKENIZER, config, **options)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    model = make_model("qwen3", vocab_size=len(TOKENIZER), num_hidden_layers=2, max_position_embeddings=2048)
    with an_llm(model) as llm:
        config = ServerConfig(port=0, api_key=KEY, served_model_name="m", max_open_requests=8)
        yield House(llm, llm.serve(config, blocking=False))


@pytest.fixture(scope="module")
def client(house: House) -> Iterator[OpenAI]:
    with house.client() as made:
        yield made


@pytest.fixture(scope="module")
def lenient(house: House) -> Iterator[OpenAI]:
    """For what OpenAI sends too, although its client's types have no null there: how a completion's chunk has not ended
    yet, and the log-prob of a prompt's first token."""
    with house.client(_strict_response_validation=False) as made:
        yield made


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**({"model": "m", "prompt": PROMPT, "max_tokens": 12} | fields))


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**({"model": "m", "messages": HI, "max_tokens": 12} | fields))


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(c.delta.content or "" if hasattr(c, "delta") else c.text for c in choices)


def same(rollout: dict[str, Any], request: Any) -> None:
    """A reply's ids are those of the request, its log-probs too but for the order of additions."""
    assert rollout["prompt_token_ids"] == request.prompt_tokens
    assert rollout["token_ids"] == request.generated_tokens
    assert rollout["log_probs"] == pytest.approx(request.generated_log_probs, abs=1e-4)
    assert rollout["policy_versions"] == request.policy_versions[len(request.prompt_tokens) :].tolist()


# --- the same as in this process --------------------------------------------------------------------------------------


def test_replies_are_what_the_same_seed_gives_in_this_process(house: House, client: OpenAI):
    ours = house.says(PROMPT, 12, seed=7, top_p=0.9, temperature=0.8)
    completion = complete(client, seed=7, top_p=0.9, temperature=0.8)
    assert isinstance(completion, Completion)
    assert completion.choices[0].text == ours.generated_text
    same(completion.choices[0].rollout, ours)
    reply = chat(client, seed=7)
    assert isinstance(reply, ChatCompletion)
    rollout = reply.choices[0].message.rollout  # type: ignore[attr-defined]
    assert rollout["prompt_token_ids"] == TOKENIZER.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]
    same(rollout, house.says(rollout["prompt_token_ids"], 12, seed=7))
    assert reply.policy_version == house.llm.policy_version  # type: ignore[attr-defined]
    assert reply.usage is not None
    assert reply.usage.total_tokens == len(rollout["prompt_token_ids"]) + len(rollout["token_ids"])


def test_temperature_0_is_models_generate(house: House, client: OpenAI):
    (choice,) = complete(client, temperature=0, extra_body={"ignore_eos": True}).choices
    assert choice.rollout["token_ids"] == greedy(house.llm.model, choice.rollout["prompt_token_ids"], 12)


def test_penalties_and_our_own_fields_reach_the_sampler(house: House, client: OpenAI):
    openais: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "seed": 3}
    ours: dict[str, Any] = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 5, "ignore_eos": True}
    reply = complete(client, **openais, extra_body=ours)
    same(reply.choices[0].rollout, house.says(PROMPT, 12, **openais, **ours))
    assert reply.choices[0].rollout["token_ids"] != complete(client, seed=3).choices[0].rollout["token_ids"]


def test_log_probs_are_the_trainers_own(house: House, client: OpenAI):
    reply = chat(client, logprobs=True, top_logprobs=4, n=2, seed=5)
    for choice in reply.choices:
        rollout = choice.message.rollout
        tokens = rollout["prompt_token_ids"] + rollout["token_ids"]
        truth = trainer_logprobs(house.llm.model, tokens)[len(rollout["prompt_token_ids"]) - 1 :].tolist()
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == pytest.approx(truth, abs=1e-4)
        assert rollout["log_probs"] == pytest.approx(truth, abs=1e-4)
        for entry in entries:
            top = [each.logprob for each in entry.top_logprobs]
            assert len(top) == 4
            assert top == sorted(top, reverse=True)
            assert top[0] >= entry.logprob - 1e-6


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_adds_up_to_the_reply_chat_and_completion(client: OpenAI, lenient: OpenAI):
    asked: dict[str, Any] = {"seed": 9, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 20}
    whole = chat(client, **asked)
    chunks: list[ChatCompletionChunk] = list(chat(client, **asked, stream=True, stream_options={"include_usage": True}))
    assert all(isinstance(chunk, ChatCompletionChunk) for chunk in chunks)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        assert text_of(chunks, choice.index) == choice.message.content
        for name in ("prompt_token_ids", "token_ids", "policy_versions"):
            assert joined(chunks, name, choice.index) == choice.message.rollout[name]
        parts = [
            c.logprobs.content for chunk in chunks for c in chunk.choices if c.index == choice.index and c.logprobs
        ]
        assert [entry.token for part in parts for entry in part] == [e.token for e in choice.logprobs.content]
    (text,) = complete(client, seed=9, max_tokens=20).choices
    pieces = list(complete(lenient, seed=9, max_tokens=20, stream=True))
    assert text_of(pieces) == text.text
    assert joined(pieces, "token_ids") == text.rollout["token_ids"]


def test_a_stop_string_over_several_tokens_is_in_no_chunk(client: OpenAI, lenient: OpenAI):
    asked: dict[str, Any] = {"seed": 21, "logit_bias": LETTERS, "max_tokens": 30}
    text = complete(client, **asked).choices[0].text
    assert len(text) == 30
    stop = text[17:21]
    before = text[: text.index(stop)]
    whole = complete(client, **asked, stop=["!", stop]).choices[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (before, "stop", stop)
    chunks = list(complete(lenient, **asked, stop=stop, stream=True))
    assert text_of(chunks) == before
    assert chunks[-1].choices[0].finish_reason == "stop"
    kept = {"include_stop_str_in_output": True}
    assert complete(client, **asked, stop=stop, extra_body=kept).choices[0].text == before + stop
    assert text_of(list(complete(lenient, **asked, stop=stop, stream=True, extra_body=kept))) == before + stop


def test_who_goes_away_is_not_computed_for(house: House, lenient: OpenAI):
    # With a filter each token is a step of its own.
    endless: dict[str, Any] = {"max_tokens": 1900, "top_p": 0.99, "extra_body": {"ignore_eos": True}}
    aborted = house.llm.stats()["requests_aborted"]
    for create in (chat, complete):
        with gated(house.llm.engine):
            with create(lenient, **endless, stream=True) as stream:
                next(iter(stream))
            with pytest.raises(openai.APITimeoutError):
                create(lenient.with_options(timeout=0.1), **endless)
            house.empties()
    assert house.llm.stats()["requests_aborted"] == aborted + 4


def test_versions_and_staleness_follow_the_weights(house: House, client: OpenAI):
    version = house.llm.weights_updated()
    reply = chat(client, max_tokens=3, temperature=0)
    assert reply.policy_version == version
    rollout = reply.choices[0].message.rollout
    assert (rollout["policy_versions"], rollout["policy_staleness"]) == ([version] * 3, [0] * 3)


# --- conversations and tools ------------------------------------------------------------------------------------------


def test_a_conversation_goes_on_from_ids_that_its_text_does_not_have(client: OpenAI):
    messages, so_far = list(HI), []
    for turn in range(3):
        reply = chat(client, messages=messages, logit_bias=UNMERGED, seed=turn)
        message = reply.choices[0].message
        rollout = message.rollout
        assert rollout["prompt_token_ids"][: len(so_far)] == so_far
        assert TOKENIZER(message.content)["input_ids"] != rollout["token_ids"], "the text would be tokenised so again"
        assert not turn or reply.usage.prompt_tokens_details.cached_tokens > 0
        so_far = rollout["prompt_token_ids"] + rollout["token_ids"]
        messages += [message.model_dump(), {"role": "user", "content": "and the next?"}]
    plainly = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert plainly[: len(so_far)] != so_far


# --- errors -----------------------------------------------------------------------------------------------------------


def test_a_conversation_that_leaves_no_room_is_refused(client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="leaves no room") as caught:
        chat(client, messages=[{"role": "user", "content": "a=" * 1100}])
    assert caught.value.param == "messages"


def test_a_wrong_key_and_a_wrong_model_have_their_exceptions(house: House, client: OpenAI):
    with house.client(api_key="sk-wrong") as stranger, pytest.raises(openai.AuthenticationError) as refused:
        complete(stranger)
    assert refused.value.code == "invalid_api_key"
    for ask in (chat, complete):
        with pytest.raises(openai.NotFoundError) as missing:
            ask(client, model="gpt-9")
        assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    assert client.models.retrieve("m").id == "m"


def test_a_request_that_takes_too_long_is_told_so(house: House, client: OpenAI):
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, max_tokens=1900, top_p=0.99, extra_body={"ignore_eos": True, "timeout_s": 0.05})
    assert caught.value.status_code == 408
    house.empties()


def test_a_lost_coordinator_is_told_to_who_asks_and_who_watches():
    model = make_model("qwen3", vocab_size=len(TOKENIZER), num_hidden_layers=1)
    with an_llm(model, use_coordinator=True) as llm:
        there = House(llm, llm.serve(ServerConfig(port=0, served_model_name="m"), blocking=False))
        job = llm.service.member.coordinator
        assert job is not None
        assert job.handle is not None
        with there.client() as client:
            assert chat(client, max_tokens=1).choices[0].finish_reason == "length"
            job.handle.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_S
            while (health := httpx.get(f"{there.server.url}/health")).status_code == 200:
                assert time.monotonic() < deadline, "nobody noticed"
                time.sleep(0.01)
            assert (health.status_code, health.json()["status"]) == (503, "coordinator_lost")
            with pytest.raises(openai.APIStatusError) as caught:
                chat(client)
            assert (caught.value.status_code, caught.value.code) == (503, "coordinator_lost")
