"""The request schema of chat completions: messages, tools, and options.

Validation works as in `schema`, except that unknown fields of assistant messages (`annotations`, `provider_specific_fields`)
are dropped. Clients can thus send back the messages of replies unchanged.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rollout.server.bodies import Body
from rollout.server.chat_template.conversation import Conversation, RenderedPrompt
from rollout.server.openai.schema import SamplingBody, TokenIds, one_or_many


def _kind_of_part(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"text": "Text", "image_url": "Image"}.get(kind) if isinstance(kind, str) else None


def _kind_of_choice(value: Any) -> str:
    return "Named" if isinstance(value, dict) else "Word"


MAX_MESSAGES = 8192
"""The maximum number of messages in a conversation."""


class TextPart(Body):
    """A text part of a message. Parts are concatenated without a separator."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    url: str
    """Image as a data URL, `data:image/…;base64,…`. Other URLs are rejected, because the server fetches nothing."""
    detail: Literal["auto"] | None = None
    """Only `auto` is accepted, because the model's image processor chooses the resolution."""


class ImagePart(Body):
    """An image part of a message, for a vision model served with its processor."""

    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(Body):
    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str
    """Arguments of the call, a JSON object as text."""


class ToolCall(Body):
    """A tool call of an earlier reply."""

    model_config = ConfigDict(extra="ignore")

    id: str
    """Id of the call, referenced by the tool message's `tool_call_id`."""
    type: Literal["function"] = "function"
    function: CalledFunction


class RolloutIds(BaseModel):
    """The `rollout` object of an earlier reply, whose token ids the next prompt reuses. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    prompt_token_ids: TokenIds
    """Token ids of the prompt that the reply answered."""
    token_ids: TokenIds
    """Token ids of the reply."""
    prompt_digest: str | None = Field(None, max_length=256)
    """Digest of the prompt, copied unchanged from the reply. Token ids without both digests are not reused."""
    content_digest: str | None = Field(None, max_length=256)
    """Digest of the reply's content and tool calls, copied unchanged from the reply."""


_PARTS = Discriminator(
    _kind_of_part, custom_error_type="part", custom_error_message="must be an object of type text or image_url"
)
ContentPart = Annotated[Annotated[TextPart, Tag("Text")] | Annotated[ImagePart, Tag("Image")], _PARTS]


class Message(Body):
    """One message of a conversation. Clients may return assistant messages exactly as replies contained them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """Role of the message's author. A chat template without the role `developer` gets `system` instead."""
    content: (
        Annotated[
            Annotated[str, Tag("One")] | Annotated[list[ContentPart], Field(min_length=1), Tag("Many")],
            Discriminator(one_or_many),
        ]
        | None
    ) = None
    """Content of the message: a string or a list of parts."""
    name: str | None = None
    """Name of the participant, for chat templates that show it."""
    tool_call_id: str | None = None
    """In a tool message, the id of the call that the message answers."""
    tool_calls: list[ToolCall] | None = None
    """In an assistant message, the tool calls of the reply."""
    reasoning_content: str | None = None
    """Reasoning text, for chat templates that show it. The name `reasoning` is accepted too."""
    refusal: str | None = None
    """Accepted, but has no effect."""
    rollout: RolloutIds | None = None
    """In an assistant message, the `rollout` object of the reply, unchanged. The prompt reuses its token ids if the
    conversation is unchanged up to and including the reply. If not, the new reply's `rollout.retokenized` gives the reason.
    Without `rollout`, the text is tokenised again."""

    @model_validator(mode="before")
    @classmethod
    def _as_clients_keep_it(cls, value: Any) -> Any:
        """Drop unknown fields that client libraries add to assistant messages; accept `rollout` where litellm puts it."""
        if not isinstance(value, dict) or value.get("role") != "assistant":
            return value
        known = {name: field for name, field in value.items() if name in cls.model_fields}
        if known.get("reasoning_content") is None:
            known["reasoning_content"] = value.get("reasoning")
        elsewhere = value.get("provider_specific_fields")
        if known.get("rollout") is None and isinstance(elsewhere, dict):
            known["rollout"] = elsewhere.get("rollout")
        return known

    @model_validator(mode="after")
    def _as_its_role_has_it(self) -> Message:
        if self.role != "assistant":
            for name in ("tool_calls", "rollout"):
                if getattr(self, name) is not None:
                    raise PydanticCustomError("role", "{name} belongs to an assistant message",
                                              {"name": name})  # fmt: skip
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("role", "a message of role {role} needs content", {"role": self.role})
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("role", "a tool message needs tool_call_id")
        return self


class FunctionDefinition(Body):
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """JSON schema of the arguments."""
    strict: bool = False
    """Whether arguments must match `parameters`. Enforced if `tool_choice` forces a call or the template is Hermes'."""


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """A `tool_choice` that requires one function."""

    type: Literal["function"]
    function: NamedFunction


class TemplateFields(Body):
    """The request fields that are passed to the chat template."""

    tools: list[Tool] = Field([], max_length=1024)
    """Functions that the model may call, rendered by its chat template."""
    chat_template_kwargs: dict[str, JsonValue] = Field({})
    """Additional variables of the chat template, such as `enable_thinking`."""
    add_generation_prompt: bool = True
    """Whether the chat template appends the start of an assistant message."""
    continue_final_message: bool = False
    """Whether the reply continues the last message."""

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [tool.model_dump(exclude_unset=True) for tool in self.tools]

    def rendered_by(self, conversation: Conversation, messages: list[Message]) -> RenderedPrompt:
        """Render and tokenise `messages` with these options; raise `InvalidRequestError` if they are invalid."""
        return conversation.render(
            [message.model_dump(exclude_none=True) for message in messages],
            tools=self.shown_tools,
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_variables,
        )

    @property
    def template_variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs


class JsonSchema(Body):
    """The schema of a JSON reply."""

    name: str | None = None
    description: str | None = None
    """Accepted, but has no effect. It is not shown to the model."""
    schema_: dict[str, JsonValue] = Field({"type": "object"}, alias="schema")
    """JSON schema of the reply."""
    strict: bool | None = None
    """Accepted, but has no effect, because a reply always fits the schema."""


class ResponseFormat(Body):
    """The format of a reply: any text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, validate_default=True)

    @field_validator("json_schema")
    @classmethod
    def _of_its_type(cls, value: JsonSchema | None, info: ValidationInfo) -> JsonSchema | None:
        if "type" in info.data and (value is None) is (info.data["type"] == "json_schema"):
            raise PydanticCustomError("format", "type json_schema needs it, and no other type has it")
        return value

    @property
    def schema_of_content(self) -> Any:
        """The JSON schema of the content, or None if the content is free text."""
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class ChatRequest(SamplingBody, TemplateFields):
    """The body of `POST /v1/chat/completions`."""

    prompt_field = "messages"

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    """The conversation, oldest message first."""
    logprobs: bool = False
    """Whether to return the log-prob of every token."""
    top_logprobs: int = Field(0, ge=0, le=20)
    """Number of most likely tokens to return per position. Requires logprobs=true."""
    max_completion_tokens: int | None = None
    """Newer name of `max_tokens`. It takes precedence if both are set."""
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("Word")] | Annotated[NamedTool, Tag("Named")],
        Discriminator(_kind_of_choice),
    ] = "auto"
    """Whether the model may call a tool (`auto`), must call one (`required`, or the named function) or cannot (`none`). A
    forced call is a constraint on sampling. With `none`, tools are not rendered, and calls in the text are not parsed."""
    response_format: ResponseFormat = ResponseFormat(type="text", json_schema=None)
    """Format of the content, as a constraint on sampling. JSON that `max_tokens` cuts off is incomplete. Every type except
    `text` requires the package extra `structured`."""
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """Value of the chat template's variable `reasoning_effort`. `none` also sets `enable_thinking=false`."""
    parallel_tool_calls: bool = True
    """Whether a reply may have several calls. false is an error if the template's call format does not mark a call's end."""
    # These fields of OpenAI's API are accepted but have no effect.
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None

    @field_validator("response_format")
    @classmethod
    def _one_constraint(cls, value: Any, info: ValidationInfo) -> Any:
        if value.type != "text" and info.data.get("structured_outputs") is not None:
            raise PydanticCustomError("unsupported", "cannot be combined with structured_outputs; give one of them")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int, info: ValidationInfo) -> int:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("needs_logprobs", "needs logprobs=true")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _of_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools", ())]
        if value in ("none", "auto"):
            return value
        if not names:
            raise PydanticCustomError("needs_tools", "needs tools")
        if info.data.get("structured_outputs") is not None:
            raise PydanticCustomError("unsupported", "a forced call cannot be combined with structured_outputs")
        if isinstance(value, NamedTool) and value.function.name not in names:
            raise PydanticCustomError("unknown_tool", "{name} is not the name of a tool",
                                      {"name": f"{value.function.name!r:.80}"})  # fmt: skip
        return value

    @property
    def budget(self) -> int | None:
        """The maximum number of tokens of a reply, or None for the remaining sequence length."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reply_schema(self) -> Any:
        """The JSON schema of the content, or None if the content is free text."""
        return self.response_format.schema_of_content

    @property
    def constrained(self) -> bool:
        strict = any(tool.function.strict for tool in self.tools)
        return super().constrained or strict or bool(self.forced_tools) or self.reply_schema is not None

    @property
    def constraint_field(self) -> str:
        if self.structured_outputs is not None:
            return super().constraint_field
        return "tools" if self.reply_schema is None or self.forced_tools else "response_format"

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else super().shown_tools

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which the reply must call one; empty if no call is forced."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.shown_tools if tool["function"]["name"] == self.tool_choice.function.name]
        return self.shown_tools if self.tool_choice == "required" else []

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        thinking = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return effort | thinking | self.chat_template_kwargs


class ChatTokensRequest(ChatRequest):
    """The body of `POST /v1/chat/completions/tokens`, a chat whose prompt is given as token ids."""

    prompt_field = "tokens"

    tokens: Annotated[TokenIds, Field(min_length=1)]
    """Token ids of the prompt, used unchanged. `messages` and `tools` determine how the reply is parsed."""
