"""Tests of the streams of an `LLM`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from rollout.errors import RequestAbortedError
from rollout.llm.llm import AsyncLLM
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.engines import PATIENCE_S, at_random, gated, greedily, shared_model
from tests.llm.asking import ENDLESS, asyncio_llm, options
from tests.models import make_tokenizer

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


def test_a_stream_that_is_left_or_aborted_ends_its_request() -> None:
    async def ask() -> None:
        async with asyncio_llm() as llm:
            with gated(llm.engine):
                stream = llm.stream("abc", ENDLESS)
                async with aclosing(stream):
                    async for _ in stream:
                        break
                while llm.num_open or llm.context.allocator.num_used:
                    await asyncio.sleep(0.005)
                with pytest.raises(RequestAbortedError):
                    _ = stream.results
                stream = llm.stream("abc", ENDLESS)
                pieces = aiter(stream)
                await anext(pieces)
                await llm.abort(stream.request_id)
                with pytest.raises(RequestAbortedError):
                    _ = [piece async for piece in pieces]

    asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))


def test_a_tokenizer_that_cannot_read_a_token_ends_its_stream_alone() -> None:
    tokenizer = make_tokenizer()

    async def ask() -> None:
        async with AsyncLLM(shared_model("qwen3"), tokenizer, options()) as llm:

            def fail(*_: object) -> None:
                raise ValueError("no such token")

            with gated(llm.engine, 0):
                broken = llm.stream("abc", ENDLESS)
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
