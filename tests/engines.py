"""Small engines on the models of `tests.models`, compared with the trainer's own results.

Models are shared and made once: a test that changes weights or flags makes its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from rollout.engine.engine import DynamicInferenceEngine
from rollout.engine.memory.block_pool import zeros
from rollout.engine.parts.context import MemoryMove
from rollout.requests.record import DynamicInferenceRequestRecord
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.configs import engine_config
from tests.invariants import check_scheduler
from tests.models import VOCAB, float64_logprobs, greedy, make_model, trainer_logprobs

Key = tuple[int, int]
BLOCK = 4
PATIENCE_S = 120.0
"""Guards against hanging, no more."""


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.005)


@cache
def shared_model(name: str) -> PreTrainedModel:
    """One model per architecture, never changed by a test."""
    return make_model(name)


def token_ids(length: int, seed: int = 0) -> list[int]:
    """A random prompt without special tokens."""
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def greedily(max_tokens: int, **options: Any) -> SamplingParams:
    """Return parameters for the `max_tokens` most likely tokens."""
    return SamplingParams(**({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | options))


def at_random(max_tokens: int, **options: Any) -> SamplingParams:
    """Tokens drawn at temperature 1, `max_tokens` of them."""
    return SamplingParams(**({"max_tokens": max_tokens, "ignore_eos": True, "seed": 11} | options))


def in_one_piece(allocate: Callable[..., torch.Tensor]) -> Callable[..., list[torch.Tensor]]:
    """Memory of a pool, by a function (or method) that makes one tensor of so many elements."""

    def made(*given: Any) -> list[torch.Tensor]:
        *owner, sizes, dtype, device = given
        return list(allocate(*owner, sum(sizes), dtype, device).split_with_sizes(list(sizes)))

    return made


class Room:
    """Device memory for the pools of an engine, which others may take away."""

    def __init__(self) -> None:
        self.bytes = 10**12

    def allocate(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        if (size := sum(sizes) * dtype.itemsize) > self.bytes:
            raise torch.OutOfMemoryError(f"{size} bytes and room for {self.bytes}")
        return zeros(sizes, dtype, device)

    def leave(self, blocks: float, engine: DynamicInferenceEngine) -> None:
        self.bytes = int(blocks * engine.cache.block_bytes)


def make_engine(
    model: PreTrainedModel | str,
    tokenizer: Any = None,
    *,
    allocate: Callable[..., list[torch.Tensor]] | None = None,
    clock: Callable[[], float] = time.time,
    **options: Any,
) -> DynamicInferenceEngine:
    """An engine with blocks of four tokens and room for a few requests."""
    defaults: dict[str, Any] = {"kv_cache_blocks": 64, "block_size_tokens": BLOCK, "max_requests": 8,
                                "max_tokens_per_step": 64, "verify_model": False}  # fmt: skip
    seams = {"clock": clock} | ({} if allocate is None else {"allocate": allocate})
    chosen = shared_model(model) if isinstance(model, str) else model
    return DynamicInferenceEngine(chosen, tokenizer, engine_config(**(defaults | options)), **seams)


def one_step_per_call(engine: DynamicInferenceEngine) -> None:
    """Let every further call of `step` make one decode step, even if it may make several."""
    engine.controller.runner.runs = None


class Gate:
    """No step is made once an engine has made `tokens` tokens in all, until it may make more."""

    def __init__(self, engine: DynamicInferenceEngine, more: float) -> None:
        self.tokens = engine.stats()["generated_tokens"] + more
        self._engine = engine
        self._step = engine.parts.stepper.step

    def let_through(self, *, ahead: bool = False) -> None:
        lock = self._engine.lifecycle.lock
        while self._engine.stats()["generated_tokens"] >= self.tokens:
            if lock.wanted or lock.asked.value:
                # The loop of steps looks at what it is asked for, and comes again.
                lock.heard()
                return
            time.sleep(0.001)
        self._step(ahead=ahead)


@contextmanager
def gated(engine: DynamicInferenceEngine, more: float = 20) -> Iterator[Gate]:
    """Keep requests in flight until the end of the block, however long this thread takes; all else continues.

    The requests must make a step per token, as they do with top log-probs or a filter.
    """
    gate = Gate(engine, more)
    with patch.object(engine.parts.stepper, "step", gate.let_through):
        try:
            yield gate
        finally:
            gate.tokens = math.inf


def steps(engine: DynamicInferenceEngine, count: int) -> list[DynamicInferenceRequestRecord]:
    """So many steps, or fewer when everything has ended; what has ended."""
    ended: list[DynamicInferenceRequestRecord] = []
    for _ in range(count):
        if engine.has_unfinished:
            ended += engine.step()
    check_scheduler(engine.context.scheduler)
    return ended


def finish(
    engine: DynamicInferenceEngine, ended: Sequence[DynamicInferenceRequestRecord] = ()
) -> dict[Key, DynamicInferenceRequest]:
    """Run to the end; every request by (request_id, sample_index), each ended once, and no block held."""
    records = [*ended, *steps(engine, 2000)]
    assert not engine.has_unfinished
    assert engine.context.allocator.num_used == 0, "a block leaked"
    merged = {(record.request_id, record.sample_index): record.merge() for record in records}
    assert len(merged) == len(records), "a request ended twice"
    return merged


@contextmanager
def suspended(engine: DynamicInferenceEngine, mode: str | None = None, **options: Any) -> Iterator[MemoryMove]:
    """Pause and suspend; go on after the block."""
    engine.pause()
    yield engine.suspend(mode, **options)
    engine.resume()
    engine.unpause()


def pass_suspended(engine: DynamicInferenceEngine, mode: str, **options: Any) -> None:
    """Pause, suspend, resume, go on."""
    with suspended(engine, mode, **options):
        pass


@cache
def _expected(name: str, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    return tuple(greedy(shared_model(name), list(prompt), length))


def expected(model: PreTrainedModel | str, prompt: list[int], length: int) -> list[int]:
    """`model.generate`'s greedy continuation."""
    if isinstance(model, str):
        # A longer one has every shorter one in it.
        return list(_expected(model, tuple(prompt), max(length, 12)))[:length]
    return greedy(model, prompt, length)


def logprob_error(model: PreTrainedModel | str, request: DynamicInferenceRequest) -> float:
    """Largest difference between a completion's log-probs and the trainer's own forward."""
    chosen = shared_model(model) if isinstance(model, str) else model
    tokens = request.prompt_tokens + request.generated_tokens
    reference = trainer_logprobs(chosen, tokens)[len(request.prompt_tokens) - 1 :].cpu().numpy()
    assert len(reference) == len(request.generated_log_probs)
    return float(np.abs(reference - np.array(request.generated_log_probs)).max(initial=0.0))


def logits_of(name: str, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), V] logits of the trainer's own forward."""
    model = shared_model(name)
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def distances_to_float64(model: PreTrainedModel | str, request: DynamicInferenceRequest) -> tuple[float, float]:
    """Largest distance to the float64 log-probs of a completion: of the request's, and of the trainer's own forward."""
    chosen = shared_model(model) if isinstance(model, str) else model
    tokens, start = request.prompt_tokens + request.generated_tokens, len(request.prompt_tokens) - 1
    exact = float64_logprobs(chosen, tokens)[start:]
    ours = torch.tensor(request.generated_log_probs, dtype=torch.float64)
    own = trainer_logprobs(chosen, tokens)[start:]
    return float((ours - exact).abs().max()), float((own - exact).abs().max())


def assert_greedy(
    model: PreTrainedModel | str, request: DynamicInferenceRequest, tolerance: float = 1e-5, *, judged: bool = False
) -> None:
    """Token for token what `generate` gives, and its log-probs what the trainer's forward gives.

    Args:
        judged: where they differ by more, float64 decides: ours may be twice as far from it as the trainer's are.
    """
    assert request.error is None
    assert len(request.generated_tokens) == request.sampling_params.max_tokens
    assert request.generated_tokens == expected(model, request.prompt_tokens, len(request.generated_tokens))
    error = logprob_error(model, request)
    if judged and error > tolerance:
        ours, own = distances_to_float64(model, request)
        assert ours <= max(tolerance, 2 * own), f"log-probs are {ours:.3g} from float64, the trainer's {own:.3g}"
        return
    assert error <= tolerance, f"log-probs differ by {error:.3g}"
