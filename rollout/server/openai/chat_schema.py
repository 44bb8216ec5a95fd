"""Request schema of chat completions: messages, tools, and options.

Always true: see `schema`. An assistant's message is taken as a reply brought it and as clients send it back:
fields of theirs that are not known here (`annotations`, `provider_specific_fields`) are left out. Labels
that no reply depends on are accepted: `metadata`, `safety_identifier`, `prompt_cache_*`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
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

from rollout.server.openai.schema import INT32, Absent, Body, SamplingBody, TokenIds, at_most, one_or_many


def _of_type(served: str, what: str) -> BeforeValidator:
    """Says of an object of another type what is served, before its other fields are looked at."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != served:
            raise PydanticCustomError("unsupported", "type {kind} is not served here: {what}",
                                      {"kind": repr(kind), "what": what})  # fmt: skip
        return value

    return BeforeValidator(check)


_TEXT_ONLY = _of_type("text", "the engine takes text")
_FUNCTION_ONLY = _of_type("function", "tools are functions")


def _kind_of_choice(value: Any) -> str:
    return "Named" if isinstance(value, dict) else "Word"


MAX_MESSAGES = 8192
"""Most messages of a conversation."""

MAX_METADATA = 16
"""Most entries of `metadata`, as OpenAI has it."""


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text"]
    text: str
    """Parts are joined without anything between them."""


class CalledFunction(Body):
    """Which function, and its arguments as JSON text."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str
    """A JSON object, as text."""


class ToolCall(Body):
    """A call that an earlier reply made."""

    model_config = ConfigDict(extra="ignore")

    id: str
    """What the tool's message names as `tool_call_id`."""
    type: Literal["function"] = "function"
    function: CalledFunction


class RolloutIds(BaseModel):
    """`rollout` of an earlier reply: the ids that the conversation is continued from. What else is in it is not read."""

    model_config = ConfigDict(extra="ignore", strict=True, use_attribute_docstrings=True)

    prompt_token_ids: TokenIds
    """Of the prompt that the message answered."""
    token_ids: TokenIds
    """What the model wrote then."""
    prompt_digest: str | None = Field(None, max_length=256)
    """As the reply brought it. Ids without it are not used."""
    content_digest: str | None = Field(None, max_length=256)
    """As the reply brought it. Ids without it are not used."""
    forced_prefix: str | None = None
    """As the reply brought it."""


class Message(Body):
    """One message of a conversation; an assistant's as a reply brought it, or as the client keeps it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """`developer` is shown as `system` to templates that do not know it."""
    content: (
        Annotated[
            Annotated[str, Tag("One")]
            | Annotated[list[Annotated[TextPart, _TEXT_ONLY]], Field(min_length=1), Tag("Many")],
            Discriminator(one_or_many),
        ]
        | None
    ) = None
    """Text, or a list of text parts."""
    name: str | None = None
    """Who speaks, where the template shows it."""
    tool_call_id: str | None = None
    """Of a tool's message: which call it answers."""
    tool_calls: list[Annotated[ToolCall, _FUNCTION_ONLY]] | None = None
    """Of an assistant's message: the calls it made."""
    reasoning_content: str | None = None
    """Thoughts, for templates that show them."""
    refusal: str | None = None
    """As replies bring it; not read."""
    audio: Absent = None
    function_call: Absent = None
    rollout: RolloutIds | None = None
    """Of an assistant's message: as the reply brought it. Token ids begin the prompt as far as what stands before the last
    such message, and what it says, is what it was; the reply's `rollout.retokenized` says where that was not so. Leave it
    out to have the text tokenised anew."""

    @model_validator(mode="before")
    @classmethod
    def _as_clients_keep_it(cls, value: Any) -> Any:
        """An assistant's message comes back with whatever its client's own type has: what is not known here goes. litellm
        has put `rollout` into a field of its own."""
        if not isinstance(value, dict) or value.get("role") != "assistant":
            return value
        known = {name: field for name, field in value.items() if name in cls.model_fields}
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
    """What a tool is called, does and takes."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """true: a call of it whose arguments do not fit `parameters` stays text."""


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The one function that must be called."""

    name: str


class NamedTool(Body):
    """`tool_choice` of one function."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    """The one format there is."""

    type: Literal["text"]


class ChatRequest(SamplingBody):
    """Body of `POST /v1/chat/completions`."""

    prompt_field = "messages"

    messages: Annotated[list[Message], at_most(MAX_MESSAGES)] = Field(
        min_length=1, max_length=MAX_MESSAGES, fail_fast=True
    )
    """The conversation, oldest message first."""
    logprobs: bool | None = None
    """Log-probs of every token."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    """How many of the likeliest tokens in each place. Needs logprobs=true."""
    max_completion_tokens: int | None = Field(None, ge=0, le=INT32)
    """OpenAI's newer name for max_tokens."""
    tools: list[Annotated[Tool, _FUNCTION_ONLY]] | None = Field(None, max_length=1024)
    """Functions, shown to the model by its chat template."""
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("Word")]
            | Annotated[NamedTool, _FUNCTION_ONLY, Tag("Named")],
            Discriminator(_kind_of_choice),
        ]
        | None
    ) = None
    """`required`, or a function: the beginning of a call is put into the prompt, and its text into the reply. `none`: tools
    are not shown, and calls stay text. Default `auto`."""
    response_format: TextFormat | None = None
    """Text."""
    modalities: list[Literal["text"]] | None = None
    """Text."""
    # ours
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Further variables of the chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Whether the template begins the assistant's message. Default true."""
    continue_final_message: bool | None = None
    """The reply goes on where the last message ends."""
    parallel_tool_calls: bool | None = None
    """false: a reply ends behind its first call; refused where the chat template's calls have no end to stop at."""
    # labels, for whoever reads the requests; no reply depends on them
    store: bool | None = None
    """true is refused: nothing is stored here."""
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA), Field(max_length=MAX_METADATA)] | None = None
    service_tier: Literal["auto", "default"] | None = None
    """There is one."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonValue = None
    prompt_cache_retention: str | None = None
    # OpenAI's, not served
    audio: Absent = None
    prediction: Absent = None
    web_search_options: Absent = None
    functions: Absent = None
    function_call: Absent = None
    moderation: Absent = None
    reasoning_effort: Absent = None
    verbosity: Absent = None

    @field_validator("store")
    @classmethod
    def _nothing_is_stored(cls, value: bool | None) -> bool | None:
        if value:
            raise PydanticCustomError("unsupported", "this server does not do that; leave the field out")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and not info.data.get("logprobs"):
            raise PydanticCustomError("needs_logprobs", "needs logprobs=true")
        return value

    @field_validator("max_completion_tokens")
    @classmethod
    def _the_same_bound(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("max_tokens") not in (None, value):
            raise PydanticCustomError("two_bounds", "must equal max_tokens; give one of them")
        return value

    @field_validator("tool_choice")
    @classmethod
    def _of_the_tools(cls, value: Any, info: ValidationInfo) -> Any:
        names = [tool.function.name for tool in info.data.get("tools") or ()]
        if not names and value not in (None, "none", "auto"):
            raise PydanticCustomError("needs_tools", "needs tools")
        if isinstance(value, NamedTool) and value.function.name not in names:
            raise PydanticCustomError("unknown_tool", "{name} is not the name of a tool",
                                      {"name": repr(value.function.name)})  # fmt: skip
        return value

    @property
    def budget(self) -> int | None:
        """Most tokens of a reply; None: what there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def plain_tools(self) -> list[dict[str, Any]] | None:
        """The tools as they were sent."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] if self.tools else None

    @property
    def plain_tool_choice(self) -> str | dict[str, Any] | None:
        """The choice as it was sent."""
        return self.tool_choice.model_dump() if isinstance(self.tool_choice, NamedTool) else self.tool_choice

    @property
    def json_texts(self) -> Iterator[str]:
        """Texts that are JSON themselves: the arguments of earlier calls."""
        for message in self.messages:
            for call in message.tool_calls or ():
                yield call.function.arguments
