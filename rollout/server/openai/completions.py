"""Endpoint `POST /v1/completions`.

Choice c is sample c % n of prompt c // n. The concatenated chunks of a stream equal the whole reply.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from rollout.distributed.client.text_stream import TextDelta, whole
from rollout.errors import InvalidRequestError
from rollout.requests.request import DynamicInferenceRequest
from rollout.sampling_params import SamplingParams
from rollout.server.bodies import body_of, documented_body, off_the_loop
from rollout.server.chat_template.prompt_ids import PromptTokenizer, Stop
from rollout.server.errors import bad_request
from rollout.server.openai import generation as calls
from rollout.server.openai.logprobs import CompletionLogprobs, TokenIdNames, TokenTexts
from rollout.server.openai.response_schema import Completion, described
from rollout.server.openai.samples import finish_reason, prompt_columns, rollout, sampling_mask, usage_of
from rollout.server.openai.schema import COMPLETION_MAX_TOKENS, CompletionRequest
from rollout.server.openai.sse import DONE, Chunks
from rollout.server.openai.token_fields import SpecialText, listed_per_position, prompt_logprobs
from rollout.server.serving import Serving, Turn


def add_completion_routes(app: FastAPI, serving: Serving) -> None:
    """Register the completions route.

    Args:
        app: application to extend.
        serving: the model and its limits.
    """
    texts = TokenTexts(serving.llm.tokenizer)
    tokenizer = copy.deepcopy(serving.llm.tokenizer)
    reader = None if tokenizer is None else PromptTokenizer(tokenizer, lambda: serving.llm.max_sequence_length)

    @app.post(
        "/v1/completions",
        response_model=None,
        responses=calls.ERRORS | described(Completion),
        openapi_extra=documented_body(CompletionRequest),
    )
    async def create_completion(request: Request) -> Response:
        """Generate completions of one or more prompts."""
        body = await body_of(serving, request, CompletionRequest)
        calls.admit(serving, request, body, len(body.prompts))
        size = calls.work_of(body, len(await request.body()))
        asked = await off_the_loop(serving, request, size, partial(_asked, serving, body, reader))
        return await calls.answer(serving, request, _Reply(serving, body, texts, asked), stream=bool(body.stream))


def _asked(serving: Serving, body: CompletionRequest, reader: PromptTokenizer | None, stop: Stop) -> list[calls.Asked]:
    """Return (token ids, sampling parameters) of every prompt."""
    asked: list[calls.Asked] = []
    adapter = serving.adapter_of(body.model)
    listed = 0
    # Validation is expensive for large parameters, and most prompts share them.
    checked: dict[int, SamplingParams] = {}
    wanted = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts: Sequence[str | list[int]] = body.prompts
    for place, prompt in enumerate(prompts):
        stop.check()
        try:
            ids = _token_ids(reader, prompt, stop)
            listed += len(ids)
            likeliest = listed_per_position(body.prompt_logprobs, serving.llm.controller.layout.vocab_size, listed)
            max_tokens = calls.tokens_left(serving, ids, wanted)
            if max_tokens not in checked:
                checked[max_tokens] = calls.checked(serving, _params(body, max_tokens, likeliest, adapter))
            asked.append((ids, checked[max_tokens]))
        except InvalidRequestError as exc:
            where = f"prompt {place} of {len(prompts)}: " if len(prompts) > 1 else ""
            raise calls.refused(exc, body, where) from exc
    return asked


def _token_ids(reader: PromptTokenizer | None, prompt: str | list[int], stop: Stop) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if reader is None:
        raise bad_request("the model has no tokenizer: send token ids", param="prompt")
    return reader.ids(prompt, "prompt", stop)


def _params(body: CompletionRequest, max_tokens: int, likeliest: int | None, adapter: str | None) -> SamplingParams:
    of_prompt = [likeliest, body.logprobs if body.echo else None]
    return body.sampling_params(
        cache_salt=body.cache_salt,
        adapter=adapter,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in of_prompt if count is not None), default=None),
    )


class _Reply:
    """Reply to one request, whole or as a stream.

    Args:
        texts: texts of the tokenizer's tokens.
        asked: (token ids, sampling parameters) of every prompt.
    """

    def __init__(self, serving: Serving, body: CompletionRequest, texts: TokenTexts, asked: list[calls.Asked]) -> None:
        self._serving = serving
        self._body = body
        self._texts = TokenIdNames(serving.llm.tokenizer) if body.return_tokens_as_token_ids else texts
        self._asked = asked
        self._samples = body.n or 1
        self._echoed_logprobs = bool(body.echo) and body.logprobs is not None

    def _echo(self, prompt: int) -> str:
        """Prompt text that a choice begins with if `echo` is set, else ""."""
        if not self._body.echo:
            return ""
        given = self._body.prompts[prompt]
        if isinstance(given, str):
            return given
        tokenizer = self._serving.llm.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode(given, skip_special_tokens=True))

    def _ahead(self, choice: dict[str, Any], sample: DynamicInferenceRequest, logprobs: CompletionLogprobs) -> None:
        """Add the prompt's log-probs to the first part of a choice, which has no columns yet."""
        if self._body.prompt_logprobs is not None:
            top = sample.sampling_params.prompt_logprobs or 0
            choice["prompt_logprobs"] = prompt_logprobs(self._texts, sample, top)
        if self._echoed_logprobs:
            choice["logprobs"] = logprobs.take(*prompt_columns(sample, self._body.logprobs or 0))

    # --- whole ------------------------------------------------------------------------------------------------------

    async def whole(self, request: Request) -> dict[str, Any]:
        """Return the reply once every sample has finished."""
        head = calls.reply_head(self._serving, self._body, "text_completion", "cmpl")
        groups = await calls.samples_of(self._serving, request, self._body, head["id"], self._asked)
        version = self._serving.llm.policy_version
        choices: list[dict[str, Any]] = []
        turn = Turn()
        for prompt, group in enumerate(groups):
            for sample in group:
                choices.append(self._whole_choice(prompt, sample, version))
                await turn.pause()
        return head | {"policy_version": version, "choices": choices, "usage": usage_of(groups)}

    def _whole_choice(self, prompt: int, sample: DynamicInferenceRequest, version: int) -> dict[str, Any]:
        logprobs = CompletionLogprobs(self._texts)
        choice: dict[str, Any] = {"index": prompt * self._samples + sample.sample_index, "text": "", "logprobs": None}
        choice |= {"token_ids": None, "prompt_token_ids": None, "prompt_logprobs": None}
        self._ahead(choice, sample, logprobs)
        delta = self._read(whole(sample), None)
        self._add(choice, delta, logprobs)
        choice["text"] = self._echo(prompt) + delta.text
        self._add_ids(choice, delta, sample.prompt_tokens)
        if self._body.wants_rollout:
            choice["rollout"] = rollout(delta, version, sample.prompt_tokens)
        return choice

    def _read(self, delta: TextDelta, reader: SpecialText | None) -> TextDelta:
        """Return the delta with special tokens in its text, if asked for; `reader`: of the earlier deltas of a stream."""
        if self._body.skip_special_tokens is not False or self._serving.llm.tokenizer is None:
            return delta
        return (reader or SpecialText(self._serving.llm.tokenizer, self._texts.special)).of(delta)

    def _add_ids(self, choice: dict[str, Any], delta: TextDelta, prompt: list[int] | None) -> None:
        if self._body.return_token_ids:
            choice["token_ids"] = delta.token_ids
            if prompt is not None:
                choice["prompt_token_ids"] = prompt

    def _add(self, choice: dict[str, Any], delta: TextDelta, logprobs: CompletionLogprobs) -> None:
        if self._body.logprobs is not None:
            columns = logprobs.take(delta.token_ids, delta.log_probs, delta.top_log_probs)
            before = choice["logprobs"] or {}
            choice["logprobs"] = {name: [*before.get(name, ()), *column] for name, column in columns.items()}
        choice["finish_reason"] = finish_reason(delta)
        choice["stop_reason"] = delta.stop_reason
        choice |= sampling_mask(delta)

    # --- as a stream ------------------------------------------------------------------------------------------------

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the reply as server-sent events, ending with `[DONE]`.

        Raises:
            ApiError, RolloutError: generation failed; the stream ends without `[DONE]`.
        """
        body, serving = self._body, self._serving
        head = calls.reply_head(serving, self._body, "text_completion", "cmpl")
        chunks = Chunks(head, with_usage=body.wants_usage)
        growing = body.prompt_logprobs is None and not self._echoed_logprobs
        streams = await calls.begin(serving, body, self._asked, growing=growing)
        begun: dict[int, CompletionLogprobs] = {}
        readers: dict[int, SpecialText] = {}
        async with aclosing(calls.deltas_of(serving, head["id"], streams, self._samples)) as deltas:
            async for index, arrived in deltas:
                version = serving.llm.policy_version
                first = index not in begun
                if first:
                    readers[index] = SpecialText(serving.llm.tokenizer, self._texts.special)
                delta = self._read(arrived, readers[index])
                choice: dict[str, Any] = {"index": index, "text": delta.text, "logprobs": None}
                if first:
                    begun[index] = CompletionLogprobs(self._texts)
                    prompt = index // self._samples
                    choice["text"] = self._echo(prompt) + delta.text
                    if not growing:
                        self._ahead(choice, streams[prompt].results[delta.sample_index], begun[index])
                self._add(choice, delta, begun[index])
                prompt_ids = self._asked[index // self._samples][0] if first else None
                self._add_ids(choice, delta, prompt_ids)
                if body.wants_rollout:
                    choice["rollout"] = rollout(delta, version, prompt_ids)
                elif not (
                    first
                    or choice["text"]
                    or delta.finish_reason
                    or delta.kept_tokens
                    or body.logprobs is not None
                    or (body.return_token_ids and delta.token_ids)
                ):
                    continue
                yield chunks.choice(choice, version)
        if body.wants_usage and (used := calls.usage_of_streams(streams)):
            yield chunks.usage(used, serving.llm.policy_version)
        yield DONE
