"""The request schemas for sampling options and completions, as pydantic models.

Null means the default, and an unknown field must be null. Some fields (`user`) are accepted but have no effect. Values are
not converted: a string is not a number, and a bool is not an integer.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, JsonValue, StringConstraints, Tag, model_validator
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
"""The maximum number of stop strings, and of stop token ids, per request."""
MAX_BIASES = 4096
"""The maximum number of entries of `logit_bias`."""
COMPLETION_MAX_TOKENS = 16
"""The default `max_tokens` of a completion. A chat's default is the remaining sequence length."""
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
    """Whether to send the usage in an additional last chunk without choices."""
    include_obfuscation: bool | None = None
    """Accepted, but has no effect, because chunks are never padded."""


class StructuredOutputs(Body):
    """A constraint on the generated text, as in vLLM. Exactly one field must be set."""

    json_: str | dict[str, JsonValue] | bool | None = Field(None, alias="json")
    """A JSON schema that the text must fit, as an object or as JSON text."""
    regex: str | None = None
    """A regular expression that the whole text must match."""
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_BIASES)] | None = None
    """The texts of which the reply must be one."""
    grammar: str | None = None
    """A context-free grammar in llguidance's dialect of Lark."""
    json_object: bool = False
    """Whether the text must be a JSON object, with any fields."""

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [self.json_, self.regex, self.choice, self.grammar, self.json_object or None]
        if sum(each is not None for each in given) != 1:
            raise PydanticCustomError("one_of", "needs exactly one of json, regex, choice, grammar, json_object=true")
        return self

    @property
    def constraint(self) -> StructuredOutput:
        """The constraint as a field of `SamplingParams`. Raises `ConfigError` if a value is out of range."""
        if self.json_object:
            return StructuredOutput(json_schema={"type": "object"})
        if self.choice is not None:
            return StructuredOutput.of_choices(self.choice)
        return StructuredOutput(json_schema=self.json_, regex=self.regex, grammar=self.grammar)


class RequestFields(Body):
    """The fields of a request other than its prompt and sampling options."""

    prompt_field: ClassVar[str]
    """The name of the field that contains the prompt."""

    model: str | None = None
    """Name of the served model or of an adapter. Null means the served model."""
    stream: bool = False
    """Whether to send the reply incrementally, as server-sent events."""
    stream_options: StreamOptions = StreamOptions()
    """Options of the stream that `stream` requests."""
    user: str | None = None
    """Accepted, but has no effect."""
    priority: int = Field(0, ge=-INT32, le=INT32)
    """Requests with a higher priority are scheduled first."""
    timeout_s: float | None = Field(None, gt=0, le=86400)
    """Seconds after which the request fails with 408, at most the server's `request_timeout_s`, which is the default."""
    return_rollout: bool = True
    """Whether to include token ids, log-probs and policy versions in the reply."""
    cache_salt: str | None = Field(None, max_length=1024)
    """Name of a group of requests that share cached KV. Requests with different salts never share it."""

    @property
    def samples(self) -> int:
        raise NotImplementedError

    @property
    def constraint_field(self) -> str:
        return "structured_outputs"

    @property
    def urgency(self) -> int:
        """The priority within the engine. Requests with a higher priority run first."""
        return self.priority


class SamplingFields(Body):
    """The sampling options of every route. Most are fields of `SamplingParams`, which checks their values."""

    n: int = Field(1, ge=1, le=MAX_N)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Number of most likely tokens that sampling may choose from. 0 and -1 mean all tokens."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenText, float], Field(max_length=MAX_BIASES)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    """Strings that stop the sample. The text is cut before the matched string, or after it if the string is included."""
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    """Maximum number of tokens of a sample, capped at the remaining sequence length. The default is 16 for a completion,
    otherwise the remaining sequence length. With 0, only the prompt is processed."""
    seed: int | None = None
    """Seed of the samples, taken modulo 2**63. Equal seed, prompt, parameters and weights give equal samples."""
    prompt_logprobs: int | None = Field(None, ge=-1)
    """Return the log-prob of every prompt token, and of this many most likely tokens per position (0: no other tokens, -1:
    the whole vocabulary). A request may cause at most 1,000,000 entries, and must not have stream=true."""
    logprobs_mode: str | None = None
    return_sampling_mask: bool = False
    """Whether each choice has a `sampling_mask`, the ids that each token was drawn from. Requires top_k (at most 4096),
    top_p or min_p."""
    skip_special_tokens: Literal[True] = True
    """Must be true: texts never contain special tokens. The reply's token ids contain them."""
    spaces_between_special_tokens: bool | None = None
    """Accepted, but has no effect, because fast tokenizers write no such spaces."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the text. Requires the package extra `structured`."""

    @property
    def constrained(self) -> bool:
        """Whether the request may contain a constraint on the text."""
        return self.structured_outputs is not None

    def sampling_params(self, **decided: Any) -> SamplingParams:
        """Build the request's `SamplingParams`; raise `ApiError` 400 for a value out of range.

        `decided` has the fields that the endpoint sets, at least `max_tokens`."""
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
"""The names of the options that HTTP requests and `SamplingParams` both have."""


class SamplingBody(RequestFields, SamplingFields):
    """The request fields common to chats and completions."""

    return_token_ids: bool = False
    """Whether to include `prompt_token_ids` and each choice's `token_ids`, in the same places as vLLM."""
    return_tokens_as_token_ids: bool = False
    """Whether log-probs name tokens by their ids (`token_id:7`) instead of their texts."""

    @property
    def samples(self) -> int:
        return self.n


# --- completions ------------------------------------------------------------------------------------------------------


class CompletionRequest(SamplingBody):
    """The body of `POST /v1/completions`."""

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
    """One string, several strings, the token ids of one prompt, or the token ids of several prompts."""

    logprobs: int | None = Field(None, ge=0, le=20)
    """Return the log-prob of every sampled token, and of this many most likely tokens per position (0: no other tokens)."""
    echo: bool = False
    """Whether to prepend the prompt to the text, and the prompt's log-probs to the log-probs."""

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt
