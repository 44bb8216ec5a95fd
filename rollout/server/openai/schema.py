"""Request schemas as pydantic models: sampling options and completions.

Always true: a field that is not written here is refused by name, and no value is converted: a string is no number, a
bool no integer. What OpenAI has and this server does not do is refused unless it is null; what changes nothing here
(`user`, `stream_options.include_obfuscation`) is accepted. A field that is null has its default.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from rollout.errors import ConfigError
from rollout.sampling_params import MIN_TEMPERATURE, SamplingParams
from rollout.server.errors import bad_request

MAX_N = 128
"""Most samples of a prompt."""

MAX_PROMPTS = 2048
"""Most prompts of one completion request."""

MAX_STOPS = 64
"""Most stop strings, and most stop token ids, of one request."""

MAX_BIASES = 4096
"""Most tokens of `logit_bias`."""

COMPLETION_MAX_TOKENS = 16
"""`max_tokens` of a completion that does not say; a chat has all the room there is."""

INT32 = 2**31 - 1
"""Largest of the numbers that travel as 32 bits."""


class Body(BaseModel):
    """A JSON object of known fields."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False)


def _refuse(value: Any) -> None:
    if value is not None:
        raise PydanticCustomError("unsupported", "this server does not do that; leave the field out")


def one_or_many(value: Any) -> str:
    """The alternative that a value is measured by: `Many` for a list, else `One`."""
    return "Many" if isinstance(value, list) else "One"


def _kind_of_prompt(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, list):
        return "IdLists"
    if isinstance(value, list):
        return "Texts" if isinstance(first, str) else "Ids"
    return "Text"


Absent = Annotated[None, BeforeValidator(_refuse)]
"""A field of OpenAI's that would change the result and is not served."""


def at_most(count: int) -> BeforeValidator:
    """Refuses more entries before any of them is looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > count:
            raise PydanticCustomError("too_many", "has {given} entries: must have at most {most}",
                                      {"given": len(value), "most": count})  # fmt: skip
        return value

    return BeforeValidator(check)


TokenId = Annotated[int, Field(ge=0, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
StopString = Annotated[str, Field(min_length=1, max_length=4096)]
BiasedToken = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-1e9, le=1e9)]


# --- sampling ---------------------------------------------------------------------------------------------------------


class StreamOptions(Body):
    """What a stream brings beside its text."""

    include_usage: bool | None = None
    """One more chunk at the end, without choices, brings the usage."""
    include_obfuscation: bool | None = None
    """Accepted, without effect: there is no padding."""


class SamplingBody(Body):
    """What both endpoints take."""

    prompt_field: ClassVar[str]
    """Where its prompt is."""

    model: str | None = None
    """The served model's name; null is that one."""
    n: int | None = Field(None, ge=1, le=MAX_N)
    """Samples per prompt."""
    temperature: float | None = Field(None, ge=0, le=100)
    """0 is greedy, exactly. Default 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Keep the likeliest tokens that together have this probability."""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    """Subtracted from the logit of every token that the sample has already."""
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    """The same, times how often the sample has it."""
    logit_bias: Annotated[dict[BiasedToken, Bias], at_most(MAX_BIASES), Field(max_length=MAX_BIASES)] | None = None
    """Token id, in decimal digits → what is added to its logit."""
    stop: (
        Annotated[
            Annotated[StopString, Tag("One")] | Annotated[list[StopString], Field(max_length=MAX_STOPS), Tag("Many")],
            Discriminator(one_or_many),
        ]
        | None
    ) = None
    """The sample ends where one of these texts would appear; it is not in the text."""
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    """The same seed, prompt, parameters and weights give the same samples. A negative one is taken modulo 2**63."""
    max_tokens: int | None = Field(None, ge=0, le=INT32)
    """Most tokens of a sample, cut to the room that the prompt leaves. 0: the prompt only, no token. Default: 16 for a
    completion, all the room there is for a chat."""
    stream: bool | None = None
    """Send the reply as it grows, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with stream=true."""
    user: str | None = None
    """Accepted, without effect."""
    # ours
    top_k: int | None = Field(None, ge=0, le=INT32)
    """Keep so many of the likeliest tokens. 0: all."""
    min_p: float | None = Field(None, ge=0, le=1)
    """Keep tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    """Divides positive and multiplies negative logits of tokens that prompt or sample have already. 1: none."""
    min_tokens: int | None = Field(None, ge=0, le=INT32)
    """No end of text, stop token or stop string before so many tokens."""
    ignore_eos: bool | None = None
    """The end-of-text token ends nothing."""
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOPS)
    """Tokens that end the sample too."""
    include_stop_str_in_output: bool | None = None
    """Leave the stop string in the text."""
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    """Log-probs of the prompt's tokens, and so many of the likeliest in each place. 0: only the tokens' own."""
    logprobs_mode: Literal["processed", "raw", "tempered"] | None = None
    """`processed`: log-probs of the distribution that is drawn from. `raw`: of the model's own. `tempered`: of the
    model's own at the temperature."""
    priority: int | None = Field(None, ge=-INT32, le=INT32)
    """Higher runs first. Default 0."""
    timeout_s: float | None = Field(None, gt=0, le=86400)
    """Seconds after which the request fails with 408; at most what the server allows."""
    return_rollout: bool | None = None
    """Token ids, log-probs and versions in the reply: default on."""
    wait_while_suspended: bool | None = None
    """false: 503 unless the engine is running."""

    @field_validator("temperature")
    @classmethod
    def _greedy_or_warm(cls, value: float | None) -> float | None:
        if value is not None and 0 < value < MIN_TEMPERATURE:
            raise PydanticCustomError("too_cold", "must be 0 (greedy) or at least {low}", {"low": MIN_TEMPERATURE})
        return value

    @field_validator("stream_options")
    @classmethod
    def _only_of_a_stream(cls, value: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if value is not None and not info.data.get("stream"):
            raise PydanticCustomError("needs_stream", "needs stream=true; leave it out")
        return value

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def wants_rollout(self) -> bool:
        """Whether the reply brings token ids, log-probs and versions."""
        return self.return_rollout is not False

    def sampling_params(self, **decided: Any) -> SamplingParams:
        """What the engine is asked for.

        Args:
            decided: fields that the endpoint decides: max_tokens, logprobs, prompt_logprobs.

        Raises:
            ApiError: 400: the values do not go together.
        """
        asked = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None} | decided
        if self.logit_bias is not None:
            asked["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        if self.seed is not None:
            asked["seed"] = self.seed % 2**63
        if asked.get("min_tokens", 0) > asked["max_tokens"]:
            raise bad_request(
                f"min_tokens={asked['min_tokens']} must be at most the {asked['max_tokens']} tokens there may be",
                param="min_tokens",
            )
        try:
            return SamplingParams(**asked)
        except ConfigError as exc:
            raise bad_request(str(exc)) from exc


_SAMPLING = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "prompt_logprobs", "logprobs_mode",
)  # fmt: skip


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
    """Text, texts, token ids, or lists of token ids."""

    logprobs: int | None = Field(None, ge=0, le=20)
    """Log-probs of every token, and so many of the likeliest in its place. 0: only the token's own."""
    echo: bool | None = None
    """The text begins with the prompt, and so do the log-probs."""
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    """Must equal n: no sample is thrown away here."""
    suffix: Absent = None
    """Not served: leave it out."""

    @field_validator("best_of")
    @classmethod
    def _as_many_as_n(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and value != (info.data.get("n") or 1):
            raise PydanticCustomError("unsupported", "must equal n: no sample is thrown away here")
        return value

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        """The prompts, one or many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
