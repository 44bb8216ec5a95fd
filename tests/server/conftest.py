"""Configuration of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from openai import OpenAI

from rollout.server.server import Server
from tests.server.chat_templates import byte_level
from tests.server.fake_llm import FakeLLM, served
from tests.server.scripted import ScriptedLLM, scripted

# A busy machine may take longer than httpx' 5 s. Its functions take their default from this one object.
DEFAULT_TIMEOUT_CONFIG.connect = DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.write = 120.0


@pytest.fixture(scope="module")
def open_house() -> Iterator[tuple[FakeLLM, Server]]:
    """A server for tests that leave nothing behind."""
    with served() as both:
        yield both
        assert both[0].aborted.empty()


@pytest.fixture(scope="module")
def stage() -> Iterator[tuple[ScriptedLLM, OpenAI]]:
    """A server over a scripted LLM, and its client."""
    with scripted(byte_level("qwen2.5"), served_model_name="m") as pair:
        yield pair


@pytest.fixture
def client(stage, llm) -> OpenAI:
    """Asks a module's `llm`, which `stage` serves."""
    return stage[1]


@pytest.fixture
def url(open_house) -> str:
    return open_house[1].url
