"""Endpoints `POST /tokenize`, `POST /detokenize` and `GET /tokenizer_info`, as vLLM has them."""

from __future__ import annotations

import copy
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request

from rollout.errors import InvalidRequestError
from rollout.server.bodies import Body, ReplyBody, body_of, documented_body, off_the_loop
from rollout.server.chat_template.prompt_ids import PromptTokenizer, Stop
from rollout.server.errors import bad_request
from rollout.server.openai import generation as calls
from rollout.server.openai.chat_schema import MAX_MESSAGES, Message, Tool
from rollout.server.openai.schema import TokenIds, at_most
from rollout.server.serving import Serving


class TokenizeRequest(Body):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    """Name of the served model; null for that one."""
    prompt: str | None = None
    """The text."""
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True), at_most(MAX_MESSAGES)] | None = None
    """The conversation, oldest message first."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens around a text. Default true. A chat template writes its own."""
    return_token_strs: bool | None = None
    """Include the tokens' names."""
    tools: list[Tool] | None = Field(None, max_length=1024)
    """Functions that the chat template shows."""
    add_generation_prompt: bool | None = None
    """Whether the chat template appends the start of an assistant message. Default true."""
    continue_final_message: bool | None = None
    """true: the last message is left open."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Additional variables of the chat template."""

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) is (self.messages is None):
            raise PydanticCustomError("one_of", "needs either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    """Name of the served model; null for that one."""
    tokens: TokenIds
    """Token ids."""


class TokenizeReply(ReplyBody):
    """Tokens of a text or a conversation."""

    count: int
    """Number of tokens."""
    max_model_len: int
    """Maximum length of prompt + completion, in tokens."""
    tokens: list[int]
    """Token ids."""
    token_strs: list[str] | None = None
    """The tokens' names in the vocabulary."""


class DetokenizeReply(ReplyBody):
    """Text of tokens, special tokens included."""

    prompt: str


class TokenizerInfoReply(ReplyBody):
    """What a client needs to know of the tokenizer."""

    tokenizer_class: str
    vocab_size: int
    """Number of tokens, added ones included."""
    model_max_length: int
    """Maximum length of prompt + completion, in tokens."""
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None


def add_tokenization_routes(app: FastAPI, serving: Serving) -> None:
    """Register the routes.

    Args:
        app: application to extend.
        serving: the model and its limits.
    """
    tokenizer = copy.deepcopy(serving.llm.tokenizer)

    def known() -> Any:
        if tokenizer is None:
            raise bad_request("the model has no tokenizer: there is nothing to tokenise with")
        return tokenizer

    def room() -> int:
        return int(serving.llm.max_sequence_length)

    @app.post("/tokenize", tags=["tokens"], responses=calls.ERRORS, openapi_extra=documented_body(TokenizeRequest))
    async def tokenize(request: Request) -> TokenizeReply:
        """Tokenise a text, or a conversation as a chat request renders it."""
        body = await body_of(serving, request, TokenizeRequest)
        serving.adapter_of(body.model)
        known()
        ids = await off_the_loop(serving, request, len(await request.body()), lambda stop: _ids(body, stop))
        names = [str(tokenizer.convert_ids_to_tokens(token)) for token in ids] if body.return_token_strs else None
        return TokenizeReply(count=len(ids), max_model_len=room(), tokens=ids, token_strs=names)

    def _ids(body: TokenizeRequest, stop: Stop) -> list[int]:
        try:
            if body.prompt is not None:
                special = body.add_special_tokens is not False
                return PromptTokenizer(tokenizer, room, special=special).ids(body.prompt, "prompt", stop)
            if serving.conversation is None or body.messages is None:
                raise InvalidRequestError("messages: the model has no chat template")
            return serving.conversation.render(
                [message.model_dump(exclude_none=True) for message in body.messages],
                tools=[tool.model_dump(exclude_unset=True) for tool in body.tools or ()] or None,
                add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
                continue_final_message=bool(body.continue_final_message),
                template_kwargs=body.chat_template_kwargs,
                stop=stop,
            ).token_ids
        except InvalidRequestError as exc:
            field = "messages" if body.prompt is None else "prompt"
            raise bad_request(str(exc), param=field) from exc

    @app.post("/detokenize", tags=["tokens"], responses=calls.ERRORS, openapi_extra=documented_body(DetokenizeRequest))
    async def detokenize(request: Request) -> DetokenizeReply:
        """Return the text of tokens."""
        body = await body_of(serving, request, DetokenizeRequest)
        serving.adapter_of(body.model)
        most, vocab_size = room(), serving.llm.controller.layout.vocab_size
        if len(body.tokens) > most or any(token >= vocab_size for token in body.tokens):
            raise bad_request(f"tokens: must be at most {most} token ids below {vocab_size}", param="tokens")
        text = await off_the_loop(
            serving,
            request,
            len(await request.body()),
            lambda _: known().decode(body.tokens, skip_special_tokens=False),
        )
        return DetokenizeReply(prompt=str(text))

    @app.get("/tokenizer_info", tags=["tokens"], responses=calls.ERRORS)
    async def tokenizer_info() -> TokenizerInfoReply:
        """Describe the tokenizer."""
        found = known()
        template = serving.config.chat_template or getattr(found, "chat_template", None)
        return TokenizerInfoReply(
            tokenizer_class=type(found).__name__,
            vocab_size=len(found),
            model_max_length=room(),
            chat_template=template if isinstance(template, str) else None,
            **{name: getattr(found, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
        )
