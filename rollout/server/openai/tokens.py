"""The endpoints of vLLM's token dialect: `/inference/v1/generate` and `/tokenize`.

Training frameworks (verifiers, prime-rl, TRL) render messages to tokens themselves and send only the token ids. In addition
to vLLM's fields, every choice has the policy version and the staleness of its tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from rollout.distributed.client.text_stream import TextDelta
from rollout.errors import InvalidRequestError
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.server.bodies import body_of, documented_body, off_the_loop
from rollout.server.chat_template.prompt_ids import PromptTokenizer
from rollout.server.errors import bad_request
from rollout.server.openai import generation as calls
from rollout.server.openai.chat_schema import MAX_MESSAGES, Message, TemplateFields
from rollout.server.openai.logprobs import TokenIdNames, chat_logprobs, prompt_logprobs
from rollout.server.openai.samples import finish_reason, routed_experts, sampling_mask, staleness
from rollout.server.openai.schema import INT32, RequestFields, SamplingFields, TokenIds
from rollout.server.serving import Serving


class GenerateParams(SamplingFields):
    """The sampling parameters, with the names that vLLM uses."""

    logprobs: int | None = Field(None, ge=0, le=20)
    """Return the log-prob of every sampled token, and of this many most likely tokens per position (0: no other tokens)."""
    output_kind: int | None = Field(None, ge=0, le=2)
    """Accepted, but has no effect: a reply always has whole samples, and a stream the new tokens of each sample."""
    detokenize: bool | None = None
    """Accepted, but has no effect, because a reply has no text."""
    skip_special_tokens: bool = True  # type: ignore[assignment]
    """Accepted, but has no effect, because a reply has no text."""


class GenerateRequest(RequestFields):
    """The body of `POST /inference/v1/generate`."""

    prompt_field = "token_ids"

    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Id of the request, for the reply and for `/abort_requests`. If null, the server chooses an id."""
    token_ids: Annotated[TokenIds, Field(min_length=1)]
    """Token ids of the prompt."""
    sampling_params: GenerateParams = Field(default_factory=lambda: GenerateParams.model_validate({}))
    return_token_ids: bool = False
    """Whether to include `prompt_token_ids` in the reply."""
    priority: int = Field(0, ge=-INT32, le=INT32)
    """Requests with a lower priority are scheduled first, as in vLLM."""

    @property
    def samples(self) -> int:
        return self.sampling_params.n

    @property
    def constraint_field(self) -> str:
        return "sampling_params.structured_outputs"

    @property
    def urgency(self) -> int:
        return -self.priority


class TokenizeRequest(TemplateFields):
    """The body of `POST /tokenize`, which contains either a string or a conversation."""

    model: str | None = None
    """Name of the served model or of an adapter."""
    prompt: str | None = None
    """Text to tokenise."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    """Conversation to tokenise, oldest message first. It and the options of the chat template work as in a chat request."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens around `prompt`. A chat template adds its own."""
    return_token_strs: bool = False
    """Whether to include `token_strs`, the tokens' strings in the vocabulary, in the reply."""

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) is (self.messages is None):
            raise PydanticCustomError("one_of", "needs either prompt or messages")
        return self


def add_token_routes(app: FastAPI, serving: Serving) -> None:
    """Register `/inference/v1/generate` and `/tokenize`."""
    names = TokenIdNames(serving.llm.tokenizer)
    tokenizer = copy.deepcopy(serving.llm.tokenizer)

    def room() -> int:
        return int(serving.llm.max_sequence_length)

    @app.post(
        "/inference/v1/generate",
        tags=["tokens"],
        response_model=None,
        responses=calls.REPLY,
        openapi_extra=documented_body(GenerateRequest),
    )
    async def generate(request: Request) -> Response:
        """Generate completions of a prompt of token ids."""
        body = await body_of(serving, request, GenerateRequest)
        calls.admit(serving, request, body, 1)
        work = calls.work_of(body.sampling_params, len(await request.body()))
        params = await off_the_loop(request, work, lambda: _params(serving, body))
        name = serving.name_of_reply("gen", body.request_id)
        head = {"request_id": name, "model": body.model or serving.model_name}
        choices = _TokenChoices(body, names, params)
        reply = calls.Reply(serving, body, choices, [(body.token_ids, params)], name, head)
        return await reply.answer(request)

    @app.post("/tokenize", tags=["tokens"], openapi_extra=documented_body(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        """Tokenise a string, or a conversation as a chat request renders it.

        The reply has `tokens`, their `count`, `token_strs`, and `max_model_len`, the maximum of prompt + completion."""
        body = await body_of(serving, request, TokenizeRequest)
        serving.adapter_of(body.model)
        if tokenizer is None:
            raise bad_request("the model has no tokenizer: send token ids to /inference/v1/generate")
        ids = await off_the_loop(request, len(await request.body()), lambda: _ids(body))
        strs = [str(tokenizer.convert_ids_to_tokens(token)) for token in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": room(), "tokens": ids, "token_strs": strs}

    def _ids(body: TokenizeRequest) -> list[int]:
        try:
            if body.prompt is not None:
                return PromptTokenizer(tokenizer, room, special=body.add_special_tokens).ids(body.prompt, "prompt")
            assert serving.conversation is not None
            return body.rendered_by(serving.conversation, body.messages or []).token_ids
        except InvalidRequestError as exc:
            raise bad_request(str(exc), param="messages" if body.prompt is None else "prompt") from exc


def _params(serving: Serving, body: GenerateRequest) -> SamplingParams:
    asked = body.sampling_params
    try:
        return calls.params_of(
            serving,
            body,
            asked,
            max_tokens=calls.tokens_left(serving, body.token_ids, asked.max_tokens),
            logprobs=asked.logprobs,
            prompt_logprobs=calls.listed(serving, asked, len(body.token_ids)),
        )
    except InvalidRequestError as exc:
        raise calls.refused(exc, body) from exc


class _TokenChoices:
    def __init__(self, body: GenerateRequest, names: TokenIdNames, params: SamplingParams) -> None:
        self._body = body
        self._names = names
        self._params = params
        self._begun = False

    def whole(self, index: int, delta: TextDelta, sample: DynamicInferenceRequest, version: int) -> dict[str, Any]:
        return self._choice(delta, version)

    def pieces(self, index: int, delta: TextDelta, version: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        first, self._begun = not self._begun, True
        ids = {"prompt_token_ids": self._body.token_ids} if first and self._body.return_token_ids else {}
        yield self._choice(delta, version), ids

    def beside(self, sample: DynamicInferenceRequest) -> dict[str, Any]:
        top = self._params.prompt_logprobs
        return {
            "prompt_token_ids": self._body.token_ids if self._body.return_token_ids else None,
            "prompt_logprobs": None if top is None else prompt_logprobs(self._names, sample, top),
        }

    def _choice(self, delta: TextDelta, version: int) -> dict[str, Any]:
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = {"content": chat_logprobs(self._names, delta.token_ids, delta.log_probs, delta.top_log_probs)}
        choice = {
            "index": delta.sample_index,
            "token_ids": delta.token_ids,
            "logprobs": logprobs,
            "finish_reason": finish_reason(delta),
            "stop_reason": delta.stop_reason,
            "policy_versions": delta.policy_versions,
            "policy_staleness": staleness(delta, version),
        }
        return choice | routed_experts(delta) | sampling_mask(delta)
