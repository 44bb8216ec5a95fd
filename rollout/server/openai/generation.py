"""The submission of validated bodies to the LLM, and the collection of replies, for all dialects of the API.

Either all prompts of a request are submitted or none. If a client disconnects before its reply, all of them are aborted.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from rollout.distributed.client.text_stream import TextDelta, whole
from rollout.errors import InvalidRequestError, RequestAbortedError
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.server.bodies import LARGE
from rollout.server.errors import ApiError, bad_request
from rollout.server.openai.logprobs import TokenIdNames, TokenTexts, listed_per_position
from rollout.server.openai.samples import refuse_failed, usage_of
from rollout.server.openai.schema import RequestFields, SamplingBody, SamplingFields
from rollout.server.openai.sse import DONE, Chunks, EventStream, bursts, encode
from rollout.server.serving import Serving, Turn, or_disconnected
from rollout.state import FinishReason

Group = list[DynamicInferenceRequest]
Asked = tuple[list[int], SamplingParams]
"""The (token ids, sampling parameters) of a prompt."""
REPLY: dict[int | str, dict[str, Any]] = {
    200: {
        "description": 'The reply; with stream=true its chunks, then `[DONE]`, or `{"error": …}` after an error.',
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
"""FastAPI's argument `responses` for the routes that generate completions: the documentation of their replies."""

# This matches the beginning of the engine's message for a constraint error.
_CONSTRAINT = re.compile(r"structured: (?:the (?:json_schema|regex|grammar) )?")

# This matches the field path with which an error message may begin, such as `messages[1].content`.
_FIELD = re.compile(r"([a-z_]+)(?:\[\d+\]|\.\w+)*")


def admit(serving: Serving, request: Request, body: RequestFields, prompts: int) -> None:
    """Count a request's samples as open. Raise an error if its `model` is unknown or its samples cannot be admitted."""
    serving.adapter_of(body.model)
    serving.admit(request, prompts * body.samples)


def reply_head(serving: Serving, body: RequestFields, kind: str, prefix: str) -> dict[str, Any]:
    """Return the fields common to a reply and its chunks: id (begins with `prefix`), object (`kind`), created, model."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model or serving.model_name,
    }


def tokens_left(serving: Serving, prompt: Sequence[int], asked: int | None) -> int:
    """Return `asked`, but at most the remaining sequence length (at least 1). Without `asked`, return this maximum.

    Raises `InvalidRequestError` if the prompt is too long, which the engine would report only after checking every token.
    """
    longest = serving.llm.max_sequence_length
    if len(prompt) > longest:
        raise InvalidRequestError(
            f"a prompt of {len(prompt)} tokens leaves no room within max_sequence_length={longest}; shorten it or raise "
            "max_sequence_length"
        )
    room: int = max(1, longest - len(prompt))
    return room if asked is None else min(asked, room)


def work_of(body: SamplingFields, size: int) -> int:
    """Return the size to pass to `off_the_loop`: `size`, or at least `LARGE` for a constraint, which is slow to compile."""
    return max(size, LARGE) if body.constrained else size


def listed(serving: Serving, options: SamplingFields, prompt_tokens: int) -> int | None:
    """Return how many most likely tokens to list per prompt position; raise `ApiError` 400 if the total is too large."""
    return listed_per_position(options.prompt_logprobs, serving.llm.controller.layout.vocab_size, prompt_tokens)


def params_of(serving: Serving, body: RequestFields, options: SamplingFields, **decided: Any) -> SamplingParams:
    """Return the sampling parameters of a request and compile its constraint. `decided` has fields set by the endpoint.

    Raises `ApiError` 400 if values contradict each other, `InvalidRequestError` if the constraint does not compile.
    """
    adapter = serving.adapter_of(body.model)
    params = options.sampling_params(cache_salt=body.cache_salt, adapter=adapter, **decided)
    if params.structured is not None:
        serving.llm.controller.check_params(params)
    return params


def texts_for(serving: Serving, body: SamplingBody) -> TokenTexts:
    texts: TokenTexts = TokenIdNames(serving.llm.tokenizer) if body.return_tokens_as_token_ids else serving.texts
    return texts


def refused(exc: InvalidRequestError, body: RequestFields, where: str = "") -> ApiError:
    """Return a 400 whose message is `where` and `exc`. Its `param` is the field that begins `exc`, or else the prompt."""
    if found := _CONSTRAINT.match(str(exc)):
        field = body.constraint_field
        return bad_request(f"{where}{field}: {str(exc)[found.end() :]}", param=field)
    named = _FIELD.match(str(exc))
    known = named is not None and named[1] in type(body).model_fields
    return bad_request(f"{where}{exc}", param=named[0] if known and named else body.prompt_field)


# --- into the engine, and out of it -----------------------------------------------------------------------------------


class Dialect(Protocol):
    """The format of the choices in one route's replies. An object serves one reply and may have state per choice.

    In its methods, `index` is the index of the choice, and `version` is the current policy version."""

    def whole(self, index: int, delta: TextDelta, sample: DynamicInferenceRequest, version: int) -> dict[str, Any]:
        """Return a finished sample as a choice of a whole reply. `delta` contains the whole sample."""

    def pieces(self, index: int, delta: TextDelta, version: int) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the chunks for a sample's new tokens, `delta`, each as (choice, the chunk's fields next to its choices)."""

    def beside(self, sample: DynamicInferenceRequest) -> dict[str, Any]:
        """Return the fields about a prompt that a whole reply has next to its choices; null if not requested."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply to one request. Choice c is sample c % n of prompt c // n."""

    serving: Serving
    body: RequestFields
    dialect: Dialect
    asked: Sequence[Asked]
    name: str
    """The id of the reply, by which a control call can abort it."""
    head: dict[str, Any]
    """The fields common to the whole reply and its chunks."""
    chunk: dict[str, Any] = field(default_factory=dict)
    """A dict from field name to its value in chunks, for the fields of `head` that have another value there."""

    async def answer(self, request: Request) -> Response:
        """Return the reply, or a stream of its chunks as server-sent events that ends with `[DONE]`.

        Raises:
            ClientGoneError: the client disconnected.
            ApiError: 400 if a prompt can never be served or a stream requests prompt log-probs; 500 if a sample failed; 503
                if a sample was restarted after a part of it had been sent.
            RolloutError: the engine no longer accepts requests, or a prompt's group of samples failed.
        """
        if self.body.stream:
            if any(params.prompt_logprobs is not None for _, params in self.asked):
                raise bad_request(
                    "stream=true: prompt_logprobs, and logprobs with echo, come in whole replies only; set stream=false",
                    param="stream",
                )
            source = self._chunks()
            return EventStream(self.serving, await or_disconnected(request, anext(source)), source)
        groups = await or_disconnected(request, self._samples())
        return Response(await self._encoded(groups), media_type="application/json")

    async def _encoded(self, groups: list[Group]) -> bytes:
        """Encode a whole reply. Let other tasks run between choices, because encoding thousands of choices takes long."""
        version, turn = self.serving.llm.policy_version, Turn()
        choices: list[bytes] = []
        for prompt, group in enumerate(groups):
            for sample in group:
                index = prompt * self.body.samples + sample.sample_index
                choices.append(encode(self.dialect.whole(index, whole(sample), sample, version)))
                await turn.pause()
        reply = self.head | {"policy_version": version, "choices": [], "usage": usage_of(groups)}
        reply |= self.dialect.beside(groups[0][0])
        return encode(reply).replace(b'"choices":[]', b'"choices":[%b]' % b",".join(choices), 1)

    async def _chunks(self) -> AsyncGenerator[bytes]:
        serving, body, dialect = self.serving, self.body, self.dialect
        # OpenAI sends `"usage": null` in every chunk but the last. vLLM's token route, which has no "object", omits it.
        chunks = Chunks(self.head | self.chunk, with_usage=body.stream_options.include_usage and "object" in self.head)
        streams = await self._begin(growing=True)
        async with aclosing(self._deltas(streams)) as deltas:
            async for index, delta in deltas:
                version = serving.llm.policy_version
                pieces = dialect.pieces(index, delta, version)
                if events := b"".join([chunks.choice(piece, version, beside) for piece, beside in pieces]):
                    yield events
        if body.stream_options.include_usage:
            with suppress(RequestAbortedError):
                yield chunks.usage(usage_of(stream.results for stream in streams), serving.llm.policy_version)
        yield DONE

    async def _begin(self, *, growing: bool) -> list[Any]:
        """Submit every prompt, or none if one fails. Return streams that yield deltas if `growing`, else whole groups."""
        serving, body, asked = self.serving, self.body, self.asked
        options: dict[str, Any] = {"priority": body.urgency, "timeout_s": serving.time_limit(body.timeout_s)}
        streams: list[Any] = []
        turn = Turn()
        try:
            for prompt, params in asked:
                await turn.pause()
                streams.append(serving.llm.stream(prompt, params, interval=1 if growing else None, **options))
        except BaseException as exc:
            await _close(streams)
            if not isinstance(exc, InvalidRequestError):
                raise
            where = f"prompt {len(streams)} of {len(asked)}: " if len(asked) > 1 else ""
            raise refused(exc, body, where) from exc
        return streams

    async def _samples(self) -> list[Group]:
        streams = await self._begin(growing=False)
        with self.serving.computing(self.name, [stream.request_id for stream in streams]):
            try:
                for stream in streams:
                    async for _ in stream:
                        pass
            except BaseException:
                await _close(streams)
                raise
        return await self._counted(streams)

    async def _deltas(self, streams: Sequence[Any]) -> AsyncGenerator[tuple[int, TextDelta]]:
        """Yield (choice index, delta) pairs. If a control call aborts the reply, open choices finish with reason `abort`."""
        samples = self.body.samples
        begun: set[int] = set()
        ended: set[int] = set()
        with self.serving.computing(self.name, [stream.request_id for stream in streams]):
            try:
                async with aclosing(bursts(streams)) as together:
                    async for burst in together:
                        for prompt, delta in burst:
                            choice = prompt * samples + delta.sample_index
                            if delta.finish_reason is not None:
                                if delta.finish_reason == FinishReason.ABORT:
                                    continue  # The stream then raises the cause of the abort.
                                refuse_failed(delta.finish_reason, delta.error, choice)
                                ended.add(choice)
                            if delta.restarted and choice in begun:
                                restarted = f"choice {choice} was restarted after a part of it had been sent"
                                cure = "discard what came, and send the request again"
                                raise ApiError(503, f"{restarted}: {cure}", code="restarted")
                            begun.add(choice)
                            yield choice, delta
            except RequestAbortedError:
                if not self.serving.was_cut(self.name):
                    raise
                for choice in sorted({*range(len(streams) * samples)} - ended):
                    yield choice, TextDelta(choice % samples, "", [], [], [], finish_reason=FinishReason.ABORT)
                return
        await self._counted(streams)

    async def _counted(self, streams: Sequence[Any]) -> list[Group]:
        """Record and return the results of finished streams; raise `ApiError` if a sample failed."""
        groups: list[Group] = [stream.results for stream in streams]
        turn = Turn()
        for position, group in enumerate(groups):
            await turn.pause()
            self.serving.counters.finished(group)
            for sample in group:
                refuse_failed(sample.finish_reason, sample.error, position * len(group) + sample.sample_index)
        return groups


async def _close(streams: Sequence[Any]) -> None:
    for stream in streams:
        await stream.aclose()
