"""Tests of OpenAI's client against the real server and a real model: replies equal the engine's in-process results."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from rollout import LLM, SamplingParams, ServerConfig
from tests.engines import PATIENCE_S, gated, until
from tests.models import greedy, trainer_logprobs
from tests.server.real import HI, TOKENIZER, emptied, small_llm, tiny
from tests.server.scripted import joined

KEY = "sk-of-this-test"
PROMPT = "the weather in"
LETTERS = {str(TOKENIZER.convert_tokens_to_ids(letter)): 100 for letter in "abcdefghijklmnopqrstuvwxyz"}
"""`logit_bias` that leaves nothing but single letters."""
UNMERGED = {token: bias for token, bias in LETTERS.items() if TOKENIZER.decode(int(token)) in "the"}
"""The same of three letters, so that hardly any text of them is tokenised into what it was made of."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with small_llm(tiny(num_hidden_layers=2)) as made:
        yield made


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[OpenAI]:
    config = ServerConfig(port=0, api_key=KEY, served_model_name="m", max_open_requests=8)
    url = llm.serve(config, blocking=False).url
    with OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def complete(client: OpenAI, **fields: Any) -> Any:
    return client.completions.create(**({"model": "m", "prompt": PROMPT, "max_tokens": 12} | fields))


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**({"model": "m", "messages": HI, "max_tokens": 12} | fields))


def text_of(chunks: list[Any]) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def same(rollout: dict[str, Any], request: Any) -> None:
    """A reply's ids are those of the request, its log-probs too but for the order of additions."""
    assert rollout["prompt_token_ids"] == request.prompt_tokens
    assert rollout["token_ids"] == request.generated_tokens
    assert rollout["log_probs"] == pytest.approx(request.generated_log_probs, abs=1e-4)
    assert rollout["policy_versions"] == request.policy_versions[len(request.prompt_tokens) :].tolist()


def test_replies_are_what_the_same_seed_gives_in_this_process(llm: LLM, client: OpenAI):
    options: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": -0.5, "seed": 7, "top_p": 0.9}
    ours: dict[str, Any] = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3, "min_tokens": 5, "ignore_eos": True}
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=12, **options, **ours))[0]
    completion = complete(client, **options, extra_body=ours)
    assert completion.choices[0].text == expected.generated_text
    same(completion.choices[0].rollout, expected)
    reply = chat(client, seed=7)
    rollout = reply.choices[0].message.rollout
    assert rollout["prompt_token_ids"] == TOKENIZER.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]
    same(rollout, llm.generate(rollout["prompt_token_ids"], SamplingParams(max_tokens=12, seed=7))[0])
    (choice,) = complete(client, temperature=0, extra_body={"ignore_eos": True}).choices
    assert choice.rollout["token_ids"] == greedy(llm.model, choice.rollout["prompt_token_ids"], 12)


def test_log_probs_are_the_trainers_own(llm: LLM, client: OpenAI):
    reply = chat(client, logprobs=True, top_logprobs=4, n=2, seed=5)
    for choice in reply.choices:
        rollout = choice.message.rollout
        tokens = rollout["prompt_token_ids"] + rollout["token_ids"]
        truth = trainer_logprobs(llm.model, tokens)[len(rollout["prompt_token_ids"]) - 1 :].tolist()
        entries = choice.logprobs.content
        assert [entry.logprob for entry in entries] == pytest.approx(truth, abs=1e-4)
        assert rollout["log_probs"] == pytest.approx(truth, abs=1e-4)
        for entry in entries:
            top = [each.logprob for each in entry.top_logprobs]
            assert len(top) == 4
            assert top == sorted(top, reverse=True)
            assert top[0] >= entry.logprob - 1e-6


def test_a_stop_string_over_several_tokens_is_in_no_chunk(client: OpenAI):
    asked: dict[str, Any] = {"seed": 21, "logit_bias": LETTERS, "max_tokens": 30}
    text = complete(client, **asked).choices[0].text
    assert len(text) == 30
    stop = text[17:21]
    before = text[: text.index(stop)]
    whole = complete(client, **asked, stop=["!", stop]).choices[0]
    assert (whole.text, whole.finish_reason, whole.stop_reason) == (before, "stop", stop)
    chunks = list(complete(client, **asked, stop=stop, stream=True))
    assert text_of(chunks) == before
    assert joined(chunks, "token_ids") == whole.rollout["token_ids"]
    assert chunks[-1].choices[0].finish_reason == "stop"
    kept = {"include_stop_str_in_output": True}
    assert complete(client, **asked, stop=stop, extra_body=kept).choices[0].text == before + stop
    assert text_of(list(complete(client, **asked, stop=stop, stream=True, extra_body=kept))) == before + stop


def test_a_sampling_mask_holds_what_every_token_was_drawn_from_whole_and_streamed(client: OpenAI):
    fields = {"prompt": "abcdef", "top_p": 0.7, "max_tokens": 6, "seed": 3}
    asked = fields | {"extra_body": {"return_sampling_mask": True, "ignore_eos": True}}
    whole = complete(client, **asked).choices[0].model_dump()
    assert len(whole["sampling_mask"]) == 6
    assert all(token in ids for token, ids in zip(whole["rollout"]["token_ids"], whole["sampling_mask"], strict=True))
    chunks = [chunk.choices[0].model_dump() for chunk in complete(client, **asked, stream=True) if chunk.choices]
    assert [ids for chunk in chunks for ids in chunk.get("sampling_mask") or ()] == whole["sampling_mask"]
    assert "sampling_mask" not in complete(client, **fields).choices[0].model_dump()


def test_who_goes_away_is_not_computed_for(llm: LLM, client: OpenAI):
    # With a filter each token is a step of its own.
    endless: dict[str, Any] = {"max_tokens": 1900, "top_p": 0.99, "extra_body": {"ignore_eos": True}}
    aborted = llm.stats()["requests_aborted"]
    with gated(llm.engine):
        with chat(client, **endless, stream=True) as stream:
            next(iter(stream))
        with pytest.raises(openai.APITimeoutError):
            complete(client.with_options(timeout=0.1), **endless)
        emptied(llm)
    assert llm.stats()["requests_aborted"] == aborted + 2


def test_versions_and_staleness_follow_the_weights(llm: LLM, client: OpenAI):
    version = llm.weights_updated()
    reply = chat(client, max_tokens=3, temperature=0)
    assert reply.policy_version == version
    rollout = reply.choices[0].message.rollout
    assert (rollout["policy_versions"], rollout["policy_staleness"]) == ([version] * 3, [0] * 3)


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


def test_errors_have_the_exceptions_of_the_client(llm: LLM, client: OpenAI):
    with pytest.raises(openai.BadRequestError, match="leaves no room") as caught:
        chat(client, messages=[{"role": "user", "content": "a=" * 1100}])
    assert caught.value.param == "messages"
    with pytest.raises(openai.AuthenticationError) as refused:
        complete(client.with_options(api_key="sk-wrong"))
    assert refused.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="gpt-9")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    assert client.models.retrieve("m").id == "m"
    with pytest.raises(openai.APIStatusError) as late:
        complete(client, max_tokens=1900, top_p=0.99, extra_body={"ignore_eos": True, "timeout_s": 0.05})
    assert late.value.status_code == 408
    emptied(llm)


def test_a_lost_coordinator_is_told_to_who_asks_and_who_watches():
    with small_llm(use_coordinator=True) as llm:
        url = llm.serve(ServerConfig(port=0, served_model_name="m"), blocking=False).url
        job = llm.service.member.coordinator
        assert job is not None
        assert job.handle is not None
        with OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as client:
            assert chat(client, max_tokens=1).choices[0].finish_reason == "length"
            job.handle.process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health").status_code != 200)
            health = httpx.get(f"{url}/health")
            assert (health.status_code, health.json()["status"]) == (503, "coordinator_lost")
            with pytest.raises(openai.APIStatusError) as caught:
                chat(client)
            assert (caught.value.status_code, caught.value.code) == (503, "coordinator_lost")
