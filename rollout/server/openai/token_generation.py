"""Endpoint `POST /inference/v1/generate`: token ids in, token ids and log-probs out, as vLLM has it.

Renderers of training frameworks (verifiers, prime-rl, TRL) turn messages to tokens themselves and call this route. Beside
vLLM's fields, every choice has the policy version and the staleness of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field, JsonValue
from starlette.requests import Request
from starlette.responses import Response

from rollout.distributed.client.text_stream import TextDelta, whole
from rollout.errors import InvalidRequestError
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.server.bodies import body_of, documented_body, off_the_loop
from rollout.server.openai import generation as calls
from rollout.server.openai.logprobs import TokenIdNames, chat_logprobs, listed_per_position, prompt_logprobs
from rollout.server.openai.response_schema import TokenGeneration, described
from rollout.server.openai.samples import finish_reason, routed_experts, sampling_mask, staleness
from rollout.server.openai.schema import Absent, RequestFields, SamplingFields, TokenIds
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
        name = serving.name_of_reply("gen", body.request_id)
        head = {"request_id": name, "model": body.model or serving.model_name}
        choices = _TokenChoices(body, names, params)
        reply = calls.ChoicesReply(serving, body, choices, [(body.token_ids, params)], name, head)
        return await calls.answer(serving, request, reply, stream=bool(body.stream))


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


class _TokenChoices:
    """Choices of token ids."""

    def __init__(self, body: GenerateRequest, names: TokenIdNames, params: SamplingParams) -> None:
        self._body = body
        self._names = names
        self._params = params
        self.growing = params.prompt_logprobs is None
        self._begun = False

    def whole(self, index: int, sample: DynamicInferenceRequest, version: int) -> dict[str, Any]:
        """Return the choice of a finished sample."""
        return self._choice(whole(sample), version)

    def pieces(
        self, index: int, delta: TextDelta, version: int, sample: DynamicInferenceRequest | None
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield the chunk of a delta; the first one has the fields of the prompt."""
        beside = {} if self.growing else {"prompt_logprobs": None}
        if not self._begun:
            self._begun, beside = True, self._prompt(sample)
        yield self._choice(delta, version), beside

    def beside(self, sample: DynamicInferenceRequest) -> dict[str, Any]:
        """Fields of the prompt; null unless asked for."""
        return {"prompt_token_ids": None, "prompt_logprobs": None} | self._prompt(sample)

    def _prompt(self, sample: DynamicInferenceRequest | None) -> dict[str, Any]:
        fields: dict[str, Any] = {"prompt_token_ids": self._body.token_ids} if self._body.return_token_ids else {}
        if self._params.prompt_logprobs is not None and sample is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._names, sample, self._params.prompt_logprobs)
        return fields

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
