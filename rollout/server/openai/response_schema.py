"""Response models for the OpenAPI description and tests; replies are not built from them.

Always true: OpenAI's types with our additions: `rollout`, `stop_reason`, `prompt_logprobs` and `policy_version`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class Rollout(_Reply):
    """Which tokens the sample is made of. Lists are as long as `token_ids`."""

    prompt_token_ids: list[int]
    """The prompt as the model had it. A stream has it in a sample's first chunk only."""
    token_ids: list[int]
    """What the model wrote, the token that ended it included."""
    log_probs: list[float | None]
    """Of the distribution that `logprobs_mode` says."""
    policy_versions: list[int]
    """Of the weights that made each token."""
    policy_staleness: list[int]
    """Weight updates between then and the reply."""
    finish_reason: Literal["stop", "length", "stale"]
    """The engine's own word; `stale`: cut because its tokens had become too old."""


class ChatRollout(Rollout):
    """The same, and what a conversation that comes back is compared by: send it back as it is."""

    prompt_digest: str
    """Of the text that the chat template wrote for this reply to answer."""
    content_digest: str
    """Of the content and the calls. A stream has it in a sample's last chunk."""
    prompt_ids_reused: int
    """How many of the first prompt tokens are ids that came back with an earlier reply; the others are new."""
    retokenized: str | None
    """Why the ids that came back with the last reply were not used, or not all; null where they were, or none came."""
    forced_prefix: str | None = None
    """Text of the reply that is in the prompt already, because `tool_choice` asks for it; not there otherwise."""


class PromptTokensDetails(_Reply):
    """Tokens whose KV was in the prefix cache."""

    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetails(_Reply):
    """OpenAI's; always 0 here."""

    reasoning_tokens: int
    audio_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(_Reply):
    """What a request cost; a prompt counts once, however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(_Reply):
    """A token, its log-prob (null: the first of a prompt), and its own bytes."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    """The same of a token that the text has, with the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Reply):
    """One entry per token."""

    content: list[ChosenTokenLogprob]
    refusal: None


class TextLogprobs(_Reply):
    """One entry per token in each column."""

    tokens: list[str]
    """The tokens' texts; `bytes:…` where one is a part of a character."""
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    """Token → log-prob, the token itself among them; null where it has none."""
    text_offset: list[int]
    """In characters, of the choice's text."""


class ReplyFunction(_Reply):
    """Which function, and its arguments as JSON text."""

    name: str
    arguments: str


class ReplyToolCall(_Reply):
    """A call that the model made."""

    id: str
    """What the tool's message names as `tool_call_id`."""
    type: Literal["function"]
    function: ReplyFunction


class ReplyMessage(_Reply):
    """What the model says. Sent back as it is, behind what it answered, the conversation goes on from its ids."""

    role: Literal["assistant"]
    content: str | None
    """Null where there are only calls."""
    refusal: None
    tool_calls: list[ReplyToolCall] | None = None
    rollout: ChatRollout | None = None


class ChatChoice(_Reply):
    """One sample."""

    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None
    """Null unless asked for."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    """`tool_calls`: it ended by itself and calls a tool."""
    stop_reason: str | int | None
    """The stop string or the stop token's id that ended it; null otherwise."""
    prompt_logprobs: ChatLogprobs | None = None
    """There when asked for."""


class ChatCompletion(_Reply):
    """Reply of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    policy_version: int
    """Of the weights when the reply was made."""
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(_Reply):
    """One sample of one prompt."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    """Null unless asked for."""
    finish_reason: Literal["stop", "length"]
    """`length`: cut, by max_tokens or because its tokens had become too old."""
    stop_reason: str | int | None
    """The stop string or the stop token's id that ended it; null otherwise."""
    prompt_logprobs: TextLogprobs | None = None
    """There when asked for."""
    rollout: Rollout | None = None


class Completion(_Reply):
    """Reply of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    policy_version: int
    """Of the weights when the reply was made."""
    choices: list[TextChoice]
    usage: Usage


_CHUNK = (
    "A chunk: the reply's fields, with what is new of one choice. A chat's choice has `delta` in place of `message`, and "
    '`rollout` in it. An error is an event `{"error": …}`, and the last; otherwise the last one is `[DONE]`.'
)


def described(reply: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` entry of a route that answers with this, or with a stream of its chunks."""
    data = {"type": "string", "contentMediaType": "application/json", "description": _CHUNK}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    events = {"text/event-stream": {"itemSchema": event}}
    return {200: {"model": reply, "description": "The reply; with stream=true, its chunks.", "content": events}}
