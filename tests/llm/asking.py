"""Small LLMs of the tests, and what they must leave behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollout.config import InferenceConfig
from rollout.llm.llm import LLM, AsyncLLM
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from tests.configs import engine_config
from tests.engines import shared_model, until
from tests.models import make_tokenizer, trainer_logprobs

ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True, top_p=0.99)
"""With a filter each token is a step of its own, as with top log-probs; without, all of them may be there at once."""


def options(**changes: Any) -> InferenceConfig:
    chosen: dict[str, Any] = {"kv_cache_blocks": 512, "block_size_tokens": 4, "max_requests": 16,
                              "max_tokens_per_step": 64, "verify_model": False}  # fmt: skip
    return engine_config(**(chosen | changes))


def blocking(model: Any = None, **changes: Any) -> LLM:
    return LLM(model or shared_model("qwen3"), make_tokenizer(), options(**changes))


def asyncio_llm(model: Any = None, **changes: Any) -> AsyncLLM:
    return AsyncLLM(model or shared_model("qwen3"), make_tokenizer(), options(**changes))


def our_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("rollout")]


@contextmanager
def nothing_is_left() -> Iterator[None]:
    before = our_threads()
    yield
    until(lambda: our_threads() == before)


def by_the_trainer(model: Any, sample: DynamicInferenceRequest) -> list[float]:
    """Log-probs of the completion's tokens by the trainer's own forward."""
    return trainer_logprobs(model, [*sample.prompt_tokens, *sample.generated_tokens])[
        -len(sample.generated_tokens) :
    ].tolist()
