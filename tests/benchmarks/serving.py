"""HTTP overhead: tokens per second of many streams over a socket, beside the same streams and calls in the process.

    python -m tests.benchmarks.serving --size 10m --streams 64 --tokens 256 --rounds 5

Three peers take turns on one LLM: `generate` (whole completions), `stream` (every token as it comes, through `AsyncLLM`),
and `http` (every token as an event, read by a client in a process of its own). All make the same tokens. The figure is
tokens per second from the first request to the last token; ratios are to `generate` of the same run. Beside it stands the
processor time per token of all threads, the client's included: on a machine with other work it says more than the clock.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rollout import Advanced, AsyncLLM, InferenceConfig, SamplingParams, ServerConfig
from rollout.server.server import Server
from tests.benchmarks.common import parse, save, show, turns
from tests.benchmarks.subject import Subject, make_subject
from tests.server.stream_client import events

PROMPT_TOKENS = 32
PEERS = ("generate", "stream", "http")


def make_prompts(subject: Subject, streams: int) -> list[list[int]]:
    """Random ones, all different."""
    generator = torch.Generator().manual_seed(0)
    prompts: list[list[int]] = torch.randint(0, subject.vocab, (streams, PROMPT_TOKENS), generator=generator).tolist()
    return prompts


async def in_process(llm: AsyncLLM, prompts: list[list[int]], tokens: int, *, streaming: bool) -> int:
    """Tokens that came."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=0)
    if not streaming:
        results = await llm.generate(prompts, params)
        return sum(len(result.generated_tokens) for result in results)  # type: ignore[union-attr]

    async def read(prompt: list[int]) -> int:
        return sum([len(delta.token_ids) async for delta in llm.stream(prompt, params)])

    return sum(await asyncio.gather(*map(read, prompts)))


def over_http(url: str, model: str, prompts: list[list[int]], tokens: int) -> tuple[int, float]:
    """(tokens that came, seconds of processor time); runs in the client's process."""
    start = time.process_time()

    async def read(prompt: list[int]) -> int:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": 0, "stream": True}
        came = 0
        async for event in events(url, "/v1/completions", body):
            if event != b"[DONE]":
                for choice in json.loads(event)["choices"]:
                    came += len((choice.get("rollout") or {}).get("token_ids", ()))
        return came

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*map(read, prompts)))

    came = asyncio.run(all_of_them())
    return came, time.process_time() - start


def measure(subject: Subject, streams: int, tokens: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(tokens per second, processor time per token in µs) of each peer in each round, in turn."""
    blocks = streams * (-(-(PROMPT_TOKENS + tokens) // Advanced.block_size_tokens) + 1)
    config = InferenceConfig(
        kv_cache_blocks=blocks,
        max_requests=streams,
        max_sequence_length=PROMPT_TOKENS + tokens + 1,
        enable_prefix_caching=False,
        advanced=Advanced(verify_model=False),
    )
    prompts = make_prompts(subject, streams)
    rates: dict[str, list[tuple[float, float]]] = {peer: [] for peer in PEERS}
    llm = AsyncLLM(subject.model, None, config)
    with multiprocessing.get_context("spawn").Pool(1) as clients:
        server = llm.serve(ServerConfig(port=0, served_model_name="subject"), blocking=False)
        try:
            calls = _calls(llm, server, clients, prompts, tokens)
            for number, peer in turns(PEERS, rounds + 1):
                start, work = time.perf_counter(), time.process_time()
                came, elsewhere = calls[peer]()
                work = time.process_time() - work + elsewhere
                if came != streams * tokens:
                    raise RuntimeError(f"{peer}: {came} tokens came of {streams * tokens}")
                if number:
                    rates[peer].append((came / (time.perf_counter() - start), work / came * 1e6))
        finally:
            server.close()
            asyncio.run(llm.close())
    return rates


def _calls(
    llm: AsyncLLM, server: Server, clients: Any, prompts: list[list[int]], tokens: int
) -> dict[str, Callable[[], tuple[int, float]]]:
    """Calls that return (tokens that came, seconds of processor time in another process)."""
    return {
        "generate": lambda: (asyncio.run(in_process(llm, prompts, tokens, streaming=False)), 0.0),
        "stream": lambda: (asyncio.run(in_process(llm, prompts, tokens, streaming=True)), 0.0),
        "http": lambda: clients.apply(over_http, (server.url, "subject", prompts, tokens)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    options = parse(
        __doc__, arguments, size="10m", dtype="bfloat16", device="cpu", streams=64, tokens=256, rounds=5
    )  # fmt: skip
    longest = PROMPT_TOKENS + options.tokens + 1
    with tempfile.TemporaryDirectory() as folder:
        subject = make_subject(options.size, options.dtype, longest, Path(folder), options.device)
    rates = measure(subject, options.streams, options.tokens, options.rounds)
    medians = {peer: [statistics.median(column) for column in zip(*rows, strict=True)] for peer, rows in rates.items()}
    show(
        f"{options.size} {options.dtype}, {options.streams} streams of {options.tokens} tokens",
        ("peer", "tokens/s, median", "of generate", "of stream", "µs of CPU per token"),
        [
            (
                peer,
                f"{rate:,.0f}",
                *(f"{rate / medians[other][0]:.3f}" for other in ("generate", "stream")),
                f"{work:.0f}",
            )
            for peer, (rate, work) in medians.items()
        ],
    )
    save(options.json, rates)


if __name__ == "__main__":
    main()
