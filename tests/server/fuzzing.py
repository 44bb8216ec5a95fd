"""Fuzz test against the OpenAPI description: no 5xx, and no undocumented status or shape.

Random, but the same each time. For a longer run, with other examples each time:

    ROLLOUT_FUZZ_EXAMPLES=2000 pytest -n0 tests/server/fuzzing.py

`test_fuzz.py` runs this file in a process of its own: by schemathesis each route is a test, and to some versions of pytest
all of them have one name, of which pytest-xdist runs one.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from rollout import LLM, Advanced, InferenceConfig, ServerConfig
from rollout.server.app import build_app
from rollout.server.openai.schema import MAX_PROMPTS
from tests.engines import BLOCK
from tests.models import make_model
from tests.server.chat_templates import byte_level

KEY = "sk-fuzz"
TOKENIZER = byte_level("qwen2.5")
# A request of many samples takes its time, and one to a paused engine all there is: then it is a 408.
CONFIG = ServerConfig(port=0, api_key=KEY, admin=True, served_model_name="m", request_timeout_s=0.5)
EXAMPLES = int(os.environ.get("ROLLOUT_FUZZ_EXAMPLES", "0"))
FEW = 4
ALIKE = 10
"""Cases at a boundary are many and alike: of one kind for one route so many are sent, and of the others one in twenty."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
    ignored_auth,
]
"""Not `positive_data_acceptance`: a schema cannot say that a token id is of this vocabulary, or a prompt short enough."""


def description() -> schemathesis.BaseSchema:
    """What a server with everything switched on says of itself; no model is needed to know."""
    nothing = SimpleNamespace(model=SimpleNamespace(), tokenizer=None)
    return schemathesis.openapi.from_dict(build_app(nothing, CONFIG).openapi())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server over a model so small that many samples of it cost little."""
    model = make_model(
        "qwen3", vocab_size=len(TOKENIZER), num_hidden_layers=1, hidden_size=16, intermediate_size=16,
        max_position_embeddings=256, num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    config = InferenceConfig(
        kv_cache_blocks=512,
        max_requests=64,
        max_tokens_per_step=256,
        advanced=Advanced(block_size_tokens=BLOCK, verify_model=False),
    )
    with LLM(model, TOKENIZER, config, use_coordinator=True) as llm:
        yield llm.serve(CONFIG, blocking=False).url
        assert llm.num_open == 0, "the server has left requests open"


SENT: Counter[tuple[str, object]] = Counter()
DRAW = random.Random(0)


def passed_over(case: schemathesis.Case) -> bool:
    """One of many that are alike; never where there is time for all, and never one that hypothesis has drawn."""
    kind = getattr(case.meta.phase.data, "scenario", None) if case.meta else None
    if EXAMPLES or kind is None:
        return False
    SENT[case.operation.label, kind] += 1
    return SENT[case.operation.label, kind] > ALIKE and DRAW.random() > 0.05


def made_servable(case: schemathesis.Case) -> None:
    """Mend what no schema can say, so that some requests come as far as the engine; what is of a wrong type stays so."""
    if not (isinstance(case.body, dict) and case.path.startswith("/v1/")):
        return
    body = _mended(case.body)
    needs = {
        "stream_options": body.get("stream") is True,
        "max_completion_tokens": "max_tokens" not in body,
        "top_logprobs": body.get("logprobs") is True,
        "tool_choice": bool(body.get("tools")),
        "timeout_s": False,
    }
    case.body = _made_cheap({name: value for name, value in body.items() if needs.get(name, True)})


def _made_cheap(body: dict[str, Any]) -> dict[str, Any]:
    """The body with a few tokens of a few prompts; unchanged where ROLLOUT_FUZZ_EXAMPLES is set."""
    if EXAMPLES:
        return body
    bound, least, prompt = body.get("max_tokens"), body.get("min_tokens"), body.get("prompt")
    if bound is None or (type(bound) is int and FEW < bound < 2**31):
        body["max_tokens"] = FEW
    if type(least) is int and 0 < least < 2**31:
        body["min_tokens"] = 1
    if isinstance(prompt, list) and FEW < len(prompt) <= MAX_PROMPTS:
        body["prompt"] = prompt[:FEW]
    return body


def _mended(value: Any, field: str = "") -> Any:
    if isinstance(value, list):
        return [_mended(each, field) for each in value]
    if field == "model" and isinstance(value, str):
        return CONFIG.served_model_name
    if field == "prompt" and value == "":
        return "the weather"
    if field in ("prompt", "token_ids", "prompt_token_ids") and type(value) is int and 0 <= value < 2**31:
        return value % len(TOKENIZER)
    if not isinstance(value, dict):
        return value
    if field == "logit_bias":
        return {str(int(key) % len(TOKENIZER)) if key.isdecimal() else key: bias for key, bias in value.items()}
    mended = {name: _mended(each, name) for name, each in value.items()}
    return _spoken(mended) if field == "messages" else mended


def _spoken(message: dict[str, Any]) -> dict[str, Any]:
    """As its role has it; never a tool's, which templates refuse where no call is before it."""
    if message.get("role") == "tool":
        message["role"] = "user"
    if message.get("role") != "assistant":
        message = {name: value for name, value in message.items() if name not in ("tool_calls", "rollout")}
    if message.get("content") is None and "role" in message:
        message["content"] = "the weather in Paris"
    return message


@description().parametrize()
@settings(
    max_examples=EXAMPLES or 5,
    derandomize=not EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
def test_the_server_does_what_its_description_says(url: str, case: schemathesis.Case) -> None:
    if passed_over(case):
        return
    made_servable(case)
    case.call_and_validate(url, checks=CHECKS, headers={"Authorization": f"Bearer {KEY}"})
