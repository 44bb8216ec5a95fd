"""`FakeLLM` that sends exactly the given deltas over a real tokenizer, and an HTTP client for its server."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
from openai import OpenAI

from rollout.config import ServerConfig
from rollout.distributed.client.text_stream import TextDelta
from rollout.requests.detokenizer import IncrementalDetokenizer
from rollout.sampling_params import SamplingParams
from rollout.server.server import Server
from tests.server.fake_llm import FakeLLM, FakeStream


class ScriptedStream(FakeStream):
    """The script, one delta after the other."""

    async def _deltas(self) -> AsyncIterator[TextDelta]:
        for delta in self._llm.script:
            yield delta
        if self._llm.hang:
            await asyncio.Event().wait()
        if self._llm.end_with is not None:
            raise self._llm.end_with


class ScriptedLLM(FakeLLM):
    """Every request is answered with `script`; its samples are what the deltas add up to.

    Attributes:
        script: the deltas of all samples, in the order in which they come.
        end_with: raised by a stream behind the script.
        hang: a stream has no end.
    """

    _stream_class = ScriptedStream

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self.controller.layout.vocab_size = len(tokenizer)
        self.controller.check_params = lambda params: None
        self.script: list[TextDelta] = []
        self.end_with: Exception | None = None
        self.hang = False

    def begin(self, script: list[TextDelta], version: int = 0) -> ScriptedLLM:
        """Reset the LLM to a new one with this script."""
        self.script, self.policy_version, self.cached = script, version, 0
        self.end_with = self.refuse_with = None
        self.submitted.clear()
        self.aborted = queue.Queue()
        return self

    def said(self, params: SamplingParams) -> list[TextDelta]:
        return self.script


def spoken(
    tokenizer: Any, text: str, *, sample: int = 0, reason: str | None = "stop", top: Any = None, version: int = 0
) -> list[TextDelta]:
    """A text as a stream has it: a delta per token, characters held back until they are whole, the end apart."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    deltas = [
        TextDelta(sample, detokenizer.push([token]), [token], [-0.5], [version], None if top is None else [top])
        for token in tokens
    ]
    last = TextDelta(sample, detokenizer.finish(), [], [], [], None if top is None else [], False, reason)
    return deltas if reason is None else [*deltas, last]


def client_of(server: Server) -> OpenAI:
    """OpenAI's client, which asks once."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120)


@contextmanager
def scripted(tokenizer: Any, **options: Any) -> Iterator[tuple[ScriptedLLM, OpenAI]]:
    """The fake, and OpenAI's client of a server over it."""
    llm = ScriptedLLM(tokenizer)
    try:
        with (
            Server(llm, ServerConfig(**{"port": 0, "shutdown_grace_s": 0} | options)) as server,
            client_of(server) as client,
        ):
            yield llm, client
        assert not llm.open, "a request was left open"
    finally:
        llm.loop.close()


def events(client: OpenAI, path: str, body: dict[str, Any]) -> list[Any]:
    """Return the events of a stream; `[DONE]` is a string."""
    with httpx.Client(timeout=60) as plain:
        reply = plain.post(f"{client.base_url}{path}", json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    sent = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    return [data if data == "[DONE]" else json.loads(data) for data in sent]


def joined(chunks: Sequence[Any], field: str, index: int = 0) -> list[Any]:
    """The tokens' entries of a list in `rollout`, over all chunks of one choice."""
    found: list[Any] = []
    for chunk in chunks:
        for choice in chunk.choices:
            holder = choice.delta if hasattr(choice, "delta") else choice
            found += (getattr(holder, "rollout", None) or {}).get(field, []) if choice.index == index else []
    return found
