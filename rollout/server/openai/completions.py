"""The endpoint `POST /v1/completions`.

Choice c is sample c % n of prompt c // n. The concatenated chunks of a stream equal the whole reply.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI
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
from rollout.server.openai.logprobs import CompletionLogprobs, prompt_logprobs
from rollout.server.openai.samples import finish_reason, prompt_columns, rollout, sampling_mask
from rollout.server.openai.schema import COMPLETION_MAX_TOKENS, CompletionRequest
from rollout.server.serving import Serving


def add_completion_routes(app: FastAPI, serving: Serving) -> None:
    """Register `/v1/completions`."""
    tokenizer = copy.deepcopy(serving.llm.tokenizer)
    reader = None if tokenizer is None else PromptTokenizer(tokenizer, lambda: serving.llm.max_sequence_length)

    @app.post(
        "/v1/completions", response_model=None, responses=calls.REPLY, openapi_extra=documented_body(CompletionRequest)
    )
    async def create_completion(request: Request) -> Response:
        """Generate completions of one or more prompts."""
        body = await body_of(serving, request, CompletionRequest)
        calls.admit(serving, request, body, len(body.prompts))
        size = calls.work_of(body, len(await request.body()))
        asked = await off_the_loop(request, size, partial(_asked, serving, body, reader))
        head = calls.reply_head(serving, body, "text_completion", "cmpl")
        choices = _Completions(serving, body, asked)
        reply = calls.Reply(serving, body, choices, asked, head["id"], head)
        return await reply.answer(request)


def _asked(serving: Serving, body: CompletionRequest, reader: PromptTokenizer | None) -> list[calls.Asked]:
    asked: list[calls.Asked] = []
    positions = 0
    # Validate once per value of `max_tokens`: validating large parameters is slow, and only `max_tokens` differs.
    checked: dict[int, SamplingParams] = {}
    wanted = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts: Sequence[str | list[int]] = body.prompts
    for place, prompt in enumerate(prompts):
        try:
            ids = _token_ids(reader, prompt)
            positions += len(ids)
            listed = [calls.listed(serving, body, positions), body.logprobs if body.echo else None]
            max_tokens = calls.tokens_left(serving, ids, wanted)
            if max_tokens not in checked:
                checked[max_tokens] = calls.params_of(
                    serving,
                    body,
                    body,
                    max_tokens=max_tokens,
                    logprobs=body.logprobs,
                    prompt_logprobs=max((count for count in listed if count is not None), default=None),
                )
            asked.append((ids, checked[max_tokens]))
        except InvalidRequestError as exc:
            where = f"prompt {place} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise calls.refused(exc, body, where) from exc
    return asked


def _token_ids(reader: PromptTokenizer | None, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if reader is None:
        raise bad_request("the model has no tokenizer: send token ids", param="prompt")
    return reader.ids(prompt, "prompt")


class _Completions:
    def __init__(self, serving: Serving, body: CompletionRequest, asked: list[calls.Asked]) -> None:
        self._tokenizer = serving.llm.tokenizer
        self._body = body
        self._texts = calls.texts_for(serving, body)
        self._asked = asked
        self._begun: dict[int, CompletionLogprobs] = {}

    def whole(self, index: int, delta: TextDelta, sample: DynamicInferenceRequest, version: int) -> dict[str, Any]:
        nulls = {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
        choice = nulls | self._choice(index, delta, version, sample)
        del self._begun[index]
        return choice

    def pieces(self, index: int, delta: TextDelta, version: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        first = index not in self._begun
        choice = self._choice(index, delta, version)
        said = first or choice["text"] or delta.finish_reason or delta.kept_tokens
        if self._body.return_rollout or said or self._body.logprobs is not None or choice.get("token_ids"):
            yield choice, {}

    def beside(self, sample: DynamicInferenceRequest) -> dict[str, Any]:
        return {}  # There are no extra fields, because the prompt is part of the choices.

    def _choice(
        self, index: int, delta: TextDelta, version: int, sample: DynamicInferenceRequest | None = None
    ) -> dict[str, Any]:
        body, prompt, ids = self._body, index // self._body.samples, None
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None}
        if index not in self._begun:
            self._begun[index] = CompletionLogprobs(self._texts)
            choice["text"], ids = self._echo(prompt), self._asked[prompt][0]
            if sample is not None:
                self._ahead(choice, sample, self._begun[index])
        choice["text"] += delta.text
        if body.logprobs is not None:
            columns = self._begun[index].take(delta.token_ids, delta.log_probs, delta.top_log_probs)
            before = choice["logprobs"] or {}
            choice["logprobs"] = {name: [*before.get(name, ()), *column] for name, column in columns.items()}
        choice |= {"finish_reason": finish_reason(delta), "stop_reason": delta.stop_reason} | sampling_mask(delta)
        if body.return_token_ids:
            choice |= {"token_ids": delta.token_ids} | ({} if ids is None else {"prompt_token_ids": ids})
        if body.return_rollout:
            choice["rollout"] = rollout(delta, version, ids)
        return choice

    def _echo(self, prompt: int) -> str:
        """Return the text with which a choice begins: the prompt's text if `echo` is set, else ""."""
        if not self._body.echo:
            return ""
        given = self._body.prompts[prompt]
        if isinstance(given, str):
            return given
        return "" if self._tokenizer is None else str(self._tokenizer.decode(given, skip_special_tokens=True))

    def _ahead(self, choice: dict[str, Any], sample: DynamicInferenceRequest, logprobs: CompletionLogprobs) -> None:
        """Add the prompt's log-probs to `choice`. Call this before the completion's log-probs are added."""
        if self._body.prompt_logprobs is not None:
            top = sample.sampling_params.prompt_logprobs or 0
            choice["prompt_logprobs"] = prompt_logprobs(self._texts, sample, top)
        if self._body.echo and self._body.logprobs is not None:
            choice["logprobs"] = logprobs.take(*prompt_columns(sample, self._body.logprobs))
