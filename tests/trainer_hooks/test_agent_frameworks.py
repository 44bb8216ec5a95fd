"""Tests of the adapters to tinker-cookbook, verl, OpenEnv and verifiers.

None of the four is installed beside the tests: their types are stand-ins of the documented fields, which refuse any other.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rollout import EpisodeBatch
from rollout.errors import ConfigError, EngineStateError, InvalidRequestError
from rollout.manager.manager import RolloutManager
from tests.models import make_model, make_tokenizer
from tests.rollouts import make_rollout, tokens
from trainer_hooks.openenv import model_step
from trainer_hooks.tinker import token_completer
from trainer_hooks.verifiers import trace_batch
from trainer_hooks.verl import ServerClient

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}<tool_call>arguments</tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.content }};{% endfor %}"
)


@pytest.fixture(scope="module")
def rollout():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATE
    with make_rollout(make_model("qwen3", num_hidden_layers=1), tokenizer) as manager:
        yield manager


def install(monkeypatch: pytest.MonkeyPatch, name: str, **types: type) -> None:
    """Make a stand-in of a module, and of the packages around it, importable."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    for each, kind in types.items():
        monkeypatch.setattr(sys.modules[name], each, kind, raising=False)


# --- tinker-cookbook 0.6 ------------------------------------------------------------------------------------------------


@dataclass
class TokensWithLogprobs:
    tokens: list[int]
    maybe_logprobs: list[float] | None
    stop_reason: str = "stop"


def prompt_of(*ids: int) -> Any:
    return SimpleNamespace(to_ints=lambda: list(ids))  # tinker.ModelInput


def test_a_token_completer_returns_what_the_manager_samples(rollout: RolloutManager, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "tinker_cookbook.completers", TokensWithLogprobs=TokensWithLogprobs)
    complete = token_completer(rollout.sample, tokens(6, temperature=0))
    whole, short = asyncio.run(both(complete(prompt_of(5, 6), []), complete(prompt_of(5, 6), [], max_tokens=2)))
    expected = rollout.generate([[5, 6]], tokens(6, temperature=0))[0]
    assert (whole.tokens, whole.stop_reason) == (expected.generated_tokens, "length")
    assert whole.maybe_logprobs == pytest.approx(expected.generated_log_probs, abs=1e-5)
    assert short.tokens == whole.tokens[:2]
    stopped = asyncio.run(both(complete(prompt_of(5, 6), [whole.tokens[0]])))[0]
    assert (stopped.tokens, stopped.stop_reason) == (whole.tokens[:1], "stop")


async def both(*awaited: Any) -> list[Any]:
    return await asyncio.gather(*awaited)


# --- verl ---------------------------------------------------------------------------------------------------------------


@dataclass
class TokenOutput:
    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


def test_an_agent_loop_of_verl_samples_turns_of_an_episode(rollout: RolloutManager, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "verl.workers.rollout.replica", TokenOutput=TokenOutput)
    given = {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    outputs = []

    async def play(episode: Any) -> float:
        server = ServerClient(episode.sample, tokens(3))
        prompt = [5, 6]
        for _ in range(2):
            made = await server.generate("id", prompt_ids=prompt, sampling_params=given, image_data=None)
            outputs.append(made)
            prompt = [*prompt, *made.token_ids, 7]
        return 1.0

    batch = rollout.run(["task"], play, on_error="raise")
    assert (batch.response_mask.sum(), len(batch)) == (6, 1)
    assert batch.input_ids[batch.response_mask].tolist() == [token for each in outputs for token in each.token_ids]
    assert batch.logprobs[batch.response_mask].tolist() == pytest.approx(outputs[0].log_probs + outputs[1].log_probs)
    assert [each.extra_fields for each in outputs] == [{"policy_versions": [rollout.policy_version] * 3}] * 2
    assert batch.episodes[0].turns[0].sampling_params.temperature == 0.5


def test_a_completion_of_no_tokens_has_no_versions(rollout: RolloutManager, monkeypatch: pytest.MonkeyPatch):
    install(monkeypatch, "verl.workers.rollout.replica", TokenOutput=TokenOutput)
    asked = ServerClient(rollout.sample, tokens(3)).generate("id", prompt_ids=[5], sampling_params={"max_tokens": 0})
    assert asyncio.run(asked).extra_fields == {"policy_versions": []}


@pytest.mark.parametrize(
    ("named", "inputs", "error"),
    [({"beams": 2}, {}, ConfigError), ({}, {"image_data": ["picture"]}, InvalidRequestError)],
)
def test_what_verl_asks_for_in_vain_is_named(rollout, monkeypatch, named, inputs, error):
    install(monkeypatch, "verl.workers.rollout.replica", TokenOutput=TokenOutput)
    asked = ServerClient(rollout.sample, tokens(3)).generate("id", prompt_ids=[5], sampling_params=named, **inputs)
    with pytest.raises(error, match=next(iter([*named, *inputs]))):
        asyncio.run(asked)


# --- OpenEnv 0.10 -------------------------------------------------------------------------------------------------------


@dataclass
class ToolCall:
    id: str
    name: str
    args: dict[str, Any]


@dataclass
class LLMResponse:
    content: str
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass
class ModelStepResult:
    response: LLMResponse
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@pytest.fixture
def openenv(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "openenv.core.harness", ModelStepResult=ModelStepResult)
    install(monkeypatch, "openenv.core.llm_client", LLMResponse=LLMResponse, ToolCall=ToolCall)


def test_a_harness_of_openenv_plays_turns_of_an_episode(rollout: RolloutManager, openenv: None):
    steps: list[ModelStepResult] = []

    def harness(step: Any, task: str) -> None:  # HarnessAdapter.run_white_box
        messages = [{"role": "user", "content": task}]
        for _ in range(2):
            steps.append(step(messages, [], {"temperature": 0.5}))
            messages += [{"role": "assistant", "content": steps[-1].response.content}, {"role": "user", "content": "b"}]

    async def play(episode: Any) -> float:
        await asyncio.to_thread(harness, model_step(episode.sample, rollout.tokenizer, tokens(3)), episode.task)
        return 1.0

    batch = rollout.run(["a"], play, on_error="raise")
    assert [each.completion_ids for each in steps] == [each.generated_tokens for each in batch.episodes[0].turns]
    assert [each.logprobs for each in steps] == [each.generated_log_probs for each in batch.episodes[0].turns]
    assert steps[0].prompt_ids == rollout.tokenizer("a;")["input_ids"]
    assert steps[0].response.content == rollout.tokenizer.decode(steps[0].completion_ids, skip_special_tokens=True)
    assert batch.episodes[0].turns[0].sampling_params.temperature == 0.5


def test_tool_calls_are_read_in_the_format_of_the_template(rollout, openenv, monkeypatch):
    said = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    asked: list[list[int]] = []

    async def sample(prompt: list[int], params: Any) -> Any:
        asked.append(prompt)
        return SimpleNamespace(prompt_tokens=prompt, generated_tokens=[5, 6], generated_log_probs=[-1.0, -2.0])

    monkeypatch.setattr(rollout.tokenizer, "decode", lambda ids, **_: said)
    add = SimpleNamespace(name="add", description="adds", input_schema={"type": "object", "properties": {}})

    async def ask() -> Any:
        step = model_step(sample, rollout.tokenizer, tokens(3))
        with pytest.raises(EngineStateError, match=r"asyncio\.to_thread"):
            step([{"role": "user", "content": "a"}], [add], {})
        return await asyncio.to_thread(step, [{"role": "user", "content": "a"}], [add], {})

    response = asyncio.run(ask()).response
    assert [(call.name, call.args) for call in response.tool_calls] == [("add", {"a": 1})]
    assert response.content == "so"
    assert len(asked) == 1


# --- verifiers 0.4 ------------------------------------------------------------------------------------------------------


def node(ids: list[int], sampled: int = 0, logprobs: list[float] | None = None) -> Any:
    """A `MessageNode` whose last `sampled` tokens the model sampled."""
    made = [-float(token) for token in ids[len(ids) - sampled :]] if logprobs is None else logprobs
    return SimpleNamespace(
        token_ids=ids, mask=[False] * (len(ids) - sampled) + [True] * sampled, logprobs=made if sampled else [],
        sampled=sampled > 0,
    )  # fmt: skip


def trace(*branches: list[Any], reward: float = 0.0, error: str | None = None) -> Any:
    return SimpleNamespace(
        branches=[SimpleNamespace(nodes=nodes, trainable=True) for nodes in branches],
        ok=error is None,
        last_error=error and SimpleNamespace(type="ToolError", message=error),
        reward=reward,
        task=SimpleNamespace(data="task"),
    )


def test_traces_become_a_batch_in_which_a_token_that_branches_share_is_marked_once():
    user, shared = node([5, 6]), node([7, 8, 9], sampled=2)
    whole = trace(
        [user, shared, node([10]), node([11, 12], sampled=1)], [user, shared, node([20]), node([21], sampled=1)], reward=2.0
    )  # fmt: skip
    whole.branches.append(SimpleNamespace(nodes=[node([5]), node([30], sampled=1)], trainable=False))
    failed = trace([node([5]), node([6], sampled=1)], error="no such tool")
    batch = trace_batch([whole, failed], policy_version=3, pad_token_id=0, n=2)
    assert isinstance(batch, EpisodeBatch)
    assert batch.episode_ids.tolist() == [0, 0, 1]
    assert batch.input_ids[0].tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert [row[mask].tolist() for row, mask in zip(batch.input_ids, batch.response_mask, strict=True)] == [
        [8, 9, 12], [21], [],
    ]  # fmt: skip
    assert torch.equal(batch.logprobs[batch.response_mask], -batch.input_ids[batch.response_mask].float())
    assert batch.policy_versions[batch.response_mask].tolist() == [3] * 4
    assert batch.rewards.nan_to_num(-1.0).tolist() == [2.0, -1.0]
    assert "no such tool" in str(batch.errors)


@pytest.mark.parametrize(
    "said",
    [node([6, 7], sampled=2, logprobs=[]), SimpleNamespace(token_ids=[], mask=[], logprobs=[], sampled=True)],
    ids=["no log-probs", "no tokens"],
)
def test_a_trace_of_the_evaluation_client_is_refused(said: Any):
    evaluated = trace([node([5]), said])
    with pytest.raises(InvalidRequestError, match=r"traces\[0\].*training client"):
        trace_batch([evaluated], policy_version=0, pad_token_id=0)
