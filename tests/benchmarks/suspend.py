"""Cost and benefit of a suspend: bandwidth next to a plain copy, memory released, resume time next to prefilling again.

    python -m tests.benchmarks.suspend --size 100m --requests 16 --tokens 2048

The requests stand in the middle of their completions. `offload` copies their KV to the host and back; `recompute` drops it
and prefills again, which is what an engine without a suspend does after every step. On CUDA, also what the allocator has
after a suspend; the plain copy is one pinned tensor of as many bytes, each way.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rollout import Advanced, DynamicInferenceEngine, InferenceConfig, SamplingParams
from tests.benchmarks import tables
from tests.benchmarks.common import finish, medians, parse, seconds, settle
from tests.benchmarks.subject import Subject, make_subject


def make_engine(subject: Subject, requests: int, tokens: int, rounds: int) -> DynamicInferenceEngine:
    """An engine with `requests` of `tokens` prompt tokens each that have begun to decode and will not end in `rounds`."""
    prefill_steps = -(-requests * tokens // InferenceConfig().step_tokens)
    new = (rounds + 2) * (2 * prefill_steps + 8)
    blocks = requests * (-(-(tokens + new) // Advanced.block_size_tokens) + 1)
    config = InferenceConfig(
        kv_cache_blocks=blocks,
        max_requests=max(64, requests),
        max_sequence_length=tokens + new,
        enable_prefix_caching=False,
        advanced=Advanced(verify_model=False),
    )
    engine = DynamicInferenceEngine(subject.model, None, config)
    generator = torch.Generator().manual_seed(0)
    for prompt in torch.randint(0, subject.vocab, (requests, tokens), generator=generator).tolist():
        engine.add_request(prompt, SamplingParams(max_tokens=new, ignore_eos=True))
    until_decoding(engine)
    return engine


def until_decoding(engine: DynamicInferenceEngine) -> None:
    """Step until every request has its KV."""
    scheduler = engine.context.scheduler
    with engine.installation:
        while scheduler.waiting or scheduler.prefilling:
            engine.step()


def away_and_back(engine: DynamicInferenceEngine, mode: str, subject: Subject) -> dict[str, float]:
    """One suspend and resume, until every request can decode its next token."""
    settle(subject.device)
    engine.pause()
    held, figures = driver_used(subject), {}
    start = time.perf_counter()
    moved = engine.suspend(mode)  # type: ignore[arg-type]
    settle(subject.device)
    figures["suspend_s"] = time.perf_counter() - start
    figures["bytes"] = float(moved.bytes_copied)
    figures["bytes_given_back"] = float(held - driver_used(subject))
    start = time.perf_counter()
    engine.resume()
    settle(subject.device)
    figures["resume_s"] = time.perf_counter() - start
    engine.unpause()
    until_decoding(engine)
    settle(subject.device)
    figures["back_s"] = time.perf_counter() - start
    return figures


def driver_used(subject: Subject) -> int:
    """Bytes of a GPU that its driver has given away, to torch and to pools that it maps itself; 0 on a CPU."""
    if subject.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(subject.device)
    return total - free


def plain_copy(subject: Subject, count: int) -> dict[str, float]:
    """Seconds of one copy of `count` bytes to the host and of one back."""
    device = torch.ones(count, dtype=torch.uint8, device=subject.device)
    host = torch.empty(count, dtype=torch.uint8, pin_memory=subject.device.type == "cuda")

    def copied(target: torch.Tensor, source: torch.Tensor) -> float:
        def work() -> None:
            target.copy_(source, non_blocking=True)
            settle(subject.device)

        work()
        return min(seconds(work) for _ in range(3))

    return {"out_s": copied(host, device), "in_s": copied(device, host)}


def measure(subject: Subject, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds; medians."""
    engine = make_engine(subject, options.requests, options.tokens, options.rounds)
    pool = engine.cache.device_bytes
    rounds: dict[str, list[dict[str, float]]] = {"offload": [], "recompute": []}
    away_and_back(engine, "offload", subject)
    for _ in range(options.rounds):
        for mode, found in rounds.items():
            found.append(away_and_back(engine, mode, subject))
    middle = {mode: medians(found) for mode, found in rounds.items()}
    if engine.context.scheduler.num_active != options.requests:
        raise RuntimeError("requests ended while they were measured: the figures would be of fewer")
    offload, count = middle["offload"], int(middle["offload"]["bytes"])
    plain = plain_copy(subject, count)
    return {
        "device": str(subject.device), "size": subject.size, "dtype": subject.dtype, "requests": options.requests,
        "tokens": options.tokens, "pool_bytes": pool, "medians": middle, "plain": plain,
        "suspend_of_plain": plain["out_s"] / offload["suspend_s"], "resume_of_plain": plain["in_s"] / offload["resume_s"],
        "given_back_of_pool": offload["bytes_given_back"] / pool if subject.device.type == "cuda" else None,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, save."""
    options = parse(
        __doc__, arguments, size="100m", dtype="bfloat16", device="cpu", requests=16,
        tokens={"default": 2048, "help": "of each prompt"}, rounds=3,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="suspend-") as folder:
        subject = make_subject(options.size, options.dtype, 4096 + options.tokens, Path(folder), options.device)
        found = measure(subject, options)
    finish(options.json, found, tables.suspend(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
