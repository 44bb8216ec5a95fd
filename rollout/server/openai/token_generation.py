"""Endpoint `POST /inference/v1/generate`: token ids in, token ids and log-probs out, as vLLM has it.

Renderers of training frameworks (verifiers, prime-rl, TRL) turn messages to tokens themselves and call this route. Beside
vLLM's fields, every choice has the policy version and the staleness of its tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field, JsonValue
from starlette.requests import Request
from starlette.responses import Response

from rollout.distributed.client.text_stream import TextDelta, whole
from rollout.errors import InvalidRequestError
from rollout.sampling_params import SamplingParams
from rollout.server.bodies import body_of, documented_body, off_the_loop
from rollout.server.openai import generation as calls
from rollout.server.openai.logprobs import TokenIdNames, chat_logprobs
from rollout.server.openai.response_schema import TokenGeneration, described
from rollout.server.openai.samples import finish_reason, routed_experts, sampling_mask, staleness, usage_of
from rollout.server.openai.schema import Absent, RequestFields, SamplingFields, TokenIds
from rollout.server.openai.sse import DONE, event
from rollout.server.openai.token_fields import listed_per_position, prompt_logprobs
from rollout.server.serving import Serving


class GenerateParams(SamplingFields):
    """Sampling parameters of vLLM."""

    logprobs: int | None = Field(None, ge=0, le=20)
    """Return log-probs of every token, and of this many likeliest tokens per position. 0: only the tokens' own."""
    output_kind: int | None = Field(None, ge=0, le=2)
    """Accepted, without effect: a reply has every sample, and a stream its new tokens."""
    detokenize: bool | None = None
    """Accepted, without effect: a reply has no text."""


class GenerateRequest(RequestFields):
    """Body of `POST /inference/v1/generate`."""

    prompt_field = "token_ids"

    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of the request: returned in the reply, and taken by `/abort_requests`. Null: one is made."""
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    """Token ids of the prompt."""
    sampling_params: GenerateParams = Field(default_factory=lambda: GenerateParams.model_validate({}))
    """Options of sampling."""
    return_token_ids: bool | None = None
    """Include `prompt_token_ids` in the reply."""
    priority: int | None = Field(None, ge=-(2**31 - 1), le=2**31 - 1)
    """Requests with a lower priority are scheduled first, as in vLLM. Default 0."""
    features: Absent = None
    """Images are not supported."""
    content_parts: list[JsonValue] | None = Field(None, max_length=0)
    """Images are not supported."""
    kv_transfer_params: Absent = None
    """Not supported."""

    @property
    def samples(self) -> int:
        """Samples of the prompt."""
        return self.sampling_params.n or 1

    @property
    def constraint_field(self) -> str:
        """Field that a constraint on the text comes from."""
        return "sampling_params.structured_outputs"

    @property
    def urgency(self) -> int:
        """Priority within the engine: higher first."""
        return -(self.priority or 0)


def add_token_routes(app: FastAPI, serving: Serving) -> None:
    """Register the route.

    Args:
        app: application to extend.
        serving: the model and its limits.
    """
    names = TokenIdNames(serving.llm.tokenizer)

    @app.post(
        "/inference/v1/generate",
        tags=["tokens"],
        response_model=None,
        responses=calls.ERRORS | described(TokenGeneration),
        openapi_extra=documented_body(GenerateRequest),
    )
    async def generate(request: Request) -> Response:
        """Generate completions of a prompt of token ids."""
        body = await body_of(serving, request, GenerateRequest)
        calls.admit(serving, request, body, 1)
        size = len(await request.body())
        work = calls.work_of(body.sampling_params, size)
        params = await off_the_loop(serving, request, work, lambda _: _params(serving, body))
        return await calls.answer(serving, request, _Reply(serving, body, names, params), stream=bool(body.stream))


def _params(serving: Serving, body: GenerateRequest) -> SamplingParams:
    asked, vocab_size = body.sampling_params, serving.llm.controller.layout.vocab_size
    try:
        return calls.checked(
            serving,
            asked.sampling_params(
                cache_salt=body.cache_salt,
                adapter=serving.adapter_of(body.model),
                max_tokens=calls.tokens_left(serving, body.token_ids, asked.max_tokens),
                logprobs=asked.logprobs,
                prompt_logprobs=listed_per_position(asked.prompt_logprobs, vocab_size, len(body.token_ids)),
            ),
        )
    except InvalidRequestError as exc:
        raise calls.refused(exc, body) from exc


class _Reply:
    """Reply to one request, whole or as a stream."""

    def __init__(self, serving: Serving, body: GenerateRequest, names: TokenIdNames, params: SamplingParams) -> None:
        self._serving = serving
        self._body = body
        self._names = names
        self._params = params
        self._id = serving.name_of_reply("gen", body.request_id)

    async def whole(self, request: Request) -> dict[str, Any]:
        """Return the reply once every sample has finished."""
        asked = [(self._body.token_ids, self._params)]
        (group,) = groups = await calls.samples_of(self._serving, request, self._body, self._id, asked)
        version = self._serving.llm.policy_version
        reply = self._head(version) | {"choices": [self._choice(whole(sample), version) for sample in group]}
        reply |= {"usage": usage_of(groups), "prompt_token_ids": None, "prompt_logprobs": None}
        if self._params.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(self._names, group[0], self._params.prompt_logprobs)
        return reply | self._prompt()

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the reply as server-sent events, ending with `[DONE]`.

        Raises:
            ApiError, RolloutError: generation failed; the stream ends without `[DONE]`.
        """
        body, serving = self._body, self._serving
        growing = self._params.prompt_logprobs is None
        streams = await calls.begin(serving, body, [(body.token_ids, self._params)], growing=growing)
        beside = self._prompt()
        async with aclosing(calls.deltas_of(serving, self._id, streams, body.samples)) as deltas:
            async for _, delta in deltas:
                version = serving.llm.policy_version
                if not growing and "prompt_logprobs" not in beside:
                    sample, top = streams[0].results[0], self._params.prompt_logprobs or 0
                    beside["prompt_logprobs"] = prompt_logprobs(self._names, sample, top)
                yield event(self._head(version) | {"choices": [self._choice(delta, version)]} | beside)
                beside = {"prompt_logprobs": None} if not growing else {}
        if body.wants_usage and (used := calls.usage_of_streams(streams)):
            yield event(self._head(serving.llm.policy_version) | {"choices": [], "usage": used})
        yield DONE

    def _head(self, version: int) -> dict[str, Any]:
        return {
            "request_id": self._id,
            "model": self._body.model or self._serving.model_name,
            "policy_version": version,
        }

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._body.token_ids} if self._body.return_token_ids else {}

    def _choice(self, delta: TextDelta, version: int) -> dict[str, Any]:
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = {"content": chat_logprobs(self._names, delta.token_ids, delta.log_probs, delta.top_log_probs)}
        return (
            {
                "index": delta.sample_index,
                "token_ids": delta.token_ids,
                "logprobs": logprobs,
                "finish_reason": finish_reason(delta),
                "stop_reason": delta.stop_reason,
                "policy_versions": delta.policy_versions,
                "policy_staleness": staleness(delta, version),
            }
            | routed_experts(delta)
            | sampling_mask(delta)
        )
