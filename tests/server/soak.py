"""Endless streams over HTTP while the weights change, with every reply checked against a ledger.

    python -m tests.server.soak --streams 256 --seconds 60

One thread pauses, suspends (each mode in turn), changes the weights, announces the version, resumes and unpauses, over
and over; meanwhile every stream that ends is followed by another one. Held true of every stream: all its tokens came,
its text is that of its tokens, its versions only rise; and of all of them together: no client was sent a token of a version
before it was announced, or of the one before after the first of the new one had been waited for.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch

from rollout import LLM, Advanced, CoordinatorConfig, InferenceConfig, ServerConfig
from rollout.server.server import Server
from tests.models import make_model, make_tokenizer
from tests.server.stream_client import events

MODES = ("offload", "recompute", "persist")


@dataclass
class Ledger:
    """What the updater did and the streams saw."""

    announced: int = 0
    """The version that may have made tokens."""
    streams: int = 0
    tokens: int = 0
    updates: int = 0
    seen: set[int] = field(default_factory=set)
    """Versions of tokens."""
    problems: list[str] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)
    """Resident, after each fifth of the time."""


def soak(streams: int, seconds: float) -> Ledger:
    """Run it.

    Returns:
        The ledger; `problems` is empty if everything held.
    """
    ledger = Ledger()
    model, tokenizer = make_model("qwen3", num_hidden_layers=2), make_tokenizer()
    config = InferenceConfig(
        kv_cache_blocks=streams * 24,
        max_requests=streams,
        max_tokens_per_step=2 * streams,
        advanced=Advanced(block_size_tokens=8, verify_model=False),
    )
    with LLM(
        model, tokenizer, config, use_coordinator=True, coordinator_config=CoordinatorConfig(progress_interval=16)
    ) as llm:
        server = llm.serve(ServerConfig(port=0, max_open_requests=4 * streams), blocking=False)
        over = threading.Event()
        updater = threading.Thread(target=_update, args=(llm, model, ledger, over))
        updater.start()
        try:
            asyncio.run(_stream(server, tokenizer, ledger, streams, seconds))
        finally:
            over.set()
            updater.join()
            server.close()
        if llm.num_open or llm.context.allocator.num_used:
            ledger.problems.append(f"{llm.num_open} requests and {llm.context.allocator.num_used} blocks are left")
    return ledger


def _update(llm: LLM, model: torch.nn.Module, ledger: Ledger, over: threading.Event) -> None:
    generator = torch.Generator().manual_seed(0)
    while not over.wait(0.3):
        if ledger.announced not in ledger.seen:
            # A slow machine has brought nobody a token of it yet.
            continue
        llm.pause()
        llm.suspend(MODES[ledger.updates % 3])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
        ledger.announced = llm.set_policy_version()
        llm.resume()
        llm.unpause()
        ledger.updates += 1


async def _stream(server: Server, tokenizer: Any, ledger: Ledger, streams: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    tasks = [
        asyncio.create_task(_one_after_the_other(server.url, tokenizer, ledger, number, deadline))
        for number in range(streams)
    ]
    for _ in range(5):
        await asyncio.sleep(seconds / 5)
        gc.collect()
        ledger.memory_mb.append(psutil.Process().memory_info().rss / 2**20)
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            ledger.problems.append(f"{type(result).__name__}: {result}")


async def _one_after_the_other(url: str, tokenizer: Any, ledger: Ledger, number: int, deadline: float) -> None:
    draw = random.Random(number)
    while time.monotonic() < deadline:
        await _one(url, tokenizer, ledger, draw)


async def _one(url: str, tokenizer: Any, ledger: Ledger, draw: random.Random) -> None:
    wanted = draw.randrange(8, 120)
    prompt = [draw.randrange(3, 97) for _ in range(draw.randrange(1, 40))]
    body = {"model": "Qwen3ForCausalLM", "prompt": prompt, "max_tokens": wanted, "ignore_eos": True, "stream": True}
    text, ended = "", False
    tokens: list[int] = []
    versions: list[int] = []
    reason = None
    async for event in events(url, "/v1/completions", body):
        if event == b"[DONE]":
            ended = True
            continue
        reply = json.loads(event)
        if "error" in reply:
            ledger.problems.append(f"a stream failed: {reply['error']}")
            return
        for choice in reply["choices"]:
            text += choice["text"]
            reason = choice["finish_reason"] or reason
            rollout = choice.get("rollout") or {}
            tokens += rollout.get("token_ids", [])
            versions += rollout.get("policy_versions", [])
            ledger.seen.update(rollout.get("policy_versions", []))
            # The next version may have been given to the engine and not be written down yet.
            if versions and versions[-1] > ledger.announced + 1:
                ledger.problems.append(f"a token of version {versions[-1]} while {ledger.announced} was announced")
    ledger.streams += 1
    ledger.tokens += len(tokens)
    if not ended or reason != "length" or len(tokens) != wanted or len(versions) != wanted:
        ledger.problems.append(f"{len(tokens)} tokens of {wanted}, finish_reason {reason}, [DONE] {ended}")
    if text != tokenizer.decode(tokens, skip_special_tokens=True):
        ledger.problems.append(f"text {text!r} is not that of tokens {tokens}")
    if versions != sorted(versions):
        ledger.problems.append(f"versions {versions} do not only rise")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    ledger = soak(arguments.streams, arguments.seconds)
    print(
        f"{ledger.streams} streams of {ledger.tokens} tokens under {ledger.updates} updates; versions seen "
        f"{min(ledger.seen)} to {max(ledger.seen)}, {len(ledger.seen)} of them; resident MiB after each fifth: "
        + ", ".join(f"{each:.0f}" for each in ledger.memory_mb)
    )
    for problem in ledger.problems[:20]:
        print(problem)
    if ledger.problems:
        raise SystemExit(f"{len(ledger.problems)} problems")


if __name__ == "__main__":
    main()
