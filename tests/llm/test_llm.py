"""Tests of `LLM` and `AsyncLLM` in one process: with and without an event loop, on the trainer's live module."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.config import CoordinatorConfig, InferenceConfig, ServerConfig
from rollout.diagnosis import THREAD_NAME
from rollout.distributed.client.client import InferenceClient
from rollout.distributed.client.futures import RequestFuture
from rollout.distributed.client.text_stream import TextDelta
from rollout.distributed.job.job_coordinator import _completed
from rollout.distributed.job.world import World
from rollout.errors import (
    ConfigError,
    ConnectionLostError,
    EngineDeadError,
    EngineStateError,
    InvalidRequestError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
    WeightsChangedError,
)
from rollout.llm.llm import LLM, AsyncLLM
from rollout.llm.model_loading import load
from rollout.requests.block_hash import compute_block_hashes_batched
from rollout.requests.request import DynamicInferenceRequest
from rollout.requests.seeds import stream_key
from rollout.sampling_params import SamplingParams
from rollout.state import EngineState
from tests.engines import at_random, greedily, make_engine, shared_model, token_ids
from tests.models import greedy, make_model, make_tokenizer, trainer_logprobs
from trainer_hooks.optimizer import attach

PATIENCE_S = 60.0
"""Guards against hanging, no more."""
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, top_p=0.99)
"""With a filter each token is a step of its own, as with top log-probs; without, all of them may be there at once."""


def options(**changes: Any) -> InferenceConfig:
    chosen: dict[str, Any] = {"kv_cache_blocks": 512, "block_size_tokens": 4, "max_requests": 16,
                              "max_tokens_per_step": 64, "verify_model": False}  # fmt: skip
    return InferenceConfig(**(chosen | changes))


def blocking(model: Any = None, **changes: Any) -> LLM:
    return LLM(model or shared_model("qwen3"), make_tokenizer(), options(**changes))


def asyncio_llm(model: Any = None, **changes: Any) -> AsyncLLM:
    return AsyncLLM(model or shared_model("qwen3"), make_tokenizer(), options(**changes))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.005)


def our_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("rollout") and name != THREAD_NAME]


@contextmanager
def nothing_is_left() -> Iterator[None]:
    before = our_threads()
    yield
    wait_until(lambda: our_threads() == before)


def by_the_trainer(model: Any, sample: DynamicInferenceRequest) -> list[float]:
    """Log-probs of the completion's tokens by the trainer's own forward."""
    return trainer_logprobs(model, [*sample.prompt_tokens, *sample.generated_tokens])[
        -len(sample.generated_tokens) :
    ].tolist()


# --- what is given back -----------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_models_own_generate_gives() -> None:
    model, prompts = make_model("llama"), [token_ids(5), token_ids(40, seed=1), token_ids(1, seed=2)]
    with nothing_is_left(), blocking(model) as llm:
        results = llm.generate(prompts, greedily(12))
    assert [result.generated_tokens for result in results] == [greedy(model, prompt, 12) for prompt in prompts]
    assert [result.prompt_tokens for result in results] == prompts


def test_results_say_what_happened_to_them_and_which_blocks_their_prompts_have() -> None:
    with blocking(kv_cache_blocks=16, track_generated_token_events=True) as llm:
        results = llm.generate([token_ids(6, seed) for seed in range(8)], at_random(24))
        preemptions = llm.engine.stats()["preemptions"]
    kinds = [[event.type.name for event in result.events] for result in results]
    assert all(each[:2] == ["ADD_ENGINE", "ADD_CONTEXT"] and each[-1] == "FINISH" for each in kinds)
    assert all(each.count("GENERATED_TOKEN") == 24 for each in kinds)
    assert sum(each.count("EVICT") for each in kinds) == preemptions > 0
    for result in results:
        assert result.event_add_engine is result.events[0]
        assert result.precomputed_block_hashes == compute_block_hashes_batched(result.prompt_tokens, 4)


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

    asyncio.run(ask())
    with blocking() as llm:
        assert [len(llm.generate(each, greedily(3))) for each in ("abc", [5, 6], ["abc"], [])] == [1, 1, 1, 0]
        assert llm.engine.state is EngineState.RUNNING
        assert llm.context is llm.engine.context
        assert llm.controller is llm.engine.controller
        assert llm.is_primary_rank


def test_chat_messages_go_through_the_template() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    with LLM(shared_model("qwen3"), tokenizer, options()) as llm:
        one, two = llm.generate([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]], greedily(2))
    assert [tokenizer.decode(each.prompt_tokens) for each in (one, two)] == ["[hi]", "[ho]"]


def test_an_asyncio_llm_does_not_wait_for_its_server_on_the_callers_loop() -> None:
    async def test() -> None:
        async with asyncio_llm() as llm:
            with pytest.raises(RuntimeError, match=r"serve\(blocking=False\)"):
                llm.serve()

    asyncio.run(test())


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
        assert llm.max_sequence_length == 32 < llm.engine.max_sequence_length
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


def test_a_deadline_that_is_swept_while_it_passes_ends_nothing_else() -> None:
    """A request that arrives sweeps those of ended ones; the engine's thread looked at one and removed another."""

    class Swept(list[tuple[float, int]]):
        def __getitem__(self, index: Any) -> Any:
            first = super().__getitem__(index)
            thread = threading.Thread(target=sweep)
            thread.start()
            thread.join(0.05)
            return first

    with blocking() as llm:
        loop: Any = llm._service

        def sweep() -> None:
            with loop._changed:
                loop._deadlines = []

        loop._deadlines = Swept([(0.0, 99)])
        (sample,) = llm.generate(token_ids(5), SamplingParams(max_tokens=4))
        assert len(sample.generated_tokens) == 4
        assert not loop.over.done()


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
    with blocking() as llm:
        first, second, third = (llm.submit("abc", ENDLESS) for _ in range(3))
        assert llm.abort(first.request_id) == 1
        with pytest.raises(RequestAbortedError):
            first.result(PATIENCE_S)
        assert llm.abort(first.request_id) == 0
        assert llm.abort() == 2
        for pending in (second, third):
            with pytest.raises(RequestAbortedError):
                pending.result(PATIENCE_S)
        wait_until(lambda: llm.context.allocator.num_used == 0)


def test_shutdown_fails_what_is_open_by_name_and_is_harmless_when_repeated() -> None:
    with nothing_is_left():
        llm = blocking()
        pending = llm.submit("abc", ENDLESS)
        llm.shutdown()
        llm.shutdown()
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
        wait_until(lambda: engine.state is EngineState.STOPPED and engine.stats()["kv_device_bytes"] == 0)


# --- streams ----------------------------------------------------------------------------------------------------------


async def read(llm: AsyncLLM, prompt: str, params: SamplingParams, **options: Any) -> list[DynamicInferenceRequest]:
    stream = llm.stream(prompt, params, **options)
    texts, tokens, log_probs, versions = ([""] * params.n, *([[] for _ in range(params.n)] for _ in range(3)))  # type: ignore[var-annotated]
    async for delta in stream:
        texts[delta.sample_index] += delta.text
        tokens[delta.sample_index] += delta.token_ids
        log_probs[delta.sample_index] += delta.log_probs
        versions[delta.sample_index] += delta.policy_versions
    for sample in stream.results:
        index = sample.sample_index
        assert texts[index] == sample.generated_text
        assert tokens[index] == sample.generated_tokens
        assert log_probs[index] == sample.generated_log_probs
        assert versions[index] == sample.policy_versions[len(sample.prompt_tokens) :].tolist()
    return stream.results


@pytest.mark.parametrize("interval", [1, 7])
def test_a_stream_gives_what_generate_gives_piece_by_piece(interval: int) -> None:
    params = at_random(30, n=3, seed=5)

    async def ask() -> None:
        async with asyncio_llm() as llm:
            whole = await llm.generate(["abc", "de"], params)
            streams = await asyncio.gather(*(read(llm, each, params, interval=interval) for each in ("abc", "de")))
            assert [s.generated_tokens for result in streams for s in result] == [s.generated_tokens for s in whole]  # type: ignore[union-attr]

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


async def anext_until_the_end(pieces: AsyncIterator[TextDelta]) -> None:
    async for _ in pieces:
        pass


def test_leaving_a_stream_early_ends_the_request() -> None:
    async def ask() -> None:
        async with asyncio_llm() as llm:
            stream = llm.stream("abc", ENDLESS)
            async with aclosing(stream):
                async for _ in stream:
                    break
            while llm.num_open or llm.context.allocator.num_used:
                await asyncio.sleep(0.005)
            with pytest.raises(RequestAbortedError):
                _ = stream.results

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


def test_a_stream_that_fails_raises_after_its_last_piece() -> None:
    async def ask() -> None:
        async with asyncio_llm() as llm:
            stream = llm.stream("abc", ENDLESS)
            pieces = aiter(stream)
            await anext(pieces)
            await llm.abort(stream.request_id)
            with pytest.raises(RequestAbortedError):
                await anext_until_the_end(pieces)

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


def test_a_tokenizer_that_cannot_read_a_token_ends_its_stream_alone() -> None:
    tokenizer = make_tokenizer()

    async def ask() -> None:
        async with AsyncLLM(shared_model("qwen3"), tokenizer, options()) as llm:
            broken = llm.stream("abc", ENDLESS)

            def fail(*_: object) -> None:
                raise ValueError("no such token")

            broken._reader.take = fail  # type: ignore[method-assign, assignment]
            other = asyncio.create_task(llm.generate("abc", greedily(20)))
            with pytest.raises(Exception, match="no such token"):
                async for _ in broken:
                    pass
            await other

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


def test_pieces_that_all_streams_may_have_together_are_bounded_but_for_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.llm.delivery.DELTAS_PER_S", 0.001)

    async def pieces(llm: AsyncLLM, prompt: str) -> list[list[int]]:
        return [delta.token_ids async for delta in llm.stream(prompt, at_random(40))]

    async def ask() -> None:
        async with asyncio_llm() as llm:
            with llm.engine.locked():
                both = [asyncio.create_task(pieces(llm, each)) for each in ("abc", "de")]
                await asyncio.sleep(0)
            whole = await llm.generate(["abc", "de"], at_random(40))
            for came, sample in zip(await asyncio.gather(*both), whole, strict=True):  # type: ignore[arg-type]
                assert [token for piece in came for token in piece] == sample.generated_tokens
                assert len(came[0]) == 1
                assert len(came) == 2

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


# --- shares of the clients --------------------------------------------------------------------------------------------


def watched_steps(llm: LLM, pending: list[RequestFuture], monkeypatch: pytest.MonkeyPatch) -> list[list[bool]]:
    """Before each step: which of these requests have ended."""
    seen: list[list[bool]] = []
    step = llm.engine.step

    def watched(**_: object) -> Any:
        seen.append([each.done() for each in pending])
        return step()

    monkeypatch.setattr(llm.engine, "step", watched)
    return seen


def test_one_token_behind_another_clients_thousand_samples_comes_with_the_first_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with blocking() as llm:
        llm.engine.pause()
        greedy = [llm.submit(token_ids(5, seed=seed), greedily(1, n=2), client="greedy") for seed in range(500)]
        modest = llm.submit(token_ids(6), greedily(1))
        seen = watched_steps(llm, [modest, greedy[-1]], monkeypatch)
        llm.engine.unpause()
        greedy[-1].result(PATIENCE_S)
        assert modest.done()
        # It is queued with the first ones, and admitted with the second or third step at the latest.
        assert seen[3] == [True, False]
        assert len(seen) > 1000 // 16


def test_the_prompts_of_one_call_are_one_client(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[object] = []
    with blocking() as llm:
        add = llm.engine.add_request

        def noted(*arguments: Any, **options: Any) -> int:
            clients.append(options["client"])
            return add(*arguments, **options)

        monkeypatch.setattr(llm.engine, "add_request", noted)
        llm.generate(["a", "b"], greedily(1))
        llm.generate("c", greedily(1))
        llm.submit("d", greedily(1)).result(PATIENCE_S)
    assert clients[0] == clients[1]
    assert len(set(clients)) == 3


# --- threads and loops ------------------------------------------------------------------------------------------------


def test_the_blocking_class_works_inside_a_running_loop_but_not_on_its_own() -> None:
    async def in_a_notebook(llm: LLM) -> list[int]:
        return llm.generate("abc", greedily(5))[0].generated_tokens

    with blocking() as llm:
        assert asyncio.run(in_a_notebook(llm)) == llm.generate("abc", greedily(5))[0].generated_tokens

        async def on_its_own() -> None:
            with pytest.raises(RuntimeError, match="would wait for ever"):
                llm.generate("abc")
            with pytest.raises(RuntimeError, match="would wait for ever"):
                llm.shutdown()
            with pytest.raises(RuntimeError, match="would wait for ever"):
                llm.wait_for_shutdown(1)
            with pytest.raises(RuntimeError, match="would wait for ever"):
                llm.submit("abc", greedily(5)).result(1)

        llm.loop.run(on_its_own(), PATIENCE_S)
        assert llm.generate("abc", greedily(5))


def test_many_threads_and_loops_ask_at_once_and_each_gets_its_own() -> None:
    with nothing_is_left(), blocking() as llm:
        answers: dict[int, list[int]] = {}

        def ask(number: int) -> None:
            async def inside() -> None:
                answers[number] = (await llm.submit([3 + number, 4], greedily(10)))[0].generated_tokens

            if number % 2:
                asyncio.run(inside())
            else:
                answers[number] = llm.generate([3 + number, 4], greedily(10))[0].generated_tokens

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert answers == {
            number: llm.generate([3 + number, 4], greedily(10))[0].generated_tokens for number in range(12)
        }


def test_a_prompt_counts_as_open_as_soon_as_it_is_submitted() -> None:
    async def on_its_own(llm: LLM) -> tuple[RequestFuture, int]:
        return llm.submit("abc", greedily(5)), llm.num_open

    with blocking() as llm:
        pending, then = llm.loop.run(on_its_own(llm), PATIENCE_S)
        assert then == 1
        pending.result(PATIENCE_S)
        assert llm.num_open == 0


def test_whatever_keeps_a_prompt_from_being_asked_for_reaches_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OverflowError("too much")

    with blocking() as llm:
        monkeypatch.setattr(llm.engine, "add_request", fail)
        with pytest.raises(OverflowError, match="too much"):
            llm.submit("abc").result(PATIENCE_S)
        assert llm.num_open == 0


def test_a_step_that_raises_a_bug_fails_what_is_open_and_every_later_call_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with nothing_is_left(), blocking() as llm:

        def fail(**_: object) -> None:
            raise AssertionError("a bug")

        async def read_it(llm: LLM) -> None:
            async for _ in llm.stream("abc", greedily(5)):
                pass

        monkeypatch.setattr(llm.engine, "step", fail)
        with pytest.raises(ConnectionLostError, match="AssertionError: a bug"):
            asyncio.run(read_it(llm))
        with pytest.raises(AssertionError, match="a bug"):
            llm.wait_for_shutdown(PATIENCE_S)
        for call in (llm.submit, llm.stream):
            with pytest.raises(EngineStateError, match="thread has ended"):
                call("abc")  # type: ignore[operator]
        assert llm.num_open == 0


def test_a_caller_of_the_engine_itself_and_one_of_the_llm_may_have_the_same_number() -> None:
    with blocking() as llm:
        llm.engine.pause()
        theirs = llm.engine.add_request(token_ids(5), greedily(3))
        ours = llm.submit(token_ids(7), greedily(4))
        assert theirs == ours.request_id
        llm.engine.unpause()
        (sample,) = ours.result(PATIENCE_S)
        assert (sample.request_id, len(sample.prompt_tokens), len(sample.generated_tokens)) == (theirs, 7, 4)


def test_shutting_down_on_the_loop_while_another_thread_shuts_down_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with nothing_is_left(), blocking() as llm:
        close = llm._service.close

        async def again() -> None:
            with pytest.raises(RuntimeError, match="would wait for ever"):
                llm.shutdown()

        def meanwhile() -> None:
            llm.loop.run(again(), 5)
            close()

        monkeypatch.setattr(llm._service, "close", meanwhile)


def test_what_a_thread_waits_for_when_another_one_shuts_down_fails_by_name() -> None:
    began = threading.Event()
    failures: list[BaseException] = []

    async def for_ever() -> None:
        began.set()
        await asyncio.Event().wait()

    def wait(llm: LLM) -> None:
        try:
            llm._run(for_ever())
        except Exception as exc:  # noqa: BLE001 - it is looked at below
            failures.append(exc)

    llm = blocking()
    waiting = threading.Thread(target=wait, args=(llm,))
    waiting.start()
    assert began.wait(PATIENCE_S)
    llm.shutdown()
    waiting.join(PATIENCE_S)
    assert [type(each) for each in failures] == [EngineStateError]


def test_calls_after_the_end_name_it() -> None:
    async def ask() -> None:
        llm = asyncio_llm()
        await llm.shutdown()
        with pytest.raises(EngineStateError, match="the LLM was shut down"):
            await llm.abort()
        with pytest.raises(EngineStateError):
            await llm.generate("abc")
        with pytest.raises(EngineStateError):
            llm.serve(blocking=False)

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


def test_a_new_version_does_not_keep_the_loop_waiting_for_a_step() -> None:
    async def nothing() -> None:
        pass

    async_llm = asyncio_llm()
    try:
        with async_llm.engine.locked():
            told = async_llm.loop.start(async_llm.set_policy_version())
            async_llm.loop.run(nothing(), 10)
        assert told.result(PATIENCE_S) == async_llm.policy_version == 1
    finally:
        async_llm._shutdown()


CTRL_C = """
    import os, signal, sys, threading, time
    from rollout import InferenceConfig, LLM, SamplingParams
    from tests.models import make_model, make_tokenizer
    llm = LLM(make_model("qwen3"), make_tokenizer(), InferenceConfig(kv_cache_blocks=256, block_size_tokens=4,
              max_requests=16, max_tokens_per_step=64, verify_model=False))
    def press():
        while llm.stats()["generated_tokens"] < 20:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=press).start()
    endless = SamplingParams(max_tokens=500, ignore_eos=True, top_p=0.99)
    try:
        while True:
            llm.generate(["abc"] * 8, endless)
    except KeyboardInterrupt:
        deadline = time.monotonic() + 60
        while (llm.num_open or llm.context.allocator.num_used) and time.monotonic() < deadline:
            time.sleep(0.01)
        print("open", llm.num_open, "blocks", llm.context.allocator.num_used)
        print("tokens", len(llm.generate("abc", SamplingParams(max_tokens=7, ignore_eos=True))[0].generated_tokens))
        llm.submit("abc", endless)
        sys.exit(7)
"""


def test_ctrl_c_ends_the_requests_and_the_interpreter_ends_in_the_middle_of_others() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CTRL_C)], cwd=Path(__file__).parents[2], capture_output=True, text=True,
        check=False, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["open 0 blocks 0", "tokens 7"], done.stderr
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr


# --- the trainer's live module ----------------------------------------------------------------------------------------


def test_the_module_is_the_trainers_again_before_anybody_hears_of_a_result() -> None:
    model = make_model("gpt2")
    before = model.config._attn_implementation
    with blocking(model) as llm:
        for length in range(1, 30):
            llm.generate("abc", greedily(length))
            assert model.config._attn_implementation == before
            assert all(module.training for module in model.modules())
            assert torch.is_grad_enabled()


def test_evaluation_between_steps_is_of_one_version_each() -> None:
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    async def train() -> None:
        async with asyncio_llm(model) as llm:
            with attach(optimizer, llm):
                for step in range(4):
                    results = await llm.generate([token_ids(6), token_ids(9, seed=1)], at_random(12, n=2))
                    for sample in results:  # type: ignore[union-attr]
                        assert set(sample.policy_versions.tolist()) == {step}
                        assert sample.generated_log_probs == pytest.approx(by_the_trainer(model, sample), abs=1e-4)
                    loss = model(torch.tensor([token_ids(8)])).logits.float().log_softmax(-1)[..., 5].mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    assert llm.policy_version == step + 1

    asyncio.run(asyncio.wait_for(train(), PATIENCE_S))


def test_a_step_of_the_optimizer_under_running_requests_splits_their_tokens_at_the_very_version() -> None:
    model = make_model("qwen3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * 0.1
    weights = [{name: value.clone() for name, value in model.state_dict().items()}]
    with blocking(model, kv_cache_management_mode="recompute") as llm, attach(optimizer, llm, mode="recompute"):
        pending = [llm.submit(token_ids(6, seed=seed), at_random(400, seed=seed, logprobs=1)) for seed in range(3)]
        for _ in range(3):
            before = llm.stats()["generated_tokens"]
            wait_until(lambda before=before: llm.stats()["generated_tokens"] > before + 30)  # type: ignore[misc]
            optimizer.step()
            weights.append({name: value.clone() for name, value in model.state_dict().items()})
        samples = [each.result(PATIENCE_S)[0] for each in pending]
    for sample in samples:
        versions = sample.policy_versions[len(sample.prompt_tokens) :]
        assert sorted(set(versions.tolist())) == [0, 1, 2, 3]
        for version, then in enumerate(weights):
            model.load_state_dict(then)
            expected = by_the_trainer(model, sample)
            for token in (versions == version).nonzero()[0]:
                assert sample.generated_log_probs[token] == pytest.approx(expected[token], abs=1e-4)


def test_suspended_takes_the_cache_off_the_device_and_requests_go_on_afterwards() -> None:
    with blocking() as llm:
        pending = llm.submit("abc", ENDLESS)
        wait_until(lambda: llm.stats()["generated_tokens"] > 10)
        with llm.suspended():
            assert llm.state is EngineState.SUSPENDED
            assert llm.stats()["kv_device_bytes"] == 0
            llm.weights_updated()
            assert llm.state is EngineState.SUSPENDED
        assert llm.state is EngineState.RUNNING
        sample = pending.result(PATIENCE_S)[0]
        assert set(sample.policy_versions.tolist()) == {0, 1}
        llm.engine.pause()
        with llm.suspended("persist"):
            pass
        assert llm.state is EngineState.PAUSED, "what the caller has paused by himself stays so"
        llm.engine.unpause()


def test_what_the_caller_has_suspended_by_himself_stays_so_after_an_update() -> None:
    with blocking() as llm:
        llm.engine.pause()
        llm.engine.suspend()
        llm.before_optimizer_step("recompute")
        assert llm.weights_updated() == 1
        assert (llm.state, llm.stats()["kv_device_bytes"]) == (EngineState.SUSPENDED, 0)


@pytest.mark.parametrize("mode", [None, "persist", "recompute"])
def test_before_an_optimizer_step_the_cache_leaves_the_device_as_configured_unless_a_mode_is_given(mode: Any) -> None:
    with blocking(kv_cache_management_mode="offload") as llm:
        pending = llm.submit("abc", ENDLESS)
        wait_until(lambda: llm.stats()["generated_tokens"] > 10)
        llm.before_optimizer_step(mode)
        assert llm.state is EngineState.SUSPENDED
        assert (llm.stats()["kv_device_bytes"] > 0) is (mode == "persist")
        assert (llm.stats()["kv_host_bytes"] > 0) is (mode is None)
        llm.weights_updated()
        assert set(pending.result(PATIENCE_S)[0].policy_versions.tolist()) == {0, 1}


def test_no_step_is_made_in_an_update_though_somebody_sets_the_engine_going() -> None:
    with blocking() as llm:
        llm.engine.pause()
        pending = llm.submit("abc", greedily(5))
        llm.before_optimizer_step()
        llm.engine.resume()
        llm.engine.unpause()
        time.sleep(0.2)
        assert not pending.done()
        assert llm.stats()["generated_tokens"] == 0
        llm.weights_updated()
        assert set(pending.result(PATIENCE_S)[0].policy_versions.tolist()) == {1}


def test_expert_routes_come_through_a_coordinator_as_from_the_engine() -> None:
    prompts, params = [token_ids(9, 1), token_ids(5, 2)], at_random(20, n=2)
    found = []
    for coordinated in (False, True):
        moe = options(record_routes=True)
        with LLM(shared_model("qwen3_moe"), make_tokenizer(), moe, use_coordinator=coordinated) as llm:
            found.append(llm.generate(prompts, params))
    for direct, sent in zip(*found, strict=True):
        assert sent.generated_tokens == direct.generated_tokens
        assert direct.routing_indices is not None
        np.testing.assert_array_equal(sent.routing_indices, direct.routing_indices)


@pytest.mark.parametrize("suspend", [False, True])
def test_a_control_call_in_a_suspended_block_is_undone_by_its_counterpart_after_it(suspend: bool) -> None:
    with LLM(shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True) as llm:
        with llm.suspended():
            llm.pause()
            if suspend:
                llm.suspend()
        assert llm.state is (EngineState.SUSPENDED if suspend else EngineState.PAUSED)
        if suspend:
            llm.resume()
        with llm.suspended():
            llm.unpause()
        assert llm.generate(token_ids(5), greedily(5))
        llm.engine.pause()
        with llm.suspended():
            pass
        assert llm.state is EngineState.PAUSED, "what the caller has paused by himself stays so"


def test_a_thread_of_steps_that_fails_leaves_its_requests_to_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = CoordinatorConfig(no_rank_timeout_s=0.2)
    with LLM(
        shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True, coordinator_config=coordinator
    ) as llm:

        def fail(**_: object) -> None:
            raise AssertionError("a bug")

        monkeypatch.setattr(llm.engine, "step", fail)
        with pytest.raises(RequestTimeoutError, match="rank"):
            llm.submit("abc").result(PATIENCE_S)
        with pytest.raises(AssertionError, match="a bug"):
            llm.wait_for_shutdown(PATIENCE_S)


def test_weights_that_changed_without_a_word_are_refused_at_every_door_but_not_while_they_are_being_changed() -> None:
    model = make_model("qwen3")
    with blocking(model) as llm:
        llm.generate("abc", greedily(2))
        weight = model.model.layers[0].mlp.up_proj.weight
        with llm.suspended():
            weight.data.mul_(1.5)
            # Nobody has had the chance to say so yet, and a request from elsewhere is no reason to complain.
            pending = llm.submit("abc", greedily(2))
            llm.weights_updated()
        assert pending.result(PATIENCE_S)[0].policy_versions[-1] == 1
        weight.data.mul_(1.5)
        for door in (llm.submit, llm.stream, llm.generate):
            with pytest.raises(WeightsChangedError, match=r"layers\.0\.mlp\.up_proj\.weight"):
                door("abc", greedily(2))  # type: ignore[operator]
        llm.weights_updated()
        assert llm.generate("abc", greedily(2))


# --- the rules of the modes -------------------------------------------------------------------------------------------


def test_lifecycle_calls_in_direct_mode_say_what_to_call_instead() -> None:
    with blocking() as llm:
        for name in ("pause", "unpause", "suspend", "resume"):
            with pytest.raises(RuntimeError, match=rf"use llm.engine.{name}\(\)"):
                getattr(llm, name)()

    async def ask() -> None:
        async with asyncio_llm() as llm:
            for name in ("pause", "unpause", "suspend", "resume"):
                with pytest.raises(RuntimeError, match=rf"use llm.engine.{name}\(\)"):
                    await getattr(llm, name)()

    asyncio.run(ask())


@pytest.mark.parametrize(
    "given",
    [{"coordinator_host": "127.0.0.1"}, {"coordinator_port": 5000}, {"coordinator_config": CoordinatorConfig()}],
)
def test_options_of_a_coordinator_without_one_are_refused(given: dict[str, Any]) -> None:
    for kind in (LLM, AsyncLLM):
        with pytest.raises(ValueError, match=rf"{next(iter(given))}=.*use_coordinator=True"):
            kind(shared_model("qwen3"), **given)


def test_with_a_coordinator_the_primary_rank_pauses_suspends_and_goes_on() -> None:
    with nothing_is_left(), LLM(shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True) as llm:
        assert llm.is_primary_rank
        with pytest.raises(ConfigError, match="client='me' with a coordinator"):
            llm.submit("abc", client="me")
        expected = make_engine("qwen3").generate([token_ids(5)], at_random(50))[0].generated_tokens
        assert llm.generate(token_ids(5), at_random(50))[0].generated_tokens == expected
        pending = llm.submit(token_ids(5), at_random(50))
        llm.pause()
        assert llm.state is EngineState.PAUSED
        llm.suspend("offload")
        assert (llm.state, llm.stats()["kv_device_bytes"]) == (EngineState.SUSPENDED, 0)
        assert llm.set_policy_version() == 1
        llm.resume()
        llm.unpause()
        assert len(pending.result(PATIENCE_S)[0].generated_tokens) == 50
        assert llm.policy_version == 1


def test_a_further_client_of_the_coordinator_asks_beside_the_llm() -> None:
    with nothing_is_left(), LLM(shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True) as llm:

        async def ask() -> list[list[int]]:
            assert llm.coordinator_address is not None
            elsewhere = InferenceClient(llm.coordinator_address, keys=llm.coordinator_keys)
            async with llm.client() as client, elsewhere:
                results = [await each.add_request(token_ids(5), greedily(6)) for each in (client, elsewhere)]
            return [result[0].generated_tokens for result in results]

        assert asyncio.run(ask()) == 2 * [llm.generate([token_ids(5)], greedily(6))[0].generated_tokens]
    with pytest.raises(EngineStateError, match="it was shut down"):
        llm.client()
    with LLM(shared_model("qwen3"), make_tokenizer(), options()) as llm:
        assert (llm.coordinator_address, llm.coordinator_keys) == (None, None)
        with pytest.raises(EngineStateError, match=r"direct mode has no coordinator.*use_coordinator=True"):
            llm.client()


def test_a_lost_coordinator_fails_what_is_open_and_the_next_call() -> None:
    with nothing_is_left():
        llm = LLM(shared_model("qwen3"), make_tokenizer(), options(), use_coordinator=True)
        pending = llm.submit("abc", ENDLESS)
        assert llm._job is not None
        job = llm._job.member.coordinator
        assert job is not None
        assert job.handle is not None
        llm.engine.pause()
        job.handle.process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionLostError):
            pending.result(PATIENCE_S)
        with pytest.raises(ConnectionLostError):
            llm.generate("abc")
        llm.shutdown()


def test_a_folder_is_loaded_and_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    with LLM(tmp_path / "model", inference_config=options()) as llm:
        assert llm.generate([5, 6, 7], greedily(8))[0].generated_tokens == greedy(model, [5, 6, 7], 8)
        assert llm.generate("abc", greedily(3))[0].generated_text is not None
    for name, why in (("nowhere", "is no folder"), (".", "has no config.json")):
        with pytest.raises(ConfigError, match=why):
            LLM(tmp_path / name)
    for bad in ("nn", "float7"):
        with pytest.raises(ConfigError, match=f"dtype='{bad}'"):
            load(tmp_path / "model", dtype=bad)


# --- options that the engine and its coordinator share ---------------------------------------------------------------------


def job_options(coordinator: CoordinatorConfig, **inference: Any) -> CoordinatorConfig:
    """What the coordinator of a job of one rank is started with."""
    return _completed(coordinator, make_engine("qwen3", **inference), None)


def test_the_seed_of_the_engine_seeds_the_requests_of_its_coordinator() -> None:
    assert job_options(CoordinatorConfig(), seed=7).seed == 7
    assert job_options(CoordinatorConfig(seed=9)).seed == 9
    assert job_options(CoordinatorConfig(seed=7), seed=7).seed == 7
    with pytest.raises(ConfigError, match=r"CoordinatorConfig.seed=9: InferenceConfig.seed is 7; leave it out"):
        job_options(CoordinatorConfig(seed=9), seed=7)


def test_an_option_of_the_coordinator_that_contradicts_the_job_is_refused_by_name() -> None:
    assert job_options(CoordinatorConfig(block_size_tokens=4)).block_size_tokens == 4
    with pytest.raises(ConfigError, match=r"CoordinatorConfig.block_size_tokens=8: InferenceConfig.* is 4"):
        job_options(CoordinatorConfig(block_size_tokens=8))
    with pytest.raises(ConfigError, match=r"CoordinatorConfig.data_parallel_size=3: the number of ranks is 1"):
        job_options(CoordinatorConfig(data_parallel_size=3))
    with pytest.raises(ConfigError, match=r"coordinator_config.host='127.0.0.2', and '127.0.0.3' beside it"):
        LLM(
            shared_model("qwen3"), None, options(), use_coordinator=True, coordinator_host="127.0.0.3",
            coordinator_config=CoordinatorConfig(host="127.0.0.2"),
        )  # fmt: skip


def test_with_a_coordinator_the_configured_deadline_holds_and_a_flush_reaches_its_engines() -> None:
    chosen = options(seed=5, control_timeout_s=7.0)
    with LLM(shared_model("qwen3"), make_tokenizer(), chosen, use_coordinator=True) as llm:
        assert llm._job._the_client()._control_timeout_s == 7.0
        (sample,) = llm.generate(token_ids(20), SamplingParams(max_tokens=4))
        assert sample.seed == stream_key(5, 0)
        assert llm.context.allocator.findable_hashes()
        assert llm.flush_prefix_cache() > 0
        assert not llm.context.allocator.findable_hashes()
        assert llm.flush_prefix_cache() == 0


def test_several_ranks_that_serve_without_a_coordinator_are_told_that_each_needs_its_own_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with blocking() as first, blocking() as second:
        server = first.serve(ServerConfig(port=0), blocking=False)
        monkeypatch.setattr(World, "of_torch", lambda: World(1, 2, None, "", one_host=True))  # type: ignore[arg-type]
        taken = ServerConfig(port=int(server.url.rpartition(":")[2]))
        with pytest.raises(ConfigError, match=r"rank 1 of 2: .*its own port.*use_coordinator=True"):
            second.serve(taken, blocking=False)
