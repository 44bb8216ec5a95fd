"""The endpoints `POST /v1/chat/completions` and `/v1/chat/completions/tokens`.

The concatenated chunks of a stream equal the whole reply. A token's id is sent with its text or in an earlier chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
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
from rollout.server.chat_template.conversation import Conversation, RenderedPrompt
from rollout.server.chat_template.reply_parser import ReplyReader
from rollout.server.errors import bad_request
from rollout.server.openai import generation as calls
from rollout.server.openai.chat_schema import ChatRequest, ChatTokensRequest
from rollout.server.openai.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from rollout.server.openai.samples import ending, finish_reason, rollout, sampling_mask, tokens
from rollout.server.serving import Serving


def add_chat_routes(app: FastAPI, serving: Serving) -> None:
    """Register `/v1/chat/completions` and `/v1/chat/completions/tokens`."""

    def add(path: str, model: type[ChatRequest]) -> None:
        @app.post(
            path,
            response_model=None,
            description=model.__doc__ or "",
            responses=calls.REPLY,
            openapi_extra=documented_body(model),
        )
        async def create_chat_completion(request: Request) -> Response:
            body = await body_of(serving, request, model)
            calls.admit(serving, request, body, 1)
            size = calls.work_of(body, len(await request.body()))
            choices = await off_the_loop(request, size, partial(_prepared, serving, body))
            head = calls.reply_head(serving, body, "chat.completion", "chatcmpl")
            chunk = {"object": "chat.completion.chunk"}
            reply = calls.Reply(serving, body, choices, choices.asked, head["id"], head, chunk)
            return await reply.answer(request)

    add("/v1/chat/completions", ChatRequest)
    add("/v1/chat/completions/tokens", ChatTokensRequest)


def _prepared(serving: Serving, body: ChatRequest) -> ChatChoices:
    conversation, tools = serving.conversation, body.shown_tools
    if conversation is None:
        raise bad_request("the model has no tokenizer: send token ids to /v1/completions", param="messages")
    try:
        prompt = body.rendered_by(conversation, body.messages)
        if isinstance(body, ChatTokensRequest):
            prompt = replace(prompt, token_ids=body.tokens, reused=len(body.tokens), retokenized=None)
        params = calls.params_of(
            serving,
            body,
            body,
            prompt_logprobs=calls.listed(serving, body, len(prompt.token_ids)),
            stop=_stops(body, conversation),
            max_tokens=calls.tokens_left(serving, prompt.token_ids, body.budget),
            logprobs=body.top_logprobs if body.logprobs else None,
            structured=conversation.constraint_on(prompt, body.reply_schema, tools, body.forced_tools),
        )
        reader = conversation.reader_for(prompt, tools, reasons=not body.forced_tools)
    except InvalidRequestError as exc:
        raise calls.refused(exc, body) from exc
    return ChatChoices(body, calls.texts_for(serving, body), prompt, params, reader)


def _stops(body: ChatRequest, conversation: Conversation) -> tuple[str, ...]:
    """Return the request's stop strings. If only one tool call is allowed, add the string that ends this call."""
    asked = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if body.parallel_tool_calls:
        return asked
    end = conversation.one_call_ends_at(body.shown_tools)
    return asked if not end or end in asked else (*asked, end)


class ChatChoices:
    """The choices of one chat reply. `texts` gives each token's text for log-probs; `reader` builds a parser per sample."""

    def __init__(
        self,
        body: ChatRequest,
        texts: TokenTexts,
        prompt: RenderedPrompt,
        params: SamplingParams,
        reader: Callable[[], ReplyReader],
    ) -> None:
        self._body = body
        self._texts = texts
        self._rendered = prompt
        self._reader = reader
        self._readers: dict[int, ReplyReader] = {}
        self.asked = [(prompt.token_ids, params)]

    def _of_prompt(self) -> dict[str, Any]:
        prompt = self._rendered
        return {
            "prompt_token_ids": prompt.token_ids,
            "prompt_digest": prompt.digest,
            "prompt_ids_reused": prompt.reused,
            "retokenized": prompt.retokenized,
        }

    def _logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        content = chat_logprobs(self._texts, delta.token_ids, delta.log_probs, delta.top_log_probs)
        return {"content": content, "refusal": None}

    # --- whole ------------------------------------------------------------------------------------------------------

    def beside(self, sample: DynamicInferenceRequest) -> dict[str, Any]:
        top = self.asked[0][1].prompt_logprobs
        return {
            "prompt_token_ids": self._rendered.token_ids if self._body.return_token_ids else None,
            "prompt_logprobs": None if top is None else prompt_logprobs(self._texts, sample, top),
        }

    def whole(self, index: int, delta: TextDelta, sample: DynamicInferenceRequest, version: int) -> dict[str, Any]:
        reader = self._reader()
        reasoning, content, tool_calls = reader.push(delta.text, ended=True)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning"] = message["reasoning_content"] = reasoning
        if tool_calls:
            message["content"] = content or None
            message["tool_calls"] = [{name: call[name] for name in ("id", "type", "function")} for call in tool_calls]
        if self._body.return_rollout:
            message["rollout"] = rollout(delta, version) | self._of_prompt() | {"content_digest": reader.digest()}
        return {
            "index": delta.sample_index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": _finish_reason(delta, reader),
            "stop_reason": delta.stop_reason,
            "token_ids": delta.token_ids if self._body.return_token_ids else None,
        } | sampling_mask(delta)

    # --- as a stream ------------------------------------------------------------------------------------------------

    def pieces(self, index: int, delta: TextDelta, version: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield up to three chunks: one for the prompt before the first delta, one for new content, and one at the end."""
        if index not in self._readers:
            opening: dict[str, Any] = {"role": "assistant", "content": ""}
            if self._body.return_rollout:
                opening["rollout"] = self._of_prompt()
            first = not self._readers and self._body.return_token_ids
            yield _piece(index, opening), {"prompt_token_ids": self._rendered.token_ids} if first else {}
            self._readers[index] = self._reader()
        reader = self._readers[index]
        added = self._added(delta, reader, version)
        ids = {"token_ids": delta.token_ids} if self._body.return_token_ids and delta.token_ids else {}
        if added or ids or (delta.token_ids and self._body.logprobs) or delta.kept_tokens:
            logprobs = self._logprobs(delta) if delta.token_ids else None
            yield _piece(index, added, logprobs) | ids | sampling_mask(delta), {}
        if delta.finish_reason is not None:
            ended = ending(delta) | {"content_digest": reader.digest()}
            last = {"rollout": ended} if self._body.return_rollout else {}
            reasons = {"finish_reason": _finish_reason(delta, reader), "stop_reason": delta.stop_reason}
            yield _piece(index, last) | reasons, {}

    def _added(self, delta: TextDelta, reader: ReplyReader, version: int) -> dict[str, Any]:
        reasoning, content, tool_calls = reader.push(delta.text, ended=delta.finish_reason is not None)
        added: dict[str, Any] = {"content": content} if content else {}
        if reasoning:
            added["reasoning"] = added["reasoning_content"] = reasoning
        if tool_calls:
            added["tool_calls"] = tool_calls
        if delta.token_ids and self._body.return_rollout:
            added["rollout"] = tokens(delta, version)
        return added


def _piece(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


def _finish_reason(delta: TextDelta, reader: ReplyReader) -> str | None:
    """Return OpenAI's finish reason, with `tool_calls` instead of `stop` for a reply that contains calls."""
    reason = finish_reason(delta)
    return "tool_calls" if reason == "stop" and reader.called else reason
