"""Submits validated bodies to the LLM and collects replies; shared by both endpoints.

Either all prompts of a request are submitted or none. A client that disconnects before its reply aborts all of them.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from rollout.distributed.client.text_stream import TextDelta
from rollout.errors import InvalidRequestError, RequestAbortedError
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.server.bodies import LARGE
from rollout.server.errors import ApiError, bad_request, documented
from rollout.server.openai.samples import refuse_failed, usage_of
from rollout.server.openai.schema import RequestFields, SamplingFields
from rollout.server.openai.sse import DONE, Chunks, EventStream, bursts, encode
from rollout.server.serving import LOG, Serving, Turn, or_disconnected
from rollout.state import FinishReason

Group = list[DynamicInferenceRequest]
Asked = tuple[list[int], SamplingParams]
"""(token ids, sampling parameters) of a prompt."""

ERRORS = documented(400, 401, 404, 408, 409, 413, 429, 500, 503)
"""Error `responses` of both routes."""

_RESTARTED = "choice {}: its tokens were given up and it has begun afresh; forget what came, and send the request again"

# Beginning of an error of a constraint, in the engine's words.
_CONSTRAINT = re.compile(r"structured: (?:the (?:json_schema|regex|grammar) )?")

# Field path at the beginning of an error message, such as `messages[1].content`.
_FIELD = re.compile(r"([a-z_]+)(?:\[\d+\]|\.\w+)*")


def admit(serving: Serving, request: Request, body: RequestFields, prompts: int) -> None:
    """Admit a request, or raise as `Serving.adapter_of` and `Serving.admit` do."""
    LOG.get().model = serving.adapter_of(body.model) or serving.model_name
    samples = prompts * body.samples
    serving.admit(request, samples, wait_while_suspended=body.wait_while_suspended is not False)


def reply_head(serving: Serving, body: RequestFields, kind: str, prefix: str) -> dict[str, Any]:
    """Return the fields common to a reply and its chunks: id, object, created, model."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model or serving.model_name,
    }


def tokens_left(serving: Serving, prompt: Sequence[int], asked: int | None) -> int:
    """Return `asked` capped at the remaining sequence length, at least 1 unless 0 was asked for.

    A prompt that leaves no room for a token is refused by the engine.

    Raises:
        InvalidRequestError: the prompt itself is too long; checked here before the engine validates every token.
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
    """Return the size that `off_the_loop` is told: a constraint may take as long to compile as a large body to parse."""
    return max(size, LARGE) if body.constrained else size


def checked(serving: Serving, params: SamplingParams) -> SamplingParams:
    """Return the parameters; compile their constraint, which is then at hand when the request is submitted.

    Raises:
        InvalidRequestError: it does not compile.
    """
    if params.structured is not None:
        serving.llm.controller.check_params(params)
    return params


def refused(exc: InvalidRequestError, body: RequestFields, where: str = "") -> ApiError:
    """Return a 400 whose `param` is the field that the message begins with, else the prompt field.

    Args:
        where: prefix of the message.
    """
    if found := _CONSTRAINT.match(str(exc)):
        field = body.constraint_field
        return bad_request(f"{where}{field}: {str(exc)[found.end() :]}", param=field)
    named = _FIELD.match(str(exc))
    known = named is not None and named[1] in type(body).model_fields
    return bad_request(f"{where}{exc}", param=named[0] if known and named else body.prompt_field)


# --- into the engine, and out of it -----------------------------------------------------------------------------------


async def begin(serving: Serving, body: RequestFields, asked: Sequence[Asked], *, growing: bool) -> list[Any]:
    """Submit every prompt and return their streams; on an error, none is submitted.

    Args:
        growing: True: streams yield deltas as tokens arrive. False: only when a group has finished.

    Raises:
        ApiError: 400, a prompt can never be served.
        RolloutError: the engine accepts no requests any more.
    """
    # None: for whole replies, and for streams with data that is known only at the end.
    interval = serving.config.stream_interval if growing else None
    options: dict[str, Any] = {"priority": body.urgency, "timeout_s": serving.time_limit(body.timeout_s)}
    if serving.llm.direct:
        # The prompts of one HTTP request share one client's turns, so that another request waits for one of them at most.
        options["client"] = object()
    streams: list[Any] = []
    turn = Turn()
    try:
        for prompt, params in asked:
            await turn.pause()
            streams.append(serving.llm.stream(prompt, params, interval=interval, **options))
    except InvalidRequestError as exc:
        await _close(streams)
        where = f"prompt {len(streams)} of {len(asked)}: " if len(asked) > 1 else ""
        raise refused(exc, body, where) from exc
    except BaseException:
        await _close(streams)
        raise
    return streams


async def samples_of(
    serving: Serving, request: Request, body: RequestFields, reply_id: str, asked: Sequence[Asked]
) -> list[Group]:
    """Submit every prompt and return the finished samples of each.

    Raises:
        ClientGoneError: the client disconnected.
        ApiError: 400, a prompt can never be served; 500, a sample failed.
        RolloutError: the cause, if a group ended without samples.
    """

    async def computed() -> list[Group]:
        streams = await begin(serving, body, asked, growing=False)
        with serving.computing(reply_id, [stream.request_id for stream in streams]):
            await _read(streams)
        return await _counted(serving, streams)

    return await or_disconnected(request, computed())


async def _read(streams: Sequence[Any]) -> None:
    try:
        for stream in streams:
            async for _ in stream:
                pass
    except BaseException:
        await _close(streams)
        raise


async def _counted(serving: Serving, streams: Sequence[Any]) -> list[Group]:
    """Record and return the results of finished streams; raise `ApiError` if a sample failed."""
    groups: list[Group] = [stream.results for stream in streams]
    turn, about = Turn(), LOG.get()
    for position, group in enumerate(groups):
        await turn.pause()
        serving.counters.finished(group)
        about.prompt_tokens += len(group[0].prompt_tokens)
        about.completion_tokens += sum(sample.generated_length for sample in group)
        for sample in group:
            refuse_failed(sample.finish_reason, sample.error, position * len(group) + sample.sample_index)
    return groups


async def _close(streams: Sequence[Any]) -> None:
    for stream in streams:
        await stream.aclose()


async def deltas_of(
    serving: Serving, reply_id: str, streams: Sequence[Any], samples: int
) -> AsyncGenerator[tuple[int, TextDelta]]:
    """Yield (choice index, delta) until all streams have ended, at the latest by a control call: then with `abort`.

    Args:
        samples: samples per prompt. Choice c is sample c % samples of prompt c // samples.

    Raises:
        ApiError: a sample failed, or was restarted after a part of it had been yielded.
        RolloutError: the cause, if a group ended without samples.
    """
    begun: set[int] = set()
    ended: set[int] = set()
    with serving.computing(reply_id, [stream.request_id for stream in streams]):
        try:
            async with aclosing(bursts(streams)) as together:
                async for burst in together:
                    for prompt, delta in burst:
                        choice = prompt * samples + delta.sample_index
                        if delta.finish_reason is not None:
                            if delta.finish_reason == FinishReason.ABORT:
                                continue  # the stream raises the cause
                            refuse_failed(delta.finish_reason, delta.error, choice)
                            ended.add(choice)
                        if delta.restarted and choice in begun:
                            raise ApiError(503, _RESTARTED.format(choice), code="restarted")
                        begun.add(choice)
                        yield choice, delta
        except RequestAbortedError:
            if not serving.was_cut(reply_id):
                raise
            for choice in sorted({*range(len(streams) * samples)} - ended):
                yield choice, TextDelta(choice % samples, "", [], [], [], finish_reason=FinishReason.ABORT)
            return
    await _counted(serving, streams)


def usage_of_streams(streams: Sequence[Any]) -> dict[str, Any] | None:
    """Return `usage` of streams that have ended; None if they were aborted."""
    try:
        return usage_of(stream.results for stream in streams)
    except RequestAbortedError:
        return None


class Dialect(Protocol):
    """How one route writes the choices of a reply. It serves one reply and may keep what it needs of each choice."""

    growing: bool
    """A stream can begin before its samples have finished."""

    def whole(self, index: int, sample: DynamicInferenceRequest, version: int) -> dict[str, Any]:
        """Return the choice of a finished sample."""

    def pieces(
        self, index: int, delta: TextDelta, version: int, sample: DynamicInferenceRequest | None
    ) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the chunks of a delta, each as (choice, fields beside it); `sample`: the finished one, unless growing."""

    def beside(self, sample: DynamicInferenceRequest) -> dict[str, Any]:
        """Return the fields of the prompt beside the choices of a whole reply."""


@dataclass(frozen=True, slots=True)
class ChoicesReply:
    """Reply that consists of choices."""

    serving: Serving
    body: RequestFields
    dialect: Dialect
    asked: Sequence[Asked]
    name: str
    """Id of the reply for an abort."""
    head: dict[str, Any]
    """Fields common to the reply and its chunks."""
    chunk: dict[str, Any] = field(default_factory=dict)
    """Fields of `head` that a chunk has otherwise."""

    async def whole(self, request: Request) -> dict[str, Any]:
        """Return the reply once every sample has finished."""
        groups = await samples_of(self.serving, request, self.body, self.name, self.asked)
        version, turn = self.serving.llm.policy_version, Turn()
        choices: list[dict[str, Any]] = []
        for prompt, group in enumerate(groups):
            for sample in group:
                choices.append(self.dialect.whole(prompt * self.body.samples + sample.sample_index, sample, version))
                await turn.pause()
        reply = self.head | {"policy_version": version, "choices": choices, "usage": usage_of(groups)}
        return reply | self.dialect.beside(groups[0][0])

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the reply as server-sent events, ending with `[DONE]`.

        Raises:
            ApiError, RolloutError: generation failed; the stream ends without `[DONE]`.
        """
        serving, body, dialect = self.serving, self.body, self.dialect
        # vLLM's route of tokens has no `"usage": null` in the other chunks.
        chunks = Chunks(self.head | self.chunk, with_usage=body.wants_usage and "object" in self.head)
        streams = await begin(serving, body, self.asked, growing=dialect.growing)
        async with aclosing(deltas_of(serving, self.name, streams, body.samples)) as deltas:
            async for index, delta in deltas:
                version = serving.llm.policy_version
                done = None if dialect.growing else streams[index // body.samples].results[delta.sample_index]
                pieces = dialect.pieces(index, delta, version, done)
                if events := b"".join([chunks.choice(piece, version, beside) for piece, beside in pieces]):
                    yield events
        if body.wants_usage and (used := usage_of_streams(streams)):
            yield chunks.usage(used, serving.llm.policy_version)
        yield DONE


async def answer(serving: Serving, request: Request, reply: ChoicesReply, *, stream: bool) -> Response:
    """Return the response that computes a reply. Choices are encoded in turns: thousands must not stop the event loop.

    Raises: what a reply raises before its first byte.
    """
    if stream:
        source = reply.chunks()
        return EventStream(serving, await or_disconnected(request, anext(source)), source)
    computed, turn = await reply.whole(request), Turn()
    encoded: list[bytes] = []
    for choice in computed["choices"]:
        encoded.append(encode(choice))
        await turn.pause()
    body = encode(computed | {"choices": []}).replace(b'"choices":[]', b'"choices":[%b]' % b",".join(encoded), 1)
    return Response(body, media_type="application/json")
