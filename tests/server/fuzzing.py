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

from rollout import ServerConfig
from rollout.server.app import build_app
from tests.server.real import small_llm, tiny

KEY = "sk-fuzz"
# A request of many samples takes its time, and one to a paused engine all there is: then it is a 408.
CONFIG = ServerConfig(port=0, api_key=KEY, admin=True, served_model_name="m", request_timeout_s=0.5)
EXAMPLES = int(os.environ.get("ROLLOUT_FUZZ_EXAMPLES", "0"))
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
    """Return the description of a server with all routes, for which no model is needed."""
    nothing = SimpleNamespace(model=SimpleNamespace(), tokenizer=None)
    return schemathesis.openapi.from_dict(build_app(nothing, CONFIG).openapi())


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Yield the URL of a server over a model so small that many samples cost little."""
    small = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    with small_llm(tiny(max_position_embeddings=256, **small), use_coordinator=True) as llm:
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
    case.call_and_validate(url, checks=CHECKS, headers={"Authorization": f"Bearer {KEY}"})
