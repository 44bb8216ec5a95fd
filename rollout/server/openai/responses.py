"""Endpoints of OpenAI's Responses API: create (whole or as a stream), and retrieve from memory.

A request is translated to a chat and its reply back. Conversations are kept in memory up to a bound, oldest given up first:
with `previous_response_id`, or with the items of earlier replies sent back, a prompt goes on from the ids sampled then.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from rollout.server.bodies import body_of, documented_body, off_the_loop
from rollout.server.errors import ApiError, documented
from rollout.server.openai import generation as calls
from rollout.server.openai.chat import ChatChoices, prepared_chat
from rollout.server.openai.logprobs import TokenTexts
from rollout.server.openai.responses_schema import ResponsesRequest, messages_of
from rollout.server.openai.sse import encode
from rollout.server.serving import Serving

MAX_STORED = 1000
"""Replies that are kept."""

MAX_STORED_BYTES = 256 * 2**20
"""Approximate size of all kept replies with their conversations."""


Event = Callable[..., bytes]
"""Encodes an event of a kind with its fields."""


@dataclass(frozen=True, slots=True)
class _Kept:
    response: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class ResponseMemory:
    """The latest replies, by id. Used on the server's event loop only."""

    def __init__(self, most: int = MAX_STORED, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._of_item: dict[str, dict[str, Any]] = {}
        self._most, self._most_bytes = most, most_bytes
        self._bytes = 0

    def add(self, response: dict[str, Any], messages: list[dict[str, Any]], rollout: dict[str, Any], size: int) -> None:
        """Keep a reply, its whole conversation and the token ids of its items; give up the oldest beyond the bounds."""
        self._kept[response["id"]] = _Kept(response, messages, size)
        self._of_item |= dict.fromkeys((item["id"] for item in response["output"]), rollout)
        self._bytes += size
        while len(self._kept) > self._most or (self._bytes > self._most_bytes and len(self._kept) > 1):
            _, old = self._kept.popitem(last=False)
            self._bytes -= old.size
            for item in old.response["output"]:
                self._of_item.pop(item["id"], None)

    def rollout_of(self, item_id: str | None) -> dict[str, Any] | None:
        """`rollout` of the reply that an item came from; None if it is not kept."""
        return None if item_id is None else self._of_item.get(item_id)

    def find(self, response_id: str, param: str | None = None) -> _Kept:
        """Return a kept reply.

        Raises:
            ApiError: 404, it is not kept.
        """
        if response_id not in self._kept:
            raise ApiError(
                404,
                f"response {response_id!r}: not kept; the server keeps the latest {self._most} in memory, and none with "
                "store=false: send the whole conversation as input",
                param=param,
                code="response_not_found",
            )
        return self._kept[response_id]


def add_responses_routes(app: FastAPI, serving: Serving) -> None:
    """Register the routes.

    Args:
        app: application to extend.
        serving: the model and its limits.
    """
    texts = TokenTexts(serving.llm.tokenizer)
    memory = ResponseMemory()

    @app.post(
        "/v1/responses", response_model=None, responses=calls.ERRORS, openapi_extra=documented_body(ResponsesRequest)
    )
    async def create_response(request: Request) -> Response:
        """Generate a reply to a conversation of items."""
        body = await body_of(serving, request, ResponsesRequest)
        calls.admit(serving, request, body, 1)
        before = (
            []
            if body.previous_response_id is None
            else memory.find(body.previous_response_id, "previous_response_id").messages
        )
        messages = [*before, *messages_of(body.input, memory.rollout_of)]
        told = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
        chat = body.chat(told + messages)
        size = len(await request.body()) + sum(len(str(message.get("content"))) for message in before)
        prepared = await off_the_loop(
            serving, request, calls.work_of(chat, size), partial(prepared_chat, serving, chat)
        )
        reply = ResponseReply(serving, body, ChatChoices(serving, chat, texts, prepared), messages, memory, size)
        return await calls.answer(serving, request, reply, stream=bool(body.stream), parts="output")

    @app.get("/v1/responses/{response_id}", responses=documented(404))
    async def retrieve_response(response_id: str) -> dict[str, Any]:
        """Return a reply that is kept in memory."""
        return memory.find(response_id).response


class ResponseReply:
    """Reply to one request, whole or as a stream."""

    def __init__(
        self,
        serving: Serving,
        body: ResponsesRequest,
        chat: ChatChoices,
        messages: list[dict[str, Any]],
        memory: ResponseMemory,
        size: int,
    ) -> None:
        self._serving = serving
        self._body = body
        self._chat = chat
        self._messages = messages
        self._memory = memory
        self._size = size
        self._id = serving.name_of_reply("resp")
        self._created = int(time.time())

    async def whole(self, request: Request) -> dict[str, Any]:
        """Return the reply once the sample has finished."""
        reply = await self._chat.reply(self._id).whole(request)
        (choice,) = reply["choices"]
        message = choice["message"]
        output = []
        if message.get("reasoning_content"):
            output.append(_reasoning(message["reasoning_content"]))
        if message["content"] or not message.get("tool_calls"):
            output.append(_message(message["content"] or ""))
        output += [_call(call["id"], **call["function"]) for call in message.get("tool_calls", ())]
        return self._ended(output, choice["finish_reason"], message["rollout"], reply["usage"], reply["policy_version"])

    def _ended(
        self, output: list[dict[str, Any]], reason: str, rollout: dict[str, Any], usage: dict[str, Any], version: int
    ) -> dict[str, Any]:
        """The finished reply, which is kept unless store is false."""
        response = self._response("incomplete" if reason == "length" else "completed", output)
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        response["policy_version"] = version
        if self._body.store is not False:
            message = {"role": "assistant", "rollout": rollout} | _as_message(output)
            size = self._size + 32 * (len(rollout["prompt_token_ids"]) + len(rollout["token_ids"]))
            size += len(rollout.get("routed_experts", {}).get("data", ""))
            self._memory.add(response, [*self._messages, message], rollout, size)
        return response | ({"rollout": rollout} if self._body.wants_rollout else {})

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        body = self._body
        given = body.model_dump(
            include={"instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p", "user"}
        )
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        return given | {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": body.model or self._serving.model_name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": body.plain_tool_choice,
            "tools": [{"strict": None, "parameters": None} | tool.model_dump() for tool in body.tools or ()],
            "text": {"format": {"type": "text"}} | text,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "truncation": "disabled",
            "store": body.store is not False,
            "metadata": body.metadata or {},
            "usage": None,
        }

    # --- as a stream ------------------------------------------------------------------------------------------------

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Yield the reply as named server-sent events, ending with `response.completed` or `response.incomplete`.

        Raises:
            ApiError, RolloutError: generation failed; the stream ends without them.
        """
        number = 0

        def event(kind: str, **fields: Any) -> bytes:
            nonlocal number
            number += 1
            body = encode({"type": f"response.{kind}", "sequence_number": number - 1} | fields)
            return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), body)

        started = self._response("in_progress", [])
        yield event("created", response=started) + event("in_progress", response=started)
        output: list[dict[str, Any]] = []
        texts = _TextItem(event, output)
        finished: tuple[str, dict[str, Any], dict[str, Any], int] | None = None
        async with aclosing(self._chat.parts(self._id)) as parts:
            async for part in parts:
                sent = texts.reasoning(part.reasoning) + texts.content(part.content)
                for call in part.tool_calls:
                    sent += texts.end() + _call_events(event, output, call)
                if part.finished is not None:
                    finished = part.finished
                    if not any(item["type"] != "reasoning" for item in output):
                        sent += texts.begin()
                    sent += texts.end()
                if sent:
                    yield sent
        assert finished is not None
        response = self._ended(output, *finished)
        yield event(response["status"], response=response)


class _TextItem:
    """Events of the items that are text: a reasoning and a message."""

    def __init__(self, event: Event, output: list[dict[str, Any]]) -> None:
        self._event = event
        self._output = output
        self._open = ""
        self._text: list[str] = []

    def reasoning(self, text: str) -> bytes:
        """Add reasoning: it is sent whole, when its item ends."""
        if not text:
            return b""
        ended = self.end() if self._open != "reasoning" else b""
        self._open = "reasoning"
        self._text.append(text)
        return ended

    def content(self, text: str) -> bytes:
        """Add content."""
        if not text:
            return b""
        begun = self.begin() if self._open != "message" else b""
        self._text.append(text)
        return begun + self._event("output_text.delta", **self._where(), delta=text, logprobs=[])

    def begin(self) -> bytes:
        """Begin a message."""
        ended = self.end()
        self._open = "message"
        self._output.append(_message("") | {"status": "in_progress"})
        item = self._output[-1] | {"content": []}
        part = _message("")["content"][0]
        return (
            ended
            + self._event("output_item.added", output_index=len(self._output) - 1, item=item)
            + self._event("content_part.added", **self._where(), part=part)
        )

    def end(self) -> bytes:
        """End the open item, if there is one."""
        text, kind = "".join(self._text), self._open
        self._text, self._open = [], ""
        if kind == "reasoning":
            item = _reasoning(text)
            self._output.append(item)
            place = len(self._output) - 1
            return self._event("output_item.added", output_index=place, item=item) + self._event(
                "output_item.done", output_index=place, item=item
            )
        if kind != "message":
            return b""
        where = self._where()
        item = self._output[-1] = _message(text) | {"id": where["item_id"]}
        return (
            self._event("output_text.done", **where, text=text, logprobs=[])
            + self._event("content_part.done", **where, part=item["content"][0])
            + self._event("output_item.done", output_index=where["output_index"], item=item)
        )

    def _where(self) -> dict[str, Any]:
        place = len(self._output) - 1
        return {"item_id": self._output[place]["id"], "output_index": place, "content_index": 0}


def _call_events(event: Event, output: list[dict[str, Any]], call: dict[str, Any]) -> bytes:
    item, place = _call(call["id"], **call["function"]), len(output)
    output.append(item)
    where = {"item_id": item["id"], "output_index": place}
    sent = event("output_item.added", output_index=place, item=item | {"arguments": "", "status": "in_progress"})
    sent += event("function_call_arguments.delta", **where, delta=item["arguments"])
    sent += event("function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"])
    return sent + event("output_item.done", output_index=place, item=item)


def _message(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "id": _new("msg"), "role": "assistant", "status": "completed", "content": content}


def _reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": _new("rs"), "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "id": _new("fc"), "call_id": call_id, "name": name, "arguments": arguments,
            "status": "completed"}  # fmt: skip


def _new(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _as_message(output: list[dict[str, Any]]) -> dict[str, Any]:
    """Content and calls of a reply, as a chat message has them."""
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    found = [
        {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
        for item in output
        if item["type"] == "function_call"
    ]
    return {"content": "".join(texts) or ("" if not found else None)} | ({"tool_calls": found} if found else {})
