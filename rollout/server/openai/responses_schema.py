"""Request schema of OpenAI's Responses API, and its translation to a chat request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from rollout.server.bodies import Body
from rollout.server.errors import bad_request, explain
from rollout.server.openai.chat_schema import (
    MAX_MESSAGES,
    MAX_METADATA,
    ChatRequest,
    DefaultVerbosity,
    JsonObjectFormat,
    JsonSchema,
    ReasoningEffort,
    TextFormat,
)
from rollout.server.openai.schema import INT32, Absent, RequestFields, at_most, one_or_many


class Item(BaseModel):
    """An item of the input: a message, a call of the model, the result of a call, or a reasoning (ignored).

    Unknown fields are ignored, because items of earlier replies are sent back with all they had.
    """

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = Field(None, max_length=256)
    """Id of an item of an earlier reply; finds its token ids."""
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: JsonValue = None
    call_id: str | None = None
    """Calls and their results: what ties them together."""
    name: str | None = None
    arguments: str | None = None
    output: JsonValue = None

    @model_validator(mode="after")
    def _as_its_type_has_it(self) -> Item:
        needed = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments"),
                  "function_call_output": ("call_id", "output"), "reasoning": ()}[self.type]  # fmt: skip
        for name in needed:
            if getattr(self, name) is None:
                raise PydanticCustomError("item", "an item of type {type} needs {name}",
                                          {"type": self.type, "name": name})  # fmt: skip
        return self


class ResponseTool(Body):
    """Function that the model may call."""

    type: Literal["function"]
    """Functions are the only tools."""
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    """true: calls fit the schema."""


class NamedResponseTool(Body):
    """`tool_choice` that requires one function."""

    type: Literal["function"]
    name: str


class ResponseJsonSchema(JsonSchema):
    """JSON that fits a schema."""

    type: Literal["json_schema"]


class ResponseText(Body):
    """What the text is."""

    format: Annotated[TextFormat | JsonObjectFormat | ResponseJsonSchema, Field(discriminator="type")] | None = None
    verbosity: DefaultVerbosity = None


class ResponseReasoning(Body):
    """Options of reasoning models."""

    effort: ReasoningEffort = None
    """As `reasoning_effort` of a chat."""
    summary: Absent = None
    generate_summary: Absent = None


class ResponsesRequest(RequestFields):
    """Body of `POST /v1/responses`."""

    prompt_field = "input"

    input: Annotated[str | list[Item], at_most(MAX_MESSAGES)]
    """A text of the user, or items, oldest first."""
    instructions: str | None = None
    """A system message put first. Not kept for the next request."""
    previous_response_id: str | None = Field(None, max_length=256)
    """Id of an earlier reply of this server, whose conversation goes on. The server keeps the latest in memory."""
    store: bool | None = None
    """false: the reply cannot be gone on from. Default true."""
    tools: list[ResponseTool] | None = Field(None, max_length=1024)
    tool_choice: Literal["none", "auto", "required"] | NamedResponseTool | None = None
    parallel_tool_calls: bool | None = None
    """false: a reply ends after its first call, where the chat template's format allows it."""
    text: ResponseText | None = None
    max_output_tokens: int | None = Field(None, ge=0, le=INT32)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    """Accepted, without effect: reasoning is text here, and log-probs are in `rollout`."""
    reasoning: ResponseReasoning | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Additional variables of the chat template, such as `enable_thinking`."""

    @property
    def samples(self) -> int:
        """One."""
        return 1

    def chat(self, messages: Sequence[dict[str, Any]]) -> ChatRequest:
        """Return the chat request for a conversation.

        Raises:
            ApiError: 400, the conversation or an option is not served.
        """
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "parallel_tool_calls": None if self.parallel_tool_calls or not self.tools else self.parallel_tool_calls,
            "response_format": self._format(),
            "tools": [{"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                      for tool in self.tools or ()] or None,
            "tool_choice": self._choice(),
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "priority": self.priority,
            "timeout_s": self.timeout_s,
        }  # fmt: skip
        try:
            return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as exc:
            errors = [{**error, "loc": ("body", *error["loc"])} for error in exc.errors(include_url=False)]
            message, field = explain(errors)
            raise bad_request(message, (field or "").replace("messages", "input", 1) or None) from None

    @property
    def plain_tool_choice(self) -> Any:
        """Tool choice as a reply tells it."""
        return (
            self.tool_choice.model_dump()
            if isinstance(self.tool_choice, NamedResponseTool)
            else self.tool_choice or "auto"
        )

    def _format(self) -> dict[str, Any] | None:
        wanted = None if self.text is None else self.text.format
        if isinstance(wanted, ResponseJsonSchema):
            named = {"name": wanted.name, "schema": wanted.schema_}
            return {
                "type": "json_schema",
                "json_schema": {name: each for name, each in named.items() if each is not None},
            }
        return None if wanted is None else {"type": wanted.type}

    def _choice(self) -> Any:
        if isinstance(self.tool_choice, NamedResponseTool):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice


def text_of(content: Any, where: str) -> str:
    """Text of a message's content: a string, or a list of text parts.

    Raises:
        ApiError: 400, a part is not text.
    """
    if isinstance(content, str):
        return content
    parts = content if one_or_many(content) == "Many" else [content]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise bad_request(f"{where}: must be a text or text parts; the engine takes text", param="input")
    return "".join(map(str, texts))


def messages_of(items: str | Sequence[Item], rollouts: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat for the items of an input.

    Args:
        rollouts: item id → `rollout` of the reply it came from, or None.

    Raises:
        ApiError: 400, an item cannot be written as a message.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        if item.type == "function_call_output":
            output = item.output if isinstance(item.output, str | list) else json.dumps(item.output)
            content = text_of(output, f"input[{place}].output")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif item.type == "function_call" or item.role == "assistant":
            _add_assistant(messages, item, f"input[{place}].content", rollouts)
        elif item.type == "message":
            messages.append({"role": item.role, "content": text_of(item.content, f"input[{place}].content")})
    return messages


def _add_assistant(messages: list[dict[str, Any]], item: Item, where: str, rollouts: Any) -> None:
    """Add a text or a call to the assistant's message; the items of one reply are one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or (item.type == "message" and ("content" in last or "tool_calls" in last)):
        last = {"role": "assistant"}
        messages.append(last)
    if item.type == "message":
        last["content"] = text_of(item.content, where)
    else:
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        last.setdefault("tool_calls", []).append(call)
    found = rollouts(item.id)
    if found is not None:
        last["rollout"] = found
