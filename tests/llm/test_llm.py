"""Tests of `LLM` and `AsyncLLM` in one process: results, refusals, failures and aborts."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rollout.distributed.client.futures import RequestFuture
from rollout.errors import (
    ConfigError,
    ConnectionLostError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
)
from rollout.llm.llm import LLM
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from tests.engines import PATIENCE_S, at_random, gated, greedily, shared_model, token_ids, until
from tests.llm.asking import ENDLESS, asyncio_llm, blocking, nothing_is_left, options
from tests.models import greedy, make_model, make_tokenizer

# --- what is given back -----------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_models_own_generate_gives() -> None:
    model, prompts = make_model("llama"), [token_ids(5), token_ids(40, seed=1), token_ids(1, seed=2)]
    with nothing_is_left(), blocking(model) as llm:
        results = llm.generate(prompts, greedily(12))
    assert [result.generated_tokens for result in results] == [greedy(model, prompt, 12) for prompt in prompts]
    assert [result.prompt_tokens for result in results] == prompts


def test_results_come_in_the_order_of_the_prompts_the_samples_of_a_prompt_side_by_side() -> None:
    prompts = [f"prompt {number}" for number in range(20)]
    params = [at_random(1 + number % 7, n=1 + number % 3, seed=number) for number in range(20)]
    with blocking() as llm:
        results = llm.generate(prompts, params)
        alone = [each for prompt, param in zip(prompts, params, strict=True) for each in llm.generate(prompt, param)]
    expected = [
        (prompt, param.max_tokens, sample)
        for prompt, param in zip(prompts, params, strict=True)
        for sample in range(param.n)
    ]
    assert [(each.prompt, len(each.generated_tokens), each.sample_index) for each in results] == expected
    assert [each.generated_tokens for each in results] == [each.generated_tokens for each in alone]


def test_the_blocking_class_always_gives_a_list_and_the_asyncio_one_a_single_result_for_a_single_prompt() -> None:
    async def ask() -> None:
        async with asyncio_llm() as llm:
            single = await llm.generate("abc", greedily(3))
            assert isinstance(single, DynamicInferenceRequest)
            assert len(await llm.generate("abc", greedily(3, n=2))) == 2  # type: ignore[arg-type]
            assert [each.prompt for each in await llm.generate(["abc"], greedily(3))] == ["abc"]  # type: ignore[union-attr]
            assert await llm.generate([]) == []
            with pytest.raises(RuntimeError, match=r"serve\(blocking=False\)"):
                llm.serve()

    asyncio.run(ask())
    with blocking() as llm:
        assert [len(llm.generate(each, greedily(3))) for each in ("abc", [5, 6], ["abc"], [])] == [1, 1, 1, 0]
        assert llm.engine.state is EngineState.RUNNING
        assert llm.context is llm.engine.context
        assert llm.controller is llm.engine.controller
        assert llm.is_primary_rank


def test_a_message_reads_the_same_behind_every_door() -> None:
    """Text parts are one text, a developer is the system to templates that do not know him, an image is refused."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'][0] }}{{ m['content'] }}]{% endfor %}"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with LLM(shared_model("qwen3"), tokenizer, options()) as llm:
        (one,) = llm.generate([{"role": "developer", "content": "a"}, {"role": "user", "content": parts}], greedily(2))
        assert tokenizer.decode(one.prompt_tokens) == "[sa][uhi]"
        with pytest.raises(InvalidRequestError, match=r"prompts\[0\].*messages\[0\].content\[2\].*image_url"):
            llm.generate([{"role": "user", "content": [*parts, image]}], greedily(2))


# --- what cannot be served --------------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_be_served_refuses_the_call_and_queues_nothing() -> None:
    with blocking() as llm:
        for bad, why in (("", "empty"), ([96, 97], "97"), ([5] * 600, "600")):
            with pytest.raises(InvalidRequestError, match=rf"prompts\[1\].*{why}"):
                llm.generate(["good", bad] if isinstance(bad, str) else [[5], bad])
        with pytest.raises(TypeError, match=r"prompts\[1\]"):
            llm.generate(["good", 3])  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="sampling_params has 2 entries for 1 prompts"):
            llm.generate("good", [SamplingParams(), SamplingParams()])
        with pytest.raises(ConfigError, match="on_error='ignore'"):
            llm.generate("good", on_error="ignore")  # type: ignore[arg-type]
        assert llm.num_open == 0
        assert llm.stats()["prompt_tokens"] == 0


def test_the_longest_sequence_is_one_that_the_pool_holds() -> None:
    with blocking(kv_cache_blocks=8) as llm:
        assert llm.max_sequence_length == 32 < llm.engine.parts.max_sequence_length
        params = SamplingParams(max_tokens=llm.max_sequence_length - 10, ignore_eos=True)
        assert len(llm.generate(token_ids(10), params)[0].generated_tokens) == 22


def test_a_request_that_fails_is_named_and_its_neighbours_are_not_harmed() -> None:
    with blocking() as llm:
        llm.engine.pause()
        ahead = llm.submit("ahead", ENDLESS)
        with pytest.raises(RequestTimeoutError, match="timeout_s"):
            llm.generate("late", timeout_s=0.001)
        failed = llm.generate("late", SamplingParams(n=2), timeout_s=0.001, on_error="return")
        assert ["RequestTimeoutError" in str(each.error) for each in failed] == [True, True]
        llm.engine.unpause()
        assert [len(each.generated_tokens) for each in ahead.result(PATIENCE_S)] == [400]


def test_a_sample_that_fails_in_a_step_raises_or_is_returned_with_its_error() -> None:
    model = make_model("gpt2")
    with blocking(model) as llm:
        broken = model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(RequestError, match="ZeroDivisionError"):
            llm.generate("abc")
        assert "ZeroDivisionError" in str(llm.generate("abc", on_error="return")[0].error)
        broken.remove()
        assert llm.generate("abc", greedily(3))[0].error is None


def test_an_engine_that_dies_fails_what_is_open_and_everything_afterwards() -> None:
    model = make_model("gpt2")
    with nothing_is_left(), blocking(model) as llm:
        llm.engine.pause()
        waiting = [llm.submit("abc", ENDLESS) for _ in range(3)]
        model.register_forward_pre_hook(lambda *_: 1 / 0)
        for _ in range(10):
            llm.submit("abc", ENDLESS)
        llm.engine.unpause()
        for pending in waiting:
            assert "ZeroDivisionError" in why_it_failed(pending)
        for _ in range(20):
            try:
                llm.generate("abc", on_error="return")
            except (EngineDeadError, ConnectionLostError):
                break
        with pytest.raises(EngineDeadError):
            llm.generate("abc")
        with pytest.raises(EngineDeadError):
            llm.wait_for_shutdown(PATIENCE_S)


def why_it_failed(pending: RequestFuture) -> str:
    try:
        return str(pending.result(PATIENCE_S)[0].error)
    except ConnectionLostError as exc:
        return str(exc)


# --- aborting ---------------------------------------------------------------------------------------------------------


def test_a_cancelled_task_ends_its_requests() -> None:
    async def ask() -> None:
        async with asyncio_llm() as llm:
            with gated(llm.engine):
                task = asyncio.create_task(llm.generate(["abc", "def"], ENDLESS))
                while llm.stats()["requests_running"] < 2:
                    await asyncio.sleep(0.005)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while llm.num_open or llm.context.allocator.num_used:
                    await asyncio.sleep(0.005)

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


def test_abort_ends_one_request_or_all_and_says_how_many_were_open() -> None:
    with blocking() as llm, gated(llm.engine):
        first, second, third = (llm.submit("abc", ENDLESS) for _ in range(3))
        assert llm.abort(first.request_id) == 1
        with pytest.raises(RequestAbortedError):
            first.result(PATIENCE_S)
        assert llm.abort(first.request_id) == 0
        assert llm.abort() == 2
        for pending in (second, third):
            with pytest.raises(RequestAbortedError):
                pending.result(PATIENCE_S)
        until(lambda: llm.context.allocator.num_used == 0)


def test_shutdown_fails_what_is_open_by_name_and_is_harmless_when_repeated() -> None:
    with nothing_is_left():
        llm = blocking()
        with gated(llm.engine):
            pending = llm.submit("abc", ENDLESS)
            llm.close()
            llm.close()
        with pytest.raises(ConnectionLostError, match="stopped"):
            pending.result(PATIENCE_S)
        for call in (lambda: llm.generate("abc"), lambda: llm.stream("abc")):
            with pytest.raises(EngineStateError):
                call()
        llm.wait_for_shutdown(PATIENCE_S)


def test_one_that_is_forgotten_gives_back_its_threads_and_its_cache() -> None:
    with nothing_is_left():
        llm = blocking()
        engine = llm.engine
        llm.generate("abc", greedily(3))
        del llm
        gc.collect()
        until(lambda: engine.state is EngineState.STOPPED and engine.stats()["kv_device_bytes"] == 0)
