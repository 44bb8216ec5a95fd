"""Real clients against a live server over a small random model, whose calls and JSON are held to their schema by sampling.

Clients that are not installed are skipped.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import torch
from pydantic import BaseModel

from rollout import LLM, ServerConfig
from rollout.errors import InvalidRequestError
from tests.engines import PATIENCE_S
from tests.models import trainer_logprobs
from tests.server.real import HI, TOKENIZER, small_llm, tiny
from trainer_hooks.verifiers import trace_batch

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
LONG = 600


class City(BaseModel, extra="forbid"):
    """Small enough that a random model completes it."""

    rain: bool


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with small_llm(tiny(eos_token_id=TOKENIZER.eos_token_id)) as made:
        yield made


@pytest.fixture(scope="module")
def url(llm: LLM) -> str:
    return llm.serve(ServerConfig(port=0, served_model_name="m"), blocking=False).url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def module(name: str) -> Any:
    return pytest.importorskip(name, exc_type=ImportError)


CHAT, TEXT, TOKENS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"


# --- clients ----------------------------------------------------------------------------------------------------------


def test_openai_parses_json_and_goes_on_from_a_call(client: openai.OpenAI):
    parsed = client.chat.completions.parse(model="m", messages=HI, response_format=City, max_tokens=LONG, temperature=0)
    assert isinstance(parsed.choices[0].message.parsed, City)
    first = client.chat.completions.create(
        model="m", messages=HI, tools=[TOOL], tool_choice="required", max_tokens=LONG, temperature=0
    )
    (call,) = first.choices[0].message.tool_calls or []
    assert set(json.loads(call.function.arguments)) == {"city"}
    messages = [*HI, first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = client.chat.completions.create(model="m", messages=messages, tools=[TOOL], max_tokens=4)
    assert second.choices[0].message.rollout["retokenized"] is None
    earlier = first.choices[0].message.rollout
    sampled = earlier["prompt_token_ids"] + earlier["token_ids"]
    assert second.choices[0].message.rollout["prompt_token_ids"][: len(sampled)] == sampled


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "zzz"}}])
def test_a_forced_call_is_of_an_offered_function_with_its_arguments(client: openai.OpenAI, choice: Any):
    """The model is random: nothing but the constraint makes it call this function."""
    tool = {
        "name": "zzz",
        "parameters": {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]},
    }
    tools: Any = [{"type": "function", "function": tool}]
    for seed in range(3):
        reply = client.chat.completions.create(
            model="m", messages=HI, tools=tools, tool_choice=choice, max_tokens=LONG, seed=seed
        )
        (call,) = reply.choices[0].message.tool_calls or []
        assert call.function.name == "zzz"
        assert set(json.loads(call.function.arguments)) == {"rain"}
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (None, "tool_calls")
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        client.chat.completions.create(
            model="m", messages=HI, tools=tools, tool_choice=choice, extra_body={"structured_outputs": {"regex": "a"}}
        )


@pytest.mark.parametrize(("path", "fields", "param", "said"), [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format",
     "does not compile: Unimplemented keys"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}],
            "tool_choice": "required"}, "tools", "does not"),
    (CHAT, {"structured_outputs": {"regex": "(a"}}, "structured_outputs", "does not compile: at 1(8): invalid regex"),
    (TEXT, {"structured_outputs": {"json": False}}, "structured_outputs", "does not compile: Unsatisfiable schema"),
    (TEXT, {"structured_outputs": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}},
     "structured_outputs", "allows no first token"),
    (TEXT, {"structured_outputs": {"choice": ["a" * 2**18]}}, "structured_outputs", "choices of 262153 characters"),
    (TOKENS, {"sampling_params": {"structured_outputs": {"grammar": "start: x"}}}, "sampling_params.structured_outputs",
     "does not compile: at 1(8): unknown name"),
    (TEXT, {"stop": [""]}, "stop", "none of them empty"),
    (TEXT, {"return_sampling_mask": True}, "return_sampling_mask", "return_sampling_mask without top_k"),
])  # fmt: skip
def test_errors_name_what_a_client_has_sent(http: httpx.Client, path: str, fields: Any, param: str | None, said: str):
    prompt = {CHAT: {"messages": HI}, TEXT: {"prompt": [5]}, TOKENS: {"token_ids": [5]}}[path]
    refused = http.post(path, json=prompt | fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert said in error["message"]
    python = (
        "llguidance",
        "x-guidance",
        "NoExtensionBias",
        "SamplingParams",
        "StructuredOutput",
        "should",
        "kept_tokens",
    )
    assert not any(word in error["message"] for word in python)


def test_litellm_takes_two_turns(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    module("mcp")  # which litellm imports and does not require
    litellm = module("litellm")
    asked = {
        "model": "openai/m",
        "api_base": f"{url}/v1",
        "api_key": "any",
        "tools": [TOOL],
        "max_tokens": LONG,
        "temperature": 0,
    }
    first = litellm.completion(messages=HI, tool_choice="required", **asked).choices[0].message
    messages = [*HI, first.model_dump(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}]
    second = litellm.completion(messages=messages, **asked | {"max_tokens": 4}).choices[0]
    assert second.finish_reason in ("stop", "length")


def test_openai_agents_by_chat_completions(url: str):
    agents = module("agents")
    agents.set_tracing_disabled(True)
    calls: list[bool] = []

    @agents.function_tool
    def get_weather(today: bool) -> str:
        calls.append(today)
        return "rain"

    async def run() -> Any:
        made = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", timeout=PATIENCE_S)
        settings = agents.ModelSettings(tool_choice="required", max_tokens=LONG, temperature=0.0)
        model = agents.OpenAIChatCompletionsModel("m", made)
        # A call in the first turn, and in the second, where the library lets it choose again, a reply of its type.
        agent = agents.Agent(name="a", model=model, tools=[get_weather], model_settings=settings, output_type=City)
        result = await agents.Runner.run(agent, "hi", max_turns=4)
        streamed = agents.Runner.run_streamed(agent, "hi", max_turns=4)
        async for _ in streamed.stream_events():
            pass
        return result, streamed

    for result in asyncio.run(run()):
        assert isinstance(result.final_output, City)
    assert len(calls) >= 2


def test_trls_client_generates_chats_and_scores(llm: LLM, url: str, monkeypatch: pytest.MonkeyPatch):
    vllm_client = module("trl.generation.vllm_client")
    monkeypatch.setattr(vllm_client, "is_vllm_available", lambda: True)
    made = vllm_client.VLLMClient(base_url=url)
    for found in (made.generate([[5, 6], [7, 8, 9]], n=2, max_tokens=5, logprobs=0), made.chat([HI], max_tokens=5)):
        assert [len(ids) for ids in found["completion_ids"]] == [len(rows) for rows in found["logprobs"]]
        assert [[row[0] for row in rows] for rows in found["logprob_token_ids"]] == found["completion_ids"]
    sequence = [5, 6, 7, 8, 9]
    scored = made.get_sequence_logprobs([sequence], [2], top_logprobs=100)
    expected = trainer_logprobs(llm.model, sequence)[1:].tolist()
    assert [row[0] for row in scored["actual_logprobs"][0]] == pytest.approx(expected, abs=1e-5)


def test_renderers_client_as_verifiers_trains_with_it(url: str):
    generate, renderer = module("renderers.client").generate, module("renderers.default").DefaultRenderer(TOKENIZER)

    async def ask() -> Any:
        made = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any")
        return await generate(client=made, renderer=renderer, messages=HI, model="m", cache_salt="1",
                              sampling_params={"max_tokens": 5}, extra_headers={"X-Session-ID": "s"})  # fmt: skip

    found = asyncio.run(ask())
    assert 0 < len(found["completion_ids"]) == len(found["completion_logprobs"]) <= 5
    assert found["prompt_ids"] == TOKENIZER.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)


@pytest.fixture
def verifiers_agent(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Maker of an agent of verifiers that goes on from the server's first reply in two ways."""
    vf = module("verifiers.v1")

    class TwoWays(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc, name-defined]
        NEEDS_CONTAINER = EXECUTES_CODE = False

        async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, *_: Any) -> Any:
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as made:
                first = await made.chat.completions.create(model=ctx.model, messages=HI)
                said: Any = {"role": "assistant", "content": first.choices[0].message.content}
                for city in ("Oslo", "Rome"):
                    asked: Any = {"role": "user", "content": f"and in {city}?"}
                    await made.chat.completions.create(model=ctx.model, messages=[*HI, said, asked])
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    plugin = ModuleType("two_ways")  # verifiers loads a harness by the name of its module
    plugin.__dict__.update(TwoWays=TwoWays, __all__=["TwoWays"])
    monkeypatch.setitem(sys.modules, "two_ways", plugin)

    def make(client: str, **options: Any) -> Any:
        config = {
            "model": "m", "harness": {"id": "two_ways"}, "runtime": {"type": "subprocess"},
            "client": {"type": client, "base_url": f"{url}/v1", "api_key_var": "ROLLOUT_API_KEY"} | options,
            # Digits, which the tokenizer does not merge, so that a reply's text has one tokenization.
            "sampling": {"temperature": 1.0, "max_tokens": 8, "structured_outputs": {"regex": "[0-9]{3}"}},
        }  # fmt: skip
        return vf.Agent(vf.AgentConfig.model_validate(config))

    return make


def played(agent: Any, times: int) -> list[Any]:
    vf = module("verifiers.v1")

    async def play() -> list[Any]:
        return [await agent.run(vf.Task(vf.TaskData(prompt="the weather?"))) for _ in range(times)]

    traces = asyncio.run(play())
    assert [(trace.ok, trace.errors) for trace in traces] == [(True, [])] * times
    return traces


def test_verifiers_evaluation_client_reads_replies_and_usage(verifiers_agent: Any):
    (trace,) = played(verifiers_agent("eval"), 1)
    assert all(re.fullmatch("[0-9]{3}", node.message.content) for node in trace.nodes if node.sampled)
    assert len(trace.branches) == 2
    assert [(call.finish_reason, call.usage.completion_tokens) for call in trace.calls] == [("stop", 4)] * 3
    with pytest.raises(InvalidRequestError, match="training client"):
        trace_batch([trace], policy_version=0, pad_token_id=TOKENIZER.pad_token_id)


def test_verifiers_training_client_brings_each_sampled_token_once_with_its_log_prob(
    llm: LLM, verifiers_agent: Any, tmp_path: Path
):
    TOKENIZER.save_pretrained(tmp_path)
    agent = verifiers_agent("train", renderer={"name": "default"}, renderer_model_name=str(tmp_path))
    traces = played(agent, 2)
    batch = trace_batch(traces, policy_version=3, pad_token_id=TOKENIZER.pad_token_id, n=2)
    assert batch.episode_ids.tolist() == [0, 0, 1, 1]
    replies = [node.message.content for trace in traces for node in trace.nodes if node.sampled]
    sampled = [TOKENIZER.decode(ids[mask]) for ids, mask in zip(batch.input_ids, batch.response_mask, strict=True)]
    end = TOKENIZER.eos_token
    assert sampled == [f"{replies[0]}{end}{replies[1]}{end}", f"{replies[2]}{end}",
                       f"{replies[3]}{end}{replies[4]}{end}", f"{replies[5]}{end}"]  # fmt: skip
    assert batch.policy_versions[batch.response_mask].unique().tolist() == [3]
    digits = torch.tensor(TOKENIZER.convert_tokens_to_ids(list("0123456789")))
    for ids, mask, logprobs in zip(batch.input_ids, batch.response_mask, batch.logprobs, strict=True):
        free = mask & torch.isin(ids, digits)  # after three digits only the end is allowed
        with torch.no_grad():
            among = llm.model(ids[None]).logits[0].roll(1, 0)[:, digits].log_softmax(-1)
        expected = among[free].gather(1, torch.searchsorted(digits, ids[free])[:, None])[:, 0]
        torch.testing.assert_close(logprobs[free], expected, atol=1e-5, rtol=0)
        assert not logprobs[mask & ~free].any()


def test_lm_evals_log_likelihoods_are_the_models(llm: LLM, url: str, monkeypatch: pytest.MonkeyPatch):
    models = module("lm_eval.models.openai_completions")
    instance = module("lm_eval.api.instance").Instance
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    made = models.LocalCompletionsAPI(
        base_url=f"{url}/v1/completions", model="m", tokenizer_backend="remote", tokenized_requests=True, max_length=512
    )
    pairs = [("the weather in", " Paris is fine"), ("in Oslo", " it rains"), ("ü", "🙂 x")]
    asked = [instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
    for pair, (found, _) in zip(pairs, made.loglikelihood(asked, disable_tqdm=True), strict=True):
        context = TOKENIZER(pair[0], add_special_tokens=False)["input_ids"]
        both = TOKENIZER("".join(pair), add_special_tokens=False)["input_ids"]
        expected = float(trainer_logprobs(llm.model, both)[len(context) - 1 :].sum())
        assert math.isclose(found, expected, abs_tol=1e-5)
