"""Small `AsyncLLM` without a model: replies with scripted text on command and records its requests.

Tokens are bytes. `hold()` keeps requests open until `release()` or their abort; `aborted` is a queue, so that a test can
wait for what a disconnect does.
"""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

from rollout.config import ServerConfig
from rollout.distributed.client.futures import RequestFuture
from rollout.distributed.client.text_stream import TextDelta, whole
from rollout.errors import InvalidRequestError, RequestAbortedError
from rollout.observe.metric_table import ENGINE_STATS
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.server.openai.samples import merged
from rollout.server.server import Server
from rollout.state import EngineState, FinishReason, Status
from rollout.threads.loop_thread import LoopThread

LOG_PROB = -0.5
END_OF_TEXT = 256
VOCAB_SIZE = 257

STATS = dict.fromkeys(ENGINE_STATS, 0) | {
    "requests_running": 1, "generated_tokens": 7, "prefill_tokens_computed": 3, "kv_blocks_total": 8, "kv_blocks_used": 1,
    "kv_blocks_free": 7, "kv_device_bytes": 1024, "steps": 5, "prompt_tokens": 3,
}  # fmt: skip
"""Counters by the names of `DynamicInferenceEngine.stats`."""


class FakeTokenizer:
    """Text is UTF-8 bytes; 256 ends it."""

    all_special_ids = (END_OF_TEXT,)

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return bytes(token for token in token_ids if token < END_OF_TEXT).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, ids: int) -> str:
        return f"<{ids}>"


class FakeRequest:
    """A request of the fake, and the real future of its samples."""

    def __init__(self, llm: FakeLLM, prompt: list[int], params: SamplingParams) -> None:
        self.request_id = next(llm.numbers)
        self.prompt, self.params = prompt, params
        self._llm = llm
        self.future = RequestFuture(self.request_id, lambda _: self.abort(), loop=llm.loop.event_loop)
        llm.open[self.request_id] = self

    def abort(self) -> None:
        if self._llm.open.get(self.request_id) is self:
            self._llm.aborted.put(self.request_id)
            self.end(RequestAbortedError(f"request {self.request_id} was aborted", self.request_id))

    def end(self, error: Exception | None = None) -> None:
        if self._llm.open.pop(self.request_id, None) is None:
            return
        if error is None:
            self.future.end([self._llm.sample(self, index) for index in range(self.params.n)])
        else:
            self.future.fail(error)


class FakeStream:
    """A stream like `RequestStream`: one delta per token, whole characters only; then, if held, nothing more."""

    def __init__(self, llm: FakeLLM, asked: FakeRequest, *, whole: bool) -> None:
        self.request_id = asked.request_id
        self._llm, self._asked, self._whole = llm, asked, whole

    @property
    def results(self) -> list[DynamicInferenceRequest]:
        return self._asked.future.result(0)

    def take_waiting(self) -> list[TextDelta]:
        return []

    async def __aiter__(self) -> AsyncIterator[TextDelta]:
        try:
            async for delta in self._wholes() if self._whole else self._deltas():
                yield delta
        finally:
            await self.aclose()

    async def _wholes(self) -> AsyncIterator[TextDelta]:
        for sample in await self._asked.future:
            yield whole(sample)

    async def _deltas(self) -> AsyncIterator[TextDelta]:
        said = self._llm.said(self._asked.params)
        for delta in said:
            if delta.finish_reason is None:
                yield delta
        await self._asked.future
        for delta in said:
            if delta.finish_reason is not None:
                yield delta

    async def aclose(self) -> None:
        self._asked.abort()


class FakeLLM:
    """The part of an `AsyncLLM` that the server uses.

    Attributes:
        reply: the text of every completion, cut at `max_tokens`.
        submitted: (prompt ids, params, priority, timeout_s) of every request.
        aborted: numbers of requests that somebody aborted, in order.
        refuse_with: raised by `submit`.
        gone: why no request is served any more.
        cached: prompt tokens that every sample finds in the prefix cache.
        direct: lifecycle methods are refused as in direct mode.
    """

    _stream_class = FakeStream
    world_size = tensor_parallel_size = 1

    def __init__(self, tokenizer: Any = None) -> None:
        self.loop = LoopThread()
        self.model = SimpleNamespace(config=SimpleNamespace(_name_or_path="fakes/one"))
        self.tokenizer = tokenizer
        self.controller = SimpleNamespace(
            layout=SimpleNamespace(vocab_size=VOCAB_SIZE),
            eos_token_ids=(END_OF_TEXT,),
            tokenizer=tokenizer,
            chat_template=None,
            takes_images=False,
        )
        self.lora_adapters: dict[str, str] = {}
        self.max_sequence_length = 4096
        self.state = EngineState.RUNNING
        self.policy_version = 0
        self.reply = "Hello"
        self.direct = False
        self.gone: Exception | None = None
        self.refuse_with: Exception | None = None
        self.numbers = count()
        self.open: dict[int, FakeRequest] = {}
        self.submitted: list[tuple[list[int], SamplingParams, int, float | None]] = []
        self.aborted: queue.Queue[int] = queue.Queue()
        self.calls: list[tuple[Any, ...]] = []
        self.cached = 0
        self._held = False

    @property
    def num_open(self) -> int:
        return len(self.open)

    # --- requests ---------------------------------------------------------------------------------------------------

    def submit(self, prompt: Any, sampling_params: SamplingParams | None = None, **options: Any) -> RequestFuture:
        return self._ask(prompt, sampling_params, **options).future

    def _ask(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> FakeRequest:
        params = sampling_params or SamplingParams()
        if self.refuse_with is not None:
            raise self.refuse_with
        tokens = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise InvalidRequestError("prompt: must have at least one token")
        self.submitted.append((tokens, params, priority, timeout_s))
        asked = FakeRequest(self, tokens, params)
        if not self._held:
            asked.end()
        return asked

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None, *, interval: int | None = 1, **options: Any
    ) -> FakeStream:
        return self._stream_class(self, self._ask(prompt, sampling_params, **options), whole=interval is None)

    def said(self, params: SamplingParams) -> list[TextDelta]:
        """Items of a stream: the reply token by token, then the ends of its samples."""
        tokens = list(self.reply.encode())[: params.max_tokens]
        reason = "length" if len(tokens) == params.max_tokens else "stop"
        deltas, before = [], ""
        for end, token in enumerate(tokens, 1):
            text = bytes(tokens[:end]).decode("utf-8", "ignore")
            top = [[(token, LOG_PROB)]] if params.logprobs else None
            deltas.append(TextDelta(0, text[len(before) :], [token], [LOG_PROB], [self.policy_version], top))
            before = text
        deltas.append(TextDelta(0, "", [], [], [], [] if params.logprobs else None, finish_reason=reason))
        return [replace(delta, sample_index=index) for index in range(params.n) for delta in deltas]

    def sample(self, pending: FakeRequest, index: int) -> DynamicInferenceRequest:
        """Sum of the deltas of a sample."""
        params, asked = pending.params, pending.params.prompt_logprobs
        nothing = TextDelta(index, "", [], [], [], finish_reason="length")
        (said,) = merged([delta for delta in self.said(params) if delta.sample_index == index] or [nothing])
        return DynamicInferenceRequest(
            request_id=pending.request_id,
            sample_index=index,
            sampling_params=params,
            status=Status.COMPLETED,
            prompt_tokens=pending.prompt,
            generated_tokens=said.token_ids,
            generated_text=said.text,
            generated_log_probs=said.log_probs,
            generated_top_n_logprobs=said.top_log_probs or [],
            prompt_log_probs=None if asked is None else [-0.25] * (len(pending.prompt) - 1),
            prompt_top_n_logprobs=[[(7, -0.125)][:asked] for _ in pending.prompt[1:]] if asked else None,
            finish_reason=FinishReason(said.finish_reason),
            stop_reason=said.stop_reason,
            error=said.error,
            routing_indices=said.routed_experts,
            policy_version=said.policy_versions[0] if said.policy_versions else 0,
            num_cached_tokens=self.cached,
            ttft=0.25,
            latency=0.5,
            seed=params.seed,
        )

    def hold(self) -> None:
        """Requests stay open from here on."""
        self._held = True

    def release(self) -> None:
        """They end."""
        self._held = False
        self.loop.run_sync(self._end_all(), 30)

    async def _end_all(self) -> None:
        for pending in list(self.open.values()):
            pending.end()

    async def abort(self, request_id: int | None = None) -> int:
        found = [self.open[number] for number in list(self.open) if request_id in (None, number)]
        for pending in found:
            pending.abort()
        return len(found)

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._control("pause", EngineState.PAUSED)

    async def unpause(self) -> None:
        self._control("unpause", EngineState.RUNNING)

    async def suspend(self, mode: Any = None) -> None:
        self._control("suspend", EngineState.SUSPENDED, mode)

    async def resume(self) -> None:
        self._control("resume", EngineState.PAUSED)

    def _control(self, name: str, state: EngineState, *arguments: Any) -> None:
        if self.direct:
            raise RuntimeError(f"direct mode has no coordinator to relay {name}(): use llm.engine.{name}()")
        self.calls.append((name, *arguments))
        self.state = state

    async def set_policy_version(self, version: int | None = None) -> int:
        self.policy_version = self.policy_version + 1 if version is None else version
        return self.policy_version

    def flush_prefix_cache(self) -> int:
        return 3

    def stats(self) -> dict[str, float]:
        self.refuse_when_over()
        return STATS | {"policy_version": self.policy_version}

    def refuse_when_over(self) -> None:
        if self.gone is not None:
            raise self.gone


@contextmanager
def served(tokenizer: Any = None, **options: Any) -> Iterator[tuple[FakeLLM, Server]]:
    """A fake and a server over it on a free port; both are gone afterwards, and nothing is left open."""
    llm = FakeLLM(tokenizer)
    try:
        server = Server(llm, ServerConfig(**{"port": 0, "shutdown_grace_s": 0} | options))
        with server:
            yield llm, server
        assert llm.num_open == 0, "the server has left requests open"
    finally:
        llm.loop.close()
