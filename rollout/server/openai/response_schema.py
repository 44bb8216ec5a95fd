"""Reply models for the OpenAPI description and tests; replies are not built from them.

OpenAI's fields, which are not described again; `rollout`, `stop_reason` and `policy_version`; and vLLM's
`prompt_token_ids`, `token_ids` and `prompt_logprobs`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class RoutedExperts(_Strict):
    """An array of integers."""

    data: str
    """Base64 of its little-endian bytes, row by row."""
    shape: list[int]
    """[positions, layers with a router, k]."""
    dtype: Literal["uint8", "int16"]


class _Sampled(_Strict):
    token_ids: list[int]
    """Generated token ids, including the one that ended the sample."""
    policy_versions: list[int]
    """Policy version of the weights that sampled each token."""
    policy_staleness: list[int]
    """Number of weight updates between sampling each token and the reply."""
    routed_experts: RoutedExperts | None = None
    """Experts that every router chose for prompt and tokens but the last, if the engine records them. In a stream, the rows
    of a chunk's tokens, with those of the prompt in a sample's first chunk."""


class Rollout(_Sampled):
    """Tokens of a sample. Lists other than the prompt's are as long as `token_ids`."""

    prompt_token_ids: list[int]
    """Token ids of the prompt. In a stream, only in a sample's first chunk."""
    log_probs: list[float | None]
    """Log-probs under the distribution chosen by `logprobs_mode`."""
    finish_reason: Literal["stop", "length", "stale", "abort"]
    """The engine's finish reason; `stale`: ended because its tokens exceeded `max_staleness`."""


class ChatRollout(Rollout):
    """Tokens of a chat sample, with the digests that let a later request continue from them. Send it back unchanged."""

    prompt_digest: str
    """Digest of the prompt's text, as the chat template rendered it."""
    content_digest: str
    """Digest of the content and the tool calls. In a stream, in a sample's last chunk."""
    prompt_ids_reused: int
    """Number of leading prompt tokens reused from an earlier reply's ids; the rest was tokenised."""
    retokenized: str | None
    """Why ids sent back with the last reply were not all used; null if they were, or none were sent."""
    forced_prefix: str | None = None
    """Beginning of the reply's text that is part of the prompt, because of `tool_choice`; absent otherwise."""


class Usage(_Strict):
    """Token counts of a request; a prompt counts once, independent of its number of samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens", "audio_tokens"], int]
    """`cached_tokens`: prompt tokens whose KV was in the prefix cache."""
    completion_tokens_details: dict[str, int]
    """Always 0."""


class TokenLogprob(_Strict):
    token: str
    logprob: float | None
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class Logprobs(_Strict):
    """One entry per token."""

    content: list[ChosenTokenLogprob]
    refusal: None = None


class TextLogprobs(_Strict):
    """One entry per token in each column."""

    tokens: list[str]
    """Texts of the tokens; `bytes:…` for an incomplete character."""
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    """Token → log-prob of the most likely tokens and the token itself; null if it has no log-prob."""
    text_offset: list[int]
    """Character offset of the token in the choice's text."""


class PromptTokenLogprob(_Strict):
    logprob: float | None
    rank: int
    """1: the most likely. A token that is not listed among the most likely has the rank behind them."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None] | None
"""Per prompt token: token id (as text) → log-prob, of the token itself and the most likely; null for the first token."""


class _Choice(_Strict):
    index: int
    stop_reason: str | int | None
    """The stop string or the stop token's id that ended it; null otherwise."""
    sampling_mask: list[list[int]] | None = None
    """The ids that each token was drawn from; absent without `return_sampling_mask`."""


class _Answer(_Strict):
    model: str
    policy_version: int
    """Policy version of the weights when the reply was made."""
    usage: Usage


class ReplyToolCall(_Strict):
    id: str
    type: Literal["function"]
    function: dict[Literal["name", "arguments"], str]


class ReplyMessage(_Strict):
    """Assistant message. Sent back unchanged in the next request, the conversation continues from its token ids."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    """vLLM's newer name of `reasoning_content`."""
    reasoning_content: str | None = None
    """Reasoning between `<think>` and `</think>`, for chat templates that mark it."""
    tool_calls: list[ReplyToolCall] | None = None
    rollout: ChatRollout | None = None


class ChatChoice(_Choice):
    """One sample."""

    message: ReplyMessage
    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    """`tool_calls`: the sample stopped by itself and contains tool calls."""
    token_ids: list[int] | None = None
    """Null without `return_token_ids`."""


class ChatCompletion(_Answer):
    """Reply of `POST /v1/chat/completions`. In a stream, the fields of the prompt are in the first chunk."""

    id: str
    object: Literal["chat.completion"]
    created: int
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    """Null without `return_token_ids`."""
    prompt_logprobs: PromptLogprobs = None


class TextChoice(_Choice):
    """One sample of one prompt. In a stream, the fields of the prompt are in a choice's first chunk."""

    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length", "abort"]
    """`length`: cut off by max_tokens or by `max_staleness`; `abort`: a stream that a control call ended."""
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = None
    """Null without `return_token_ids`, as `token_ids`."""
    token_ids: list[int] | None = None
    rollout: Rollout | None = None


class Completion(_Answer):
    """Reply of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    choices: list[TextChoice]


class TokenChoice(_Sampled, _Choice):
    """One sample of token ids. Its lists are as long as `token_ids`; its tokens are named `token_id:7`."""

    logprobs: Logprobs | None
    finish_reason: Literal["stop", "length", "abort"]


class TokenGeneration(_Answer):
    """Reply of `POST /inference/v1/generate`."""

    request_id: str
    choices: list[TokenChoice]
    prompt_token_ids: list[int] | None = None
    """Null without `return_token_ids`."""
    prompt_logprobs: PromptLogprobs = None


_CHUNK = (
    "A chunk: the reply's fields, with the new part of one choice. A chat choice has `delta` instead of `message`, with "
    '`rollout` inside. The last event is `[DONE]`, or `{"error": …}` after an error.'
)


def described(reply: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` entry of a route that replies with this model or with a stream of its chunks."""
    data = {"type": "string", "contentMediaType": "application/json", "description": _CHUNK}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    events = {"text/event-stream": {"itemSchema": event}}
    return {200: {"model": reply, "description": "The reply; with stream=true, its chunks.", "content": events}}
