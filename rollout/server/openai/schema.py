"""Request schemas as pydantic models: sampling options and completions.

Null stands for the default; an unknown field must be null. Fields without effect here (`user`) are accepted. Values are not
converted: a string is not a number, a bool is not an integer.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    JsonValue,
    StringConstraints,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rollout.errors import ConfigError
from rollout.sampling_params import SamplingParams, StructuredOutput
from rollout.server.bodies import Body
from rollout.server.errors import bad_request, describe

MAX_N = 128
"""The maximum number of samples per prompt."""
MAX_PROMPTS = 2048
"""The maximum number of prompts per completion request."""
MAX_STOPS = 64
"""Maximum stop strings, and maximum stop token ids, per request."""
MAX_BIASES = 4096
"""The maximum number of entries of `logit_bias`."""
COMPLETION_MAX_TOKENS = 16
"""Default `max_tokens` of a completion; a chat's default is the remaining sequence length."""
INT32 = 2**31 - 1


def one_or_many(value: Any) -> str:
    return "Many" if isinstance(value, list) else "One"


def _kind_of_prompt(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, list):
        return "IdLists"
    if isinstance(value, list):
        return "Texts" if isinstance(first, str) else "Ids"
    return "Text"


TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(max_length=4096)]
TokenText = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]


# --- sampling ---------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    include_usage: bool = False
    """Send the usage in an additional last chunk without choices."""
    include_obfuscation: bool | None = None
    """Accepted, without effect: there is no padding."""


class StructuredOutputs(Body):
    """A constraint on a text: exactly one of the fields, as in vLLM."""

    json_: str | dict[str, JsonValue] | bool | None = Field(None, alias="json")
    regex: str | None = None
    """A regular expression that the whole text matches."""
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_BIASES)] | None = None
    grammar: str | None = None
    """A context-free grammar in llguidance's dialect of Lark."""
    json_object: bool = False
    """true: any JSON object."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(each is not None for each in given) != 1:
            raise PydanticCustomError("one_of", "needs exactly one of json, regex, choice, grammar, json_object=true")
        return self

    @property
    def constraint(self) -> StructuredOutput:
        """The constraint of `SamplingParams`; raises `ConfigError` if a value is out of range."""
        if self.json_object:
            return StructuredOutput(json_schema={"type": "object"})
        if self.choice is not None:
            return StructuredOutput.of_choices(self.choice)
        return StructuredOutput(json_schema=self.json_, regex=self.regex, grammar=self.grammar)


class RequestFields(Body):
    """The fields of a request other than its prompt and sampling options."""

    prompt_field: ClassVar[str]
    """Name of the field that holds the prompt."""

    model: str | None = None
    """Name of the served model or of an adapter. Null: the served model."""
    stream: bool = False
    """Send the reply incrementally, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    """Options of a stream."""
    user: str | None = None
    """Accepted, without effect."""
    priority: int = Field(0, ge=-INT32, le=INT32)
    """Requests with a higher priority are scheduled first."""
    timeout_s: float | None = Field(None, gt=0, le=86400)
    """Seconds after which the request fails with 408; capped at the server's `request_timeout_s`."""
    return_rollout: bool = True
    """Include token ids, log-probs and policy versions in the reply."""
    cache_salt: str | None = Field(None, max_length=1024)
    """Cached KV is reused among requests of equal salt only."""

    @property
    def samples(self) -> int:
        raise NotImplementedError

    @property
    def constraint_field(self) -> str:
        return "structured_outputs"

    @property
    def urgency(self) -> int:
        """Priority within the engine; requests with a higher priority run first."""
        return self.priority


class SamplingFields(Body):
    """The sampling options of every route: the fields of `SamplingParams`, which checks their values."""

    n: int = Field(1, le=MAX_N)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Keep the k most likely tokens. 0 or -1: all."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenText, float], Field(max_length=MAX_BIASES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    """Strings that end the sample. The text ends before the matched one."""
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    """Maximum tokens of a sample, capped at the remaining sequence length, which is the default (of a completion: 16). 0:
    process the prompt only."""
    seed: int | None = None
    """Equal seed, prompt, parameters and weights give equal samples. A negative seed is taken modulo 2**63."""
    prompt_logprobs: int | None = Field(None, ge=-1)
    """Return log-probs of the prompt's tokens, and of this many most likely tokens per position. 0: only the prompt's own
    tokens; -1: the whole vocabulary. At most 1,000,000 entries per request. Not with stream=true."""
    logprobs_mode: str | None = None
    return_sampling_mask: bool = False
    """Return the ids that each token was drawn from, as `sampling_mask` of the choice. Needs top_k (at most 4096), top_p
    or min_p."""
    skip_special_tokens: Literal[True] = True
    """Texts have no special tokens. The reply's token ids contain them."""
    spaces_between_special_tokens: bool | None = None
    """Accepted, without effect: fast tokenizers write no such spaces."""
    structured_outputs: StructuredOutputs | None = None
    """Constrain the text; needs the server's extra `structured`."""

    @property
    def constrained(self) -> bool:
        """Whether there may be a constraint on the text."""
        return self.structured_outputs is not None

    def sampling_params(self, **decided: Any) -> SamplingParams:
        """Build the request's `SamplingParams`; raise `ApiError` 400 for a value out of range.

        `decided` are the fields set by the endpoint, at least `max_tokens`."""
        asked = {name: getattr(self, name) for name in _SAMPLING & self.model_fields_set} | decided
        if self.return_sampling_mask:
            asked["return_kept_tokens"] = True
        if self.logit_bias is not None:
            asked["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.seed is not None:
            asked["seed"] = self.seed % 2**63
        if self.top_k == -1:
            asked["top_k"] = 0
        if self.structured_outputs is not None:
            try:
                asked["structured"] = self.structured_outputs.constraint
            except ConfigError as exc:
                raise bad_request(str(exc), param="structured_outputs") from exc
        try:
            return SamplingParams(**asked)
        except ConfigError as exc:
            raise describe(exc) from exc


_SAMPLING = {each.name for each in fields(SamplingParams)} & SamplingFields.model_fields.keys()
"""Options that HTTP and `SamplingParams` both have."""


class SamplingBody(RequestFields, SamplingFields):
    """The fields common to chats and completions."""

    return_token_ids: bool = False
    """Include `prompt_token_ids` and each choice's `token_ids`, placed as in vLLM."""
    return_tokens_as_token_ids: bool = False
    """Name tokens in log-probs `token_id:7` instead of by their text."""

    @property
    def samples(self) -> int:
        return self.n


# --- completions ------------------------------------------------------------------------------------------------------


class CompletionRequest(SamplingBody):
    """Body of `POST /v1/completions`."""

    prompt_field = "prompt"

    prompt: Annotated[
        Annotated[str, Tag("Text")]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("Texts")]
        | Annotated[TokenIds, Field(min_length=1), Tag("Ids")]
        | Annotated[
            list[Annotated[TokenIds, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
            Tag("IdLists"),
        ],
        Discriminator(_kind_of_prompt),
    ]
    """One text, several texts, token ids, or lists of token ids."""

    logprobs: int | None = Field(None, ge=0, le=20)
    """Return log-probs of every token, and of this many most likely tokens per position. 0: only the sampled tokens."""
    echo: bool = False
    """Prepend the prompt to the text, and its log-probs to the log-probs."""

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
