"""A small real model behind an `LLM`, for tests of what only an engine can show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from rollout import LLM, Advanced, InferenceConfig
from tests.engines import BLOCK, until
from tests.models import make_model
from tests.server.chat_templates import byte_level

TOKENIZER = byte_level("qwen2.5")
HI: list[Any] = [{"role": "user", "content": "the weather in Paris?"}]


def tiny(seed: int = 0, **sizes: Any) -> Any:
    sizes = {"vocab_size": len(TOKENIZER), "num_hidden_layers": 1, "max_position_embeddings": 2048} | sizes
    return make_model("qwen3", seed, **sizes)


@contextmanager
def small_llm(model: Any = None, **options: Any) -> Iterator[LLM]:
    config = InferenceConfig(
        kv_cache_blocks=1024, max_requests=16, max_tokens_per_step=256,
        advanced=Advanced(block_size_tokens=BLOCK, verify_model=False),
    )  # fmt: skip
    with LLM(model or tiny(), TOKENIZER, config, **options) as llm:
        yield llm


def ok(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()


def emptied(llm: LLM) -> None:
    """Nothing is computed any more."""
    until(lambda: not llm.num_open and not llm.context.allocator.num_used)
